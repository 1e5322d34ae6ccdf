"""`compute_loss` and `batch_loss` of the trainer, either of which a subclass or a script may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.metrics import merge_all
from groupgrad.objectives import PolicyLoss


class ReplaceableLoss:
    """Detects a replaced `compute_loss` or `batch_loss`, and collects the metrics of a replaced one."""

    batch_loss: Callable[..., PolicyLoss]
    """`batch_loss(model, batch)`: a batch's share in the loss of its optimizer step, with gradient, and its metrics."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of `batch_loss`; a subclass may change it."""
        if return_outputs:
            raise ValueError("return_outputs=True is not supported: the loss is made of token scores, not of outputs")
        return self.batch_loss(model, inputs).loss

    @property
    def _uses_builtin_compute_loss(self) -> bool:
        """True if neither a subclass nor a script has replaced `compute_loss`."""
        return getattr(self.compute_loss, "__func__", None) is ReplaceableLoss.compute_loss

    @property
    def _uses_builtin_loss(self) -> bool:
        """True if neither `batch_loss` nor `compute_loss` is replaced: rows without advantage then have no loss."""
        function = getattr(self.batch_loss, "__func__", None)
        return self._uses_builtin_compute_loss and getattr(function, "__module__", "") == "groupgrad.trainer.trainer"

    def _loss_with_gradient(self, model: nn.Module, batch: Batch) -> PolicyLoss:
        """`batch_loss`, by way of `compute_loss` if that is replaced."""
        return self.batch_loss(model, batch) if self._uses_builtin_compute_loss else self._replaced_loss(model, batch)

    def _replaced_loss(self, model: nn.Module, batch: Batch) -> PolicyLoss:
        """The replaced `compute_loss`, with the metrics of each `batch_loss` that it calls."""
        losses: list[PolicyLoss] = []
        batch_loss, replaced = self.batch_loss, vars(self).get("batch_loss")

        def recorded(*args: Any, **kwargs: Any) -> PolicyLoss:
            losses.append(batch_loss(*args, **kwargs))
            return losses[-1]

        self.batch_loss = recorded
        try:
            loss = self.compute_loss(model, batch)
        finally:
            del self.batch_loss
            if replaced is not None:
                self.batch_loss = replaced
        terms = tuple(one for part in losses for one in part.token_terms)
        return PolicyLoss(loss, merge_all(part.metrics for part in losses), terms)
