r"""VESPO: each token is weighed by its whole sequence's weight. Averaged over all tokens of the step.

With the product W of a completion's ratios, and `vespo_k_...` and `vespo_lambda_...` by the sign of A:

$$\ell_{i,t} = -sg\left(W_i^{k} e^{\lambda (1 - W_i)}\right) A_i \log\pi_{i,t}$$

Worked: `ratios=[[2]], advantages=[1]` gives `gradient=[[-0.199]], metrics={"vespo/phi_seq_mean": 0.199}`;
`ratios=[[2]], advantages=[-1]` gives `gradient=[[1.083]]`.

When: very stale samples (`rollout_ahead`, asynchronous vLLM).

Source: arXiv:2602.10693, eq. 20.
"""

from __future__ import annotations

import math

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.measure import mean_where
from groupgrad.objectives.method import Method, PolicyTerms, TokenLoss
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import PerRow, PerToken, broadcast_to_tokens, row_sum

# Sums of log-ratios are held within these bounds (nats) before they are exponentiated.
LOG_WEIGHT_MIN = math.log(1e-8)
LOG_WEIGHT_MAX = 20.0


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


def weighted_sequences(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """`vespo` of each token."""
    batch = terms.batch
    log_weight = sequence_log_weight(terms.log_ratio, terms.correction, batch)
    by_sign = (
        *(options.vespo_k_pos, options.vespo_lambda_pos),
        *(options.vespo_k_neg, options.vespo_lambda_neg),
    )
    phi = gamma_weights(log_weight, batch.advantages, *by_sign)
    of_tokens = broadcast_to_tokens(PerRow(phi), batch)
    if batch.token_advantages is not None:  # turns of one sequence may have different signs
        of_tokens = gamma_weights(broadcast_to_tokens(PerRow(log_weight), batch), terms.token_advantages, *by_sign)
    loss = vespo(of_tokens, terms.token_advantages, terms.logprobs)
    return TokenLoss(loss, {"vespo/phi_seq_mean": mean_where(phi, batch.loss_tokens > 0)})


METHOD = Method(
    weighted_sequences,
    "token_mean",
    reads=("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
    level="token",
    folds_mismatch=True,
    needs_token_correction=True,
    metrics=("vespo/phi_seq_mean",),
)
