"""Passes over tiles of logits: scores of tokens, and gradients of the output head (see `tiled_head.py`).

A tile of logits lives in memory that fits the processor's cache. The outer loop goes over the vocabulary, so each slice
of the weight is read once per pass. Inside, logits are in bits (times log2 e, at no cost), because exp2 is cheaper than
exp; log-probs and entropies leave in nats.
"""

# The formulas. Hidden states h (L, H) and a head (W, b) give z = h W' + b, and with scale s, cap c and temperature T
#
#   logits     x = c tanh(s z / c) / T    (without a cap x = s z / T), in bits y = x log2 e
#   p_v        = 2^(y_v - n),             n = log2 sum_v 2^y_v the normaliser (bits)
#   log p_t    = (y_t - n) ln 2           of the token t (nats)
#   entropy E  = -sum_v p_v log p_v.      With the peak m, S = sum 2^(y - m) and M = sum 2^(y - m) (y - m):
#                                         n = m + log2 S and E = (log2 S - M / S) ln 2, in one pass over the tiles
#
# With incoming gradients g of log p_t and e of E (`token_grad` = `prob_grad` = g, `entropy_grad` = e)
#
#   d log p_t / d x_v = [v = t] - p_v     and    d E / d x_v = -p_v (log p_v + E)
#   d loss / d z_v    = dx/dz ([v = t] g - p_v (g + e E + e ln2 log2 p_v)),    dx/dz = s / T, times 1 / cosh^2(s z / c)
#                     = p_v (f + k log2 p_v) for v != t  (`factors`: f = -(g + e E) s / T, k = -e ln2 s / T)
#   d h = dz W,  d W = dz' h,  d b = sum of dz over the tokens
#
# For v = t the terms nearly cancel if the token is nearly certain: `token_gradient` has -g expm1(log p) for g (1 - p).

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from groupgrad.kernels import library
from groupgrad.kernels.head import BITS, SoftmaxSums, TileGradient, pass_tile
from groupgrad.kernels.layers import product

NATS = math.log(2.0)
"""Nats in a bit."""


@dataclass(slots=True, frozen=True)
class LogitTransform:
    """Logits of hidden states h under a head (W, b): softcap(scale * (h @ W.T + b))."""

    scale: float = 1.0
    """Multiplies the head's output."""
    softcap: float | None = None
    """cap * tanh(x / cap) on the scaled output; None for no cap."""
    in_float32: bool = False
    """The head computes in float32 under autocast too, and whatever its weight's dtype."""


@dataclass(slots=True, frozen=True)
class Tiles:
    """Maximum sizes of a tile of logits; the tiles of one call have about equal sizes."""

    tokens: int
    vocab: int

    @classmethod
    def of(cls, device: torch.device) -> Tiles:
        """Fast sizes for a kind of device."""
        return _TILES.get(device.type, _TILES["cuda"])


# On a CPU a tile of logits takes 4 MB, as much as a slice of the weight and one of its gradient each take at H=512.
_TILES = {"cpu": Tiles(512, 2048), "cuda": Tiles(4096, 8192)}


@dataclass(slots=True, frozen=True)
class OutputHead:
    """An output head, and what a low-rank adapter on it adds for the hidden states of one call.

    The output z (L, V) for hidden states (L, H) is hidden @ weight.T + bias + states @ adapter.T. As a sequence it is
    the weight (V, H + r) of both matrices.
    """

    weight: torch.Tensor
    """(V, H)."""
    bias: torch.Tensor | None = None
    """(V,)."""
    adapter: torch.Tensor | None = None
    """(V, r); None without an adapter. Gradients flow into it and into its states too."""
    states: torch.Tensor | None = None
    """(L, r), computed from the hidden states."""

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, ids: slice | torch.Tensor) -> torch.Tensor:
        """(n, H + r) weights of some ids."""
        return self.weight[ids] if self.adapter is None else torch.cat([self.weight[ids], self.adapter[ids]], dim=1)

    @property
    def width(self) -> int:
        """H + r."""
        return self.weight.shape[1] + (0 if self.adapter is None else self.adapter.shape[1])

    @property
    def device(self) -> torch.device:
        """Device of all weights."""
        return self.weight.device

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """(L, V), all at once: z, in the dtype of the weight or of autocast."""
        hidden = hidden.to(self.weight.device)
        if hidden.dtype == torch.float32 and self.weight.dtype == torch.bfloat16 and not hidden.is_cuda:
            z = F.linear(hidden, self.weight.float(), None if self.bias is None else self.bias.float())
        else:
            z = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        return z if self.states is None or self.adapter is None else z + F.linear(self.states, self.adapter).to(z)


