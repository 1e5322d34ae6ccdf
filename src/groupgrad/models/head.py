"""Log-probabilities and entropies straight from hidden states, in tiles over tokens and vocabulary.

Nothing of size (tokens, V) ever exists: a tile of logits lives in scratch memory that fits the processor's cache, and
the backward pass computes it again. Tiles of the vocabulary are the outer loop, so that each slice of the head's weight
is read once a pass and the slice's gradient is finished before the next one is begun. Logits are held in bits
(multiplied by log2 e while they are computed, at no cost), because exp2 is cheaper than exp by far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from groupgrad.types import TokenScores

_BITS = math.log2(math.e)
_NATS = math.log(2.0)


@dataclass(slots=True, frozen=True)
class HeadRecipe:
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


# On CPU a tile of float32 logits and its probabilities take 16 MB, beside 4 MB each of weight and its gradient.
_TILES = {"cpu": Tiles(1024, 2048), "cuda": Tiles(4096, 8192)}


@dataclass(slots=True, frozen=True)
class _Job:
    """What one call does."""

    recipe: HeadRecipe
    temperature: float
    entropy_gradient: bool
    tiles: Tiles
    dtype: torch.dtype
    """Logits are multiplied in it, as the head's own module would."""
    keep_direction: bool
    """Find d log-prob / d hidden in the forward pass already."""

    @property
    def exact(self) -> torch.dtype:
        """Everything but the products is computed, and everything is summed, in it."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def slope(self) -> float:
        """d logit / d (h @ W.T + b), a cap's own slope aside."""
        return self.recipe.scale / self.temperature

    @property
    def cap_in_bits(self) -> float | None:
        """Bound of the logits in bits; None without a cap."""
        return None if self.recipe.softcap is None else self.recipe.softcap * _BITS / self.temperature


def tiled_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    *,
    recipe: HeadRecipe,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    tiles: Tiles | None = None,
) -> TokenScores:
    """Log-prob and entropy (L,) of `tokens` (L,) under softmax(recipe(hidden @ weight.T + bias) / temperature).

    hidden (L, H), weight (V, H), bias (V,) or None. Results are float32 (float64 for a float64 head), on the weight's
    device; NaN log-probs for ids outside the vocabulary. Gradients flow from the log-probs, and with
    `entropy_gradient` from the entropies, into whichever of hidden, weight and bias require them, once (no double
    backward); tokens without an incoming gradient cost nothing there. With a frozen head (an adapter elsewhere) and no
    gradient from the entropies, the forward pass keeps d log-prob / d hidden (L, H) and nothing is computed again.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or tokens.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)} and tokens {tuple(tokens.shape)}; they "
            "must be (L, H), (V, H) and (L,)"
        )
    needs = torch.is_grad_enabled()
    head_trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    job = _Job(
        recipe,
        temperature,
        entropy_gradient and needs,
        tiles or Tiles.of(weight.device),
        _compute_dtype(weight, recipe),
        keep_direction=needs and hidden.requires_grad and not head_trains and not entropy_gradient,
    )
    hidden, tokens = hidden.to(weight.device), tokens.to(weight.device)
    logprobs, entropy = _TiledScores.apply(hidden, weight, bias, tokens, job)  # pyright: ignore[reportGeneralTypeIssues]
    return TokenScores(logprobs=logprobs, entropy=entropy)


def _compute_dtype(weight: torch.Tensor, recipe: HeadRecipe) -> torch.dtype:
    """The dtype that nn.Linear would multiply in."""
    device = weight.device.type
    if recipe.own_dtype or weight.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return weight.dtype
    return torch.get_autocast_dtype(device)


class _TiledScores(torch.autograd.Function):
    """`tiled_scores` of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        job: _Job,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(weight.device.type, enabled=False):
            found = _forward(hidden.to(job.dtype), weight, bias, tokens, job)
        ctx.job, ctx.hidden_dtype = job, hidden.dtype
        if job.keep_direction:
            ctx.save_for_backward(found.direction)
        else:
            ctx.save_for_backward(hidden, weight, bias, tokens, found.normaliser, found.entropy)
        if not job.entropy_gradient:
            ctx.mark_non_differentiable(found.entropy)
        return found.logprobs, found.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: _Job = ctx.job
        to_logprobs, to_entropy = incoming
        if job.keep_direction:
            (direction,) = ctx.saved_tensors
            return (direction * (to_logprobs * job.slope)[:, None]).to(ctx.hidden_dtype), None, None, None, None
        hidden, weight, bias, tokens, normaliser, entropy = ctx.saved_tensors
        live = to_logprobs != 0
        if job.entropy_gradient:
            live |= to_entropy != 0
        rows = None if bool(live.all()) else live.nonzero().squeeze(1)
        pick = (lambda x: x) if rows is None else (lambda x: x[rows])
        to_entropy = pick(to_entropy) if job.entropy_gradient else None
        asked = _Asked(pick(tokens), pick(normaliser), pick(entropy), pick(to_logprobs), to_entropy)
        with torch.autocast(weight.device.type, enabled=False):
            found = _backward(pick(hidden).to(job.dtype), weight, bias, asked, job, ctx.needs_input_grad[:3])
        if rows is not None and found.hidden is not None:
            found.hidden = torch.zeros(hidden.shape, dtype=job.exact, device=hidden.device).index_copy_(
                0, rows, found.hidden
            )
        grads = (found.hidden, found.weight, found.bias)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(grads, (hidden, weight, bias))), None, None


