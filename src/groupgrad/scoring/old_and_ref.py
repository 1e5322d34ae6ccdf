"""Scores batches without gradients: under the reference model, and under the policy before an update."""

from __future__ import annotations

import torch
from torch import nn

from groupgrad.batch import Batch, TokenScores
from groupgrad.models.reference import Reference
from groupgrad.scoring.forward import ForwardOptions, score_without_gradient


class OldAndRefScorer:
    """Scores batches without dropout or gradients. Batches and results are on the CPU; the models run on `device`."""

    def __init__(
        self, policy: nn.Module, reference: Reference | None, options: ForwardOptions, device: torch.device | str
    ):
        self._policy, self._reference, self._options, self._device = policy, reference, options, device

    def policy(self, batch: Batch, *, rows_per_pass: int | None = None) -> TokenScores:
        """Scores by the policy as it is now, `rows_per_pass` rows at a time; None: all at once."""
        return self._score(self._policy, batch, rows_per_pass)

    def reference_logprobs(self, batch: Batch, *, rows_per_pass: int | None = None) -> torch.Tensor | None:
        """(L,) log-probs (nats) by the reference model; None if there is none."""
        if self._reference is None:
            return None
        with self._reference.active() as module:
            return self._score(module, batch, rows_per_pass).logprobs

    def _score(self, model: nn.Module, batch: Batch, rows_per_pass: int | None) -> TokenScores:
        size = rows_per_pass or max(1, batch.num_rows)
        # An empty batch is one pass too: the passes of a model that is spread over ranks are collective.
        starts = range(0, max(1, batch.num_rows), size)
        parts = [batch]
        if len(starts) > 1:
            parts = [batch.select(range(start, min(start + size, batch.num_rows))) for start in starts]
        scores = [score_without_gradient(model, part.to(self._device), self._options) for part in parts]
        return TokenScores(
            torch.cat([score.logprobs for score in scores]).cpu(), torch.cat([score.entropy for score in scores]).cpu()
        )
