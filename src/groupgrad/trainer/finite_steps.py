"""Skips optimizer steps whose loss or gradient is not finite, and ends a run that makes only such steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.errors import NonFiniteError
from groupgrad.metrics import Metric, latest
from groupgrad.models.shards import local_part
from groupgrad.objectives import NonFiniteToken, PolicyLoss, nonfinite_tokens
from groupgrad.trainer.run_state import SameOnRanks

logger = logging.getLogger(__name__)

MAX_IN_ROW = 3
"""Steps in a row that are not finite after which a run ends."""

_REMEDY = (
    "look at the row among the rollouts, lower learning_rate or max_grad_norm, bound ratios (delta), or compute "
    "in a wider type (bf16 or float32 in place of fp16)"
)


class FiniteSteps(SameOnRanks):
    """Counts and skips the optimizer steps whose loss or gradient is not finite.

    A rank whose loss is not finite makes a number of its gradient NaN. Averaging carries it to all ranks, so every rank
    finds the same norm of the gradient and skips the same steps. The message names the token to
    blame, decoded by `tokenizer`. With `applies_early` the optimizer steps within the backward pass, so that no
    step can be skipped.
    """

    def __init__(self, tokenizer: Any, *, applies_early: bool):
        self._tokenizer, self._applies_early = tokenizer, applies_early
        self.num_skipped = 0
        """Skipped steps of the run."""
        self._num_in_row = 0
        self._num_in_window = self._num_lost = 0

    def mark(self, loss: torch.Tensor, holders: Iterable[nn.Parameter]) -> None:
        """Makes a number of the first of the holders' gradients NaN if the loss is not finite.

        Does not wait for the device.
        """
        found = (local_part(p.grad) for p in holders if p.grad is not None)
        gradient = next((part for part in found if part.numel()), None)
        if gradient is not None:
            first = gradient[(0,) * gradient.ndim]
            first.copy_(torch.where(torch.isfinite(loss.detach()).to(first.device), first, torch.nan))

    def drop_unless_finite(self, trainer: Any, norm: Any) -> None:
        """Drops the trainer's gradients if their `norm` is not finite, as `check` says."""
        scaler = getattr(trainer.accelerator, "scaler", None)
        scales = trainer.is_deepspeed_enabled and trainer.args.fp16 if scaler is None else scaler.get_scale() > 1
        if norm is None or scales:
            return  # a step that overflows in float16 is skipped with a lower scale
        step, losses = trainer.state.global_step + 1, trainer._step_log.losses
        if not self.check(norm, step, trainer._micro_batches, losses) and scaler is None:
            for parameter in trainer.model.parameters():
                parameter.grad = None

    def check(self, norm: Any, step: int, rows: Sequence[MicroBatch], losses: Sequence[PolicyLoss]) -> bool:
        """False if the step has to be skipped, since the norm of its averaged gradient is not finite.

        `step` is the number that the step would get, `rows` what this rank trained in it, `losses` those of its parts.
        NonFiniteError for the third such step in a row, and for one that the optimizer has applied already.
        """
        self._num_in_window += 1
        if bool(torch.isfinite(torch.as_tensor(norm)).all()):
            self._num_in_row = 0
            return True
        self._skip(norm, step, rows, losses)
        return False

    def end_window(self) -> dict[str, float]:
        """NaN as `loss` if none of the steps since the last call had a finite one on this rank, else nothing.

        `logging_nan_inf_filter` of transformers would log 0.
        """
        is_lost = 0 < self._num_in_window == self._num_lost
        self._num_in_window = self._num_lost = 0
        return {"loss": math.nan} if is_lost else {}

    def _skip(self, norm: Any, step: int, rows: Sequence[MicroBatch], losses: Sequence[PolicyLoss]) -> None:
        """Counts a step that is not finite, and warns or raises."""
        self.num_skipped += 1
        self._num_in_row += 1
        has_loss = all(bool(torch.isfinite(part.loss)) for part in losses)
        self._num_lost += not has_loss
        found = nonfinite_tokens([terms for part in losses for terms in part.token_terms])
        seen = f"step {step}: {_what(found, rows, self._tokenizer, has_loss)} (gradient norm {float(norm)})"
        if self._applies_early:
            raise NonFiniteError(
                f"{seen}, and the optimizer, which steps within the backward pass, has used it. Go on from the last "
                "checkpoint with a lower learning_rate or a lower max_grad_norm"
            )
        if self._num_in_row >= MAX_IN_ROW:
            raise NonFiniteError(
                f"{seen}, and so were the {MAX_IN_ROW - 1} steps before it. The weights are those before them; "
                f"{_REMEDY}"
            )
        logger.warning("%s, so the step was skipped: weights and optimizer stay as they were", seen)

    def metrics(self) -> dict[str, Metric]:
        """`nonfinite_steps`, from the first one on."""
        return {"nonfinite_steps": latest(float(self.num_skipped))} if self.num_skipped else {}

    def state_dict(self) -> dict[str, Any]:
        """The counts so far."""
        window = {"num_in_window": self._num_in_window, "num_lost": self._num_lost}
        return {"num_skipped": self.num_skipped, "num_in_row": self._num_in_row, **window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counts of `state_dict`."""
        self.num_skipped, self._num_in_row = state["num_skipped"], state["num_in_row"]
        self._num_in_window, self._num_lost = state.get("num_in_window", 0), state.get("num_lost", 0)


def _what(found: Mapping[int, NonFiniteToken], rows: Sequence[MicroBatch], tokenizer: Any, has_loss: bool) -> str:
    """What is not finite, with the term and the token if this rank's loss has one."""
    for batch, row, place in _rows_of(rows):
        if (bad := found.get(place)) is not None:
            text = tokenizer.decode(batch.completion_ids[int(batch.offsets[row]) + bad.token :][:1])
            others = ", ".join(
                f"{name} {value:.6g}" for name, value in bad.numbers.items() if name not in (bad.term, "loss")
            )
            others = f" ({others})" if others else ""
            more = f"; {len(found)} rows have such tokens" if len(found) > 1 else ""
            value, number = bad.numbers[bad.term], place if batch.row_index is None else int(batch.row_index[row])
            return (
                f"the loss is not finite, since {bad.term} is {value} at token {bad.token} ({text!r}) of row {number}"
                f"{others}{more}"
            )
    if not has_loss:
        return "the loss is not finite"
    return f"the gradient is not finite; the loss {'of this rank ' if dist.is_active() else ''}is finite"


def _rows_of(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Batch, int, int]]:
    """Each row of a step: its micro-batch, and its places in that and in the batch of the step."""
    for micro_batch in micro_batches:
        for row, place in enumerate(micro_batch.rows):
            yield micro_batch.batch, row, place
