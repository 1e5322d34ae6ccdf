"""Surrogate losses: the contribution of each token to the policy loss, with one function per equation.

All take and give (L,) tensors. `ratio` is the policy ratio c that holds for the token, `advantages` its row's A. The
value is a loss: lower is better.
"""

from __future__ import annotations

import math

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.ragged import PerRow, PerToken, row_sum

# Sums of log-ratios are held within these bounds (nats) before they are exponentiated.
LOG_WEIGHT_MIN = math.log(1e-8)
LOG_WEIGHT_MAX = 20.0


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> torch.Tensor:
    """-min(c A, clip(c, 1 - epsilon, 1 + epsilon_high) A), with c at most `delta` on the unclipped side.

    No gradient where the clipped side is the smaller. Source: arXiv:2402.03300, eq. 3; separate upper width:
    arXiv:2503.14476, eq. 8; delta: arXiv:2505.07291, two-sided clipping.
    """
    inside = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = limited(ratio, delta)
    return -torch.minimum(bounded * advantages, inside * advantages)


def limited(ratio: torch.Tensor, ceiling: float | None) -> torch.Tensor:
    """The ratio, at most `ceiling`; unchanged if that is None."""
    return ratio if ceiling is None else ratio.clamp(max=ceiling)


def cispo(ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, ceiling: float) -> torch.Tensor:
    """-stopgrad(min(c, ceiling)) A log pi: the weight is clipped, so every token keeps a gradient.

    Gradient flows through `logprobs` only. Source: arXiv:2506.13585, eq. 4.
    """
    return -limited(ratio.detach(), ceiling) * advantages * logprobs


def sapo(ratio: torch.Tensor, advantages: torch.Tensor, temperature_pos: float, temperature_neg: float) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (c - 1)) A with tau by the sign of A: a smooth gate in place of the clip.

    Its gradient at c = 1 is that of -c A. Source: arXiv:2511.20347, eq. 5 and 6.
    """
    positive = torch.full_like(ratio, temperature_pos)
    tau = torch.where(advantages > 0, positive, torch.full_like(ratio, temperature_neg))
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def vespo(weights: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """-phi A log pi with phi from `gamma_weights`; gradient flows through `logprobs` only. Source: the VESPO paper."""
    return -weights.detach() * advantages * logprobs


def sequence_log_weight(log_ratio: torch.Tensor, correction: PerToken | PerRow | None, batch: Batch) -> torch.Tensor:
    """(B,) log of the whole sequence's weight W, nats: policy ratio times mismatch ratio, over loss tokens only.

    Every term and the sum are held within LOG_WEIGHT_MIN (for the policy ratio -20) and LOG_WEIGHT_MAX. No gradient.
    """
    log_weight = row_sum(log_ratio.detach().clamp(-LOG_WEIGHT_MAX, LOG_WEIGHT_MAX), batch)
    if correction is not None:
        log_rho = correction.values.log().clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)
        log_weight = log_weight + (row_sum(log_rho, batch) if isinstance(correction, PerToken) else log_rho)
    return log_weight.clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)


def gamma_weights(
    log_weight: torch.Tensor,
    advantages: torch.Tensor,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> torch.Tensor:
    """(B,) phi = W^k exp(lambda (1 - W)) with k and lambda by the sign of A; 1 at W = 1, 0 where it is not finite.

    A lambda below 1e-4 counts as 1e-4. No gradient. Source: the VESPO paper.
    """
    positive = advantages >= 0
    log_weight = log_weight.detach()
    k = torch.where(positive, torch.full_like(log_weight, k_pos), torch.full_like(log_weight, k_neg))
    decay = torch.where(positive, torch.full_like(log_weight, lambda_pos), torch.full_like(log_weight, lambda_neg))
    decay = decay.clamp(min=1e-4)
    phi = torch.exp(decay + k * log_weight - decay * log_weight.exp())
    return torch.where(phi.isfinite(), phi, torch.zeros_like(phi))
