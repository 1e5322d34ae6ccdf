"""The KL divergence from the reference model, estimated token by token."""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.ragged import PerRow, PerToken, spread, where_trained


def kl_to_reference(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, batch: Batch, correction: PerToken | PerRow | None = None
) -> torch.Tensor:
    """(L,) the k3 estimate of KL(policy, reference), nats, never negative; 0 outside the loss tokens.

    `correction` is the policy ratio that makes the estimate unbiased for samples of an older policy; the gradient
    flows through it too. None for the plain estimate. Source: joschu.net/blog/kl-approx.html (k3), arXiv:2402.03300,
    eq. 4; the correction: arXiv:2512.02556, unbiased KL estimate.
    """
    gap = where_trained(ref_logprobs.detach() - logprobs, batch)
    # expm1 keeps the difference exact where policy and reference nearly agree, the usual case.
    estimate = torch.expm1(gap) - gap
    return estimate if correction is None else estimate * spread(correction, batch)
