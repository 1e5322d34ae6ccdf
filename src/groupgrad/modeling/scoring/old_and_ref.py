"""The scores that do not change while a batch is trained on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.modeling.reference import Reference
from groupgrad.modeling.scoring.forward import ForwardOptions, score_without_gradient


class OldAndRefScorer:
    """Scores batches without dropout or gradients. Batches and results are on the CPU, the work is on `device`."""

    def __init__(
        self, policy: nn.Module, reference: Reference | None, options: ForwardOptions, device: torch.device | str
    ):
        self._policy, self._reference, self._options, self._device = policy, reference, options, device

    def __call__(self, batch: Batch, *, old: bool) -> Batch:
        """The batch with the reference's log-probs, if there is one, and with `old` the policy's present ones."""
        return replace(
            batch,
            old_logprobs=self._score(self._policy, batch).logprobs.cpu() if old else None,
            ref_logprobs=self._reference_logprobs(batch),
        )

    def entropy(self, batch: Batch) -> torch.Tensor:
        """(L,) entropies (nats) of the policy as it is."""
        return self._score(self._policy, batch).entropy.cpu()

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with self._reference.active() as module:
            return self._score(module, batch).logprobs.cpu()

    def _score(self, model: nn.Module, batch: Batch):
        return score_without_gradient(model, batch.to(self._device), self._options)
