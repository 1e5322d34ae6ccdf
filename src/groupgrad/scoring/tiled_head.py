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
from groupgrad.scoring.early_gradients import PrecomputedGradient, early_gradients, take_early
from groupgrad.scoring.head_tiles import (
    Gradients,
    HeadGradRequest,
    HeadTask,
    HeadWeights,
    LogitTransform,
    Scores,
    Tiles,
    empty_gradients,
    gradient_pass,
    rows_to_all,
    score_pass,
)


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
        hidden = hidden.to(self.weight.device)
        if hidden.dtype == torch.float32 and self.weight.dtype == torch.bfloat16 and not hidden.is_cuda:
            z = F.linear(hidden, self.weight.float(), None if self.bias is None else self.bias.float())
        else:
            z = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
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
    elif dtype == torch.bfloat16 and hidden.dtype == torch.float32 and device.type == "cpu":
        dtype = torch.float32  # see `computes_in_float32`
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
    """Scores in the forward pass, gradients in the backward pass.

    With `precomputed` the forward pass computes most of the gradients, and the backward pass adds what they lack.
    """

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
        states, head, early = hidden.to(task.dtype), HeadWeights(weight, adapter, bias), None
        with torch.autocast(weight.device.type, enabled=False):
            if precomputed is not None:
                early = early_gradients(states, head, tokens, precomputed, task, _needed(ctx))
            scores = score_pass(states, head, tokens, task) if early is None else early.scores
        ctx.early = early
        return _keep(ctx, (hidden, weight, adapter, bias, tokens), scores, task)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.task.keep_direction:
            (direction,) = ctx.saved_tensors
            return (direction * (incoming[0] * ctx.task.slope)[:, None]).to(ctx.hidden_dtype), *[None] * 6
        # Early gradients are used once: a second backward pass through this node computes all of them.
        early, ctx.early = ctx.early, None
        hidden, head, request = _kept(ctx, incoming)
        with torch.autocast(head.device.type, enabled=False):
            done = None if early is None else take_early(early, request)
            grads = _gradients(hidden, head, request, ctx.task, _needed(ctx), done)
        return *_of_inputs(grads, hidden, head, ctx.task), None, None, None


def _keep(
    ctx: Any, inputs: tuple[torch.Tensor | None, ...], scores: Scores, task: HeadTask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps for the backward pass what it needs; returns log-probs and entropies."""
    ctx.task = task
    if task.keep_direction:
        assert inputs[0] is not None
        ctx.hidden_dtype = inputs[0].dtype
        ctx.save_for_backward(scores.direction)
    else:
        ctx.save_for_backward(*inputs, scores.normaliser, scores.logprobs, scores.entropy)
    if not task.entropy_gradient:
        ctx.mark_non_differentiable(scores.entropy)
    return scores.logprobs, scores.entropy


def _kept(ctx: Any, incoming: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, HeadWeights, HeadGradRequest]:
    """Hidden states, head and the request for gradients, from what `_keep` has kept and the incoming gradients."""
    hidden, weight, adapter, bias, tokens, normaliser, logprobs, entropy = ctx.saved_tensors
    logprob_grad, entropy_grad = incoming
    request = HeadGradRequest(
        tokens,
        normaliser,
        token_grad=logprob_grad,
        prob_grad=logprob_grad,
        logprobs=logprobs,
        entropy=entropy,
        entropy_grad=entropy_grad if ctx.task.entropy_gradient else None,
    )
    return hidden, HeadWeights(weight, adapter, bias), request


def _needed(ctx: Any) -> tuple[bool, bool, bool]:
    """True for each of hidden states, weight (or adapter) and bias that needs a gradient."""
    hidden, weight, adapter, bias = ctx.needs_input_grad[:4]
    return hidden, weight or adapter, bias


def _gradients(
    hidden: torch.Tensor,
    head: HeadWeights,
    request: HeadGradRequest,
    task: HeadTask,
    needed: tuple[bool, bool, bool],
    done: Gradients | None = None,
) -> Gradients:
    """The requested gradients, in addition to those that are `done`; tokens without any are skipped."""
    if done is None and not task.has_few_gradients:
        grads = empty_gradients(len(hidden), head, task, needed)
        gradient_pass(hidden.to(task.dtype), head, request, task, grads, add=False)
        return grads
    has_gradient = (request.token_grad != 0) | (request.prob_grad != 0)
    if request.entropy_grad is not None:
        has_gradient |= request.entropy_grad != 0
    rows = has_gradient.nonzero().squeeze(1)
    if done is not None and not len(rows):
        return done
    is_part = len(rows) < len(hidden)
    states = (hidden[rows] if is_part else hidden).to(task.dtype)
    grads = empty_gradients(len(rows), head, task, needed)
    if done is not None:
        grads.weight, grads.bias = done.weight, done.bias
    gradient_pass(states, head, request.at(rows) if is_part else request, task, grads, add=done is not None)
    if is_part:
        grads.hidden = rows_to_all(grads.hidden, rows, len(hidden))
    if done is not None and grads.hidden is not None and done.hidden is not None:
        grads.hidden += done.hidden
    return grads


def _of_inputs(
    grads: Gradients, hidden: torch.Tensor, head: HeadWeights, task: HeadTask
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of hidden states, weight, adapter and bias, in their types."""
    of_weight = of_adapter = grads.weight
    if grads.weight is not None and head.adapter is not None:
        width = head.weight.shape[1] - task.frozen_columns
        of_weight, of_adapter = (grads.weight[:, :width] if width else None), grads.weight[:, width:]
    inputs = (hidden, head.weight, head.adapter, head.bias)
    pairs = zip((grads.hidden, of_weight, of_adapter, grads.bias), inputs)
    return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in pairs)
