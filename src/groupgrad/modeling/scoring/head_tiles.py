"""The passes over tiles of logits that `modeling/scoring/head.py` is made of: scores, and gradients.

A tile of logits lives in scratch memory that fits the processor's cache. Tiles of the vocabulary are the outer loop, so
that each slice of the head's weight is read once a pass and the slice's gradient is finished before the next one is
begun. Logits are held in bits (multiplied by log2 e while they are computed, at no cost), because exp2 is cheaper than
exp by far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from groupgrad.kernels import library
from groupgrad.kernels.head import BITS, ExactSums, Wanted, pass_tile
from groupgrad.kernels.layers import product

NATS = math.log(2.0)
"""Nats in a bit."""


@dataclass(slots=True, frozen=True)
class LogitTransform:
    """What becomes of hidden states h under a head (W, b): softcap(scale * (h @ W.T + b))."""

    scale: float = 1.0
    """Multiplies the head's output."""
    softcap: float | None = None
    """cap * tanh(x / cap) on the scaled output; None for no cap."""
    own_dtype: bool = False
    """The head computes in its weight's dtype also under autocast."""


@dataclass(slots=True, frozen=True)
class Tiles:
    """Upper bounds of a tile of logits; tiles of one call are of about equal size."""

    tokens: int
    vocab: int

    @classmethod
    def of(cls, device: torch.device) -> Tiles:
        """What is fast on a kind of device."""
        return _TILES.get(device.type, _TILES["cuda"])


# On CPU a tile of float32 logits takes 4 MB, its probabilities as much where they do not take its place.
# Beside them lie 4 MB each of weight and its gradient at H=512.
_TILES = {"cpu": Tiles(512, 2048), "cuda": Tiles(4096, 8192)}


@dataclass(slots=True, frozen=True)
class Joined:
    """A head's weight (V, H) and a second matrix (V, r) beside it, read as one (V, H + r) a slice at a time."""

    left: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return torch.cat([self.left[rows], self.right[rows]], dim=1)

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H + r)."""
        return len(self.left), self.left.shape[1] + self.right.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's weight."""
        return self.left.dtype

    @property
    def device(self) -> torch.device:
        """Where both lie."""
        return self.left.device


HeadWeight = torch.Tensor | Joined


@dataclass(slots=True, frozen=True)
class HeadTask:
    """What one call does."""

    transform: LogitTransform
    temperature: float
    tiles: Tiles
    dtype: torch.dtype
    """Products are computed in it, as the head's own module would."""
    entropy_gradient: bool = False
    keep_direction: bool = False
    """Find d log-prob / d hidden in the forward pass already."""
    frozen_columns: int = 0
    """Columns of the weight, from the left, whose gradient nobody wants."""

    @property
    def exact(self) -> torch.dtype:
        """Everything but the products is computed, and everything is summed, in it."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def slope(self) -> float:
        """d logit / d (h @ W.T + b), a cap's own slope aside."""
        return self.transform.scale / self.temperature

    @property
    def factor(self) -> float:
        """Multiplies h @ W.T + b on the way to bits, or to the cap's tanh."""
        return self.slope * BITS if self.transform.softcap is None else self.transform.scale / self.transform.softcap

    @property
    def cap(self) -> float | None:
        """Bound of the logits in bits; None without a cap."""
        return None if self.transform.softcap is None else self.transform.softcap * BITS / self.temperature


@dataclass(slots=True)
class Scores:
    """Results of a pass, all (L,) but the last."""

    logprobs: torch.Tensor
    """Nats."""
    entropy: torch.Tensor
    """Nats."""
    normaliser: torch.Tensor
    """Log-sum-exp of the logits, in bits."""
    direction: torch.Tensor | None = None
    """(L, H) d log-prob / d hidden over `HeadTask.slope`, if it is kept."""


