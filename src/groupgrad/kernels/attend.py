"""Causal attention of many tokens behind prompts that others may share, by the compiled kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch


class _Attention(ctypes.Structure):
    """See `forward.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_width", "window")),
        *((name, ctypes.c_int64) for name in ("head_stride", "token_stride")),
        *((name, ctypes.c_void_p) for name in ("queries", "output", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(slots=True, frozen=True)
class Stored:
    """Keys and values of a sequence, each (Hkv, places, D) float32 on the CPU, a head's in one piece."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def stride(self) -> int:
        """Numbers from one head to the next."""
        return self.keys.stride(0)


@dataclass(slots=True, frozen=True)
class Span:
    """Consecutive tokens that are queries, each of what comes before it in its sequence and of itself."""

    start: int
    """Place of the first of them among the queries."""
    length: int
    own: Stored
    """Of the sequence behind the prompt, theirs included."""
    offset: int = 0
    """Tokens of it that come before the first query."""
    prompt: Stored | None = None
    prompt_length: int = 0

    def record(self) -> tuple[int, ...]:
        """What the kernel reads of it."""
        prompt = self.own if self.prompt is None else self.prompt
        assert self.own.values.stride(0) == self.own.stride and prompt.values.stride(0) == prompt.stride
        stored = (prompt.keys, prompt.values, self.own.keys, self.own.values)
        pointers = (tensor.data_ptr() for tensor in stored)
        return (
            self.start, self.length, self.offset, self.prompt_length, prompt.stride, self.own.stride, *pointers
        )  # fmt: skip


OFFSET = 2
"""Place of `Span.offset` in a record."""


def flat_spans(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(n, 10) records of rows whose keys and values (Hkv, T, D) lie among the queries' own, in one piece.

    `rows` (n, 4) int64 are each row's first place and length, and those of its prompt (or any place and 0).
    """
    start, length, prompt_start, prompt_length = rows.unbind(1)
    stride = torch.full_like(start, key.stride(0))
    places = (prompt_start, prompt_start, start, start)
    addresses = [x.data_ptr() + at * key.shape[2] * 4 for x, at in zip((key, value) * 2, places)]
    return torch.stack([start, length, torch.zeros_like(start), prompt_length, stride, stride, *addresses], dim=1)


class Scores(Protocol):
    """What is asked of attention's scores; see `models.attention.AttentionCall`."""

    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def sinks(self) -> torch.Tensor | None: ...


def attend(
    kernels: ctypes.CDLL,
    query: torch.Tensor,
    spans: torch.Tensor,
    num_key_heads: int,
    scores: Scores,
) -> torch.Tensor:
    """(T, Hq, D) float32 outputs of queries (Hq, T, D), whose numbers of a head lie side by side.

    `spans` (n, 10) int64 are their records; every query belongs to one. MemoryError if there is no room for the scores
    of some tokens.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads, num_tokens, width = query.shape
    output = query.new_empty(num_tokens, num_heads, width)
    sinks = None if scores.sinks is None else scores.sinks.detach().float().contiguous()
    call = _Attention(
        heads=num_heads,
        kv_heads=num_key_heads,
        head_width=width,
        window=scores.window or 0,
        head_stride=query.stride(0),
        token_stride=query.stride(1),
        queries=query.data_ptr(),
        output=output.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=scores.scale,
        softcap=scores.softcap or 0.0,
    )
    failed = kernels.groupgrad_attend(ctypes.addressof(call), spans.data_ptr(), len(spans), torch.get_num_threads())
    if failed:
        raise MemoryError(f"no memory is left for the attention of {num_tokens} tokens")
    return output
