"""Log-probs and entropies straight from hidden states; no tensor of size (tokens, V) ever exists.

`HeadHook.scores_of` computes the same from all logits at once. Here the work is done in tiles over tokens and
vocabulary (`head_tiles.py`); the backward pass computes the logits that it needs again. Counted in products of size
L x V x H, a step costs four: logits; logits again, the gradient of the states, the gradient of the weight. A frozen
head needs two of them, and a precomputed log-prob gradient saves one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from groupgrad.batch import TokenScores
from groupgrad.scoring.early_gradients import PrecomputedGradient, early_gradients, take_early
from groupgrad.scoring.head_tiles import (
    Gradients,
    HeadGradRequest,
    HeadTask,
    LogitTransform,
    OutputHead,
    Tiles,
    empty_gradients,
    gradient_pass,
    rows_to_all,
    score_pass,
)


def tiled_scores(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    *,
    transform: LogitTransform,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    precomputed: PrecomputedGradient | None = None,
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

    With `precomputed` the forward pass of a head that trains in float32 computes the gradients too, which is a quarter
    less work, unless entropies carry a gradient. The scores are those of the present weights, whatever was precomputed.
    So are the gradients, to a few millionths: tokens whose precomputed log-prob or gradient differs by more are
    computed again in the backward pass.
    """
    weight, adapter = head.weight, head.adapter
    device, hidden = weight.device, hidden.to(weight.device)
    tiles, dtype = tiles or Tiles.of(device), _product_dtype(hidden, weight, transform)
    task = HeadTask(transform, temperature, tiles, dtype, has_few_gradients=has_few_gradients)
    matrices = (weight,) if adapter is None else (weight, adapter)
    trains = [x is not None and x.requires_grad for x in (*matrices, head.bias)]
    is_exact = dtype == task.exact and all(matrix.dtype == task.exact for matrix in matrices)
    if not (torch.is_grad_enabled() and any(trains[:-1]) and is_exact) or entropy_gradient:
        precomputed = None
    if torch.is_grad_enabled():
        keep = hidden.requires_grad and not any(trains) and not entropy_gradient
        task = replace(task, entropy_gradient=entropy_gradient, keep_direction=keep)
    if adapter is not None and head.states is not None:
        # One product over the columns of both. The head's own columns get no gradient where they are frozen.
        hidden, adapter = torch.cat([hidden, head.states.to(device)], dim=1), adapter.to(device)
        task = replace(task, frozen_columns=0 if weight.requires_grad else weight.shape[1])
    if precomputed is not None:
        fields = (precomputed.logprobs, precomputed.gradient)
        precomputed = PrecomputedGradient(*(x.detach().to(device=device, dtype=task.exact) for x in fields))
    scores: Any = _TiledScores.apply(hidden, weight, adapter, head.bias, tokens.to(device), task, precomputed)
    return TokenScores(logprobs=scores[0], entropy=scores[1])


def _product_dtype(hidden: torch.Tensor, weight: torch.Tensor, transform: LogitTransform) -> torch.dtype:
    """Dtype of the matrix products, which the head's module has too."""
    if transform.in_float32:
        return torch.float32
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    is_half = weight.dtype == torch.bfloat16 and hidden.dtype == torch.float32 and weight.device.type == "cpu"
    return torch.float32 if is_half else weight.dtype  # see `computes_in_float32`


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
        states, head, early = hidden.to(task.dtype), OutputHead(weight, bias, adapter), None
        with torch.autocast(weight.device.type, enabled=False):
            if precomputed is not None:
                early = early_gradients(states, head, tokens, precomputed, task, _needed(ctx))
            scores = score_pass(states, head, tokens, task) if early is None else early.scores
        ctx.task, ctx.early, ctx.hidden_dtype = task, early, hidden.dtype
        if task.keep_direction:
            ctx.save_for_backward(scores.direction)
        else:
            results = scores.normaliser, scores.logprobs, scores.entropy
            ctx.save_for_backward(hidden, weight, adapter, bias, tokens, *results)
        if not task.entropy_gradient:
            ctx.mark_non_differentiable(scores.entropy)
        return scores.logprobs, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        task, (logprob_grad, entropy_grad) = ctx.task, incoming
        if task.keep_direction:
            (direction,) = ctx.saved_tensors
            return (direction * (logprob_grad * task.slope)[:, None]).to(ctx.hidden_dtype), *[None] * 6
        # Early gradients are used once: a second backward pass through this node computes all of them.
        early, ctx.early = ctx.early, None
        hidden, weight, adapter, bias, tokens, normaliser, logprobs, entropy = ctx.saved_tensors
        head = OutputHead(weight, bias, adapter)
        request = HeadGradRequest(
            tokens,
            normaliser,
            token_grad=logprob_grad,
            prob_grad=logprob_grad,
            logprobs=logprobs,
            entropy=entropy,
            entropy_grad=entropy_grad if task.entropy_gradient else None,
        )
        with torch.autocast(head.device.type, enabled=False):
            done = None if early is None else take_early(early, request)
            grads = _gradients(hidden, head, request, task, _needed(ctx), done)
        return *_of_inputs(grads, hidden, head, task), None, None, None


def _needed(ctx: Any) -> tuple[bool, bool, bool]:
    """True for each of hidden states, weight (or adapter) and bias that needs a gradient."""
    hidden, weight, adapter, bias = ctx.needs_input_grad[:4]
    return hidden, weight or adapter, bias


def _gradients(
    hidden: torch.Tensor,
    head: OutputHead,
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
    grads: Gradients, hidden: torch.Tensor, head: OutputHead, task: HeadTask
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of hidden states, weight, adapter and bias, in their types."""
    of_weight = of_adapter = grads.weight
    if grads.weight is not None and head.adapter is not None:
        width = head.weight.shape[1] - task.frozen_columns
        of_weight, of_adapter = (grads.weight[:, :width] if width else None), grads.weight[:, width:]
    inputs = (hidden, head.weight, head.adapter, head.bias)
    pairs = zip((grads.hidden, of_weight, of_adapter, grads.bias), inputs)
    return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in pairs)