@dataclass(slots=True)
class HeadGradRequest:
    """What a gradient pass starts from, all (L,).

    With p = exp(logit - normaliser), d loss / d logit = of_token * [token] - of_chances * p - to_entropy * p *
    (log p + entropy). For the gradient of log-probs `of_token` and `of_chances` are both d loss / d log-prob.
    """

    tokens: torch.Tensor
    normaliser: torch.Tensor
    """Bits."""
    of_token: torch.Tensor
    of_chances: torch.Tensor
    entropy: torch.Tensor | None = None
    to_entropy: torch.Tensor | None = None
    """d loss / d entropy; None if none flows, and then `entropy` is not needed."""

    def at(self, rows: slice | torch.Tensor) -> HeadGradRequest:
        """The same for some of the tokens."""
        entropy = None if self.entropy is None else self.entropy[rows]
        to_entropy = None if self.to_entropy is None else self.to_entropy[rows]
        return HeadGradRequest(
            self.tokens[rows], self.normaliser[rows], self.of_token[rows], self.of_chances[rows], entropy, to_entropy
        )


@dataclass(slots=True)
class Sums:
    """What a gradient pass finds out about the distributions on its way, given normalisers that are nearly right."""

    chosen: torch.Tensor
    """(L,) log2 exp(token's logit - normaliser)."""
    total: torch.Tensor
    """(L,) sum of p, 1 if the normaliser is right."""
    moment: torch.Tensor
    """(L,) sum of p * log2 p."""
    exact: Scores | None = None
    """The scores, if they have been found already; the tokens' own shares are then in no gradient yet."""

    @classmethod
    def zeros(cls, like: torch.Tensor) -> Sums:
        """Nothing seen yet."""
        return cls(torch.full_like(like, math.nan), torch.zeros_like(like), torch.zeros_like(like))

    def scores(self, normaliser: torch.Tensor) -> Scores:
        """The scores under the distributions made exact."""
        if self.exact is not None:
            return self.exact
        excess = self.total.log2()
        entropy = excess - self.moment / self.total
        return Scores((self.chosen - excess) * NATS, entropy * NATS, normaliser + excess)


@dataclass(slots=True)
class Gradients:
    """Gradients of the loss; None where one is not needed.

    Sums have the dtype `HeadTask.exact`, the weight's gradient has the weight's dtype.

    The weight's is that of its columns from `HeadTask.frozen_columns` on.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class _Grid:
    """The tiles of one pass and the memory that they share."""

    def __init__(self, num_tokens: int, weight: HeadWeight, bias: torch.Tensor | None, job: HeadTask):
        self._weight, self._bias, self._job = weight, bias, job
        self.tokens = list(slices(num_tokens, job.tiles.tokens))
        """Slices of the tokens; the first is the longest."""
        self._columns = list(slices(len(weight), job.tiles.vocab, 128))
        size = (self.tokens[0].stop if self.tokens else 0) * self.vocab_size
        self._logits = torch.empty(size, dtype=job.exact, device=weight.device)
        self._slopes = None if job.cap is None else torch.empty_like(self._logits)
        self._rounded = None if job.dtype == job.exact else torch.empty_like(self._logits, dtype=job.dtype)
        is_float = job.dtype == torch.float32 and weight.device.type == "cpu"
        self.kernels = library() if is_float and job.cap is None else None
        """Compiled ones, which give a token the score that it is given when it is sampled."""
        self._chances = None if self.kernels is not None else torch.empty_like(self._logits)
        # Without kernels, a head of few tokens is a small part of its model, and can be summed in float64.
        self._is_fine = is_float and len(weight) <= weight.shape[1]

    def vocab(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Slices of the vocabulary, each with its weight (v, H) and bias (v,) in the dtype of the products."""
        for columns in self._columns:
            bias = None if self._bias is None else self._bias[columns].to(self._job.dtype)
            yield columns, self._weight[columns].to(self._job.dtype), bias

    @property
    def vocab_size(self) -> int:
        """Width of the widest tile."""
        return self._columns[0].stop

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(t, v) logits in bits, temperature applied."""
        shape = (hidden.shape[0], weight.shape[0])
        factor, cap = self._job.factor, self._job.cap
        logits = _view(self._logits, shape)
        if self._rounded is not None:
            rounded = _view(self._rounded, shape)
            if bias is None:
                torch.mm(hidden, weight.t(), out=rounded)
            else:
                torch.addmm(bias, hidden, weight.t(), out=rounded)
            logits.copy_(rounded).mul_(factor)
        elif self._is_fine:
            found = hidden.double() @ weight.double().t()
            logits.copy_((found if bias is None else found.add_(bias)).mul_(factor))
        elif bias is None:
            logits.addmm_(hidden, weight.t(), beta=0, alpha=factor)
        else:
            torch.addmm(bias, hidden, weight.t(), beta=factor, alpha=factor, out=logits)
        return logits if cap is None else logits.tanh_().mul_(cap)

    def raw_logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(t, v) logits by the kernels, before scale and temperature."""
        assert self.kernels is not None
        logits = _view(self._logits, (hidden.shape[0], weight.shape[0]))
        return product(self.kernels, hidden, weight, bias, out=logits)

    def cap_slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """(t, v) slope of the cap at these logits; None without a cap."""
        cap = self._job.cap
        if cap is None or self._slopes is None:
            return None
        slope = _view(self._slopes, logits.shape).fill_(1.0)
        return torch.addcmul(slope, logits, logits, value=-1.0 / cap**2, out=slope)

    def exp2(self, logits: torch.Tensor) -> torch.Tensor:
        """(t, v) in memory of its own."""
        assert self._chances is not None
        return torch.exp2(logits, out=_view(self._chances, logits.shape))

    def rounded(self, tile: torch.Tensor) -> torch.Tensor:
        """`tile` in the dtype of the products."""
        return tile if self._rounded is None else _view(self._rounded, tile.shape).copy_(tile)


