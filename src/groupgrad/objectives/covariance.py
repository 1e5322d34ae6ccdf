"""The covariance of log-prob and advantage of each token, by which two losses choose tokens of the step."""

from __future__ import annotations

import torch

from groupgrad.objectives.method import StepTokens


def covariances(tokens: StepTokens) -> torch.Tensor:
    """(N,) (log pi - mean)(A - mean) of each token, the means over all tokens. Source: arXiv:2505.22617."""
    return (tokens.logprobs - tokens.logprobs.mean()) * (tokens.advantages - tokens.advantages.mean())


def num_of(share: float, count: int) -> int:
    """The tokens that a share of them are, rounded down, at least one."""
    return max(1, int(share * count)) if share > 0 and count else 0