@dataclass(slots=True, frozen=True)
class HeadTask:
    """Settings of one call."""

    transform: LogitTransform
    temperature: float
    tiles: Tiles
    dtype: torch.dtype
    """Dtype of the matrix products; the head's module has the same."""
    entropy_gradient: bool = False
    keep_direction: bool = False
    """Compute d log-prob / d hidden in the forward pass already."""
    frozen_columns: int = 0
    """Columns of the weight, from the left, that need no gradient."""
    has_few_gradients: bool = True  # False: the backward pass computes tokens without a gradient too

    @property
    def exact(self) -> torch.dtype:
        """Type of all sums and of everything but the matrix products."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def slope(self) -> float:
        """d logit / d (h @ W.T + b), without the slope of a cap."""
        return self.transform.scale / self.temperature

    @property
    def factor(self) -> float:
        """Multiplies h @ W.T + b to get bits, or the argument of the cap's tanh."""
        return self.slope * BITS if self.transform.softcap is None else self.transform.scale / self.transform.softcap

    @property
    def cap(self) -> float | None:
        """Bound of the logits in bits; None without a cap."""
        return None if self.transform.softcap is None else self.transform.softcap * BITS / self.temperature


@dataclass(slots=True)
class Scores:
    """Results of a pass, all (L,) but the last, in nats but the normaliser."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    normaliser: torch.Tensor
    """Log-sum-exp of the logits, in bits."""
    direction: torch.Tensor | None = None
    """(L, H) d log-prob / d hidden over `HeadTask.slope`, if it is kept."""


@dataclass(slots=True)
class HeadGradRequest:
    """Incoming gradients of a pass, all (L,).

    With p = exp(logit - normaliser), d loss / d logit = token_grad * [token] - prob_grad * p - entropy_grad * p *
    (log p + entropy). For the gradient of log-probs `token_grad` and `prob_grad` are both d loss / d log-prob.
    """

    tokens: torch.Tensor
    normaliser: torch.Tensor
    """Bits."""
    token_grad: torch.Tensor
    prob_grad: torch.Tensor
    logprobs: torch.Tensor | None = None
    """Exact log-probs; None to leave the tokens' logits out of the gradients."""
    entropy: torch.Tensor | None = None
    entropy_grad: torch.Tensor | None = None

    def at(self, rows: slice | torch.Tensor) -> HeadGradRequest:
        """The request for some of the tokens."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[rows] for name, value in values.items() if value is not None})

    def token_gradient(self, slope: float) -> torch.Tensor | None:
        """(L,) d loss / d (h @ W.T + b) at the tokens themselves; None if they are left out.

        From the exact log-prob: the p of a tile carries the rounding of a logit, which for a nearly certain token is a
        large part of 1 - p.
        """
        if self.logprobs is None:
            return None
        gradient = self.token_grad - self.prob_grad - self.prob_grad * torch.expm1(self.logprobs)
        if self.entropy_grad is not None and self.entropy is not None:
            logprobs = self.logprobs.clamp(min=-1e4)  # a logit of minus infinity
            gradient -= self.entropy_grad * logprobs.exp() * (logprobs + self.entropy)
        return gradient * slope

    def factors(self, slope: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(L,) f and k, or None for 0: d loss / d (h @ W.T + b) of other tokens is p * (f + k * log2 p)."""
        prob_factor = -self.prob_grad * slope
        if self.entropy_grad is None or self.entropy is None:
            return prob_factor, None
        entropy_grad = -self.entropy_grad * slope
        return prob_factor + entropy_grad * self.entropy, NATS * entropy_grad


