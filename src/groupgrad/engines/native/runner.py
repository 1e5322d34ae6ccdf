"""Decode steps: one new token for each running row, in the way that is fastest for the model and the device."""

# The life of decode steps. `DecodeRunner.step_for` makes a step for a set of rows, which keep their slots meanwhile:
#
#   RecordedStep   on a GPU     replays a CUDA graph, and launches several steps before the host reads their tokens
#   CompiledRun    on a CPU     several steps in one call of C++, which sees the ends of rows itself
#   EagerStep      anywhere     one step, in the direct form or in the model's modules
#
#   the model is new    the first step runs in the modules and in the direct form; the form that differs is dropped
#   rows stay           `run` adds tokens to them, as far ahead of the host as `run_ahead` allows
#   rows change         the session asks for another step; a recorded one of the same sizes takes the new rows
#   buffers move        keys and values have other addresses: recordings are void, compiled steps read the new ones
#   recording fails     steps of this session run eagerly, and those of later ones unless memory was short
#   memory runs out     recordings are freed, and fewer rows run

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
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
from groupgrad.scoring.rounding import Rounding

logger = logging.getLogger(__name__)

DIRECT_TOLERANCE, DIRECT_ROUNDINGS = 1e-5, 8
"""Largest accepted difference between the logits of a model and of its direct form, relative to the largest logit: the
first in float32, so many times the distance of 1.0 to the next number in coarser types."""


MODULES = "decode steps run through the model's modules, which is slower"
"""What is said where a family with a direct form runs without it."""

Compute = Callable[[torch.Tensor, torch.Tensor, DecodeLayout], torch.Tensor]
"""Newest tokens (n,), their positions (n,) and attention -> (n, V) logits behind the tokens, whose keys and values are
stored."""


@dataclass(slots=True)
class StepFindings:
    """Results of the trials of a model's decode steps, which hold as long as its modules stay the same."""

    direct_agrees: dict[type, bool] = field(default_factory=dict[type, bool])
    """Class of a direct form -> True if its logits agreed with the logits of the model's modules."""
    can_record: bool = True
    """False once a step of the model could not be recorded."""


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


class ModelForms:
    """The two forms that compute a step: the model's modules, and its direct form if that agrees with them."""

    def __init__(
        self, model: nn.Module, cache: KVCache, direct: CompiledModel | DirectModel | None, findings: StepFindings
    ):
        self._model, self._cache, self._findings, self._direct_type = model, cache, findings, type(direct)
        self.direct = direct if findings.direct_agrees.get(self._direct_type, True) else None
        """The direct form; None if there is none or its logits differ."""
        self.is_compared = self._direct_type in findings.direct_agrees
        """The direct form's logits have been compared with the modules'."""

    @property
    def path(self) -> str:
        """`compiled` (the direct form of CPUs, compiled), `direct`, or `modules`."""
        if self.direct is None:
            return "modules"
        return "compiled" if isinstance(self.direct, CompiledModel) else "direct"

    @property
    def unbound(self) -> DirectModel | None:
        """The direct form, unless it is compiled: that is bound to rows (`CompiledStep`)."""
        return None if isinstance(self.direct, CompiledModel) else self.direct

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: DecodeLayout,
        *,
        direct: Compute | None,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """(n, V) logits of a step, by `direct`, the direct form for these rows, if the form is in use.

        Rows behind the first `num_rows` are padding.
        """
        if direct is not None and self.direct is not None and not self.is_compared:
            self._compare(tokens, positions, attention, direct, len(tokens) if num_rows is None else num_rows)
        if direct is None or self.direct is None:
            return step_logits(self._model, tokens, positions, attention)
        return direct(tokens, positions, attention)

    def _compare(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: DecodeLayout, direct: Compute, num_rows: int
    ) -> None:
        """Runs a step in both forms, and drops the direct form if it fails or its logits differ from the modules'.

        Afterwards the caller runs the step once more, so that keys and values come from the form in use, as in all
        later sessions. Recurrent states, which a step changes, are put back before.
        """
        states = [state[: len(tokens)] for state in self._cache.suffixes.states]
        before = [state.clone() for state in states]

        def put_back() -> None:
            for state, old in zip(states, before):
                state.copy_(old)

        expected = step_logits(self._model, tokens, positions, attention)[:num_rows]
        put_back()
        if not expected.isfinite().all():
            self.direct = None  # for this session: broken weights prove nothing about later ones
            return
        problem = self.problem(lambda: direct(tokens, positions, attention)[:num_rows], expected)
        put_back()
        self.is_compared, self._findings.direct_agrees[self._direct_type] = True, not problem
        if problem:
            self.direct = None
            fall_back(logger, MODULES, f"the direct form {problem}")

    def problem(self, compute: Callable[[], torch.Tensor], expected: torch.Tensor) -> str:
        """Returns how computed logits differ from the modules' logits `expected`; empty if by rounding alone."""
        try:
            apart, largest = (x.float().abs().max().item() for x in (compute() - expected, expected))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"failed ({type(error).__name__}: {error})"
        # The logits' own type says little: accelerate returns them in float32 whatever they were computed in.
        accepted = max(DIRECT_TOLERANCE, DIRECT_ROUNDINGS * Rounding.of(self._model).eps)
        return "" if apart <= accepted * max(1.0, largest) else f"differs by {apart:.1e} in its logits"


