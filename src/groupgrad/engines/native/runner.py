"""Decode steps: one new token for each running row, in the way that is fastest for the model and the device."""

# A model has one of three forms that compute a step, by its family and device:
#
#   modules    the model's own modules: any model
#   direct     `DirectModel`: a common decoder, the same formulas in fewer calls
#   compiled   `CompiledModel`: a common decoder on a CPU, all layers in one call of C++
#
# The life of decode steps. `DecodeRunner.step_for` makes a step for a set of rows, which keep their slots meanwhile:
#
#   RecordedStep   modules, direct on a GPU   replays a CUDA graph, several times before the host reads the tokens
#   CompiledRun    compiled                   several steps in one call of C++, which sees the ends of rows itself
#   EagerStep      modules, direct            one step, where neither of the others is possible
#
#   rows stay           `run` adds tokens to them, as far ahead of the host as `run_ahead` allows
#   rows change         the session asks for another step; a recorded one of the same sizes takes the new rows
#   buffers move        keys and values have other addresses: recordings are void, compiled steps read the new ones
#   recording fails     steps of this session run eagerly, and those of later ones unless memory was short
#   memory runs out     recordings are freed, and fewer rows run

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from groupgrad.engines.native.attention_layouts import DecodeBatch, DecodeLayout, StepShape
from groupgrad.engines.native.cpp_step import CompiledModel, CompiledStep
from groupgrad.engines.native.cuda_graphs import Recorder, Work
from groupgrad.engines.native.direct_step import DirectModel
from groupgrad.engines.native.kv_cache import KVCache, padded
from groupgrad.engines.native.logits import step_logits
from groupgrad.engines.native.run_ahead import RunAhead
from groupgrad.engines.native.sampler import Sampler
from groupgrad.kernels.fallbacks import fall_back
from groupgrad.memory.oom import is_out_of_memory

logger = logging.getLogger(__name__)

MODULES = "decode steps run through the model's modules, which is slower"
"""The warning where a family with a direct form runs without it."""

Compute = Callable[[torch.Tensor, torch.Tensor, DecodeLayout], torch.Tensor]
"""Newest tokens (n,), their positions (n,) and attention -> (n, V) logits behind the tokens, whose keys and values are
stored."""


@dataclass(slots=True)
class RunningRows:
    """Tensors (n,) of the running rows, in the order of their slots."""

    tokens: torch.Tensor
    """Sampled last; their keys and values are not stored yet."""
    counts: torch.Tensor
    """Tokens sampled so far."""
    table_rows: torch.Tensor
    """In the sampler's tables."""
    starts: torch.Tensor
    """Positions of the first sampled tokens."""

    @property
    def positions(self) -> torch.Tensor:
        """Positions of `tokens`."""
        return self.starts + self.counts - 1


# ---------------------------------------------------------------------------------------- three kinds of step


class DecodeStep(Protocol):
    """Decode steps of a set of rows that keep their slots."""

    @property
    def path(self) -> str:
        """The form: `modules`, `direct`, or `compiled` on a CPU; `eager` on a GPU for steps that are not recorded."""
        ...

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits behind the rows' newest `tokens` (n,) at `positions` (n,), whose keys and values are stored.

        The next step may overwrite them.
        """
        ...

    def run(self, rows: RunningRows, sampler: Sampler, ahead: RunAhead) -> torch.Tensor:
        """(steps, n) sampled tokens of at most `ahead.steps` steps; tokens behind the end of a row are meaningless."""
        ...


def _run_one_by_one(step: DecodeStep, rows: RunningRows, sampler: Sampler, num_steps: int) -> torch.Tensor:
    """(num_steps, n) tokens; nothing in here reads one, for which the host would wait."""
    newest, positions, chosen = rows.tokens, rows.positions, []
    for number in range(num_steps):
        # Of a recorded step the graph ends with the logits; tokens are drawn outside of it.
        logits = step.logits(newest, positions + number).to(sampler.device)
        newest = sampler.choose(logits, rows.table_rows, rows.counts + number)
        chosen.append(newest)
    return torch.stack(chosen)


@dataclass(slots=True)
class EagerStep:
    """Steps whose operations the host launches one by one."""

    path: str
    compute: Compute
    attention: DecodeLayout

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits; see `DecodeStep`."""
        logits = self.compute(tokens, positions, self.attention)
        self.attention.advance()
        return logits

    def run(self, rows: RunningRows, sampler: Sampler, ahead: RunAhead) -> torch.Tensor:
        """(1, n) tokens of one step."""
        return _run_one_by_one(self, rows, sampler, 1)