def score_pass(
    hidden: torch.Tensor, weight: HeadWeight, bias: torch.Tensor | None, tokens: torch.Tensor, job: HeadTask
) -> Scores:
    """Scores in one pass: sums are rescaled whenever a larger logit appears. `hidden` is of the products' dtype."""
    grid = _Grid(len(hidden), weight, bias, job)
    if grid.kernels is not None:
        return _compiled_scores(grid, hidden, weight, tokens, job)
    like: dict[str, Any] = {"dtype": job.exact, "device": weight.device}
    # `top` stays finite so that no difference of it is NaN.
    top = torch.full((len(hidden),), torch.finfo(job.exact).min / 4, **like)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    chosen = torch.full_like(top, math.nan)
    mean = torch.zeros(hidden.shape, **like) if job.keep_direction else None
    for columns, w, b in grid.vocab():
        for rows in grid.tokens:
            logits = grid.logits(hidden[rows], w, b)
            inside, where = _place(tokens[rows], columns)
            chosen[rows] = torch.where(inside, _own(logits, where), chosen[rows])
            cap_slope = grid.cap_slope(logits) if mean is not None else None
            highest = torch.maximum(top[rows], logits.amax(1))
            chances = grid.exp2(logits.sub_(highest[:, None]))
            lower = top[rows] - highest
            shrink = lower.exp2()
            # The moment is the sum of exp2(x - top) * (x - top): a new top changes both factors.
            moment[rows] = shrink * (moment[rows] + lower * total[rows]) + logits.mul_(chances).sum(1)
            total[rows] = shrink * total[rows] + chances.sum(1)
            top[rows] = highest
            if mean is not None:
                # The token's own share is left out: it nearly cancels, and is added exactly below.
                _add_at(chances, where, inside, -_own(chances, where))
                if cap_slope is not None:
                    chances.mul_(cap_slope)
                mean[rows] *= shrink[:, None]
                _accumulate(mean[rows], grid.rounded(chances), w)
    scores = Scores((chosen - top - total.log2()) * NATS, (total.log2() - moment / total) * NATS, top + total.log2())
    if mean is not None:
        own = -torch.expm1(scores.logprobs)
        if job.cap is not None:
            own *= 1 - (chosen / job.cap) ** 2
        scores.direction = weight[tokens].to(job.exact) * own[:, None] - mean / total[:, None]
    return scores


