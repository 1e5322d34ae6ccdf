"""Trains micro-batches that do not fit into memory in parts, without changing the gradient.

A step has the micro-batches A and B, each of four rows:

    what is trained    what happens                                         gradient afterwards
    A                  forward, backward                                    A
    B                  forward; memory runs out in the backward pass        A and a part of B, not known which
                       `clear`; to be trained: A again, B in two halves     nothing
    A                  forward, backward; its loss is recorded already      A
    B, rows 0 and 1    forward, backward                                    A + half of B
    B, rows 2 and 3    forward, backward                                    A + B

So no copy of the gradients is ever needed. Had memory run out in B's forward pass, A's gradient would have stayed. A
half's loss counts by its share of B's loss tokens, so that both add up to that of B. The cost of a half is the limit
from now on, also in checkpoints: the next step cuts its micro-batches beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.memory.free_memory import return_free_memory
from groupgrad.memory.oom import collect_what_failed, is_out_of_memory
from groupgrad.models.unwrapping import pretrained
from groupgrad.objectives import FORWARD_AND_BACKWARD, NO_PASS, PolicyLoss

Forward = Callable[[MicroBatch], PolicyLoss]
"""Gives the loss of a part whose rows all need the same passes."""
Backward = Callable[[torch.Tensor, bool], object]
"""Adds the gradient of a loss; True for the last backward pass of its micro-batch, unless that fails."""

logger = logging.getLogger(__name__)


class MemoryGuard:
    """Trains the micro-batches of a step one after the other, and cuts a micro-batch that runs out of memory.

    `clear` drops all gradients. Dropout is drawn anew for what is trained again, and a load-balancing loss is measured
    in each part. `obstacle` is the reason why this run cannot cut micro-batches; with None it can. Micro-batches above
    `max_tokens` are cut beforehand: cost follows tokens, so smaller passes take less memory and hardly more time.
    Groups are cut only where computing their prompt again costs little. Passes without gradients may have three times
    as many tokens. `prepare` is called with each batch before its passes with a gradient. With `returns_memory`,
    `return_free_memory` runs before each backward pass.

    Ranks that make their passes together only cut micro-batches beforehand: a rank that runs out of memory is in the
    middle of collectives, which the others would wait for. `num_ranks` ranks split the tokens of each pass, which has
    the rows of all of them; a micro-batch is cut into one part for each, and `max_tokens` are those of a rank. With
    `is_joint` the ranks share a model in shards, each with its own rows; one that has fewer parts than another makes
    passes without rows.
    """

    def __init__(
        self,
        clear: Callable[[], None],
        *,
        obstacle: str | None = None,
        max_tokens: int | None = None,
        prepare: Callable[[Batch], None] | None = None,
        num_ranks: int = 1,
        is_joint: bool = False,
        returns_memory: bool = False,
    ):
        self._clear, self._obstacle, self._prepare, self._num_ranks = clear, obstacle, prepare, num_ranks
        self._is_joint, self._returns_memory = is_joint, returns_memory
        self._max_cost = None if max_tokens is None or obstacle is not None else 3 * max_tokens * num_ranks
        self._limit: int | None = None
        self._done: list[MicroBatch] = []

    def begin_step(self) -> None:
        """Starts a step; the gradients must be empty."""
        self._done = []

    def train(self, micro_batch: MicroBatch, forward: Forward, backward: Backward) -> list[PolicyLoss]:
        """The detached losses and the metrics of a micro-batch's parts, whose gradients are added.

        Raises RuntimeError if one row alone does not fit. Collective for ranks that share a model.
        """
        parts = self._within_limit(micro_batch)
        # What is to be trained, as in the table above; False if its loss is recorded already.
        waiting = [(part, True) for part in parts]
        if self._is_joint:  # ranks that share a model make equally many passes
            num_passes = sum(part.passes != NO_PASS for part in parts)
            num_missing = max(dist.all_gather_objects(num_passes)) - num_passes
            waiting += [(micro_batch.without_rows(), False)] * num_missing
        losses: list[PolicyLoss] = []
        while waiting:
            part, is_first_time = waiting.pop(0)
            is_last = not self._is_joint and all(other.passes != FORWARD_AND_BACKWARD for other, _ in waiting)
            loss, gradients_are_valid = self._try(part, forward, backward, is_last=is_last)
            if loss is None:
                waiting[:0] = self._again(part, is_first_time, gradients_are_valid)
                continue
            if part.passes == FORWARD_AND_BACKWARD:
                self._done.append(part)
            if is_first_time:
                losses.append(loss)
        return losses

    def _within_limit(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """Parts whose rows all need the same passes, as large as a pass may be, within the limit learned so far."""
        parts = micro_batch.by_passes()
        if self._num_ranks > 1:
            parts = [one for part in parts for one in part.split(min(self._num_ranks, len(part.rows) or 1))]
        if self._max_cost is not None:
            parts = [smaller for part in parts for smaller in part.split_to_size(self._max_cost)]
        if self._limit is not None:
            parts = [smaller for part in parts for smaller in self._cut(part, self._limit)]
        return parts

    def _cut(self, part: MicroBatch, limit: int) -> list[MicroBatch]:
        """Splits a part into as few parts of similar cost as the limit allows; a row is never split."""
        parts = [part]
        while max(p.cost for p in parts) > limit and len(parts) < len(part.rows):
            parts = part.split(len(parts) + 1)
        return parts

    def _try(
        self, part: MicroBatch, forward: Forward, backward: Backward, *, is_last: bool
    ) -> tuple[PolicyLoss | None, bool]:
        """The detached loss, or None if memory ran out; False if a failed backward pass may have added to gradients."""
        gradients_are_valid, result = True, None
        if part.passes == FORWARD_AND_BACKWARD and self._prepare is not None:
            self._prepare(part.batch)
        try:
            result = forward(part)
            if part.passes == FORWARD_AND_BACKWARD:
                gradients_are_valid = False
                if self._returns_memory:
                    return_free_memory()
                backward(result.loss, is_last)
            return replace(result, loss=result.loss.detach()), True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if (problem := self._hopeless(part)) is not None:
                raise RuntimeError(problem) from error
        result = None  # its graph, and the exception with the frames of the failed pass, are gone now
        collect_what_failed()
        return None, gradients_are_valid

    def _again(self, part: MicroBatch, is_first_time: bool, gradients_are_valid: bool) -> list[tuple[MicroBatch, bool]]:
        """The parts to train after `part` did not fit, each with False if its loss has been recorded before."""
        again = [(smaller, is_first_time) for smaller in self._smaller(part)]
        if not gradients_are_valid:
            self._clear()
            again[:0] = [(done, False) for done in self._done]
            self._done = []
        return again

    def _smaller(self, part: MicroBatch) -> list[MicroBatch]:
        halves = part.split(2)
        size = max(half.cost for half in halves)
        self._limit = size if self._limit is None else min(size, self._limit)
        batch = part.batch
        logger.warning(
            "a micro-batch of %d completions and %d tokens does not fit into memory and is trained in parts from now "
            "on, with the same result; a lower per_device_train_batch_size or gradient_checkpointing=True avoids that",
            batch.num_rows,
            batch.num_tokens,
        )
        return halves

    def _hopeless(self, part: MicroBatch) -> str | None:
        """The error if a part that has run out of memory cannot be cut; None if it can."""
        batch = part.batch
        size = f"{batch.num_rows} completions, {batch.num_tokens} tokens besides {len(batch.prompt_ids)} of prompts"
        if self._obstacle is not None:
            return (
                f"a micro-batch ({size}) does not fit into memory, and {self._obstacle}; lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps by as much, or set "
                "gradient_checkpointing=True"
            )
        if self._num_ranks > 1 or (self._is_joint and batch.num_rows != 1):
            count = dist.world_size() if self._is_joint else self._num_ranks
            half = f" or max_tokens_per_pass={max(1, part.cost // (6 * self._num_ranks))}, half of what it has"
            return (
                f"a pass ({size}) does not fit into memory on one of the {count} processes that make it together; set "
                f"gradient_checkpointing=True{half if batch.num_rows > 1 else ''}, or lower "
                f"per_device_train_batch_size{'' if self._is_joint else ', or raise context_parallel_size'}"
            )
        if batch.num_rows < 2:
            return (
                f"one row alone ({size}) does not fit into memory; lower max_completion_length, shorten the prompts, "
                "set gradient_checkpointing=True or bf16=True, or train an adapter (peft_config) or a smaller model"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """The learned size."""
        return {"limit": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the learned size, except where ranks make each pass together: they cut by `max_tokens` alone."""
        self._limit = state["limit"] if self._num_ranks == 1 and not self._is_joint else None

    def join_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Returns None: with another number of ranks the size is learned anew."""


LARGE_MODEL = 16_000_000
"""Trained parameters from which on training on a CPU returns free memory of the heap before each backward pass.

