"""Log-probabilities and entropies straight from hidden states; nothing of size (tokens, V) ever exists.

The work is done in tiles over tokens and vocabulary (`modeling/scoring/head_tiles.py`); the backward pass computes the
logits that it needs again. Counted in products of size L x V x H, a step costs four: logits; logits again, the
gradient of the states, the gradient of the weight. Two cases need fewer: a frozen head (two), and gradients that are
foreseen (three).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from groupgrad.batch import TokenScores
from groupgrad.modeling.scoring.head_tiles import (
    NATS,
    Gradients,
    HeadGradRequest,
    HeadTask,
    HeadWeight,
    Joined,
    LogitTransform,
    Scores,
    Sums,
    Tiles,
    chosen_logits,
    gradient_pass,
    score_pass,
)

# A token whose foreseen gradient is this close to the true one, relatively, is left as it is.
_CLOSE = 5e-6


@dataclass(slots=True, frozen=True)
class PrecomputedGradient:
    """What is known of a step before its forward pass, where the weights are those that sampled."""

    logprobs: torch.Tensor
    """(L,) the sampler's log-probs (nats, same temperature); NaN where unknown."""
    gradient: torch.Tensor
    """(L,) d loss / d log-prob up to a common factor, 0 where there is none."""


@dataclass(slots=True, frozen=True)
class LowRank:
    """What an adapter on the head adds to its output: states @ weight.T."""

    states: torch.Tensor
    """(L, r), made of the hidden states."""
    weight: torch.Tensor
    """(V, r)."""


def tiled_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    *,
    transform: LogitTransform,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    tiles: Tiles | None = None,
    low_rank: LowRank | None = None,
) -> TokenScores:
    """Log-prob and entropy (L,) of `tokens` (L,) under softmax(recipe(hidden @ weight.T + bias) / temperature).

    With `low_rank` its product is added to the head's, and gradients flow into its parts too.

    hidden (L, H), weight (V, H), bias (V,) or None. Results are float32 (float64 for a float64 head), on the weight's
    device; NaN log-probs for ids outside the vocabulary. Gradients flow from the log-probs, and with
    `entropy_gradient` from the entropies, into whichever of hidden, weight and bias require them, once (no double
    backward); tokens without an incoming gradient cost nothing there. With a frozen head (an adapter elsewhere) and no
    gradient from the entropies, the forward pass keeps d log-prob / d hidden (L, H) and nothing is computed again.
    """
    job = _job(hidden, weight, tokens, transform, temperature, tiles)
    if torch.is_grad_enabled():
        head_trains = _trains(weight, low_rank) or (bias is not None and bias.requires_grad)
        keep = hidden.requires_grad and not head_trains and not entropy_gradient
        job = replace(job, entropy_gradient=entropy_gradient, keep_direction=keep)
    return _apply(hidden, weight, bias, tokens, job, None, low_rank)


def scores_with_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    precomputed: PrecomputedGradient,
    *,
    transform: LogitTransform,
    temperature: float = 1.0,
    tiles: Tiles | None = None,
    low_rank: LowRank | None = None,
) -> TokenScores:
    """`tiled_scores` whose forward pass finds the gradients of hidden, weight and bias too: a quarter less work.

    The scores are those of the present weights, whatever was foreseen. So are the gradients, to a few millionths:
    tokens where the foreseen log-prob or gradient turns out to differ by more are put right in the backward pass, at
    the cost of computing these tokens again. Entropies carry no gradient. Without gradients, for half-precision
    products or for a frozen head it is `tiled_scores` itself.
    """
    job = _job(hidden, weight, tokens, transform, temperature, tiles)
    is_exact = job.dtype == job.exact and (low_rank is None or low_rank.weight.dtype == job.exact)
    if not (torch.is_grad_enabled() and _trains(weight, low_rank) and is_exact):
        return tiled_scores(
            hidden, weight, bias, tokens, transform=transform, temperature=temperature, tiles=tiles, low_rank=low_rank
        )
    return _apply(hidden, weight, bias, tokens, job, precomputed, low_rank)


def _trains(weight: torch.Tensor, low_rank: LowRank | None) -> bool:
    return weight.requires_grad or (low_rank is not None and low_rank.weight.requires_grad)


def _job(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    transform: LogitTransform,
    temperature: float,
    tiles: Tiles | None,
) -> HeadTask:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or tokens.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)} and tokens {tuple(tokens.shape)}; they "
            "must be (L, H), (V, H) and (L,)"
        )
    device = weight.device
    dtype = weight.dtype
    # As nn.Linear would multiply here.
    if not transform.own_dtype and dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return HeadTask(transform, temperature, tiles or Tiles.of(device), dtype)