# ---------------------------------------------------------------------------------------- three kinds of step


class DecodeStep(Protocol):
    """Decode steps of a set of rows that keep their slots."""

    @property
    def path(self) -> str:
        """The form that computes the steps (`ModelForms.path`), or `eager` on a GPU for steps that are not recorded."""
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
        logits = step.logits(newest, positions + number).to(sampler.device)
        newest = sampler.choose(logits, rows.table_rows, rows.counts + number)
        chosen.append(newest)
    return torch.stack(chosen)


class EagerStep:
    """Steps whose operations the host launches one by one."""

    def __init__(self, forms: ModelForms, cache: KVCache, batch: DecodeBatch, *, on_gpu: bool):
        self._forms, self._on_gpu, self._attention = forms, on_gpu, DecodeLayout(cache, batch)
        self._direct: Compute | None = forms.unbound

    @property
    def path(self) -> str:
        """`eager` on a GPU, else the form."""
        return "eager" if self._on_gpu else self._forms.path

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits; see `DecodeStep`."""
        logits = self._forms.logits(tokens, positions, self._attention, direct=self._direct)
        self._attention.advance()
        return logits

    def run(self, rows: RunningRows, sampler: Sampler, ahead: RunAhead) -> torch.Tensor:
        """(1, n) tokens of one step."""
        return _run_one_by_one(self, rows, sampler, 1)


class CompiledRun(EagerStep):
    """Steps in the compiled form, several in one call where tokens follow the plain softmax."""

    def __init__(self, forms: ModelForms, cache: KVCache, batch: DecodeBatch, compiled: CompiledModel):
        super().__init__(forms, cache, batch, on_gpu=False)
        self._direct = self._compiled = CompiledStep(compiled, cache, batch)

    def run(self, rows: RunningRows, sampler: Sampler, ahead: RunAhead) -> torch.Tensor:
        """(steps, n) tokens of one or several steps."""
        sampling = None
        if ahead.steps > 1 and self._forms.direct is not None and self._forms.is_compared:
            sampling = sampler.unfiltered(rows.table_rows, rows.counts, ahead.idle_tokens)
        if sampling is None:
            return super().run(rows, sampler, ahead)
        tokens = self._compiled.sample(rows.tokens, rows.positions, sampling, ahead.steps)
        self._attention.advance(len(tokens))
        return tokens


@dataclass(slots=True)
class RecordedStep:
    """Steps of fixed sizes, which replay recorded operations. These read and write the same tensors at every replay."""

    forms: ModelForms
    attention: DecodeLayout
    ids: torch.Tensor
    """(padded n,)."""
    positions: torch.Tensor
    replay: Work

    @property
    def path(self) -> str:
        """The form."""
        return self.forms.path

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


class StepRecorder:
    """Records decode steps, one for each `StepShape`."""

    def __init__(self, forms: ModelForms, cache: KVCache, device: torch.device, record: Recorder):
        self._forms, self._cache, self._device, self._record = forms, cache, device, record
        self._rows_per_group = 1
        self.num_recorded = 0
        self._steps: dict[StepShape, RecordedStep] = {}
        self._version = (0, 0)

    def drop(self) -> None:
        """Drops the recorded steps. The memory of the newest one is kept, and later steps are recorded into it."""
        self._steps = {}

    def step_for(self, batch: DecodeBatch) -> RecordedStep:
        """A step for these rows, recorded if there is none of their shape."""
        suffixes, prompts = self._cache.suffixes, self._cache.prompts
        if self._version != self._cache.version:
            # The tensors that these steps were recorded with are gone.
            self._steps, self._version = {}, self._cache.version
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
        if shape in self._steps:
            self._steps[shape].attention.change(batch)
        else:
            self._steps[shape] = self._record_step(batch, shape)
        return self._steps[shape]

    def _record_step(self, batch: DecodeBatch, shape: StepShape) -> RecordedStep:
        forms, attention = self._forms, DecodeLayout(self._cache, batch, shape)
        ids, positions = (torch.zeros(shape.num_rows, dtype=torch.int64, device=self._device) for _ in range(2))
        # The trial may compare logits, and at position 0 rotary embeddings would turn nothing.
        true = [prompt + suffix for prompt, suffix in zip(batch.prompt_lengths, batch.lengths)]
        positions[: len(true)] = torch.tensor(true, device=self._device)

        def work() -> torch.Tensor:
            # Masks depend on lengths, so the recording has to include their computation.
            attention.drop_masks()
            return forms.logits(ids, positions, attention, direct=forms.unbound, num_rows=len(true))

        def trial() -> torch.Tensor:
            # The first replay writes the same keys and values again, but would update recurrent states a second time.
            with attention.recurrence.trial():
                return work()

        buffers = (self._cache.suffixes, self._cache.prompts)
        stored = [tensor for buffer in buffers for pair in buffer.tensors.values() for tensor in pair]
        stored += self._cache.suffixes.states
        step = RecordedStep(forms, attention, ids, positions, self._record(work, stored, trial))
        self.num_recorded += 1
        return step


class DecodeRunner:
    """Makes decode steps: recorded ones if `record` is given and works, else compiled or eager ones.

    `direct` is the model's direct form. `findings` keeps from session to session whether these work.
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
    ):
        self.cache, self._findings, self._model_name = cache, findings, type(model).__name__
        self._on_gpu = device.type == "cuda"
        self._forms = ModelForms(model, cache, direct, findings)
        self._recorder = None if record is None else StepRecorder(self._forms, cache, device, record)

    @property
    def direct(self) -> CompiledModel | DirectModel | None:
        """The direct form in use."""
        return self._forms.direct

    @property
    def num_recorded(self) -> int:
        """Steps that were recorded."""
        return 0 if self._recorder is None else self._recorder.num_recorded

    def step_for(self, batch: DecodeBatch) -> DecodeStep:
        """A decode step for these rows, which keep their slots."""
        if self._recorder is not None:
            try:
                return self._recorder.step_for(batch)
            except Exception as error:
                self._recorder = None
                # A later session may have more memory.
                self._findings.can_record = is_out_of_memory(error)
                what = f"decode steps of {self._model_name} are not recorded as CUDA graphs, which is slower"
                fall_back(logger, what, f"they cannot be recorded ({type(error).__name__}: {error})")
        if isinstance(self.direct, CompiledModel):
            return CompiledRun(self._forms, self.cache, batch, self.direct)
        return EagerStep(self._forms, self.cache, batch, on_gpu=self._on_gpu)

    def disable_direct(self) -> None:
        """Lets the model's modules compute all further steps."""
        if self.direct is not None:
            self._forms.direct = None
            self.drop_recordings()

    def drop_recordings(self) -> None:
        """Frees the recorded steps; they are recorded again when they are needed."""
        if self._recorder is not None:
            self._recorder.drop()
