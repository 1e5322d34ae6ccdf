"""Decides where the engine's log-probs and entropies replace a forward pass of the policy."""

from __future__ import annotations

import torch
from torch import nn

from groupgrad.batch import Batch, TokenScores
from groupgrad.metrics import Metric
from groupgrad.objectives import MismatchOptions, OnPolicyInfo, fresh_rows, known_rows, logp_mismatch, mismatch_metrics
from groupgrad.rollout.requests import RolloutSource
from groupgrad.trainer.mismatch_watch import MISMATCH, has_dropout


class SamplerLogprobs:
    """Reads the engine's log-probs and entropies of a batch where they equal the policy's own.

    Log-probs that a user's rollout function reports never replace a forward pass, whatever the engine.
    """

    def __init__(self, source: RolloutSource, model: nn.Module, correction: MismatchOptions | None = None):
        self._source, self._model, self._correction = source, model, correction
        self._is_exact = False

    def begin_training(self, *, is_shared: bool) -> None:
        """Prepares for training. With a model that ranks share (`is_shared`) nothing replaces a pass.

        Such ranks make their passes together, and the engine's numbers may be missing on some of them.
        """
        self._is_exact = self._source.is_exact and not is_shared

    def on_policy(self, step: int) -> OnPolicyInfo:
        """Describes which engine numbers are exact in this step's training passes; with dropout none are."""
        return OnPolicyInfo(step, self._is_exact and not has_dropout(self._model))

    def old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """(L,) log-probs of the policy that sampled the batch, as the engine reported them; None if a pass is needed.

        That is so if the engine is not exact, or if a loss token has no log-prob. Other tokens without one get 0.
        """
        known = batch.sampling_logprobs
        if not self._is_exact or known is None or bool((batch.trained & ~known.isfinite()).any()):
            return None
        return known.nan_to_num(0.0, 0.0, 0.0)

    def entropy(self, batch: Batch, step: int) -> torch.Tensor | None:
        """(L,) entropies (nats) of the policy of this step in evaluation mode; None if unknown."""
        if bool(known_rows(batch, OnPolicyInfo(step, self._is_exact)).all()):
            return batch.sampling_entropy
        return None

    def metrics(self, scores: TokenScores, batch: Batch, on_policy: OnPolicyInfo) -> dict[str, Metric]:
        """The difference between sampling and training, over tokens that the training pass has scored.

        For an engine with weights of its own, the metrics of the mismatch correction. For an exact one the largest gap
        of rows that the present weights sampled; nothing with dropout, where a gap is no fault.
        """
        if self._correction is not None:
            old = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            return mismatch_metrics(batch, self._correction, old)
        if not on_policy.exact:
            return {}
        return {MISMATCH: logp_mismatch(scores.logprobs, batch, fresh_rows(batch, on_policy))}