def _apply(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    job: HeadTask,
    precomputed: PrecomputedGradient | None,
    low_rank: LowRank | None,
) -> TokenScores:
    device, second = weight.device, None
    hidden = hidden.to(device)
    if low_rank is not None:
        # One product over the columns of both; the first ones are left out of the gradient where they are frozen.
        hidden, second = torch.cat([hidden, low_rank.states.to(device)], dim=1), low_rank.weight.to(device)
        job = replace(job, frozen_columns=0 if weight.requires_grad else weight.shape[1])
    if precomputed is not None:
        parts = (precomputed.logprobs, precomputed.gradient)
        precomputed = PrecomputedGradient(*(x.detach().to(device=device, dtype=job.exact) for x in parts))
    found: Any = _TiledScores.apply(hidden, weight, second, bias, tokens.to(device), job, precomputed)
    return TokenScores(logprobs=found[0], entropy=found[1])


class _TiledScores(torch.autograd.Function):
    """The scores of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        second: torch.Tensor | None,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        job: HeadTask,
        precomputed: PrecomputedGradient | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.job, ctx.hidden_dtype, ctx.ahead = job, hidden.dtype, None
        states, joined = hidden.to(job.dtype), _joined(weight, second)
        with torch.autocast(weight.device.type, enabled=False):
            if precomputed is not None:
                ctx.ahead = _look_ahead(states, joined, bias, tokens, precomputed, job, _needed(ctx))
            scores = score_pass(states, joined, bias, tokens, job) if ctx.ahead is None else ctx.ahead.scores
        if job.keep_direction:
            ctx.save_for_backward(scores.direction)
        else:
            ctx.save_for_backward(hidden, weight, second, bias, tokens, scores.normaliser, scores.entropy)
        if not job.entropy_gradient:
            ctx.mark_non_differentiable(scores.entropy)
        return scores.logprobs, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: HeadTask = ctx.job
        to_logprobs, to_entropy = incoming
        if job.keep_direction:
            (direction,) = ctx.saved_tensors
            return (direction * (to_logprobs * job.slope)[:, None]).to(ctx.hidden_dtype), *[None] * 6
        hidden, weight, second, bias, tokens, normaliser, entropy = ctx.saved_tensors
        pull = HeadGradRequest(
            tokens, normaliser, to_logprobs, to_logprobs, entropy, to_entropy if job.entropy_gradient else None
        )
        # What was found ahead is handed on and gone: another backward pass through this node starts anew.
        ahead, ctx.ahead = ctx.ahead, None
        with torch.autocast(weight.device.type, enabled=False):
            found = _gradients(hidden, _joined(weight, second), bias, pull, job, ahead, _needed(ctx))
        first = last = found.weight
        if found.weight is not None and second is not None:
            width = weight.shape[1] - job.frozen_columns
            first, last = (found.weight[:, :width] if width else None), found.weight[:, width:]
        grads = zip((found.hidden, first, last, found.bias), (hidden, weight, second, bias))
        return *(None if g is None or x is None else g.to(x.dtype) for g, x in grads), None, None, None


def _joined(weight: torch.Tensor, second: torch.Tensor | None) -> HeadWeight:
    return weight if second is None else Joined(weight, second)


def _needed(ctx: Any) -> tuple[bool, ...]:
    """Whether the gradients of hidden states, of the weight with what is beside it, and of the bias are wanted."""
    hidden, weight, second, bias = ctx.needs_input_grad[:4]
    return hidden, weight or second, bias


@dataclass(slots=True)
class _Ahead:
    """Gradients found in the forward pass."""

    scores: Scores
    gradients: Gradients
    """For the foreseen d loss / d log-prob; hidden's is (L, H)."""
    gradient: torch.Tensor
    """(L,) the foreseen d loss / d log-prob, 0 for tokens left out."""
    excess: torch.Tensor
    """(L,) what the probabilities in use summed up to; but for the token's own, they are too large by this factor."""


def _look_ahead(
    hidden: torch.Tensor,
    weight: HeadWeight,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    precomputed: PrecomputedGradient,
    job: HeadTask,
    needed: tuple[bool, ...],
) -> _Ahead | None:
    """Scores and foreseen gradients in one pass, or None if what was foreseen is of no use."""
    normaliser = chosen_logits(hidden, weight, bias, tokens, job) - precomputed.logprobs / NATS
    fit = (precomputed.gradient != 0) & normaliser.isfinite()
    rows, others = _where(fit), _where(~fit)
    if not len(rows):
        return None
    of = precomputed.gradient[rows]
    found = _empty(len(rows), hidden, weight, bias, job, needed)
    sums = Sums.zeros(of)
    gradient_pass(
        hidden[rows], weight, bias, HeadGradRequest(tokens[rows], normaliser[rows], of, of), job, found, sums=sums
    )
    # Far from 1 the sums may be infinite or all zero, and so would be what was added to the gradients.
    if not bool(((sums.total - 1).abs() < 0.5).all()):
        return None
    scores = sums.scores(normaliser[rows])
    _correct_own(found, hidden[rows], weight, tokens[rows], of, sums, scores, job)
    if not len(others):
        return _Ahead(scores, found, of, sums.total)
    rest = score_pass(hidden[others], weight, bias, tokens[others], job)
    found.hidden = _spread(found.hidden, rows, len(hidden))
    back = torch.cat([rows, others]).argsort()
    whole = Scores(
        torch.cat([scores.logprobs, rest.logprobs])[back],
        torch.cat([scores.entropy, rest.entropy])[back],
        torch.cat([scores.normaliser, rest.normaliser])[back],
    )
    excess = torch.cat([sums.total, torch.ones_like(rest.entropy)])[back]
    return _Ahead(whole, found, precomputed.gradient.masked_fill(~fit, 0.0), excess)