@dataclass(slots=True)
class Gradients:
    """Gradients of the loss, None where not needed; `hidden` and `bias` have the dtype `HeadTask.exact`."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    """Columns from `HeadTask.frozen_columns` on, in the weight's dtype."""
    bias: torch.Tensor | None


def empty_gradients(num_tokens: int, head: OutputHead, task: HeadTask, needed: tuple[bool, bool, bool]) -> Gradients:
    """Memory for the gradients of hidden states, weight and bias where needed; the first tile overwrites it."""
    make = torch.empty if num_tokens else torch.zeros
    like: dict[str, Any] = {"dtype": task.exact, "device": head.device}
    trained = head.adapter if head.adapter is not None and task.frozen_columns else head.weight
    return Gradients(
        make((num_tokens, head.width), **like) if needed[0] else None,
        make((len(head), head.width - task.frozen_columns), dtype=trained.dtype, device=head.device)
        if needed[1]
        else None,
        make(len(head), **like) if needed[2] else None,
    )


def rows_to_all(part: torch.Tensor | None, rows: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
    """(L, H) with `part` at `rows` and 0 elsewhere."""
    return None if part is None else part.new_zeros(num_tokens, part.shape[1]).index_copy_(0, rows, part)


class _Grid:
    """The tiles of one pass and the scratch memory that they share. `slopes` keeps the slopes of the cap."""

    def __init__(self, num_tokens: int, head: OutputHead, task: HeadTask, *, slopes: bool):
        self._head, self._task = head, task
        self.tokens = list(slices(num_tokens, task.tiles.tokens))
        """Slices of the tokens; the first is the longest."""
        self._columns = list(slices(len(head), task.tiles.vocab, 128))
        size = (self.tokens[0].stop if self.tokens else 0) * self.vocab_size
        self._logits = torch.empty(size, dtype=task.exact, device=head.device)
        self._slopes = torch.empty_like(self._logits) if slopes and task.cap is not None else None
        self._rounded = None if task.dtype == task.exact else torch.empty_like(self._logits, dtype=task.dtype)
        is_float = task.dtype == torch.float32 and head.device.type == "cpu"
        self.kernels = library() if is_float and task.cap is None else None
        """The compiled kernels, which score a token as it was scored when it was sampled."""
        self._probs = None if self.kernels is not None else torch.empty_like(self._logits)
        # Without kernels a head of a small vocabulary is a small part of its model, so float64 sums cost little.
        self._is_fine = is_float and len(head) <= head.width

    def vocab(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Slices of the vocabulary, each with its weight (v, H) and bias (v,) in the dtype of the products."""
        for columns in self._columns:
            bias = None if self._head.bias is None else self._head.bias[columns].to(self._task.dtype)
            yield columns, self._head[columns].to(self._task.dtype), bias

    @property
    def vocab_size(self) -> int:
        """Width of the widest tile."""
        return self._columns[0].stop

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(t, v) logits in bits, temperature applied."""
        shape = (hidden.shape[0], weight.shape[0])
        factor, cap = self._task.factor, self._task.cap
        logits = _view(self._logits, shape)
        if self._rounded is not None:
            rounded = _view(self._rounded, shape)
            if bias is None:
                torch.mm(hidden, weight.t(), out=rounded)
            else:
                torch.addmm(bias, hidden, weight.t(), out=rounded)
            logits.copy_(rounded).mul_(factor)
        elif self._is_fine:
            products = hidden.double() @ weight.double().t()
            logits.copy_((products if bias is None else products.add_(bias)).mul_(factor))
        elif bias is None:
            logits.addmm_(hidden, weight.t(), beta=0, alpha=factor)
        else:
            torch.addmm(bias, hidden, weight.t(), beta=factor, alpha=factor, out=logits)
        if self._slopes is not None:
            _cap_slope(logits, out=_view(self._slopes, shape))
        return logits if cap is None else logits.tanh_().mul_(cap)

    def raw_logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(t, v) logits by the kernels, before scale and temperature."""
        assert self.kernels is not None
        logits = _view(self._logits, (hidden.shape[0], weight.shape[0]))
        return product(self.kernels, hidden, weight, bias, out=logits)

    def cap_slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Like `logits` (t, v), the latest: the slope of the cap at each; None without a cap."""
        return None if self._slopes is None else _view(self._slopes, logits.shape)

    def exp2(self, logits: torch.Tensor) -> torch.Tensor:
        """(t, v), in other memory than `logits`."""
        assert self._probs is not None
        return torch.exp2(logits, out=_view(self._probs, logits.shape))

    def rounded(self, tile: torch.Tensor) -> torch.Tensor:
        """`tile` in the dtype of the products."""
        return tile if self._rounded is None else _view(self._rounded, tile.shape).copy_(tile)


def score_pass(hidden: torch.Tensor, head: OutputHead, tokens: torch.Tensor, task: HeadTask) -> Scores:
    """Scores in one pass; sums are rescaled when a larger logit appears. `hidden` has the products' dtype."""
    grid = _Grid(len(hidden), head, task, slopes=task.keep_direction)
    if grid.kernels is not None:
        return _compiled_scores(grid, hidden, head, tokens, task)
    like: dict[str, Any] = {"dtype": task.exact, "device": head.device}
    # `top` stays finite, so that no difference of two tops is NaN.
    top = torch.full((len(hidden),), torch.finfo(task.exact).min / 4, **like)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    chosen, token_slope = torch.full_like(top, math.nan), torch.ones_like(top)
    mean = torch.zeros(hidden.shape, **like) if task.keep_direction else None
    for columns, w, b in grid.vocab():
        for rows in grid.tokens:
            logits = grid.logits(hidden[rows], w, b)
            inside, where = _place(tokens[rows], columns)
            chosen[rows] = torch.where(inside, _entries(logits, where), chosen[rows])
            cap_slope = grid.cap_slope(logits)
            highest = torch.maximum(top[rows], logits.amax(1))
            probs = grid.exp2(logits.sub_(highest[:, None]))
            lower = top[rows] - highest
            shrink = lower.exp2()
            # The moment is the sum of exp2(x - top) * (x - top): a new top changes both factors.
            moment[rows] = shrink * (moment[rows] + lower * total[rows]) + logits.mul_(probs).sum(1)
            total[rows] = shrink * total[rows] + probs.sum(1)
            top[rows] = highest
            if mean is not None:
                # The token's part nearly cancels; it is left out here and added exactly below.
                _add_at(probs, where, inside, -_entries(probs, where))
                if cap_slope is not None:
                    token_slope[rows] = torch.where(inside, _entries(cap_slope, where), token_slope[rows])
                    probs.mul_(cap_slope)
                mean[rows] *= shrink[:, None]
                _accumulate(mean[rows], grid.rounded(probs), w)
    scores = Scores((chosen - top - total.log2()) * NATS, (total.log2() - moment / total) * NATS, top + total.log2())
    if mean is not None:
        rest = -torch.expm1(scores.logprobs) * token_slope
        scores.direction = head[tokens].to(task.exact) * rest[:, None] - mean / total[:, None]
    return scores


def _compiled_scores(
    grid: _Grid, hidden: torch.Tensor, head: OutputHead, tokens: torch.Tensor, task: HeadTask
) -> Scores:
    kernels, sums = grid.kernels, SoftmaxSums.empty(len(hidden))
    assert kernels is not None
    mean = torch.zeros_like(hidden) if task.keep_direction else None
    for columns, w, b in grid.vocab():
        for rows in grid.tokens:
            tile, row_sums = grid.raw_logits(hidden[rows], w, b), sums.at(rows)
            old_peaks = row_sums.sums[:, 0].clone()
            pass_tile(kernels, tile, tokens[rows], columns.start, task.factor, sums=row_sums)
            if mean is not None:
                peaks = row_sums.sums[:, 0]
                # The token's part nearly cancels; it is left out here and added exactly below.
                probs = TileGradient(peaks.float(), tile.new_ones(len(peaks)))
                pass_tile(kernels, tile, tokens[rows], columns.start, task.factor, gradient=probs)
                mean[rows] *= (old_peaks - peaks).exp2().float()[:, None]
                _accumulate(mean[rows], tile, w)
    scores = Scores(*sums.finish(kernels))
    if mean is not None:
        rest = -torch.expm1(scores.logprobs)
        scores.direction = head[tokens] * rest[:, None] - mean / sums.sums[:, 1:2].float()
    return scores


def gradient_pass(
    hidden: torch.Tensor,
    head: OutputHead,
    request: HeadGradRequest,
    task: HeadTask,
    grads: Gradients,
    *,
    add: bool = False,
) -> None:
    """Fills `grads` in one pass; with `add` the gradients of weight and bias are added to.

    `hidden` has the products' dtype and holds the tokens of `request` alone, as does `grads.hidden`.
    """
    grid = _Grid(len(hidden), head, task, slopes=True)

    def tile_of(rows: slice, columns: slice, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        part = request.at(rows)
        if grid.kernels is None:
            return grid.rounded(_gradient_tile(grid, grid.logits(hidden[rows], w, b), part, columns, task))
        tile, (prob_factor, bits_factor) = grid.raw_logits(hidden[rows], w, b), part.factors(task.slope)
        gradient = TileGradient(part.normaliser, prob_factor, part.token_gradient(task.slope), bits_factor)
        pass_tile(grid.kernels, tile, part.tokens, columns.start, task.factor, gradient=gradient)
        return tile

    _accumulate_gradients(grid, hidden, task, grads, tile_of, add=add)


def scored_gradient_pass(
    hidden: torch.Tensor, head: OutputHead, request: HeadGradRequest, task: HeadTask, grads: Gradients
) -> tuple[Scores, torch.Tensor]:
    """`gradient_pass` from normalisers that are nearly right, which also computes the scores exactly.

    Leaves each token's logit out of the gradients, because its 1 - p is known exactly only afterwards. Also
    returns (L,) the sums of the probabilities in use, 1 for exact normalisers. No gradient flows from entropies.
    """
    grid = _Grid(len(hidden), head, task, slopes=True)
    exact_sums = None if grid.kernels is None else SoftmaxSums.empty(len(hidden))
    sums = request.normaliser.new_zeros(3, len(hidden))
    """Per token: its logit less the normaliser, the sum of p, and the sum of p * log2 p."""
    sums[0] = math.nan

    def tile_of(rows: slice, columns: slice, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        part = request.at(rows)
        if grid.kernels is None or exact_sums is None:
            logits = grid.logits(hidden[rows], w, b)
            return grid.rounded(_gradient_tile(grid, logits, part, columns, task, sums[:, rows]))
        tile, gradient = grid.raw_logits(hidden[rows], w, b), TileGradient(part.normaliser, part.factors(task.slope)[0])
        sums_of_rows = exact_sums.at(rows)
        pass_tile(grid.kernels, tile, part.tokens, columns.start, task.factor, sums=sums_of_rows, gradient=gradient)
        return tile

    _accumulate_gradients(grid, hidden, task, grads, tile_of, add=False)
    if grid.kernels is not None and exact_sums is not None:
        total = (exact_sums.normaliser() - request.normaliser).exp2().float()
        return Scores(*exact_sums.finish(grid.kernels)), total
    chosen, total, moment = sums
    excess = total.log2()
    entropy = excess - moment / total
    return Scores((chosen - excess) * NATS, entropy * NATS, request.normaliser + excess), total


def _accumulate_gradients(
    grid: _Grid,
    hidden: torch.Tensor,
    task: HeadTask,
    grads: Gradients,
    tile_of: Any,
    *,
    add: bool,
) -> None:
    """Multiplies tiles of d loss / d (h @ W.T + b) into `grads`; `tile_of` gives them for rows and columns."""
    # The gradient of a half-precision slice is summed in float32, and rounded once when it is finished.
    slice_sum = None
    if grads.weight is not None and grads.weight.dtype != task.exact:
        slice_sum = torch.empty((grid.vocab_size, grads.weight.shape[1]), dtype=task.exact, device=grads.weight.device)
    for columns, w, b in grid.vocab():
        grad_slice = None if grads.weight is None else grads.weight[columns]
        if slice_sum is not None:
            grad_slice = slice_sum[: len(w)]
        for rows in grid.tokens:
            tile = tile_of(rows, columns, w, b)
            first = rows.start == 0 and not add
            if grads.hidden is not None:
                _accumulate(grads.hidden[rows], tile, w, first=columns.start == 0)
            if grad_slice is not None:
                _accumulate(grad_slice, tile.t(), hidden[rows, task.frozen_columns :], first=first)
            if grads.bias is not None:
                part = tile.sum(0, dtype=task.exact)
                grads.bias[columns] = part if first else grads.bias[columns] + part
        if grads.weight is not None and slice_sum is not None and grid.tokens:
            grads.weight[columns] = slice_sum[: len(w)]


def _gradient_tile(
    grid: _Grid,
    logits: torch.Tensor,
    request: HeadGradRequest,
    columns: slice,
    task: HeadTask,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """(t, v) d loss / d (h @ W.T + b), overwriting `logits`. With `sums` (3, t) the tokens are summed and left out."""
    cap_slope = grid.cap_slope(logits)
    inside, where = _place(request.tokens, columns)
    tile = grid.exp2(logits.sub_(request.normaliser[:, None]))
    prob_factor, bits_factor = request.factors(task.slope)
    if sums is not None:
        chosen, total, moment = sums
        chosen.copy_(torch.where(inside, _entries(logits, where), chosen))
        total.add_(tile.sum(1))
        moment.add_(logits.mul_(tile).sum(1))
    if bits_factor is None:
        tile.mul_(prob_factor[:, None])
    else:
        tile.mul_(torch.addcmul(prob_factor[:, None], logits, bits_factor[:, None], out=logits))
    _add_at(tile, where, inside, -_entries(tile, where))
    if (token_gradient := request.token_gradient(task.slope)) is not None:
        _add_at(tile, where, inside, token_gradient)
    return tile if cap_slope is None else tile.mul_(cap_slope)


def token_logits(
    hidden: torch.Tensor, head: OutputHead, tokens: torch.Tensor, task: HeadTask
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(L,) logits of the tokens alone, in bits, NaN for ids outside the vocabulary; (L,) slopes of the cap, or None."""
    ids = tokens.clamp(0, len(head) - 1)
    logits = (hidden.to(task.exact) * head[ids]).sum(1)
    if head.bias is not None:
        logits = logits + head.bias[ids]
    logits, slopes = torch.where(ids == tokens, logits * task.factor, math.nan), None
    if task.cap is not None:
        logits, slopes = logits.tanh() * task.cap, _cap_slope(logits)
    return logits, slopes


def _cap_slope(argument: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Slope of tanh, as 1 / cosh^2: near the cap, 1 - tanh^2 would be rounding alone."""
    return torch.cosh(argument, out=out).square_().reciprocal_()


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
    """(t,) True for tokens inside these columns, and (t, 1) their column there, or any column if outside."""
    where = tokens - columns.start
    width = columns.stop - columns.start
    return (where >= 0) & (where < width), where.clamp(0, width - 1)[:, None]


def _entries(tile: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """(t,) the entry of each row's token."""
    return tile.gather(1, where).squeeze(1)


def _add_at(tile: torch.Tensor, where: torch.Tensor, inside: torch.Tensor, values: torch.Tensor) -> None:
    """Adds `values` (t,) to the entry of each row's token where that is inside."""
    tile.scatter_add_(1, where, torch.where(inside, values, 0.0)[:, None])


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool = False) -> None:
    """total += left @ right, or = for the first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)
