"""Chooses how decode steps run: recorded as CUDA graphs, in a model's direct form, or through the model's modules."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from groupgrad.engines.native.attention_plans import DecodeBatch, DecodePlan
from groupgrad.engines.native.cpp_step import CompiledModel, CompiledStep, UnfilteredSampling
from groupgrad.engines.native.cuda_graphs import Recorder, StepRecorder
from groupgrad.engines.native.direct_step import DirectModel
from groupgrad.engines.native.kv_cache import KVCache
from groupgrad.engines.native.logits import step_logits
from groupgrad.modeling.systems.oom import is_out_of_memory

logger = logging.getLogger(__name__)

DIRECT_TOLERANCE = 1e-5
"""Largest accepted difference between the logits of a model and of its direct form, relative to the largest logit."""


class Step(Protocol):
    """A decode step for n rows that keep their slots."""

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits behind the rows' newest `tokens` (n,) at `positions` (n,), whose keys and values are stored."""
        ...

    def sample(
        self, tokens: torch.Tensor, positions: torch.Tensor, sampling: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor | None:
        """(steps, n) tokens of up to `num_steps` steps (`CompiledStep.sample`); None if steps run one at a time."""
        ...


@dataclass(slots=True)
class StepChecks:
    """Results of earlier sessions about a model's decode steps."""

    direct_agrees: dict[type, bool] = field(default_factory=dict)
    """True, by the class of the direct form, if its logits were those of the model's modules."""
    can_record: bool = True
    """False once a step of the model could not be recorded."""


class DirectForm:
    """The direct form of a model, used once its logits have been compared with those of the model's modules."""

    def __init__(self, model: CompiledModel | DirectModel | None, checks: StepChecks):
        self._type, self._checks = type(model), checks
        self.model = model if checks.direct_agrees.get(self._type, True) else None

    @property
    def is_checked(self) -> bool:
        """True if the comparison has been made."""
        return self._type in self._checks.direct_agrees

    def check(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares logits (n, V) with those of the model's modules; the direct form is dropped if they differ."""
        if not expected.isfinite().all():
            # Broken weights prove nothing about later ones.
            self.model = None
            return
        difference = float((logits - expected).abs().max())
        agrees = difference <= DIRECT_TOLERANCE * max(1.0, float(expected.abs().max()))
        self._checks.direct_agrees[self._type] = agrees
        if not agrees:
            self.model = None
            logger.warning("the direct decode step differs by %.1e in its logits: the model's own is used", difference)


class EagerStep:
    """A step through the model's modules, or in its direct form."""

    def __init__(self, model: nn.Module, cache: KVCache, batch: DecodeBatch, direct: DirectForm):
        self._model, self._plan, self._direct = model, DecodePlan(cache, batch), direct
        form = direct.model
        self._direct_step = form.step_for(cache, batch) if isinstance(form, CompiledModel) else form

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Step`."""
        logits = None
        if self._direct_step is not None and self._direct.model is not None:
            expected = None
            if not self._direct.is_checked:
                expected = step_logits(self._model, tokens, positions, self._plan)
            # After the model's modules, so that the cache holds the same numbers as in all later sessions.
            logits = self._direct_step(tokens, positions, self._plan)
            if expected is not None:
                self._direct.check(logits, expected)
        if logits is None or self._direct.model is None:
            logits = step_logits(self._model, tokens, positions, self._plan)
        self._plan.advance()
        return logits

    def sample(
        self, tokens: torch.Tensor, positions: torch.Tensor, sampling: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor | None:
        """See `Step`."""
        is_usable = self._direct.model is not None and self._direct.is_checked
        if not is_usable or not isinstance(self._direct_step, CompiledStep):
            return None
        sampled = self._direct_step.sample(tokens, positions, sampling, num_steps)
        self._plan.advance(len(sampled))
        return sampled


class DecodeRunner:
    """Makes decode steps: recorded ones if `record` is given and works, eager ones otherwise."""

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        device: torch.device,
        *,
        record: Recorder | None,
        direct: CompiledModel | DirectModel | None,
        checks: StepChecks,
    ):
        self._model, self._cache, self._checks = model, cache, checks
        self._recorder = None if record is None else StepRecorder(model, cache, device, record)
        self._direct = DirectForm(direct, checks)

    def disable_direct(self) -> None:
        """Lets the model's modules compute all further steps."""
        self._direct.model = None

    def step_for(self, batch: DecodeBatch) -> Step:
        """A step for these rows."""
        if self._recorder is not None:
            try:
                return self._recorder.step_for(batch)
            except Exception as error:
                self._recorder = None
                # A later session may have more memory.
                self._checks.can_record = is_out_of_memory(error)
                logger.warning(
                    "the decode step of %s cannot be recorded as a CUDA graph (%s: %s); sampling is slower",
                    type(self._model).__name__,
                    type(error).__name__,
                    error,
                )
        return EagerStep(self._model, self._cache, batch, self._direct)
