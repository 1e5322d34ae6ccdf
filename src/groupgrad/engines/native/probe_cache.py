"""Caches the results of probing a model, which hold as long as it consists of the same modules and parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from groupgrad.engines.native.attention_plans import ProbePlan
from groupgrad.engines.native.runner import StepChecks

_ATTENTION_SETTINGS = ("scaling", "sliding_window")
"""Attributes of transformers' attention layers that may be changed in place."""


@dataclass(slots=True)
class ProbeResults:
    """Results of running a model once under a `ProbePlan`, and of its decode steps since."""

    fingerprint: tuple[Any, ...]
    plan: ProbePlan
    checks: StepChecks = field(default_factory=StepChecks)


class ProbeCache:
    """Keeps the probe results of one model from session to session."""

    def __init__(self) -> None:
        self._results: ProbeResults | None = None

    def results(self, model: nn.Module, run: Callable[[ProbePlan], object]) -> ProbeResults:
        """The results for `model`; `run` runs it under a plan if it has changed since the last call.

        New values in the same parameters are no change.
        """
        fingerprint = _fingerprint(model)
        if self._results is None or self._results.fingerprint != fingerprint:
            plan = ProbePlan()
            run(plan)
            self._results = ProbeResults(fingerprint, plan)
        return self._results


def _fingerprint(model: nn.Module) -> tuple[Any, ...]:
    # Weak references, since a later module may have the address of an earlier one.
    modules = ((weakref.ref(m), *(m.__dict__.get(name) for name in _ATTENTION_SETTINGS)) for m in model.modules())
    parameters = [(p.shape, p.dtype, p.device) for p in model.parameters()]
    device_types = sorted({"cpu", *(device.type for _, _, device in parameters)} - {"meta"})
    autocast = ((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in device_types)
    return (*modules, *parameters, *autocast)