To ask how much is free takes about a millisecond, which the steps of smaller models would notice. Models whose passes
are collectives (FSDP, ZeRO-3) do without.
"""


def memory_guard(
    model: nn.Module,
    args: Any,
    clear: Callable[[], None],
    *,
    aux_loss: bool,
    prepare: Callable[[Batch], None] | None = None,
    is_joint: bool = False,
) -> MemoryGuard:
    """The guard for a run with these training arguments.

    `clear` drops the gradients of a step, `prepare` is called with each batch before its passes with a gradient.
    `is_joint`: the ranks share the model, so that its passes are collectives.

    A CPU's matrix products run at full speed from few tokens on, so larger micro-batches are cut there. A
    load-balancing loss depends on the cut, so its micro-batches stay whole. ValueError if `max_tokens_per_pass` is set
    and micro-batches cannot be cut.
    """
    obstacle = None if is_joint else obstacle_to_cutting(args)
    reason = "the load-balancing loss (router_aux_loss_coef) depends on the rows of a pass" if aux_loss else obstacle
    if args.max_tokens_per_pass is not None and reason is not None:
        raise ValueError(
            f"max_tokens_per_pass={args.max_tokens_per_pass} cuts micro-batches, and {reason}; leave it unset and "
            "lower per_device_train_batch_size instead"
        )
    is_cpu = args.device.type == "cpu"
    max_tokens = args.max_tokens_per_pass
    if max_tokens is None and is_cpu and not aux_loss:
        config: Any = getattr(pretrained(model), "config", None)
        width = None if config is None else getattr(config.get_text_config(), "hidden_size", None)
        max_tokens = tokens_per_pass() if width is None else tokens_per_pass(width)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    num_ranks = args.context_parallel_size
    return MemoryGuard(
        clear,
        obstacle=reason if is_joint else obstacle,
        max_tokens=max_tokens,
        prepare=prepare,
        num_ranks=num_ranks,
        is_joint=is_joint,
        returns_memory=is_cpu and not is_joint and num_trained >= LARGE_MODEL,
    )


def obstacle_to_cutting(args: Any) -> str | None:
    """Names the reason why a run with these training arguments cannot train a micro-batch in parts; None if it can."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.deepspeed is not None or getattr(args, "deepspeed_plugin", None) is not None:
        return "DeepSpeed keeps the gradients to itself, so that they cannot be made again"
    if "lomo" in optimizer or "layerwise" in optimizer:
        return f"optim={optimizer!r} changes weights while gradients are made, so that they cannot be made again"
    return None


# ---------------------------------------------------------------------------------------------- sizes of a pass

TOKENS_PER_PASS_CPU, _WIDTH, _MOST_TIMES = 2048, 256, 8
"""Tokens per training pass on a CPU, for models of hidden size `_WIDTH` or larger: larger passes only take more memory.

Narrower models get more tokens, up to `_MOST_TIMES` as many. Python's overhead dominates their passes, and their
activations are small.
"""


def tokens_per_pass(hidden_size: int = _WIDTH) -> int:
    """Tokens of a training pass of a model on a CPU, unless the configuration sets them."""
    return TOKENS_PER_PASS_CPU * min(_MOST_TIMES, max(1, _WIDTH // max(1, hidden_size)))


STRETCH_TOKENS = 2048
"""Maximum number of tokens of a long row that a layer computes at once."""


def is_long(states: torch.Tensor) -> bool:
    """True if hidden `states` (..., T, width) have more tokens than a pass is cut to, which only a long row causes."""
    return states.shape[-2] > tokens_per_pass(states.shape[-1])
