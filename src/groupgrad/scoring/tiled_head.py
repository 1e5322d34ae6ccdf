"""Log-probs and entropies straight from hidden states; no tensor of size (tokens, V) ever exists.

The work is done in tiles over tokens and vocabulary (`head_tiles.py`); the backward pass computes the logits that it
needs again. Counted in products of size L x V x H, a step costs four: logits; logits again, the gradient of the states,
the gradient of the weight. A frozen head needs two of them, and a precomputed log-prob gradient saves one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from groupgrad.batch import TokenScores
from groupgrad.scoring.head_tiles import (
    NATS,
    Gradients,
    HeadGradRequest,
    HeadTask,
    HeadWeights,
    LogitTransform,
    Scores,
    Tiles,
    gradient_pass,
    score_pass,
    scored_gradient_pass,
    token_logits,
)

_CLOSE = 5e-6
"""Relative difference up to which a token's precomputed gradient replaces its true one."""


@dataclass(slots=True, frozen=True)
class PrecomputedGradient:
    """Log-probs and their gradient, computed before the forward pass with the weights that sampled."""

    logprobs: torch.Tensor
    """(L,) the sampler's log-probs (nats, same temperature); NaN where unknown."""
    gradient: torch.Tensor
    """(L,) d loss / d log-prob up to a common factor, 0 where there is none."""


@dataclass(slots=True, frozen=True)
class LowRank:
    """An adapter on the head, which adds states @ weight.T to its output."""

    states: torch.Tensor
    """(L, r), computed from the hidden states."""
    weight: torch.Tensor
    """(V, r)."""


