"""Terms of the policy loss: the ratio of the policies, the masks of tokens and sequences, and the KL divergence.

Masks take tokens out of the numerator; the denominators of the loss stay as they are.
"""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.options import RatioLevel
from groupgrad.objectives.ragged import PerRow, PerToken, broadcast_to_tokens, row_mean, where_trained


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
    return estimate if correction is None else estimate * broadcast_to_tokens(correction, batch)