@dataclass(slots=True)
class _Found:
    """Results of the forward pass."""

    logprobs: torch.Tensor
    """(L,) nats."""
    entropy: torch.Tensor
    """(L,) nats."""
    normaliser: torch.Tensor
    """(L,) log-sum-exp of the logits, in bits."""
    direction: torch.Tensor | None
    """(L, H) d log-prob / d hidden over `slope`, if it is kept."""


@dataclass(slots=True)
class _Asked:
    """What the backward pass starts from, for the tokens that have a gradient."""

    tokens: torch.Tensor
    normaliser: torch.Tensor
    entropy: torch.Tensor
    to_logprobs: torch.Tensor
    """d loss / d log-prob."""
    to_entropy: torch.Tensor | None
    """d loss / d entropy; None if none flows."""

    def at(self, rows: slice) -> _Asked:
        """The same for some of the tokens."""
        to_entropy = None if self.to_entropy is None else self.to_entropy[rows]
        return _Asked(self.tokens[rows], self.normaliser[rows], self.entropy[rows], self.to_logprobs[rows], to_entropy)


@dataclass(slots=True)
class _Gradients:
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class _Grid:
    """The tiles of one pass."""

    def __init__(self, num_tokens: int, weight: torch.Tensor, bias: torch.Tensor | None, job: _Job):
        self._weight, self._bias, self._job = weight, bias, job
        self._rows = list(_slices(num_tokens, job.tiles.tokens))
        self._columns = list(_slices(len(weight), job.tiles.vocab))

    def tokens(self) -> list[slice]:
        """Slices of the tokens; the first is the longest."""
        return self._rows

    def vocab(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Slices of the vocabulary, each with its weight (v, H) and bias (v,) in the dtype of the products."""
        for columns in self._columns:
            bias = None if self._bias is None else self._bias[columns].to(self._job.dtype)
            yield columns, self._weight[columns].to(self._job.dtype), bias

    @property
    def vocab_size(self) -> int:
        """Width of the widest tile."""
        return self._columns[0].stop

    def scratch(self) -> _Scratch:
        """Memory for the largest tile."""
        num_tokens = self._rows[0].stop if self._rows else 0
        return _Scratch(self._job, num_tokens, self.vocab_size, self._weight.device)


class _Scratch:
    """Memory that all tiles of a pass share, and the logits computed into it."""

    def __init__(self, job: _Job, num_tokens: int, num_vocab: int, device: torch.device):
        self._job = job
        size = num_tokens * num_vocab
        self._logits = torch.empty(size, dtype=job.exact, device=device)
        self._chances = torch.empty_like(self._logits)
        self._cap_slope = None if job.recipe.softcap is None else torch.empty_like(self._logits)
        self._rounded = None if job.dtype == job.exact else torch.empty(size, dtype=job.dtype, device=device)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(t, v) logits in bits, temperature applied."""
        recipe, in_bits = self._job.recipe, self._job.slope * _BITS
        factor = in_bits if recipe.softcap is None else recipe.scale / recipe.softcap
        logits = self._view(self._logits, hidden, weight)
        if self._rounded is None:
            if bias is None:
                logits.addmm_(hidden, weight.t(), beta=0, alpha=factor)
            else:
                torch.addmm(bias, hidden, weight.t(), beta=factor, alpha=factor, out=logits)
        else:
            rounded = self._view(self._rounded, hidden, weight)
            if bias is None:
                torch.mm(hidden, weight.t(), out=rounded)
            else:
                torch.addmm(bias, hidden, weight.t(), out=rounded)
            logits.copy_(rounded).mul_(factor)
        cap = self._job.cap_in_bits
        return logits if cap is None else logits.tanh_().mul_(cap)

    def cap_slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """(t, v) slope of the cap at these logits; None without a cap."""
        cap = self._job.cap_in_bits
        if cap is None or self._cap_slope is None:
            return None
        slope = self._cap_slope[: logits.numel()].view(logits.shape)
        return torch.addcmul(slope.fill_(1.0), logits, logits, value=-1.0 / cap**2, out=slope)

    def exp2(self, logits: torch.Tensor) -> torch.Tensor:
        """(t, v) in memory of its own."""
        return torch.exp2(logits, out=self._chances[: logits.numel()].view(logits.shape))

    def rounded(self, tile: torch.Tensor) -> torch.Tensor:
        """`tile` in the dtype of the products."""
        return tile if self._rounded is None else self._rounded[: tile.numel()].view(tile.shape).copy_(tile)

    @staticmethod
    def _view(memory: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = (hidden.shape[0], weight.shape[0])
        return memory[: shape[0] * shape[1]].view(shape)


def _forward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, job: _Job
) -> _Found:
    """One pass over the tiles, with sums that are rescaled whenever a larger logit appears."""
    grid = _Grid(len(hidden), weight, bias, job)
    scratch = grid.scratch()
    like: dict[str, Any] = {"dtype": job.exact, "device": weight.device}
    # `top` stays finite so that no difference of it is NaN.
    top = torch.full((len(hidden),), torch.finfo(job.exact).min / 4, **like)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    chosen = torch.full_like(top, math.nan)
    mean = torch.zeros(hidden.shape, **like) if job.keep_direction else None
    for columns, w, b in grid.vocab():
        for rows in grid.tokens():
            logits = scratch.logits(hidden[rows], w, b)
            inside, where = _place(tokens[rows], columns)
            chosen[rows] = torch.where(inside, logits.gather(1, where).squeeze(1), chosen[rows])
            slope = scratch.cap_slope(logits) if mean is not None else None
            highest = torch.maximum(top[rows], logits.amax(1))
            chances = scratch.exp2(logits.sub_(highest[:, None]))
            lower = top[rows] - highest
            shrink = lower.exp2()
            # The moment is the sum of exp2(x - top) * (x - top): a new top changes both factors.
            moment[rows] = shrink * (moment[rows] + lower * total[rows]) + logits.mul_(chances).sum(1)
            total[rows] = shrink * total[rows] + chances.sum(1)
            top[rows] = highest
            if mean is not None:
                # The token's own share is left out: it nearly cancels, and is added exactly below.
                _add_at(chances, where, inside, -chances.gather(1, where).squeeze(1))
                if slope is not None:
                    chances.mul_(slope)
                mean[rows] *= shrink[:, None]
                _accumulate(mean[rows], scratch.rounded(chances), w)
    normaliser = top + total.log2()
    logprobs = (chosen - normaliser) * _NATS
    entropy = (total.log2() - moment / total) * _NATS
    if mean is not None:
        own = -torch.expm1(logprobs)
        if job.cap_in_bits is not None:
            own *= 1 - (chosen / job.cap_in_bits) ** 2
        mean = weight[tokens].to(job.exact) * own[:, None] - mean / total[:, None]
    return _Found(logprobs, entropy, normaliser, mean)


def _backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    asked: _Asked,
    job: _Job,
    needed: tuple[bool, ...],
) -> _Gradients:
    """One more pass over the tiles: the logits again, and from them the gradients that are `needed`.

    With p the probabilities, d log-prob / d logit = [token] - p and d entropy / d logit = -p * (log p + entropy).
    """
    grid = _Grid(len(hidden), weight, bias, job)
    scratch = grid.scratch()
    like: dict[str, Any] = {"dtype": job.exact, "device": weight.device}
    # The first tile overwrites, so memory need not be cleared, unless there is no tile at all.
    make = torch.empty if len(hidden) else torch.zeros
    found = _Gradients(
        make(hidden.shape, **like) if needed[0] else None,
        make(weight.shape, dtype=weight.dtype, device=weight.device) if needed[1] else None,
        make(bias.shape, **like) if needed[2] and bias is not None else None,
    )
    # Half weights: the slice's gradient is summed in float32 and rounded once, when it is finished.
    own_sum = None if weight.dtype == job.exact else torch.empty((grid.vocab_size, weight.shape[1]), **like)
    for columns, w, b in grid.vocab():
        slice_sum = None if found.weight is None else found.weight[columns]
        if slice_sum is not None and own_sum is not None:
            slice_sum = own_sum[: len(w)]
        for rows in grid.tokens():
            logits = scratch.logits(hidden[rows], w, b)
            pull = scratch.rounded(_pull(logits, asked.at(rows), columns, scratch, job))
            first = rows.start == 0
            if found.hidden is not None:
                _accumulate(found.hidden[rows], pull, w, first=columns.start == 0)
            if slice_sum is not None:
                _accumulate(slice_sum, pull.t(), hidden[rows], first=first)
            if found.bias is not None:
                part = pull.sum(0, dtype=job.exact)
                found.bias[columns] = part if first else found.bias[columns] + part
        if found.weight is not None and own_sum is not None and len(hidden):
            found.weight[columns] = own_sum[: len(w)]
    return found