@dataclass(slots=True, frozen=True)
class OutputHead:
    """An output head, and what its adapter adds for the hidden states of one call.

    The output z (L, V) for hidden states (L, H) is hidden @ weight.T + bias + low_rank.states @ low_rank.weight.T.
    """

    weight: torch.Tensor
    """(V, H)."""
    bias: torch.Tensor | None = None
    """(V,)."""
    low_rank: LowRank | None = None
    """None without an adapter. Gradients flow into its states and its weight too."""

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The matrices that multiply states: the head's own, and the adapter's if there is one."""
        return (self.weight,) if self.low_rank is None else (self.weight, self.low_rank.weight)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """(L, V), all at once: z, in the dtype of the weight or of autocast."""
        z = F.linear(hidden.to(self.weight.device, self.weight.dtype), self.weight, self.bias)
        return z if self.low_rank is None else z + F.linear(self.low_rank.states, self.low_rank.weight).to(z)


def tiled_scores(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    *,
    transform: LogitTransform,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    tiles: Tiles | None = None,
    has_few_gradients: bool = True,
) -> TokenScores:
    """Log-prob and entropy (L,) of `tokens` (L,) under softmax(transform(z) / temperature), z the head's output.

    `hidden` is (L, H). Results are float32 (float64 for a float64 head), on the head's device; NaN log-probs for ids
    outside the vocabulary. Gradients flow from the log-probs, and with `entropy_gradient` from the entropies, into the
    hidden states and the head's parameters that require them, once (no double backward). With `has_few_gradients`
    tokens without an incoming gradient cost nothing there, but the host waits for a GPU to find them. With a frozen
    head (an adapter elsewhere) and no gradient from the entropies, the forward pass keeps d log-prob / d hidden (L, H)
    and nothing is computed again.
    """
    task = replace(_task(hidden, head, tokens, transform, temperature, tiles), has_few_gradients=has_few_gradients)
    if torch.is_grad_enabled():
        head_trains = any(x is not None and x.requires_grad for x in (*head.matrices, head.bias))
        keep = hidden.requires_grad and not head_trains and not entropy_gradient
        task = replace(task, entropy_gradient=entropy_gradient, keep_direction=keep)
    return _apply(hidden, head, tokens, task, None)


def scores_with_gradient(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    precomputed: PrecomputedGradient,
    *,
    transform: LogitTransform,
    temperature: float = 1.0,
    tiles: Tiles | None = None,
    has_few_gradients: bool = True,
) -> TokenScores:
    """`tiled_scores` whose forward pass computes the gradients of hidden states and head too: a quarter less work.

    The scores are those of the present weights, whatever was precomputed. So are the gradients, to a few millionths:
    tokens whose precomputed log-prob or gradient differs by more are computed again in the backward pass. Entropies
    carry no gradient. Without gradients, for half-precision weights and for a frozen head this is `tiled_scores`.
    """
    task = _task(hidden, head, tokens, transform, temperature, tiles)
    is_exact = task.dtype == task.exact and all(weight.dtype == task.exact for weight in head.matrices)
    if not (torch.is_grad_enabled() and any(weight.requires_grad for weight in head.matrices) and is_exact):
        options: dict[str, Any] = {"transform": transform, "temperature": temperature, "tiles": tiles}
        return tiled_scores(hidden, head, tokens, has_few_gradients=has_few_gradients, **options)
    return _apply(hidden, head, tokens, task, precomputed)


def _task(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    transform: LogitTransform,
    temperature: float,
    tiles: Tiles | None,
) -> HeadTask:
    weight = head.weight
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or tokens.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)} and tokens {tuple(tokens.shape)}; they "
            "must be (L, H), (V, H) and (L,)"
        )
    device, dtype = weight.device, weight.dtype
    if transform.in_float32:
        dtype = torch.float32
    # The same type as nn.Linear under autocast.
    elif dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return HeadTask(transform, temperature, tiles or Tiles.of(device), dtype)


def _apply(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    task: HeadTask,
    precomputed: PrecomputedGradient | None,
) -> TokenScores:
    weight, adapter = head.weight, None
    device = weight.device
    hidden = hidden.to(device)
    if head.low_rank is not None:
        # One product over the columns of both. The head's own columns get no gradient where they are frozen.
        hidden, adapter = torch.cat([hidden, head.low_rank.states.to(device)], dim=1), head.low_rank.weight.to(device)
        task = replace(task, frozen_columns=0 if weight.requires_grad else weight.shape[1])
    if precomputed is not None:
        fields = (precomputed.logprobs, precomputed.gradient)
        precomputed = PrecomputedGradient(*(x.detach().to(device=device, dtype=task.exact) for x in fields))
    scores: Any = _TiledScores.apply(hidden, weight, adapter, head.bias, tokens.to(device), task, precomputed)
    return TokenScores(logprobs=scores[0], entropy=scores[1])


class _TiledScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        adapter: torch.Tensor | None,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        task: HeadTask,
        precomputed: PrecomputedGradient | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.task, ctx.hidden_dtype, ctx.early = task, hidden.dtype, None
        states, head = hidden.to(task.dtype), HeadWeights(weight, adapter, bias)
        with torch.autocast(weight.device.type, enabled=False):
            if precomputed is not None:
                ctx.early = _early_gradients(states, head, tokens, precomputed, task, _needed(ctx))
            scores = score_pass(states, head, tokens, task) if ctx.early is None else ctx.early.scores
        if task.keep_direction:
            ctx.save_for_backward(scores.direction)
        else:
            ctx.save_for_backward(
                hidden, weight, adapter, bias, tokens, scores.normaliser, scores.logprobs, scores.entropy
            )
        if not task.entropy_gradient:
            ctx.mark_non_differentiable(scores.entropy)
        return scores.logprobs, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        task: HeadTask = ctx.task
        logprob_grad, entropy_grad = incoming
        if task.keep_direction:
            (direction,) = ctx.saved_tensors
            return (direction * (logprob_grad * task.slope)[:, None]).to(ctx.hidden_dtype), *[None] * 6
        hidden, weight, adapter, bias, tokens, normaliser, logprobs, entropy = ctx.saved_tensors
        if not task.entropy_gradient:
            entropy_grad = None
        request = HeadGradRequest(tokens, normaliser, logprob_grad, logprob_grad, logprobs, entropy, entropy_grad)
        # Early gradients are used once: a second backward pass through this node computes its own.
        early, ctx.early = ctx.early, None
        head = HeadWeights(weight, adapter, bias)
        with torch.autocast(weight.device.type, enabled=False):
            grads = _gradients(hidden, head, request, task, early, _needed(ctx))
        of_weight = of_adapter = grads.weight
        if grads.weight is not None and adapter is not None:
            width = weight.shape[1] - task.frozen_columns
            of_weight, of_adapter = (grads.weight[:, :width] if width else None), grads.weight[:, width:]
        pairs = zip((grads.hidden, of_weight, of_adapter, grads.bias), (hidden, weight, adapter, bias))
        return *(None if g is None or x is None else g.to(x.dtype) for g, x in pairs), None, None, None


def _needed(ctx: Any) -> tuple[bool, bool, bool]:
    """True for each of hidden states, weight (or adapter) and bias that needs a gradient."""
    hidden, weight, adapter, bias = ctx.needs_input_grad[:4]
    return hidden, weight or adapter, bias


@dataclass(slots=True)
class _EarlyGradients:
    """Gradients computed in the forward pass, from a precomputed log-prob gradient."""

    scores: Scores
    gradients: Gradients
    """For the precomputed d loss / d log-prob; hidden's is (L, H)."""
    gradient: torch.Tensor
    """(L,) the precomputed d loss / d log-prob, 0 for tokens left out."""
    excess: torch.Tensor
    """(L,) sum of the probabilities in use. All of them but the token's own are too large by this factor."""