@dataclass(slots=True)
class CompiledRun:
    """Steps in the compiled form, several in one call where tokens follow the plain softmax."""

    step: CompiledStep
    path: str = "compiled"

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits; see `DecodeStep`."""
        return self.step(tokens, positions)

    def run(self, rows: RunningRows, sampler: Sampler, ahead: RunAhead) -> torch.Tensor:
        """(steps, n) tokens of one or several steps."""
        sampling = None
        if ahead.steps > 1:
            sampling = sampler.unfiltered(rows.table_rows, rows.counts, ahead.idle_tokens)
        if sampling is None:
            return _run_one_by_one(self, rows, sampler, 1)
        return self.step.sample(rows.tokens, rows.positions, sampling, ahead.steps)


@dataclass(slots=True)
class RecordedStep:
    """Steps of fixed sizes, which replay recorded operations. These read and write the same tensors at every replay."""

    path: str
    attention: DecodeLayout
    ids: torch.Tensor
    """(padded n,)."""
    positions: torch.Tensor
    replay: Work

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits; see `DecodeStep`."""
        self.ids[: len(tokens)] = tokens
        self.positions[: len(tokens)] = positions
        logits = self.replay()[: len(tokens)]
        self.attention.advance()
        return logits

    def run(self, rows: RunningRows, sampler: Sampler, ahead: RunAhead) -> torch.Tensor:
        """(steps, n) tokens of `ahead.unread_steps` steps."""
        return _run_one_by_one(self, rows, sampler, ahead.unread_steps)


# ---------------------------------------------------------------------------------------- the choice among them


@dataclass(slots=True)
class StepFindings:
    """Findings about the decode steps of a model; they hold as long as its modules stay the same."""

    can_record: bool = True
    """False once a step of the model could not be recorded."""


class DecodeRunner:
    """Makes decode steps: recorded ones if `record` is given and works, else compiled or eager ones.

    `direct` is the model's direct form. `findings` keeps from session to session whether steps can be recorded. Without
    `uses_triton` attention runs by matrix products.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        device: torch.device,
        *,
        record: Recorder | None,
        direct: CompiledModel | DirectModel | None,
        findings: StepFindings,
        uses_triton: bool = True,
    ):
        self.cache, self._model, self._device, self._findings = cache, model, device, findings
        self._record, self.direct, self._uses_triton = record, direct, uses_triton
        self._rows_per_group = 1
        self._recorded: dict[StepShape, RecordedStep] = {}
        self._version = (0, 0)
        self.num_recorded = 0

    def step_for(self, batch: DecodeBatch) -> DecodeStep:
        """A decode step for these rows, which keep their slots."""
        if self._record is not None:
            try:
                return self._recorded_step(batch, self._record)
            except Exception as error:
                self._record, self._recorded = None, {}
                # A later session may have more memory.
                self._findings.can_record = is_out_of_memory(error)
                name = type(self._model).__name__
                what = f"decode steps of {name} are not recorded as CUDA graphs, which is slower"
                fall_back(logger, what, f"they cannot be recorded ({type(error).__name__}: {error})")
        if isinstance(self.direct, CompiledModel):
            return CompiledRun(CompiledStep(self.direct, self.cache, batch))
        path, compute = self._form()
        attention = DecodeLayout(self.cache, batch, uses_triton=self._uses_triton)
        return EagerStep("eager" if self._device.type == "cuda" else path, compute, attention)

    def _form(self) -> tuple[str, Compute]:
        """The name of a form that computes steps of any rows, and the form."""
        if isinstance(self.direct, DirectModel):
            return "direct", self.direct
        return "modules", functools.partial(step_logits, self._model)

    def disable_direct(self) -> None:
        """Lets the model's modules compute all further steps."""
        if self.direct is not None:
            self.direct = None
            self.drop_recordings()

    def drop_recordings(self) -> None:
        """Frees the recorded steps; they are recorded again when they are needed.

        The memory of the newest one is kept, and later steps are recorded into it.
        """
        self._recorded = {}

    def _recorded_step(self, batch: DecodeBatch, record: Recorder) -> RecordedStep:
        """A step for these rows, recorded if there is none of their shape."""
        suffixes, prompts = self.cache.suffixes, self.cache.prompts
        if self._version != self.cache.version:
            # The tensors that these steps were recorded with are gone.
            self._recorded, self._version = {}, self.cache.version
        # It never shrinks: a smaller value would save a few queries and cost recordings.
        exact = batch.shape
        self._rows_per_group = max(self._rows_per_group, padded(exact.rows_per_group))
        shape = StepShape(
            num_rows=min(padded(exact.num_rows), suffixes.num_slots),
            num_groups=min(padded(exact.num_groups), prompts.num_slots),
            rows_per_group=self._rows_per_group,
            prompt_size=prompts.slot_size,
            suffix_size=suffixes.slot_size,
        )
        if shape in self._recorded:
            self._recorded[shape].attention.change(batch)
        else:
            self._recorded[shape] = self._record_step(batch, shape, record)
            self.num_recorded += 1
        return self._recorded[shape]

    def _record_step(self, batch: DecodeBatch, shape: StepShape, record: Recorder) -> RecordedStep:
        path, compute = self._form()
        attention = DecodeLayout(self.cache, batch, shape, uses_triton=self._uses_triton)
        ids, positions = (torch.zeros(shape.num_rows, dtype=torch.int64, device=self._device) for _ in range(2))

        def work() -> torch.Tensor:
            # Masks depend on lengths, so the recording has to include their computation.
            attention.drop_masks()
            return compute(ids, positions, attention)

        def trial() -> torch.Tensor:
            # The first replay writes the same keys and values again, but would update recurrent states a second time.
            with attention.recurrence.trial():
                return work()

        buffers = (self.cache.suffixes, self.cache.prompts)
        stored = [tensor for buffer in buffers for pair in buffer.tensors.values() for tensor in pair]
        stored += self.cache.suffixes.states
        return RecordedStep(path, attention, ids, positions, record(work, stored, trial))
