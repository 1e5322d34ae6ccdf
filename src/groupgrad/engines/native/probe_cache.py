"""What is found out about a model by running it, which holds as long as the model is made of the same parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from groupgrad.engines.native.attention_plans import ProbePlan
from groupgrad.engines.native.runner import Agreement

_ASKED = ("scaling", "sliding_window")
"""Attributes of transformers' attention layers."""


@dataclass(slots=True)
class ProbeResults:
    """What one run of a model tells."""

    parts: tuple[Any, ...]
    probe: ProbePlan
    agreement: Agreement = field(default_factory=Agreement)


class ProbeCache:
    """Keeps what is known of a model from one round of sampling to the next."""

    def __init__(self) -> None:
        self._known: ProbeResults | None = None

    def of(self, model: nn.Module, run: Callable[[ProbePlan], object]) -> ProbeResults:
        """What is known of `model`; `run` runs it under a plan if its parts are others than before.

        Other values in the same parameters are no other parts.
        """
        parts = _parts(model)
        if self._known is None or self._known.parts != parts:
            probe = ProbePlan()
            run(probe)
            self._known = ProbeResults(parts, probe)
        return self._known


def _parts(model: nn.Module) -> tuple[Any, ...]:
    # References and not addresses, which a later module may come to have. What attention is asked for may be changed in
    # place.
    modules = ((weakref.ref(m), *(m.__dict__.get(name) for name in _ASKED)) for m in model.modules())
    parameters = [(p.shape, p.dtype, p.device) for p in model.parameters()]
    kinds = sorted({"cpu", *(device.type for _, _, device in parameters)} - {"meta"})
    precision = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (*modules, *parameters, *precision)
