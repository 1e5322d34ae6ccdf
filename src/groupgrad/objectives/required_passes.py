"""Passes through the model that each row of a step needs: forward and backward, forward alone, or none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.batch import Batch, TokenScores
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import row_sum, token_advantages

NO_PASS = 0
"""The row's scores are known from sampling, or no loss token needs them."""
FORWARD = 1
"""The row's scores are measured, but no gradient comes from it."""
FORWARD_AND_BACKWARD = 2


@dataclass(slots=True, frozen=True)
class OnPolicyInfo:
    """Step and exactness that decide if the sampling engine's numbers hold for the present policy."""

    step: int
    """Number of the present optimizer step; rows that its weights sampled are fresh."""
    exact: bool
    """The engine's log-probs and entropies are those that a forward pass of the same weights gives."""


def fresh_rows(batch: Batch, on_policy: OnPolicyInfo) -> torch.Tensor:
    """(B,) bool: rows whose engine numbers are those of the present policy."""
    if batch.policy_version is None or not on_policy.exact:
        return torch.zeros_like(batch.advantages, dtype=torch.bool)
    return batch.policy_version == on_policy.step


def known_rows(batch: Batch, on_policy: OnPolicyInfo) -> torch.Tensor:
    """(B,) bool: fresh rows with a log-prob and an entropy for each loss token."""
    if batch.sampling_logprobs is None or batch.sampling_entropy is None:
        return torch.zeros_like(batch.advantages, dtype=torch.bool)
    lacks = ~(batch.sampling_logprobs.isfinite() & batch.sampling_entropy.isfinite())
    return fresh_rows(batch, on_policy) & (row_sum(lacks.long(), batch) == 0)


def sampler_scores(batch: Batch) -> TokenScores:
    """The sampler's log-probs and entropies as scores, 0 where it gave none.

    Old log-probs come before them: they are those of the same weights, and ratios to them are 1 in any precision.
    """
    zeros = torch.zeros(batch.num_tokens, device=batch.completion_ids.device)
    old = batch.sampling_logprobs if batch.old_logprobs is None else batch.old_logprobs
    values = (old, batch.sampling_entropy)
    return TokenScores(*(zeros if value is None else value.nan_to_num(0.0, 0.0, 0.0) for value in values))


def live_rows(batch: Batch, options: PolicyOptions, *, entropy_coef: float, aux_loss: bool) -> torch.Tensor:
    """(B,) bool: rows that the step's loss can have a gradient through.

    A row without loss tokens has no gradient. A row whose tokens have advantages of exactly 0 has none either, unless a
    KL term or an entropy bonus is applied. A load-balancing loss (`aux_loss`) reaches every row.
    """
    if aux_loss:
        return torch.ones_like(batch.advantages, dtype=torch.bool)
    has_tokens = batch.loss_tokens > 0
    if options.beta != 0 or entropy_coef != 0:
        return has_tokens
    return row_sum((token_advantages(batch) != 0).long(), batch) > 0


def required_passes(
    batch: Batch, options: PolicyOptions, on_policy: OnPolicyInfo, *, entropy_coef: float, aux_loss: bool
) -> torch.Tensor:
    """(B,) int64: FORWARD_AND_BACKWARD for live rows, NO_PASS for others that are known or have no loss tokens.

    FORWARD for the rest: rows without a gradient whose log-probs and entropies are measured.
    """
    has_gradient = live_rows(batch, options, entropy_coef=entropy_coef, aux_loss=aux_loss)
    settled = known_rows(batch, on_policy) | (batch.loss_tokens == 0)
    passes = torch.full_like(batch.prompt_of_row, FORWARD).masked_fill(settled, NO_PASS)
    return passes.masked_fill(has_gradient, FORWARD_AND_BACKWARD)
