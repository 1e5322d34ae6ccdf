"""Causal attention of many tokens by the compiled kernels, behind prompts that rows may share."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch


class _Attention(ctypes.Structure):
    """Mirrors `Attention` of `forward.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_width", "window")),
        *((name, ctypes.c_int64) for name in ("head_stride", "token_stride")),
        *((name, ctypes.c_void_p) for name in ("queries", "output", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(slots=True, frozen=True)
class Stored:
    """Keys and values of a sequence, each (Hkv, places, D) float32 on the CPU, contiguous in each head."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def stride(self) -> int:
        """Floats from one head to the next."""
        return self.keys.stride(0)


@dataclass(slots=True, frozen=True)
class Span:
    """Consecutive query tokens of one sequence; each attends to the tokens before it and to itself."""

    start: int
    """Place of the first token among the queries."""
    length: int
    own: Stored
    """Keys and values of the sequence behind the prompt, up to the last query."""
    offset: int = 0
    """Tokens of the sequence behind the prompt and before the first query."""
    prompt: Stored | None = None
    prompt_length: int = 0

    def record(self) -> tuple[int, ...]:
        """(10,) numbers that the kernel reads; see `Span` of `forward.cpp`."""
        prompt = self.own if self.prompt is None else self.prompt
        assert self.own.values.stride(0) == self.own.stride and prompt.values.stride(0) == prompt.stride
        stored = (prompt.keys, prompt.values, self.own.keys, self.own.values)
        pointers = (tensor.data_ptr() for tensor in stored)
        return (
            self.start, self.length, self.offset, self.prompt_length, prompt.stride, self.own.stride, *pointers
        )  # fmt: skip


OFFSET = 2
"""Index of `Span.offset` in a record."""


def flat_spans(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(n, 10) records of rows whose keys and values are those of the query tokens, (Hkv, T, D) contiguous.

    `rows` (n, 4) int64 are the start and the length of each row, and of its prompt (length 0 without one).
    """
    start, length, prompt_start, prompt_length = rows.unbind(1)
    stride = torch.full_like(start, key.stride(0))
    places = (prompt_start, prompt_start, start, start)
    addresses = [x.data_ptr() + at * key.shape[2] * 4 for x, at in zip((key, value) * 2, places)]
    return torch.stack([start, length, torch.zeros_like(start), prompt_length, stride, stride, *addresses], dim=1)


class ScoreOptions(Protocol):
    """Options of attention scores; see `modeling.scoring.attention.AttentionCall`."""

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
    options: ScoreOptions,
) -> torch.Tensor:
    """(T, Hq, D) float32 outputs of queries (Hq, T, D).

    `spans` (n, 10) int64 are records in which every query occurs once. MemoryError if the scores of a tile do not fit.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads, num_tokens, width = query.shape
    output = query.new_empty(num_tokens, num_heads, width)
    sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
    call = _Attention(
        heads=num_heads,
        kv_heads=num_key_heads,
        head_width=width,
        window=options.window or 0,
        head_stride=query.stride(0),
        token_stride=query.stride(1),
        queries=query.data_ptr(),
        output=output.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=options.scale,
        softcap=options.softcap or 0.0,
    )
    failed = kernels.groupgrad_attend(ctypes.addressof(call), spans.data_ptr(), len(spans), torch.get_num_threads())
    if failed:
        raise MemoryError(f"no memory is left for the attention of {num_tokens} tokens")
    return output
