"""Stand-ins for Triton's kernels on the simulated device: the same results, by torch's operations on the CPU.

Each is one operation of the device, so a recorded step holds it as one call. `LAUNCHES` says how many launches a call
stands for on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from groupgrad.engines import native
from groupgrad.engines.native import decode_kernels
from groupgrad.engines.native.decode_kernels import DecodeTables
from groupgrad.scoring.attention_layout import AttentionCall

LAUNCHES = {"twins::norm": 1, "twins::add_and_norm": 1, "twins::rotate": 1, "twins::gate": 1, "twins::attend": 3}
"""Names of the operations -> launches of a call."""


def _normed(rows: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    return F.rms_norm(rows.float(), weight.shape, weight.float(), epsilon).to(dtype)


@torch.library.custom_op("twins::norm", mutates_args=())
def _norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    return _normed(hidden, weight, epsilon, dtype)


@torch.library.custom_op("twins::add_and_norm", mutates_args=())
def _add_and_norm(
    hidden: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden + added
    return total, _normed(total, weight, epsilon, dtype)


@torch.library.custom_op("twins::rotate", mutates_args=())
def _rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    def turned(heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        rows = heads.float() if weight is None else _normed(heads, weight, epsilon, torch.float32)
        width = cosines.shape[1]
        first, rest = rows[..., :width], rows[..., width:]
        first = first * cosines.float()[:, None] + first.roll(width // 2, -1) * sines.float()[:, None]
        return torch.cat([first, rest], dim=-1).to(heads.dtype)

    return turned(query, query_weight), turned(key, key_weight)


@torch.library.custom_op("twins::gate", mutates_args=())
def _gate(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (F.silu(gates.float()).to(gates.dtype).float() * values.float()).to(values.dtype)


@torch.library.custom_op("twins::attend", mutates_args=("own_keys", "own_values"))
def _attend(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    prompt_keys: torch.Tensor,
    prompt_values: torch.Tensor,
    lengths: torch.Tensor,
    groups: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> torch.Tensor:
    heads, num_rows, _ = query.shape
    repeat = heads // new_key.shape[0]
    output = query.new_zeros(num_rows, heads, new_value.shape[2])
    prompt_of = {row: (group, table[0]) for group, table in enumerate(groups.tolist()) for row in table[1:] if row >= 0}
    for row, newest in enumerate(lengths.tolist()):
        if row not in prompt_of or newest >= own_keys.shape[2]:  # a row that only fills the recorded sizes
            continue
        own_keys[row, :, newest], own_values[row, :, newest] = new_key[:, row], new_value[:, row]
        group, length = prompt_of[row]
        keys, values = (
            torch.cat([prompts[group, :, :length], own[row, :, : newest + 1]], dim=1)
            .float()
            .repeat_interleave(repeat, dim=0)
            for prompts, own in ((prompt_keys, own_keys), (prompt_values, own_values))
        )
        scores = (keys @ query[:, row].float()[..., None])[..., 0] * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[:, : max(0, scores.shape[1] - window)] = float("-inf")
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, : keys.shape[1]]
        output[row] = (weights[:, None] @ values)[:, 0].to(output.dtype)
    return output


def _layers() -> ModuleType:
    module: Any = ModuleType("triton_layers")

    def add_and_norm(
        hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if added is None:
            return hidden, _norm(hidden, weight, epsilon, dtype)
        return _add_and_norm(hidden, added, weight, epsilon, dtype)

    def rotate(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, norms: Any) -> Any:
        return _rotate(query, key, cosines, sines, *(norms or (None, None, 0.0)))

    module.add_and_norm, module.rotate, module.gate = add_and_norm, rotate, _gate
    return module


def _attention() -> ModuleType:
    module: Any = ModuleType("triton_attention")

    def decode_attention(
        query: torch.Tensor, new: Any, own: Any, prompts: Any, tables: DecodeTables, call: AttentionCall
    ) -> torch.Tensor:
        options = call.sinks, call.scale, call.softcap or 0.0, call.window or 0
        return _attend(query, *new, *own, *prompts, tables.lengths, tables.groups, *options)

    module.decode_attention = decode_attention
    return module


@contextmanager
def triton_twins() -> Iterator[None]:
    """Lets the simulated device have Triton's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (("triton_layers", _layers()), ("triton_attention", _attention())):
            patch.setitem(sys.modules, f"{native.__name__}.{name}", module)
            patch.setattr(native, name, module, raising=False)
        patch.setattr(decode_kernels, "_is_on_gpu", lambda tensor: tensor.is_cuda)
        patch.setattr(decode_kernels, "_has_triton", lambda: True)
        yield