def _compiled_scores(
    grid: _Grid, hidden: torch.Tensor, weight: HeadWeight, tokens: torch.Tensor, job: HeadTask
) -> Scores:
    kernels, sums = grid.kernels, ExactSums.of_nothing(len(hidden))
    assert kernels is not None
    mean = torch.zeros_like(hidden) if job.keep_direction else None
    for columns, w, b in grid.vocab():
        for rows in grid.tokens:
            tile, seen = grid.raw_logits(hidden[rows], w, b), sums.at(rows)
            before = seen.sums[:, 0].clone()
            pass_tile(kernels, tile, tokens[rows], columns.start, job.factor, sums=seen)
            if mean is not None:
                peaks = seen.sums[:, 0]
                # The token's own share is left out: it nearly cancels, and is added exactly below.
                wanted = Wanted(peaks.float(), tile.new_ones(len(peaks)))
                pass_tile(kernels, tile, tokens[rows], columns.start, job.factor, wanted=wanted)
                mean[rows] *= (before - peaks).exp2().float()[:, None]
                _accumulate(mean[rows], tile, w)
    scores = Scores(*sums.finish(kernels))
    if mean is not None:
        own = -torch.expm1(scores.logprobs)
        scores.direction = weight[tokens] * own[:, None] - mean / sums.sums[:, 1:2].float()
    return scores


def gradient_pass(
    hidden: torch.Tensor,
    weight: HeadWeight,
    bias: torch.Tensor | None,
    pull: HeadGradRequest,
    job: HeadTask,
    found: Gradients,
    *,
    add: bool = False,
    sums: Sums | None = None,
) -> None:
    """Fill `found` (`add` to its weight and bias, rather) in one pass, and `sums` if they are given.

    `hidden` is of the products' dtype and holds the tokens of `pull` alone, as does `found.hidden`.
    """
    grid = _Grid(len(hidden), weight, bias, job)
    seen_exactly = ExactSums.of_nothing(len(hidden)) if grid.kernels is not None and sums is not None else None
    # Half weights: the slice's gradient is summed in float32 and rounded once, when it is finished.
    own_sum = None
    if found.weight is not None and found.weight.dtype != job.exact:
        own_sum = torch.empty((grid.vocab_size, found.weight.shape[1]), dtype=job.exact, device=weight.device)
    for columns, w, b in grid.vocab():
        slice_sum = None if found.weight is None else found.weight[columns]
        if slice_sum is not None and own_sum is not None:
            slice_sum = own_sum[: len(w)]
        for rows in grid.tokens:
            if grid.kernels is not None:
                tile = grid.raw_logits(hidden[rows], w, b)
                seen = None if seen_exactly is None else seen_exactly.at(rows)
                # What is foreseen leaves the token's own share out, which is added when its log-prob is known.
                wanted, ids = _wanted(pull.at(rows), job, own=sums is None), pull.tokens[rows]
                pass_tile(grid.kernels, tile, ids, columns.start, job.factor, sums=seen, wanted=wanted)
            else:
                logits = grid.logits(hidden[rows], w, b)
                seen = None if sums is None else Sums(sums.chosen[rows], sums.total[rows], sums.moment[rows])
                tile = grid.rounded(_pull_tile(grid, logits, pull.at(rows), columns, job, seen))
            first = rows.start == 0 and not add
            if found.hidden is not None:
                _accumulate(found.hidden[rows], tile, w, first=columns.start == 0)
            if slice_sum is not None:
                _accumulate(slice_sum, tile.t(), hidden[rows, job.frozen_columns :], first=first)
            if found.bias is not None:
                part = tile.sum(0, dtype=job.exact)
                found.bias[columns] = part if first else found.bias[columns] + part
        if found.weight is not None and own_sum is not None and grid.tokens:
            found.weight[columns] = own_sum[: len(w)]
    if grid.kernels is not None and sums is not None and seen_exactly is not None:
        sums.exact = Scores(*seen_exactly.finish(grid.kernels))
        sums.chosen = seen_exactly.chosen - pull.normaliser
        sums.total = (seen_exactly.normaliser() - pull.normaliser).exp2().float()