def _pull(logits: torch.Tensor, asked: _Asked, columns: slice, scratch: _Scratch, job: _Job) -> torch.Tensor:
    """(t, v) d loss / d (h @ W.T + b) for one tile; overwrites `logits`."""
    cap_slope = scratch.cap_slope(logits)
    inside, where = _place(asked.tokens, columns)
    to_logprobs = asked.to_logprobs * job.slope
    pull = scratch.exp2(logits.sub_(asked.normaliser[:, None]))
    if asked.to_entropy is None:
        pull.mul_(-to_logprobs[:, None])
    else:
        to_entropy = asked.to_entropy * job.slope
        offset = -to_logprobs - to_entropy * asked.entropy
        pull.mul_(torch.addcmul(offset[:, None], logits, -_NATS * to_entropy[:, None], out=logits))
    _add_at(pull, where, inside, to_logprobs)
    return pull if cap_slope is None else pull.mul_(cap_slope)


def _slices(total: int, bound: int) -> Iterator[slice]:
    """0 to total in slices of about equal length, at most `bound`, all but the last multiples of 64 if they can be."""
    step = -(-total // -(-total // bound)) if total else 1
    multiple = min(64, bound)
    step = min(-(-step // multiple) * multiple, bound)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _place(tokens: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token whether it lies in these columns (t,), and its column there, or any if it does not (t, 1)."""
    where = tokens - columns.start
    width = columns.stop - columns.start
    return (where >= 0) & (where < width), where.clamp(0, width - 1)[:, None]


def _add_at(tile: torch.Tensor, where: torch.Tensor, inside: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` (t,) at each token's own column where that is inside."""
    tile.scatter_add_(1, where, torch.where(inside, values, 0.0)[:, None])


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool = False) -> None:
    """total += left @ right, or = for the first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)
