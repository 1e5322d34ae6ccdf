"""The policy ratio: how much more likely the present policy makes what was sampled than the policy that sampled it."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.options import RatioLevel
from groupgrad.objectives.ragged import PerRow, PerToken, row_mean, where_trained


def policy_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """(L,) log of the token ratio, nats; exactly 0 outside the loss tokens.

    Without `old_logprobs` the old policy is the present one: the value is exactly 0 and the gradient is that of
    `logprobs`. No gradient flows to the old policy.
    """
    old = logprobs if old_logprobs is None else old_logprobs
    return where_trained(logprobs - old.detach(), batch)


def policy_ratio(log_ratio: torch.Tensor, batch: Batch, level: RatioLevel) -> PerToken | PerRow:
    """The policy ratio c of each token, or of each sequence: the geometric mean over its loss tokens.

    Positive; 1 where there is no loss token. Differentiable. Source: arXiv:2402.03300, eq. 3 (token);
    arXiv:2507.18071, eq. 7 (sequence).
    """
    if level == "token":
        return PerToken(log_ratio.exp())
    return PerRow(row_mean(log_ratio, batch).exp())
