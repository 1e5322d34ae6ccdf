"""What the engine said of the tokens that it sampled, used wherever it is what training would compute again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from groupgrad.batch import NO_PASS, Batch, TokenScores
from groupgrad.metrics import Metric
from groupgrad.modeling.scoring.old_and_ref import OldAndRefScorer
from groupgrad.modeling.systems.zero3 import is_sharded
from groupgrad.objectives import (
    FRAC_DROPPED_ROWS,
    FRAC_DROPPED_TOKENS,
    MismatchOptions,
    OnPolicyInfo,
    fresh_rows,
    known_rows,
    logp_mismatch,
    mismatch_metrics,
)
from groupgrad.trainer.mismatch_watch import DropWatch, MismatchWatch, computing_types, has_dropout, tolerance

MISMATCH = "sampling/logp_mismatch"


class Source(Protocol):
    """What made the rollouts."""

    @property
    def is_exact(self) -> bool:
        """True if its log-probs and entropies are those of the very modules that train, in evaluation mode."""
        ...


class SamplerLogprobs:
    """Log-probs and entropies from sampling, or from a pass of the policy where those do not do.

    What a user's function reports is never taken for the policy's, whatever the engine beside it.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        scorer: OldAndRefScorer,
        accelerator: Any,
        correction: MismatchOptions | None = None,
    ):
        self._source, self._model, self._scorer, self._correction = source, model, scorer, correction
        self._drops = DropWatch()
        types = computing_types(model, accelerator.mixed_precision)
        self._watch = MismatchWatch(tolerance(types, accelerator.device))
        self._step = 0
        self.freshness = OnPolicyInfo(step=0, exact=False)
        """How far they hold for the training passes of the present step; dropout sets these apart."""

    @property
    def _is_exact(self) -> bool:
        """What is known may differ between ranks, and those that share a model go through it together."""
        return self._source.is_exact and not is_sharded(self._model)

    def begin_step(self, step: int) -> None:
        """The optimizer step that the next ones are asked for."""
        self._step = step
        self.freshness = OnPolicyInfo(step, self._is_exact and not has_dropout(self._model))

    def with_frozen_scores(self, batch: Batch, *, off_policy: bool) -> Batch:
        """The batch with the log-probs that stay while its round is trained on: the reference's and, `off_policy`, the
        old ones. Its round must just have been sampled."""
        old = known_logprobs(batch) if off_policy and self._is_exact else None
        scored = self._scorer(batch, old=off_policy and old is None)
        return scored if old is None else replace(scored, old_logprobs=old)

    def entropy(self, batch: Batch) -> torch.Tensor:
        """(L,) entropies (nats) of the policy in evaluation mode as it is in this step."""
        freshness = OnPolicyInfo(self._step, self._is_exact)
        if batch.sampling_entropy is not None and bool(known_rows(batch, freshness).all()):
            return batch.sampling_entropy
        return self._scorer.entropy(batch)

    def mismatch(self, scores: TokenScores, batch: Batch) -> dict[str, Metric]:
        """The largest gap between sampling and training, over rows that the model has seen with the weights that
        sampled them. With dropout, under which a gap is no fault, nothing; for an engine of its own weights, whose
        numbers are not exact, what their correction is made of."""
        if self._correction is not None:
            old = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            return mismatch_metrics(batch, self._correction, old)
        if not self.freshness.exact:
            return {}
        rows = fresh_rows(batch, self.freshness)
        if batch.passes is not None:
            rows = rows & (batch.passes != NO_PASS)
        return {MISMATCH: logp_mismatch(scores.logprobs, batch, rows)}

    def note(self, metrics: dict[str, Metric]) -> None:
        """Take a micro-batch's mismatch, if there is one among its metrics."""
        if MISMATCH in metrics:
            self._watch.observe(metrics[MISMATCH])
        if FRAC_DROPPED_TOKENS in metrics:
            self._drops.observe(metrics[FRAC_DROPPED_TOKENS], metrics[FRAC_DROPPED_ROWS])

    def end_step(self, step: int) -> None:
        """Warn if the step's mismatch is more than rounding, or if its correction dropped much."""
        self._watch.end_step(step)
        self._drops.end_step(step)


def known_logprobs(batch: Batch) -> torch.Tensor | None:
    """(L,) the sampler's log-probs, if it gave one for each sampled token; 0 where it gave none for the others."""
    if batch.sampling_logprobs is None:
        return None
    known = batch.sampling_logprobs.isfinite()
    if bool((batch.trained & ~known).any()):
        return None
    return torch.where(known, batch.sampling_logprobs, torch.zeros_like(batch.sampling_logprobs))
