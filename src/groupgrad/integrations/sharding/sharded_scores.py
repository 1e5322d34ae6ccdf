"""Wraps the plain pass of `scoring/forward.py` for models whose parameters are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch, TokenScores
from groupgrad.integrations.sharding.fsdp import zero_of_vision_tower
from groupgrad.scoring.early_gradients import PrecomputedGradient
from groupgrad.scoring.head_hook import HeadHook
from groupgrad.scoring.tiled_head import LogitTransform


@contextmanager
def on_shards(hook: HeadHook, head: Any, transform: LogitTransform | None) -> Iterator[None]:
    """`hook.on`, for a model that ZeRO-3 shards.

    With the tiled head the module returns the scores as its output, so that its weights are gathered for their
    backward pass as for any module.
    """
    inside = nullcontext()
    # The head in an adapter is a module of its own, which gathers no weights itself.
    if transform is not None and isinstance(head, nn.Linear) and hook.rows.numel():
        inside = _scoring_inside(hook, head, transform)
    with hook.on(head), inside:
        yield


@contextmanager
def _scoring_inside(hook: HeadHook, head: Any, transform: LogitTransform) -> Iterator[None]:
    """Makes the head's forward method return scores of its narrowed input in place of logits.

    ZeRO-3 gathers a module's weights by its inputs and outputs, forward and backward. The code behind the head gets
    zeros as the logits of one token.
    """
    plain = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not hook.is_narrowed:
            return plain(hidden)
        scores = hook.tiled_scores(head, hidden[0], transform)
        return torch.stack([scores.logprobs, scores.entropy])

    def take(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        if not hook.is_narrowed:
            return None
        logprobs, entropy = output.unbind()
        hook.scores = TokenScores(logprobs, entropy if hook.entropy_gradient else entropy.detach())
        return inputs[0].new_zeros(1, 1, head.out_features)

    handle = head.register_forward_hook(take)
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        handle.remove()


def with_vision_tower(model: nn.Module, scores: TokenScores) -> TokenScores:
    """Scores that depend on the vision tower of a model under FSDP, with gradients of 0, in passes without images too.

    To be called right after the pass (see `zero_of_vision_tower`).
    """
    zero = zero_of_vision_tower(model)
    return scores if zero is None else replace(scores, logprobs=scores.logprobs + zero)


def score_beside(
    placeholder: Batch,
    score: Callable[..., TokenScores],
    batch: Batch,
    precomputed: PrecomputedGradient | None,
) -> TokenScores:
    """Scores of `batch` from a pass that also computes a placeholder row of one token, whose gradients are 0.

    A batch without tokens has no scores, but they depend on the pass, so that a backward pass runs through the model.
    """
    if not batch.num_tokens:
        scores = score(placeholder)
        return replace(scores, logprobs=scores.logprobs[:0], entropy=scores.entropy[:0])
    unjoined = dict.fromkeys(
        (
            *("old_logprobs", "ref_logprobs", "sampling_logprobs", "sampling_entropy"),
            *("token_advantages", "selected"),
        )
    )
    rows = Batch.concat([replace(batch, **unjoined), placeholder])
    if precomputed is not None:
        parts = (precomputed.logprobs, torch.nan), (precomputed.gradient, 0.0)
        precomputed = PrecomputedGradient(*(torch.cat([values, values.new_full((1,), last)]) for values, last in parts))
    scores = score(rows, precomputed=precomputed)
    return replace(scores, logprobs=scores.logprobs[:-1], entropy=scores.entropy[:-1])
