"""Masks of the policy term. They take tokens out of the numerator; the denominators of the loss stay as they are."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.ragged import PerRow, row_mean


def off_policy_keep(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, batch: Batch, threshold: float) -> PerRow:
    """(B,) bool: sequences that are kept, as their advantage is not negative or their drift is at most `threshold`.

    The drift is the mean over loss tokens of `behaviour - logprobs`, in nats; a token whose behaviour log-prob is NaN
    (the engine gave none) counts as no drift. No gradient. Source: arXiv:2512.02556, off-policy sequence masking.
    """
    gap = behaviour_logprobs - logprobs.detach()
    gap = torch.where(gap.isnan(), torch.zeros_like(gap), gap)
    drift = row_mean(gap, batch)
    return PerRow((batch.advantages >= 0) | (drift <= threshold))


def high_entropy_keep(entropy: torch.Tensor, batch: Batch, threshold: float) -> torch.Tensor:
    """(L,) bool: loss tokens whose entropy (nats) is at least `threshold`.

    No gradient. A threshold of inf or NaN keeps nothing. Source: arXiv:2506.01939, eq. 5.
    """
    return batch.trained & (entropy.detach() >= threshold)
