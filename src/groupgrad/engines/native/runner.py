"""Chooses how decode steps run: recorded as CUDA graphs, in a model's direct form, or through the model's modules."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from groupgrad.engines.native.attention_plans import DecodeBatch, DecodePlan, ProbePlan
from groupgrad.engines.native.cpp_step import CompiledModel, CompiledStep, UnfilteredSampling
from groupgrad.engines.native.cuda_graphs import RecordedStep, Recorder, StepRecorder
from groupgrad.engines.native.direct_step import DirectModel
from groupgrad.engines.native.kv_cache import KVCache
from groupgrad.engines.native.logits import step_logits
from groupgrad.kernels.fallbacks import fall_back
from groupgrad.memory.oom import is_out_of_memory
from groupgrad.models.rounding import Rounding

logger = logging.getLogger(__name__)

DIRECT_TOLERANCE, DIRECT_ROUNDINGS = 1e-5, 8
"""Largest accepted difference between the logits of a model and of its direct form, relative to the largest logit: the
first in float32, so many times the distance of 1.0 to the next number in coarser types."""


MODULES = "decode steps run through the model's modules, which is slower"
"""What is said where a family with a direct form runs without it."""


class EagerStep:
    """A decode step that runs in the model's direct form if its logits agree with the modules', else in the modules."""

    def __init__(self, runner: DecodeRunner, batch: DecodeBatch):
        self._runner, self._plan = runner, DecodePlan(runner.cache, batch)
        direct = runner.direct
        self._direct = CompiledStep(direct, runner.cache, batch) if isinstance(direct, CompiledModel) else direct

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits behind the rows' newest `tokens` (n,) at `positions` (n,), whose keys and values are stored."""
        runner, logits = self._runner, None
        if self._direct is not None and runner.direct is not None:
            compute = self._direct if runner.is_checked else self._checked
            logits = compute(tokens, positions, self._plan)
        if logits is None:
            logits = step_logits(runner.model, tokens, positions, self._plan)
        self._plan.advance()
        return logits

    def _checked(self, tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan) -> torch.Tensor | None:
        """Runs a step in the modules and in the direct form; returns the direct form's logits, None if they differ.

        The modules come first, so that the cache holds the direct form's numbers, as in all later sessions. Recurrent
        states are put back between the two, and before the caller repeats the step.
        """
        runner = self._runner
        assert self._direct is not None
        states = [state[: len(tokens)] for state in runner.cache.suffixes.states]
        before = [state.clone() for state in states]

        def put_back() -> None:
            for state, old in zip(states, before):
                state.copy_(old)

        direct = self._direct
        expected = step_logits(runner.model, tokens, positions, plan)
        put_back()
        logits = runner.check(lambda: direct(tokens, positions, plan), expected, len(tokens))
        if logits is None:
            put_back()
        return logits

    def sample(
        self, tokens: torch.Tensor, positions: torch.Tensor, sampling: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor | None:
        """(steps, n) tokens of up to `num_steps` steps (`CompiledStep.sample`); None if steps run one at a time."""
        is_usable = self._runner.direct is not None and self._runner.is_checked
        if not is_usable or not isinstance(self._direct, CompiledStep):
            return None
        sampled = self._direct.sample(tokens, positions, sampling, num_steps)
        self._plan.advance(len(sampled))
        return sampled


class DecodeRunner:
    """Makes decode steps: recorded ones if `record` is given and works, eager ones otherwise.

    `direct` is the model's direct form. `probe` keeps from session to session whether these work.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        device: torch.device,
        *,
        record: Recorder | None,
        direct: CompiledModel | DirectModel | None,
        probe: ProbePlan,
    ):
        self.model, self.cache, self._probe, self._is_on_gpu = model, cache, probe, device.type == "cuda"
        self._recorder = None if record is None else StepRecorder(cache, device, record)
        self._direct_type = type(direct)
        self.direct = direct if probe.direct_agrees.get(self._direct_type, True) else None
        """The direct form; None if there is none or its logits differ."""

    @property
    def num_recorded(self) -> int:
        """Steps that were recorded."""
        return 0 if self._recorder is None else self._recorder.num_recorded

    def path_of(self, step: EagerStep | RecordedStep) -> str:
        """How a step runs.

        `direct` or `modules`: in the model's direct form or in its modules, recorded as a CUDA graph if on a GPU.
        `eager`: on a GPU and not recorded. `compiled`: in the compiled form of CPUs.
        """
        if self._is_on_gpu and not isinstance(step, RecordedStep):
            return "eager"
        if self.direct is None:
            return "modules"
        return "compiled" if isinstance(self.direct, CompiledModel) else "direct"

    @property
    def is_checked(self) -> bool:
        """True if the direct form's logits have been compared with the modules' logits."""
        return self._direct_type in self._probe.direct_agrees

    def check(self, compute: Callable[[], torch.Tensor], expected: torch.Tensor, num_rows: int) -> torch.Tensor | None:
        """The direct form's (n, V) logits if those of the first rows are near the modules' (`expected`).

        Where they differ, or cannot be computed, the form is dropped and the result is None.
        """
        if not expected[:num_rows].isfinite().all():
            # Broken weights prove nothing about later ones.
            self.direct = None
            return None
        try:
            logits = compute()
            apart, largest = ((x[:num_rows].float()).abs().max().item() for x in (logits - expected, expected))
            # The logits' own type says little: accelerate returns them in float32 whatever they were computed in.
            accepted = max(DIRECT_TOLERANCE, DIRECT_ROUNDINGS * Rounding.of(self.model).eps)
            agrees = apart <= accepted * max(1.0, largest)
            problem = "" if agrees else f"differs by {apart:.1e} in its logits"
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logits, problem = None, f"failed ({type(error).__name__}: {error})"
        self._probe.direct_agrees[self._direct_type] = not problem
        if problem:
            self.direct = logits = None
            fall_back(logger, MODULES, f"the direct form {problem}")
        return logits

    def recorded(self, tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        """(n, V) logits of a step that is recorded."""
        if isinstance(self.direct, DirectModel):
            return self.direct(tokens, positions, plan)
        return step_logits(self.model, tokens, positions, plan)

    def trial(self, tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan, num_rows: int) -> torch.Tensor:
        """The same before it is recorded; the first one runs in both forms. Rows behind `num_rows` are padding."""
        direct = self.direct
        if isinstance(direct, DirectModel) and not self.is_checked:
            expected = step_logits(self.model, tokens, positions, plan)
            self.check(lambda: direct(tokens, positions, plan), expected, num_rows)
        return self.recorded(tokens, positions, plan)

    def disable_direct(self) -> None:
        """Lets the model's modules compute all further steps."""
        if self.direct is not None:
            self.direct = None
            self.drop_recordings()

    def drop_recordings(self) -> None:
        """Frees the recorded steps; they are recorded again when they are needed."""
        if self._recorder is not None:
            self._recorder.drop()

    def step_for(self, batch: DecodeBatch) -> EagerStep | RecordedStep:
        """A decode step for these rows, which keep their slots."""
        if self._recorder is not None:
            try:
                return self._recorder.step_for(batch, self)
            except Exception as error:
                self._recorder = None
                # A later session may have more memory.
                self._probe.can_record = is_out_of_memory(error)
                what = f"decode steps of {type(self.model).__name__} are not recorded as CUDA graphs, which is slower"
                fall_back(logger, what, f"they cannot be recorded ({type(error).__name__}: {error})")
        return EagerStep(self, batch)
