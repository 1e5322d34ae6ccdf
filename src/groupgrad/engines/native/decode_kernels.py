"""Chooses Triton's kernels for the attention of decode steps on a GPU, after comparing them with matrix products.

The first call of each kind, eager as the trial of every recording is, runs in both forms. Where the kernels cannot be
compiled or differ, calls of that kind go on with the products, and a warning says so once. `GROUPGRAD_TRITON=0` turns
the kernels off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from groupgrad import compat
from groupgrad.engines.native.decode_tables import DecodeTables
from groupgrad.kernels.fallbacks import fall_back
from groupgrad.memory.oom import is_out_of_memory
from groupgrad.scoring.attention_layout import AttentionCall

logger = logging.getLogger(__name__)

SWITCH = "GROUPGRAD_TRITON"
"""Environment variable; 0 turns the kernels off."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest accepted difference from the products, relative to the largest output, by the type that they multiply in."""


Products = Callable[[], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
Kernels = Callable[[torch.Tensor, Pair, Pair, Pair, DecodeTables, Products], torch.Tensor]
"""(query, new keys and values, those of suffixes, of prompts, tables, the same by products) -> outputs."""

_agrees: dict[tuple[Any, ...], bool] = {}
"""Kind of a call -> True if the kernels agreed with the products."""


def decode_kernels_for(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> Kernels | None:
    """The kernels for calls like this one; None without a GPU or Triton, and where they have failed or differed."""
    if not _is_on_gpu(query) or query.dtype not in TOLERANCE:
        return None
    if not _has_triton():
        fall_back(logger, "attention of decode steps runs by matrix products, which is slower", obstacle_to_kernels())
        return None
    sizes = (*query.shape[::2], *key.shape[::2], value.shape[2])  # heads and widths
    options = (call.softcap is None, call.window is None, call.sinks is None)
    kind = (query.device, query.dtype, key.dtype, *sizes, *options)
    return None if _agrees.get(kind) is False else _Checked(call, kind)


def has_layer_kernels(parameters: Sequence[torch.Tensor]) -> bool:
    """True if Triton's kernels can compute the layers of a model with these parameters: they are on one GPU."""
    return len({p.device for p in parameters}) == 1 and _is_on_gpu(parameters[0].data) and _has_triton()


def obstacle_to_kernels() -> str:
    """The reason why a model on a GPU has no Triton kernels here; empty if nothing speaks against them."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 turns Triton's kernels off"
    return "" if _has_triton() else "Triton is not installed"


def _is_on_gpu(query: torch.Tensor) -> bool:
    return query.is_cuda and type(query) is torch.Tensor and os.environ.get(SWITCH) != "0"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _tolerance(dtype: torch.dtype) -> float:
    is_tf32 = dtype == torch.float32 and compat.multiplies_in_tf32()
    return TOLERANCE[torch.float16 if is_tf32 else dtype]


def _attend(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    from groupgrad.engines.native.triton_attention import decode_attention  # Triton is there on machines with a GPU

    with torch.cuda.device_of(query):  # where Triton launches, unlike torch, if another device is the current one
        return decode_attention(query, *arguments)


@dataclass(slots=True, frozen=True)
class _Checked:
    """The kernels for one kind of call; the first call of a kind is compared."""

    call: AttentionCall
    kind: tuple[Any, ...]

    def __call__(
        self, query: torch.Tensor, new: Pair, suffixes: Pair, prompts: Pair, tables: DecodeTables, products: Products
    ) -> torch.Tensor:
        if self.kind in _agrees:
            return _attend(query, new, suffixes, prompts, tables, self.call)
        expected = products()
        used = expected[: tables.num_rows].float()
        if torch.cuda.is_current_stream_capturing() or not used.isfinite().all():  # broken weights prove nothing
            return expected
        try:
            found = _attend(query, new, suffixes, prompts, tables, self.call)
            apart = (found[: tables.num_rows].float() - used).abs().max().item()
            bound = _tolerance(query.dtype) * max(1.0, used.abs().max().item())
            problem = "" if apart <= bound else f"their outputs differ by {apart:.1e}"
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"{type(error).__name__}: {error}"
        _agrees[self.kind] = not problem
        if problem:
            heads = f"heads of {query.shape[2]} in {str(query.dtype).removeprefix('torch.')}"
            fall_back(logger, f"attention of decode steps ({heads}) runs by matrix products, which is slower", problem)
        return expected
