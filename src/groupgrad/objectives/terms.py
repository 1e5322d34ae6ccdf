"""Terms of the policy loss: the ratio of the policies, the masks of tokens and sequences, and the KL divergence.

Masks take tokens out of the numerator; the denominators of the loss stay as they are.
"""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.options import RatioLevel
from groupgrad.objectives.ragged import PerRow, PerToken, broadcast_to_tokens, row_mean, token_advantages, where_trained

LOG_RATIO_MAX = 80.0
"""Log-ratio (nats) whose exponential is beyond every clip, and finite in float32 and bfloat16."""
ROUNDING_NATS = 1e-5
"""Two passes in float32, of other rows or on other ranks, give a token log-probs and entropies that differ by less."""


def policy_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """(L,) log of the token ratio, nats; exactly 0 outside the loss tokens.

    Without `old_logprobs` the old policy is the present one: the value is exactly 0 and the gradient is that of
    `logprobs`. No gradient flows to the old policy.
    """
    old = logprobs if old_logprobs is None else old_logprobs
    return where_trained(logprobs - old.detach(), batch)


def at_level(log_ratio: torch.Tensor, batch: Batch, level: RatioLevel) -> PerToken | PerRow:
    """Log of the policy ratio c of each token, or of each sequence: the mean over its loss tokens. Nats.

    0 where there is no loss token. Differentiable. Source: arXiv:2402.03300, eq. 3 (token); arXiv:2507.18071, eq. 7
    (sequence: the geometric mean of the tokens' ratios).
    """
    return PerToken(log_ratio) if level == "token" else PerRow(row_mean(log_ratio, batch))


def policy_ratio(log_ratio: PerToken | PerRow, unbounded: torch.Tensor | None = None) -> PerToken | PerRow:
    """The policy ratio c, held at e^80 except where `unbounded`, a bool of its shape. Differentiable; positive.

    Every clip, ceiling and gate is far below e^80, so a ratio that is held decides over no loss and has no gradient.
    Without the hold its exponent would be infinite, and infinity times its gradient of 0 is NaN.
    """
    values, limit = log_ratio.values, LOG_RATIO_MAX
    if unbounded is not None:
        return type(log_ratio)(values.clamp(max=torch.where(unbounded, torch.inf, limit).to(values.dtype)).exp())
    return type(log_ratio)(values.clamp(max=limit).exp())


def off_policy_keep(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, batch: Batch, threshold: float
) -> torch.Tensor:
    """(L,) bool: tokens that are kept, as their advantage is not negative or the drift of their sequence is at most
    `threshold`.

    The drift is the mean over loss tokens of `behaviour - logprobs`, in nats; a token whose behaviour log-prob is NaN
    (the engine gave none) counts as no drift. No gradient. Source: arXiv:2512.02556, off-policy sequence masking.
    """
    is_near = PerRow(row_mean(-drift(logprobs, behaviour_logprobs, batch), batch) <= threshold)
    return (token_advantages(batch) >= 0) | broadcast_to_tokens(is_near, batch)


def drift(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(L,) log-ratio of the policy to the sampler, nats; 0 outside the loss tokens and where `behaviour` is NaN.

    No gradient.
    """
    gap = logprobs.detach() - behaviour_logprobs
    return where_trained(torch.where(gap.isnan(), torch.zeros_like(gap), gap), batch)


def high_entropy_keep(entropy: torch.Tensor, batch: Batch, threshold: float) -> torch.Tensor:
    """(L,) bool: loss tokens whose entropy (nats) is at least `threshold`.

    No gradient. A threshold of inf or NaN keeps nothing. Source: arXiv:2506.01939, eq. 5.
    """
    return batch.trained & (entropy.detach() >= threshold)


def reference_gap(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(L,) log-prob of the reference less that of the policy, nats; 0 outside the loss tokens. Differentiable."""
    return where_trained(ref_logprobs.detach() - logprobs, batch)


def kl_to_reference(gap: torch.Tensor) -> torch.Tensor:
    """(L,) the k3 estimate of KL(policy, reference) from the `reference_gap`, nats, never negative.

    Infinite where the reference finds a token likelier by more than 88 nats. Source: joschu.net/blog/kl-approx.html
    (k3), arXiv:2402.03300, eq. 4.
    """
    # expm1 keeps the difference exact where policy and reference nearly agree, the usual case.
    return torch.expm1(gap) - gap


def unbiased_kl(
    gap: torch.Tensor, ratio: PerToken | PerRow, log_ratio: PerToken | PerRow, batch: Batch
) -> torch.Tensor:
    """(L,) the k3 estimate times the policy ratio: unbiased for samples of an older policy.

    The gradient flows through the ratio too. Source: arXiv:2512.02556, unbiased KL estimate.
    """
    zeros, far = torch.zeros_like(gap), gap > LOG_RATIO_MAX
    product = kl_to_reference(torch.where(far, zeros, gap)) * broadcast_to_tokens(ratio, batch)
    # A huge estimate may meet a tiny ratio: their exponents are added before one exponential is taken.
    gap, weight = (torch.where(far, one, zeros) for one in (gap, broadcast_to_tokens(log_ratio, batch)))
    return torch.where(far, (gap + weight).exp() - (1 + gap) * weight.exp(), product)