def _wanted(pull: HeadGradRequest, job: HeadTask, *, own: bool) -> Wanted:
    """d loss / d (h @ W.T + b) as the kernels are asked for it."""
    of_chances, of_bits = -pull.of_chances * job.slope, None
    if pull.to_entropy is not None and pull.entropy is not None:
        to_entropy = -pull.to_entropy * job.slope
        of_chances, of_bits = of_chances + to_entropy * pull.entropy, NATS * to_entropy
    return Wanted(pull.normaliser, of_chances, pull.of_token * job.slope if own else None, of_bits)


def _pull_tile(
    grid: _Grid, logits: torch.Tensor, pull: HeadGradRequest, columns: slice, job: HeadTask, sums: Sums | None
) -> torch.Tensor:
    """(t, v) d loss / d (h @ W.T + b); overwrites `logits`, adds what it sees to `sums`."""
    cap_slope = grid.cap_slope(logits)
    inside, where = _place(pull.tokens, columns)
    tile = grid.exp2(logits.sub_(pull.normaliser[:, None]))
    if sums is not None:
        sums.chosen.copy_(torch.where(inside, _own(logits, where), sums.chosen))
        sums.total.add_(tile.sum(1))
        sums.moment.add_(torch.mul(logits, tile, out=None if pull.to_entropy is not None else logits).sum(1))
    of_chances = -pull.of_chances * job.slope
    if pull.to_entropy is None or pull.entropy is None:
        tile.mul_(of_chances[:, None])
    else:
        to_entropy = -pull.to_entropy * job.slope
        offset = of_chances + to_entropy * pull.entropy
        tile.mul_(torch.addcmul(offset[:, None], logits, NATS * to_entropy[:, None], out=logits))
    _add_at(tile, where, inside, pull.of_token * job.slope)
    return tile if cap_slope is None else tile.mul_(cap_slope)


def chosen_logits(
    hidden: torch.Tensor, weight: HeadWeight, bias: torch.Tensor | None, tokens: torch.Tensor, job: HeadTask
) -> torch.Tensor:
    """(L,) logits of the tokens alone, in bits; NaN for ids outside the vocabulary."""
    ids = tokens.clamp(0, len(weight) - 1)
    logits = (hidden.to(job.exact) * weight[ids]).sum(1)
    if bias is not None:
        logits = logits + bias[ids]
    logits = logits * job.factor
    if job.cap is not None:
        logits = logits.tanh() * job.cap
    return torch.where(ids == tokens, logits, math.nan)


def slices(total: int, bound: int, multiple: int = 64) -> Iterator[slice]:
    """0 to total in slices of about equal length, at most `bound`; all but the last are multiples if they can be."""
    step = -(-total // -(-total // bound)) if total else 1
    multiple = min(multiple, bound)
    step = min(-(-step // multiple) * multiple, bound)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _view(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[: math.prod(shape)].view(shape)


def _place(tokens: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token whether it lies in these columns (t,), and its column there, or any if it does not (t, 1)."""
    where = tokens - columns.start
    width = columns.stop - columns.start
    return (where >= 0) & (where < width), where.clamp(0, width - 1)[:, None]


def _own(tile: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """(t,) each token's own entry."""
    return tile.gather(1, where).squeeze(1)


def _add_at(tile: torch.Tensor, where: torch.Tensor, inside: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` (t,) to each token's own entry where that is inside."""
    tile.scatter_add_(1, where, torch.where(inside, values, 0.0)[:, None])


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool = False) -> None:
    """total += left @ right, or = for the first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)
