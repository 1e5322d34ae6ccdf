"""The gated delta rule over flat tokens by the compiled kernels, with gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

EPSILON = 1e-6
"""Added to the squared length of queries and keys that are divided by their length."""


class _Spread(ctypes.Structure):
    """Mirrors `Spread` of `delta_rule.cpp`."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("token", "head", "channel")))


class _DeltaRule(ctypes.Structure):
    """Mirrors `DeltaRule` of `delta_rule.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "key_width", "value_width")),
        *((name, _Spread) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("decays", "strengths", "outputs", "gradient")),
        *((name, _Spread) for name in ("of_queries", "of_keys", "of_values")),
        *((name, ctypes.c_void_p) for name in ("of_decays", "of_strengths")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
    )


@dataclass(slots=True, frozen=True)
class _Part:
    """A view of a tensor, without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """From the tensor's first number."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(slots=True, frozen=True)
class _Setting:
    """The arguments of a call that have no gradient."""

    kernels: ctypes.CDLL
    groups: tuple[torch.Tensor, torch.Tensor]
    norm: bool
    parts: tuple[_Part, ...]
    """Queries, keys and values in the only tensor that holds them; empty if they are three tensors."""

    def vectors(self, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Queries, keys and values, or their gradients."""
        return [part.of(sources[0]) for part in self.parts] or sources


def gated_delta_rule(
    kernels: ctypes.CDLL,
    groups: tuple[torch.Tensor, torch.Tensor],
    vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    strength: torch.Tensor,
    norm: bool,
) -> torch.Tensor:
    """(T, H, Dv) outputs of the gated delta rule (arXiv:2412.06464, section 3.3) of flat tokens, float32 on the CPU.

    `vectors` are query and key (T, Hk, Dk), where Hk divides H, and value (T, H, Dv), with any strides; query and key
    are divided by their lengths before if `norm`, and the query by the root of its width. `decay` is a logarithm,
    (T, H) like `strength`. `groups` are those of `attend.rows_by_prompt`. There are no second derivatives. MemoryError
    if the states of a row do not fit.
    """
    source, parts = _only_source(vectors)
    setting = _Setting(kernels, groups, norm, parts)
    sources = vectors if source is None else (source,)
    return _GatedDeltaRule.apply(setting, decay, strength, *sources)  # pyright: ignore[reportReturnType]


def _only_source(vectors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, tuple[_Part, ...]]:
    """The tensor of which queries, keys and values are the parts, each number once; None if there is no such tensor.

    A gradient that is written to one tensor spares autograd from putting it together. In the tensor follow the channels
    of a token (T, channels), or the tokens of a channel (channels, T), as convolutions have them.
    """
    source, (num_tokens, *_) = vectors[0]._base, vectors[0].shape
    if source is None or any(x._base is not source or x.dtype != source.dtype for x in vectors):
        return None, ()
    num_channels = sum(x.shape[1] * x.shape[2] for x in vectors)
    if not source.is_contiguous() or source.numel() != num_tokens * num_channels:
        return None, ()
    offsets = [int(x.storage_offset() - source.storage_offset()) for x in vectors]
    parts = tuple(_Part(tuple(x.shape), x.stride(), offset) for x, offset in zip(vectors, offsets))
    for token, channel in ((num_channels, 1), (1, num_tokens)):
        first, found = 0, True
        for part in sorted(parts, key=lambda part: part.offset):
            _, heads, width = part.shape
            found &= part.strides == (token, width * channel, channel) and part.offset == first * channel
            first += heads * width
        if found:
            return source, parts
    return None, ()


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, setting: _Setting, decay: torch.Tensor, strength: torch.Tensor, *sources: torch.Tensor
    ) -> torch.Tensor:
        decay, strength = decay.contiguous(), strength.contiguous()
        vectors = setting.vectors(sources)
        output = decay.new_empty(vectors[2].shape)
        _run(setting, _call(vectors, decay, strength, setting.norm, outputs=output.data_ptr()))
        ctx.save_for_backward(decay, strength, *sources)
        ctx.setting = setting
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        decay, strength, *sources = ctx.saved_tensors
        setting: _Setting = ctx.setting
        gradient = grads[0].contiguous()
        found = [torch.empty_like(x) for x in (decay, strength, *sources)]
        parts = map(_spread, setting.vectors(found[2:]))
        call = _call(
            setting.vectors(sources),
            decay,
            strength,
            setting.norm,
            gradient=gradient.data_ptr(),
            **dict(zip(("of_queries", "of_keys", "of_values"), parts)),
            of_decays=found[0].data_ptr(),
            of_strengths=found[1].data_ptr(),
        )
        _run(setting, call)
        return None, *found


def _spread(values: torch.Tensor) -> _Spread:
    return _Spread(values.data_ptr(), *values.stride())


def _call(
    vectors: Sequence[torch.Tensor], decay: torch.Tensor, strength: torch.Tensor, norm: bool, **more: Any
) -> _DeltaRule:
    query, key, value = vectors
    return _DeltaRule(
        heads=value.shape[1],
        key_heads=key.shape[1],
        key_width=key.shape[2],
        value_width=value.shape[2],
        queries=_spread(query),
        keys=_spread(key),
        values=_spread(value),
        decays=decay.data_ptr(),
        strengths=strength.data_ptr(),
        scale=query.shape[-1] ** -0.5,
        epsilon=EPSILON if norm else -1.0,
        **more,
    )


def _run(setting: _Setting, call: _DeltaRule) -> None:
    rows, bounds = setting.groups
    failed = setting.kernels.groupgrad_delta_rule(
        ctypes.addressof(call), rows.data_ptr(), bounds.data_ptr(), len(bounds) - 1, torch.get_num_threads()
    )
    if failed:
        raise MemoryError(f"no memory is left for the states of {call.heads} heads of a recurrent layer")