def _correct_own(
    found: Gradients,
    hidden: torch.Tensor,
    weight: HeadWeight,
    tokens: torch.Tensor,
    of: torch.Tensor,
    sums: Sums,
    scores: Scores,
    job: HeadTask,
) -> None:
    """Make each token's own share of the gradients exact.

    It is 1 - p, where for a sure token even a tiny error of p weighs; the shares of the others have that error
    relatively.
    """
    if sums.exact is not None:
        lacking = -of * torch.expm1(scores.logprobs) * job.slope
    else:
        lacking = of * (sums.chosen.exp2() - scores.logprobs.exp()) * job.slope
    if job.cap is not None:
        logits = scores.normaliser + scores.logprobs / NATS
        lacking *= 1 - (logits / job.cap) ** 2
    if found.hidden is not None:
        found.hidden.addcmul_(weight[tokens], lacking[:, None])
    if found.weight is not None:
        found.weight.index_add_(0, tokens, hidden[:, job.frozen_columns :] * lacking[:, None])
    if found.bias is not None:
        found.bias.index_add_(0, tokens, lacking)


def _gradients(
    hidden: torch.Tensor,
    weight: HeadWeight,
    bias: torch.Tensor | None,
    pull: HeadGradRequest,
    job: HeadTask,
    ahead: _Ahead | None,
    needed: tuple[bool, ...],
) -> Gradients:
    """The gradients that `pull` asks for; only tokens with something left to do are computed."""
    found = None if ahead is None else _settle(ahead, pull)
    live = (pull.of_token != 0) | (pull.of_chances != 0)
    if pull.to_entropy is not None:
        live |= pull.to_entropy != 0
    rows = _where(live)
    if found is not None and not len(rows):
        return found
    some = len(rows) < len(hidden)
    states = (hidden[rows] if some else hidden).to(job.dtype)
    fresh = _empty(len(rows), states, weight, bias, job, needed)
    if found is not None:
        fresh.weight, fresh.bias = found.weight, found.bias
    gradient_pass(states, weight, bias, pull.at(rows) if some else pull, job, fresh, add=found is not None)
    if some:
        fresh.hidden = _spread(fresh.hidden, rows, len(hidden))
    if found is not None and fresh.hidden is not None and found.hidden is not None:
        fresh.hidden += found.hidden
    return fresh


def _settle(ahead: _Ahead, pull: HeadGradRequest) -> Gradients:
    """The gradients found ahead times their common factor with the true ones; `pull` is left with what they lack."""
    found, true = ahead.gradients, pull.of_token
    largest = ahead.gradient.abs().argmax()
    factor = float(true[largest] / ahead.gradient[largest])
    for x in (found.hidden, found.weight, found.bias):
        if x is not None and factor != 1.0:
            x *= factor
    done = ahead.gradient * factor
    lacking, of_chances = true - done, true - done * ahead.excess
    close = torch.maximum(lacking.abs(), of_chances.abs()) <= _CLOSE * true.abs()
    chance = ahead.scores.logprobs.exp()
    of_token = lacking * (1 - chance) + of_chances * chance
    pull.of_token, pull.of_chances = of_token.masked_fill(close, 0.0), of_chances.masked_fill(close, 0.0)
    return found


def _empty(
    num_tokens: int,
    hidden: torch.Tensor,
    weight: HeadWeight,
    bias: torch.Tensor | None,
    job: HeadTask,
    needed: tuple[bool, ...],
) -> Gradients:
    """Memory for the gradients, not cleared (the first tile overwrites it) unless there will be no tile."""
    make = torch.empty if num_tokens else torch.zeros
    like: dict[str, Any] = {"dtype": job.exact, "device": weight.device}
    trained = weight.right.dtype if isinstance(weight, Joined) and job.frozen_columns else weight.dtype
    shape = (len(weight), weight.shape[1] - job.frozen_columns)
    return Gradients(
        make((num_tokens, hidden.shape[1]), **like) if needed[0] else None,
        make(shape, dtype=trained, device=weight.device) if needed[1] else None,
        make(bias.shape, **like) if needed[2] and bias is not None else None,
    )


def _spread(part: torch.Tensor | None, rows: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
    """(L, H) with `part` at `rows` and 0 elsewhere."""
    return None if part is None else part.new_zeros(num_tokens, part.shape[1]).index_copy_(0, rows, part)


def _where(mask: torch.Tensor) -> torch.Tensor:
    """(n,) positions at which `mask` is true."""
    return mask.nonzero().squeeze(1)
