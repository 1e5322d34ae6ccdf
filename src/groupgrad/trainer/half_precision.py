"""Says what half precision costs on a CPU, where few processors compute in it."""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.run_folder.advice import Finding

SLOW = 2.0
"""Times as long as in float32 from which on products count as slow: on a busy machine clocks may err by as much."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_precision(trainer: Any) -> Finding | None:
    """Returns how a run in half precision on a CPU compares with one in float32; None for any other run."""
    weights, mixed = _type_of_weights(trainer.model), trainer.accelerator.mixed_precision
    if trainer.accelerator.device.type != "cpu":
        return None
    if weights in _HALF.values():
        what, mend = f"weights in {str(weights).removeprefix('torch.')}", "Load the model with dtype='float32'"
    elif mixed in _HALF:
        what, mend = f"{mixed}=True", f"Set {mixed}=False"
    else:
        return None
    times = time_of_products(_HALF.get(mixed, weights))
    products = f"a matrix product and its gradients take {times:.2g} times as long as in float32 on this processor"
    if times < SLOW:
        return Finding("precision", f"{what}: {products}; sampling lacks the compiled kernels, which are for float32.")
    text = f"{what}: {products}, and the compiled kernels are for float32 alone."
    return Finding("precision", text, "warning", f"{mend} if memory allows.")


def _type_of_weights(model: nn.Module) -> torch.dtype | None:
    """The dtype of most of the model's weights."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=None)


@functools.cache
def time_of_products(dtype: torch.dtype) -> float:
    """Returns how many times as long as in float32 a product of 64 tokens, forward and backward, takes on this CPU."""
    return _seconds(dtype) / _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Seconds of the fastest of five products, after one that may compile a kernel."""
    tokens, weight = (torch.ones(rows, 512, dtype=dtype, requires_grad=True) for rows in (64, 512))
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            torch.autograd.grad(F.linear(tokens, weight).sum(), (tokens, weight))
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
