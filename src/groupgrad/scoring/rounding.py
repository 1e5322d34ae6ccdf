"""How far rounding alone moves a model's numbers, in the precision in which they are computed.

Every start-up check, trial and watch compares with what stands here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from groupgrad import compat
from groupgrad.models.quantized import rounds_to_int8
from groupgrad.scoring.fused_modules import computes_in_float32

# Two orders of the same additions differ by about 1e-5 (float32) and 0.05 (half precision, TF32) by rounding alone; in
# bfloat16 single tokens of a pretrained model differ by 0.5. A wrong mask or position makes several nats on a trained
# model and 0.01 or more on a random one.
TOLERANCE_FLOAT32, TOLERANCE_HALF = 1e-3, 0.25
"""Nats that log-probs may differ by: the largest over all tokens in float32, their mean in half precision."""

_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True, frozen=True)
class Rounding:
    """The coarsest rounding in a model's computation."""

    eps: float
    """Distance of 1.0 to the next number."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        precision: Callable[..., AbstractContextManager[Any]] = nullcontext,
        mixed_precision: str = "no",
    ) -> Rounding:
        """The rounding of `model` in the contexts that `precision` makes: of its parameters and of autocast.

        `mixed_precision` ("bf16", "fp16") counts too, for a model that DeepSpeed will convert when training begins.
        """
        types, devices = _parameter_types(model)
        if computes_in_float32(model):
            types = types - {torch.bfloat16} | {torch.float32}
        with precision():
            types |= {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
        types |= {dtype for name, dtype in _MIXED.items() if name == mixed_precision}
        return cls(coarsest_eps(types, devices))

    @property
    def is_half(self) -> bool:
        """True where numbers have fewer bits than in float32."""
        return self.eps > torch.finfo(torch.float32).eps

    @property
    def tolerance(self) -> float:
        """Nats that rounding may make of a `gap`, at a temperature of 1."""
        return TOLERANCE_HALF if self.is_half else TOLERANCE_FLOAT32

    def gap(self, measured: torch.Tensor, expected: torch.Tensor) -> float:
        """Nats between two sets of log-probs, comparable with `tolerance`; inf if one of a pair is not finite.

        Tokens that both forbid, by a log-prob of -inf, agree.
        """
        measured, expected = measured.float(), expected.float()
        gaps = torch.where(measured == expected, 0.0, (measured - expected).abs())
        gap = float(gaps.mean() if self.is_half else gaps.max())
        return gap if math.isfinite(gap) else math.inf


def coarsest_eps(dtypes: Iterable[torch.dtype], devices: Iterable[str]) -> float:
    """The largest eps of these dtypes, and of TF32 where a GPU multiplies float32 in it: it rounds like float16."""
    types = {dtype for dtype in dtypes if dtype.is_floating_point} or {torch.float32}
    if "cuda" in devices and torch.float32 in types and compat.multiplies_in_tf32():
        types.add(torch.float16)
    return max(torch.finfo(dtype).eps for dtype in types)


def _parameter_types(model: nn.Module) -> tuple[set[torch.dtype], set[str]]:
    """Dtypes of the model's parameters, and the kinds of devices that they are on."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if rounds_to_int8(model):
        types.add(torch.bfloat16)  # 8 bits of precision too
    # Offloaded weights are on the meta device until they are used.
    return types, {parameter.device.type for parameter in model.parameters()} - {"meta"}
