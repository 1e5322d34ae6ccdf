"""Micro-batches that do not fit into memory are trained in parts, without a change of the gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.batching.packing import row_costs, split, total_cost
from groupgrad.metrics import Metric, merge_all
from groupgrad.modeling.systems.oom import collect_what_failed, is_out_of_memory

logger = logging.getLogger(__name__)

COMFORTABLE_TOKENS_CPU = 2048
"""Tokens of a training pass on a CPU beyond which it only takes more memory."""


@dataclass(slots=True, frozen=True)
class Trained:
    """What a forward and a backward pass gave."""

    loss: torch.Tensor
    """() without gradient."""
    metrics: dict[str, Metric]


class MemoryGuard:
    """Trains the micro-batches of a step one after the other, those that run out of memory in parts.

    A failed backward pass may have added a part of its gradient. Then `clear` drops all gradients and the step's
    earlier batches are trained again, so that no copy of the gradients is ever needed. (Dropout is drawn anew when that
    happens, and a load-balancing loss is measured in each part.) The size that fitted is remembered and part of a
    checkpoint: larger batches are cut beforehand.

    `obstacle` says in words why this run cannot do so; None: it can. `comfortable_tokens` cuts larger batches between
    their groups beforehand: cost follows tokens, so smaller passes take less memory and no more time.
    """

    def __init__(
        self, clear: Callable[[], None], *, obstacle: str | None = None, comfortable_tokens: int | None = None
    ):
        self._clear, self._obstacle = clear, obstacle
        self._comfort = None if comfortable_tokens is None or obstacle is not None else 3 * comfortable_tokens
        self._limit: int | None = None
        self._done: list[Batch] = []
        self.gradients_are_whole = False
        """The attempt now made has added nothing to the gradients yet; whoever makes it says so."""

    def begin_step(self) -> None:
        """The gradients are empty now."""
        self._done = []

    def train(self, batch: Batch, attempt: Callable[[Batch], Trained]) -> Trained:
        """The loss and metrics of a micro-batch, its gradient added. RuntimeError if one row alone does not fit.

        `attempt` makes the forward and backward pass of a batch and adds to the gradients.
        """
        waiting = [(part, True) for part in self._within_limit(batch)]
        results: list[Trained] = []
        while waiting:
            part, counts = waiting.pop(0)
            result = self._try(part, attempt)
            if result is None:
                waiting[:0] = [(smaller, counts) for smaller in self._smaller(part)]
                if not self.gradients_are_whole:
                    self._clear()
                    waiting[:0] = [(done, False) for done in self._done]
                    self._done = []
                continue
            self._done.append(part)
            if counts:
                results.append(result)
        return results[0] if len(results) == 1 else _merged(results)

    def state_dict(self) -> dict[str, Any]:
        """The size learned."""
        return {"limit": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut as the run that `state_dict` was taken from."""
        self._limit = state["limit"]

    def _try(self, part: Batch, attempt: Callable[[Batch], Trained]) -> Trained | None:
        """None if memory ran out."""
        self.gradients_are_whole = False
        try:
            return attempt(part)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._refuse_the_hopeless(part, error)
        collect_what_failed()  # here the error is gone
        return None

    def _refuse_the_hopeless(self, part: Batch, error: Exception) -> None:
        size = f"{part.num_rows} completions, {part.num_tokens} tokens besides {len(part.prompt_ids)} of prompts"
        if self._obstacle is not None:
            raise RuntimeError(
                f"a micro-batch ({size}) does not fit into memory, and {self._obstacle}; lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps by as much, or set "
                "gradient_checkpointing=True"
            ) from error
        if part.num_rows < 2:
            raise RuntimeError(
                f"one row alone ({size}) does not fit into memory; lower max_completion_length, shorten the prompts, "
                "set gradient_checkpointing=True or bf16=True, or train an adapter (peft_config) or a smaller model"
            ) from error

    def _smaller(self, part: Batch) -> list[Batch]:
        pieces = cut(part, 2)
        size = max(_size(piece) for piece in pieces)
        self._limit = size if self._limit is None else min(size, self._limit)
        logger.warning(
            "a micro-batch of %d completions and %d tokens does not fit into memory and is trained in parts from now "
            "on, with the same result; a lower per_device_train_batch_size or gradient_checkpointing=True avoids that",
            part.num_rows,
            part.num_tokens,
        )
        return pieces

    def _within_limit(self, batch: Batch) -> list[Batch]:
        pieces = [batch] if self._comfort is None else between_groups(batch, self._comfort)
        return [part for piece in pieces for part in self._within_learned_limit(piece)]

    def _within_learned_limit(self, batch: Batch) -> list[Batch]:
        pieces = [batch]
        while self._limit is not None and max(_size(p) for p in pieces) > self._limit and len(pieces) < batch.num_rows:
            pieces = cut(batch, len(pieces) + 1)
        return pieces


def between_groups(batch: Batch, most: int) -> list[Batch]:
    """The batch in parts that cost at most `most` or are one group, of like cost; no prompt is computed twice."""
    costs = row_costs(batch)
    groups: dict[int, list[int]] = {}
    for row, cost in enumerate(costs):
        groups.setdefault(cost.group, []).append(row)
    fair = total_cost(costs) / max(1, -(-total_cost(costs) // most))
    parts: list[list[int]] = [[]]
    for rows in groups.values():
        now, then = (total_cost(costs[row] for row in part) for part in (parts[-1], parts[-1] + rows))
        if parts[-1] and (then > most or abs(then - fair) > abs(now - fair)):
            parts.append([])
        parts[-1] += rows
    return [batch] if len(parts) == 1 else _apart(batch, [sorted(rows) for rows in parts])


def cut(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` of like cost, whose losses sum to its loss and whose metrics merge to its metrics."""
    return _apart(batch, split(row_costs(batch), parts))


def _apart(batch: Batch, parts: Sequence[Sequence[int]]) -> list[Batch]:
    count = int(batch.trained.sum())
    pieces = [batch.select(rows) for rows in parts]
    shares = [int(piece.trained.sum()) / count if count else 1 / len(pieces) for piece in pieces]
    counts = [batch.totals.micro_batches / share if share else float("inf") for share in shares]
    return [replace(p, totals=replace(p.totals, micro_batches=n)) for p, n in zip(pieces, counts)]


def memory_guard(model: nn.Module, args: Any, *, aux_loss: bool) -> MemoryGuard:
    """What trains the micro-batches of a run with these training arguments.

    A CPU's matrix products run at full speed from few tokens on, so larger batches are cut for comfort there. A
    load-balancing loss depends on how batches are cut, and is left whole.
    """
    comfort = COMFORTABLE_TOKENS_CPU if args.device.type == "cpu" and not aux_loss else None
    return MemoryGuard(model.zero_grad, obstacle=obstacle_to_cutting(args), comfortable_tokens=comfort)


def obstacle_to_cutting(args: Any) -> str | None:
    """Why a run with these training arguments cannot train a micro-batch in parts, in words; None if it can."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.deepspeed is not None or getattr(args, "deepspeed_plugin", None) is not None:
        return "DeepSpeed keeps the gradients to itself, so that they cannot be made again"
    if "lomo" in optimizer or "layerwise" in optimizer:
        return f"optim={optimizer!r} changes weights while gradients are made, so that they cannot be made again"
    return None


def _size(batch: Batch) -> int:
    return total_cost(row_costs(batch))


def _merged(results: Sequence[Trained]) -> Trained:
    loss = torch.stack([result.loss for result in results]).sum()
    return Trained(loss, merge_all(result.metrics for result in results))
