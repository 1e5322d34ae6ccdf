"""The gradient of an on-policy step, known before its forward pass.

If the batch was sampled from the present weights, the forward pass will give the sampler's log-probs, so the loss's
gradient with respect to them is known beforehand. The output head then computes its own gradients together with its
scores, instead of computing its logits twice.
"""

from __future__ import annotations

import torch

from groupgrad.batch import Batch, TokenScores
from groupgrad.objectives import PolicyOptions, policy_loss
from groupgrad.scoring.early_gradients import PrecomputedGradient


def precompute_gradient(batch: Batch, options: PolicyOptions) -> PrecomputedGradient | None:
    """The gradient of the loss with respect to the log-probs; None off-policy, or without log-probs of the sampler.

    The entropy bonus is left out: with one, entropies carry gradients of their own and no gradient is known beforehand.
    """
    if batch.old_logprobs is not None or batch.sampling_logprobs is None or not batch.num_tokens:
        return None
    known = batch.sampling_logprobs.detach().float()
    logprobs = known.nan_to_num(nan=0.0).requires_grad_()
    with torch.enable_grad():
        loss = policy_loss(TokenScores(logprobs, torch.zeros_like(known)), batch, options).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
    return PrecomputedGradient(known, gradient)