def _early_gradients(
    hidden: torch.Tensor,
    head: HeadWeights,
    tokens: torch.Tensor,
    precomputed: PrecomputedGradient,
    task: HeadTask,
    needed: tuple[bool, bool, bool],
) -> _EarlyGradients | None:
    """Scores and gradients in one pass, or None if the precomputed log-probs are far off."""
    own_logits, own_slopes = token_logits(hidden, head, tokens, task)
    normaliser = own_logits - precomputed.logprobs / NATS
    is_known = (precomputed.gradient != 0) & normaliser.isfinite()
    rows, others = _where(is_known), _where(~is_known)
    if not len(rows):
        return None
    gradient = precomputed.gradient[rows]
    grads = _empty(len(rows), head, task, needed)
    request = HeadGradRequest(tokens[rows], normaliser[rows], gradient, gradient)
    scores, excess = scored_gradient_pass(hidden[rows], head, request, task, grads)
    # Far from 1 the sums, and with them the gradients, may be infinite or zero.
    if not bool(((excess - 1).abs() < 0.5).all()):
        return None
    own = -gradient * torch.expm1(scores.logprobs) * task.slope
    if own_slopes is not None:
        own *= own_slopes[rows]
    _add_own_tokens(grads, hidden[rows], head, tokens[rows], own, task)
    if not len(others):
        return _EarlyGradients(scores, grads, gradient, excess)
    rest = score_pass(hidden[others], head, tokens[others], task)
    grads.hidden = _scatter(grads.hidden, rows, len(hidden))
    order = torch.cat([rows, others]).argsort()
    all_scores = Scores(
        *(
            torch.cat([getattr(scores, name), getattr(rest, name)])[order]
            for name in ("logprobs", "entropy", "normaliser")
        )
    )
    excess = torch.cat([excess, torch.ones_like(rest.entropy)])[order]
    return _EarlyGradients(all_scores, grads, precomputed.gradient.masked_fill(~is_known, 0.0), excess)


def _add_own_tokens(
    grads: Gradients, hidden: torch.Tensor, head: HeadWeights, tokens: torch.Tensor, own: torch.Tensor, task: HeadTask
) -> None:
    """Adds the gradient of each token's own logit, `own` (L,): d loss / d log-prob * (1 - p), from its exact log-prob.

    For a nearly certain token even a tiny error of p would be a large one of 1 - p.
    """
    if grads.hidden is not None:
        grads.hidden.addcmul_(head[tokens], own[:, None])
    if grads.weight is not None:
        grads.weight.index_add_(0, tokens, hidden[:, task.frozen_columns :] * own[:, None])
    if grads.bias is not None:
        grads.bias.index_add_(0, tokens, own)


def _gradients(
    hidden: torch.Tensor,
    head: HeadWeights,
    request: HeadGradRequest,
    task: HeadTask,
    early: _EarlyGradients | None,
    needed: tuple[bool, bool, bool],
) -> Gradients:
    """The requested gradients; tokens without a remaining gradient are skipped."""
    done = None if early is None else _use_early(early, request)
    if done is None and not task.has_few_gradients:
        grads = _empty(len(hidden), head, task, needed)
        gradient_pass(hidden.to(task.dtype), head, request, task, grads, add=False)
        return grads
    has_gradient = (request.token_grad != 0) | (request.prob_grad != 0)
    if request.entropy_grad is not None:
        has_gradient |= request.entropy_grad != 0
    rows = _where(has_gradient)
    if done is not None and not len(rows):
        return done
    is_part = len(rows) < len(hidden)
    states = (hidden[rows] if is_part else hidden).to(task.dtype)
    grads = _empty(len(rows), head, task, needed)
    if done is not None:
        grads.weight, grads.bias = done.weight, done.bias
    gradient_pass(states, head, request.at(rows) if is_part else request, task, grads, add=done is not None)
    if is_part:
        grads.hidden = _scatter(grads.hidden, rows, len(hidden))
    if done is not None and grads.hidden is not None and done.hidden is not None:
        grads.hidden += done.hidden
    return grads


def _use_early(early: _EarlyGradients, request: HeadGradRequest) -> Gradients:
    """The early gradients times the factor between them and the true ones; `request` keeps what they lack."""
    grads, true = early.gradients, request.token_grad
    largest = early.gradient.abs().argmax()
    factor = float(true[largest] / early.gradient[largest])
    for x in (grads.hidden, grads.weight, grads.bias):
        if x is not None and factor != 1.0:
            x *= factor
    done = early.gradient * factor
    token_rest, prob_rest = true - done, true - done * early.excess
    is_close = torch.maximum(token_rest.abs(), prob_rest.abs()) <= _CLOSE * true.abs()
    # The early gradients of a token's own logit have the exact p, those of all others the p in use.
    own_prob = early.scores.logprobs.exp()
    token_rest = token_rest * (1 - own_prob) + prob_rest * own_prob
    request.token_grad, request.prob_grad = token_rest.masked_fill(is_close, 0.0), prob_rest.masked_fill(is_close, 0.0)
    return grads


def _empty(num_tokens: int, head: HeadWeights, task: HeadTask, needed: tuple[bool, bool, bool]) -> Gradients:
    """Memory for the gradients; not cleared if the first tile overwrites it."""
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


def _scatter(part: torch.Tensor | None, rows: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
    """(L, H) with `part` at `rows` and 0 elsewhere."""
    return None if part is None else part.new_zeros(num_tokens, part.shape[1]).index_copy_(0, rows, part)


def _where(mask: torch.Tensor) -> torch.Tensor:
    """(n,) positions at which `mask` is true."""
    return mask.nonzero().squeeze(1)
