"""Skips optimizer steps whose loss or gradient is not finite, and ends a run that makes only such steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.errors import NonFiniteError
from groupgrad.metrics import Metric, latest
from groupgrad.modeling.systems.fsdp import local_part
from groupgrad.trainer.callbacks import SameOnRanks

logger = logging.getLogger(__name__)

MAX_IN_ROW = 3
"""Steps in a row that are not finite after which a run ends."""

FOLDER = "nonfinite_steps"
"""Folder in `output_dir` for the rows of skipped steps."""


class FiniteSteps(SameOnRanks):
    """Counts and skips the optimizer steps whose loss or gradient is not finite.

    A rank whose loss is not finite makes a number of its gradient NaN. Averaging carries it to all ranks, so every rank
    finds the same norm of the gradient and skips the same steps. The rows of skipped steps are written to
    `output_dir`, decoded by `tokenizer`. With `applies_early` the optimizer steps within the backward pass, so that no
    step can be skipped.
    """

    def __init__(self, output_dir: str | Path, tokenizer: Any, *, applies_early: bool):
        self._folder, self._tokenizer, self._applies_early = Path(output_dir) / FOLDER, tokenizer, applies_early
        self.num_skipped = 0
        """Skipped steps of the run."""
        self._num_in_row = 0

    def mark(self, loss: torch.Tensor, holders: Iterable[nn.Parameter]) -> None:
        """Makes a number of the first of the holders' gradients NaN if the loss is not finite.

        Does not wait for the device.
        """
        found = (local_part(p.grad) for p in holders if p.grad is not None)
        gradient = next((part for part in found if part.numel()), None)
        if gradient is not None:
            first = gradient[(0,) * gradient.ndim]
            first.copy_(torch.where(torch.isfinite(loss.detach()).to(first.device), first, torch.nan))

    def check(self, norm: Any, step: int, rows: Sequence[MicroBatch]) -> bool:
        """False if the step has to be skipped, since the norm of its averaged gradient is not finite.

        `step` is the number that the step would get, `rows` what this rank trained in it. NonFiniteError for the third
        such step in a row, and for one that the optimizer has applied already.
        """
        if bool(torch.isfinite(torch.as_tensor(norm)).all()):
            self._num_in_row = 0
            return True
        self._skip(norm, step, rows)
        return False

    def _skip(self, norm: Any, step: int, rows: Sequence[MicroBatch]) -> None:
        """Counts a step that is not finite, writes its rows, and warns or raises."""
        self.num_skipped += 1
        self._num_in_row += 1
        path = self._folder / f"step_{step:06d}_rank_{dist.rank()}.jsonl"
        seen = f"step {step}: the loss or the gradient is not finite (gradient norm {float(norm)})"
        try:
            _write_rows(path, rows, self._tokenizer)
            seen += f"; its rows are in {path}"
        except OSError as error:
            seen += f"; its rows cannot be written to {path}: {error}"
        if self._applies_early:
            raise NonFiniteError(
                f"{seen}, and the optimizer, which steps within the backward pass, has used it. Go on from the last "
                "checkpoint with a lower learning_rate or a lower max_grad_norm"
            )
        if self._num_in_row >= MAX_IN_ROW:
            raise NonFiniteError(
                f"{seen}, and so were the {MAX_IN_ROW - 1} steps before it. The weights are those before them; look at "
                "the rows' rewards and advantages, lower learning_rate or max_grad_norm, or compute in a wider type "
                "(bf16 or float32 in place of fp16)"
            )
        logger.warning("%s, so the step was skipped: weights and optimizer stay as they were", seen)

    def metrics(self) -> dict[str, Metric]:
        """`nonfinite_steps`, from the first one on."""
        return {"nonfinite_steps": latest(float(self.num_skipped))} if self.num_skipped else {}

    def state_dict(self) -> dict[str, Any]:
        """The counts so far."""
        return {"num_skipped": self.num_skipped, "num_in_row": self._num_in_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counts of `state_dict`."""
        self.num_skipped, self._num_in_row = state["num_skipped"], state["num_in_row"]


def _write_rows(path: Path, micro_batches: Sequence[MicroBatch], tokenizer: Any) -> None:
    """Writes a line of JSON for each row: texts, advantage, and log-probs that are not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, micro_batch in enumerate(micro_batches):
            batch = micro_batch.batch
            ends, starts = batch.offsets.tolist(), batch.prompt_offsets.tolist()
            for row in range(batch.num_rows):
                tokens, prompt = slice(ends[row], ends[row + 1]), int(batch.prompt_of_row[row])
                prompt_ids = batch.prompt_ids[starts[prompt] : starts[prompt + 1]]
                bad = {
                    name: int((~torch.isfinite(values[tokens])).sum())
                    for name in ("old_logprobs", "ref_logprobs")
                    if (values := getattr(batch, name)) is not None
                }
                line = {
                    "micro_batch": number,
                    "row": None if batch.row_index is None else int(batch.row_index[row]),
                    "advantage": float(batch.advantages[row]),
                    "nonfinite": {name: count for name, count in bad.items() if count},
                    "prompt": tokenizer.decode(prompt_ids),
                    "completion": tokenizer.decode(batch.completion_ids[tokens]),
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
