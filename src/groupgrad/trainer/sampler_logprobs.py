"""Decides where the engine's log-probs and entropies replace a pass of the policy, or tell its gradient beforehand."""

from __future__ import annotations

import torch
from torch import nn

from groupgrad.batch import Batch, TokenScores
from groupgrad.metrics import Metric
from groupgrad.objectives import (
    MismatchOptions,
    OnPolicyInfo,
    PolicyOptions,
    fresh_rows,
    known_rows,
    logp_mismatch,
    mismatch_metrics,
    policy_loss,
    sampler_scores,
)
from groupgrad.rollout.custom import CustomRollouts
from groupgrad.rollout.requests import RolloutSource
from groupgrad.scoring.early_gradients import PrecomputedGradient
from groupgrad.scoring.rounding import Rounding

MISMATCH = "sampling/logp_mismatch"
"""Key of the largest gap (nats) between sampling and training log-probs."""


class SamplerLogprobs:
    """Reads the engine's log-probs and entropies of a batch where they equal the policy's own.

    `rounding` is that of the policy's computation. Log-probs that a user's rollout function reports never replace a
    forward pass, whatever the engine.
    """

    def __init__(
        self,
        source: RolloutSource,
        model: nn.Module,
        rounding: Rounding,
        correction: MismatchOptions | None = None,
        *,
        samples_policy: bool = True,
    ):
        self._source, self._model, self._rounding, self._correction = source, model, rounding, correction
        self._samples_policy = samples_policy and not isinstance(source, CustomRollouts)
        self._is_shared = self._has_dropout = False

    def begin_training(self, *, is_shared: bool) -> None:
        """Prepares for training. With a model that ranks share (`is_shared`) nothing replaces a pass.

        Such ranks make their passes together, and the engine's numbers may be missing on some of them.
        """
        self._is_shared = is_shared

    @property
    def _is_exact(self) -> bool:
        return self._source.is_exact and not self._is_shared

    def on_policy(self, step: int) -> OnPolicyInfo:
        """Describes which engine numbers are exact in this step's training passes; with dropout none are."""
        self._has_dropout = has_dropout(self._model)
        return OnPolicyInfo(step, self._is_exact and not self._has_dropout)

    def old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """(L,) log-probs of the policy that sampled the batch, as the engine reported them; None if a pass is needed.

        That is so where they are not `are_old`, or if a loss token has no log-prob. Other tokens without one get 0.
        """
        sampled = batch.sampling_logprobs
        if not self.are_old:
            return None
        if sampled is None or bool((batch.trained & ~sampled.isfinite()).any()):
            return None
        return sampled.nan_to_num(0.0, 0.0, 0.0)

    @property
    def are_old(self) -> bool:
        """True if old log-probs are those of sampling, and not of a forward pass of training.

        Half precision needs a pass: a decode step there rounds tokens of a pretrained model by up to 0.5 nats otherwise
        than training does, which moves ratios by more than the loss clips at.
        """
        return self._is_exact and not self._rounding.is_half

    def old_in_words(self, gap: float | None) -> str:
        """Where old log-probs come from. `gap` is the largest (nats) that the engine's trial has found, or None."""
        source = "sampling" if self.are_old else "a forward pass of training"
        if gap is None or not self._samples_policy:
            return f"those of {source}"
        others = "a forward pass of training" if self.are_old else "sampling"
        return f"those of {source}, from which those of {others} differ by up to {gap:.1g} nats a token"

    def scores(self, batch: Batch, step: int) -> TokenScores | None:
        """Log-probs and entropies of the policy of this step in evaluation mode; None if unknown."""
        return sampler_scores(batch) if bool(known_rows(batch, OnPolicyInfo(step, self._is_exact)).all()) else None

    def metrics(self, scores: TokenScores, batch: Batch, step: int) -> dict[str, Metric]:
        """The difference between sampling and training, over tokens that the training pass has scored.

        For an engine with weights of its own, the metrics of the mismatch correction. For one that samples from the
        policy itself, the largest gap of rows that the weights of this step sampled; nothing with dropout, where a gap
        is no fault.
        """
        if self._correction is not None:
            old = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            return mismatch_metrics(batch, self._correction, old)
        if not self._samples_policy or batch.sampling_logprobs is None or self._has_dropout:
            return {}
        return {MISMATCH: logp_mismatch(scores.logprobs, batch, fresh_rows(batch, OnPolicyInfo(step, exact=True)))}


def precompute_gradient(batch: Batch, options: PolicyOptions) -> PrecomputedGradient | None:
    """The gradient of the loss with respect to the log-probs; None off-policy, or without log-probs of the sampler.

    If the batch was sampled from the present weights, its forward pass will give the sampler's log-probs, so this
    gradient is known beforehand. The output head then computes its gradients together with its scores, instead of
    computing its logits twice.

    The entropy bonus is left out: with one, entropies carry gradients of their own and no gradient is known beforehand.
    """
    if batch.old_logprobs is not None or batch.sampling_logprobs is None or not batch.num_tokens:
        return None
    logprobs_sampled = batch.sampling_logprobs.detach().float()
    logprobs = logprobs_sampled.nan_to_num(nan=0.0).requires_grad_()
    with torch.enable_grad():
        loss = policy_loss(TokenScores(logprobs, torch.zeros_like(logprobs_sampled)), batch, options).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
    return PrecomputedGradient(logprobs_sampled, gradient)


def has_dropout(model: nn.Module) -> bool:
    """True if the model computes at random in training mode, so that its scores are not those of sampling."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and ("dropout" in name or "jitter" in name):
                return True
    return False
