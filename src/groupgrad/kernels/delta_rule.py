"""The gated delta rule and Mamba-2 over flat tokens by the compiled kernels, with gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from groupgrad.kernels.attend import rows_by_prompt

EPSILON = 1e-6
"""Added to the squared length of queries and keys that are divided by their length."""


class _StridedTensor(ctypes.Structure):
    """Mirrors `StridedTensor` of `strided.h`."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("token", "head", "channel")))


class _DeltaRule(ctypes.Structure):
    """Mirrors `DeltaRule` of `delta_rule.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "key_width", "value_width")),
        *((name, _StridedTensor) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("decays", "strengths", "initials", "outputs", "finals")),
        *((name, ctypes.c_void_p) for name in ("gradient", "of_finals")),
        *((name, _StridedTensor) for name in ("of_queries", "of_keys", "of_values")),
        *((name, ctypes.c_void_p) for name in ("of_decays", "of_strengths", "of_initials")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
    )


@dataclass(slots=True, frozen=True)
class StateRows:
    """Rows of flat tokens by their prompt, with the states that they take and leave; see `state_rows`."""

    table: torch.Tensor
    """(n, 6) int64, mirrors `RecurrentRow` of `delta_rule.cpp`."""
    bounds: torch.Tensor
    """(groups + 1,) int64 bounds of the rows that share a prompt, the prompt itself first."""
    num_finals: int
    """Number of rows whose final states are returned."""


def state_rows(spans: torch.Tensor, continuing: Sequence[int] = (), left: Sequence[int] = ()) -> StateRows:
    """Rows of `spans` (n, 6) (see `span_table`), each of which begins with zeros or with its prompt's final state.

    Rows that start at the flat places `continuing` have no prompt before them and begin with given states, in this
    order. The final states of rows that start at `left` are returned, in this order.
    """
    rows, bounds = rows_by_prompt(spans)
    index = {start: row for row, start in enumerate(rows[:, 0].tolist())}
    table = torch.cat([rows, rows.new_full((len(rows), 2), -1)], dim=1)
    for column, starts in ((4, continuing), (5, left)):
        table[[index[start] for start in starts], column] = torch.arange(len(starts))
    return StateRows(table, bounds, len(left))


@dataclass(slots=True, frozen=True)
class _Setting:
    """The non-differentiable arguments of a call."""

    kernels: ctypes.CDLL
    rows: StateRows
    norm: bool
    scale: float


def gated_delta_rule(
    kernels: ctypes.CDLL,
    rows: StateRows,
    vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    strength: torch.Tensor,
    norm: bool,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule (arXiv:2412.06464, section 3.3) of flat tokens, float32 on the CPU.

    Returns (T, H, Dv) outputs and the (m, H, Dk, Dv) final states that `rows` names. `vectors` are query and key
    (T, Hk, Dk), where Hk divides H, and value (T, H, Dv), with any strides; query and key are divided by their lengths
    before if `norm`, and the query by the root of its width. `decay` is a logarithm, (T, H) like `strength`. `initial`
    are (k, H, Dk, Dv) states with which the continuing rows begin. There are no second derivatives. MemoryError if the
    states of a row do not fit.
    """
    setting = _Setting(kernels, rows, norm, vectors[0].shape[-1] ** -0.5)
    return _GatedDeltaRule.apply(setting, initial, decay, strength, *vectors)  # pyright: ignore[reportReturnType]


def mamba2(
    kernels: ctypes.CDLL,
    rows: StateRows,
    vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2 (arXiv:2405.21060, section 6): the state S (N, P) becomes exp(decay) S + B v', and the output is C' S.

    `vectors` are C and B (T, Hk, N), and v (T, H, P), which is the step times x. Otherwise as `gated_delta_rule`.
    """
    setting = _Setting(kernels, rows, False, 1.0)
    return _GatedDeltaRule.apply(setting, initial, decay, None, *vectors)  # pyright: ignore[reportReturnType]


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        setting: _Setting,
        initial: torch.Tensor | None,
        decay: torch.Tensor,
        strength: torch.Tensor | None,
        *vectors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [None if x is None else x.contiguous() for x in (initial, decay, strength)]
        _, key, value = vectors
        output = value.new_empty(value.shape)
        finals = value.new_empty(setting.rows.num_finals, value.shape[1], key.shape[2], value.shape[2])
        _run(setting, _call(setting, vectors, inputs, outputs=output.data_ptr(), finals=_address(finals)))
        ctx.save_for_backward(*inputs, *vectors)
        ctx.set_materialize_grads(False)
        ctx.setting = setting
        return output, finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        setting: _Setting = ctx.setting
        initial, decay, strength, *vectors = ctx.saved_tensors
        inputs = initial, decay, strength
        gradient = vectors[2].new_zeros(vectors[2].shape) if grads[0] is None else grads[0].contiguous()
        of_finals = None if grads[1] is None else grads[1].contiguous()
        of_initial, of_decay, of_strength = of_inputs = [None if x is None else torch.empty_like(x) for x in inputs]
        of_vectors = [torch.empty_like(x) for x in vectors]
        call = _call(
            setting,
            vectors,
            inputs,
            gradient=gradient.data_ptr(),
            of_finals=_address(of_finals),
            **dict(zip(("of_queries", "of_keys", "of_values"), map(_strided, of_vectors))),
            of_decays=_address(of_decay),
            of_strengths=_address(of_strength),
            of_initials=_address(of_initial),
        )
        _run(setting, call)
        return None, *of_inputs, *of_vectors


def _address(tensor: torch.Tensor | None) -> int | None:
    """The address of the tensor's numbers; None if it has none."""
    return None if tensor is None else tensor.data_ptr() or None


def _strided(values: torch.Tensor) -> _StridedTensor:
    return _StridedTensor(values.data_ptr(), *values.stride())


def _call(
    setting: _Setting, vectors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None], **more: Any
) -> _DeltaRule:
    query, key, value = vectors
    initial, decay, strength = inputs
    return _DeltaRule(
        heads=value.shape[1],
        key_heads=key.shape[1],
        key_width=key.shape[2],
        value_width=value.shape[2],
        queries=_strided(query),
        keys=_strided(key),
        values=_strided(value),
        decays=_address(decay),
        strengths=_address(strength),
        initials=_address(initial),
        scale=setting.scale,
        epsilon=EPSILON if setting.norm else -1.0,
        **more,
    )


def _run(setting: _Setting, call: _DeltaRule) -> None:
    rows, bounds = setting.rows.table, setting.rows.bounds
    failed = setting.kernels.groupgrad_delta_rule(
        ctypes.addressof(call), rows.data_ptr(), bounds.data_ptr(), len(bounds) - 1, torch.get_num_threads()
    )
    if failed:
        raise MemoryError(f"no memory is left for the states of {call.heads} heads of a recurrent layer")
