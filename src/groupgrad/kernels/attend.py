"""Causal attention over flat tokens in the compiled kernels; rows may share the prompt before them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch


class _Attention(ctypes.Structure):
    """Mirrors `Attention` of `attention_tile.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_width", "window")),
        *((name, ctypes.c_int64) for name in ("head_stride", "token_stride")),
        *((name, ctypes.c_void_p) for name in ("queries", "output", "totals", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


OFFSET = 2
"""Column of the offsets in the records of spans."""


def span_table(spans: torch.Tensor) -> torch.Tensor:
    """Returns the table (n, 10) of integers that `slot_spans` reads; a span's offset may be changed in it.

    Each row of `spans` (n, 6) has the first four numbers of a record (see `attend`), then the slot of the prompt and
    the slot of the sequence itself.
    """
    return spans[:, [0, 1, 2, 3, 0, 0, 4, 4, 5, 5]]


def slot_spans(
    table: torch.Tensor, prompts: tuple[torch.Tensor, torch.Tensor], suffixes: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Returns the memory addresses of the keys and values of n spans, as (n, 10) integers.

    Each row of `table` describes one span. `prompts` and `suffixes` are keys and values (slots, Hkv, places, D) of
    prompts and of the tokens after them. Flat keys (T, Hkv, D) work as overlapping slots: the slot of a token begins at
    it and contains the tokens after it.
    """
    tensors = (*prompts, *suffixes)
    factors = [1, 1, 1, 1, 0, 0, *(4 * x.stride(0) for x in tensors)]
    origins = [0, 0, 0, 0, prompts[0].stride(1), suffixes[0].stride(1), *(x.data_ptr() for x in tensors)]
    return table * torch.tensor(factors) + torch.tensor(origins)


def attend(
    kernels: ctypes.CDLL,
    query: torch.Tensor,
    spans: torch.Tensor,
    num_key_heads: int,
    options: Any,
    totals: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, Hq, D) float32 outputs of queries (Hq, T, D).

    `spans` (n, 10) int64 are records in which every query occurs once. A span is consecutive query tokens of one
    sequence, each of which attends to the tokens before it and to itself. Its record has the index of the first query,
    the number of queries, the number of tokens between the prompt and the first query, the length of the prompt, and
    the strides and addresses of keys and values (see `Span` of `attention_tile.h`). `totals` (T, Hq, 2) float32, if
    given, receives each query's largest score m and 1 / sum(exp(score - m)). `options` has those of scores in a
    `scoring.attention_layout.AttentionCall`. MemoryError if the scores of a tile do not fit into memory.
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
        totals=None if totals is None else totals.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=options.scale,
        softcap=options.softcap or 0.0,
    )
    failed = kernels.groupgrad_attend(ctypes.addressof(call), spans.data_ptr(), len(spans), torch.get_num_threads())
    if failed:
        raise MemoryError(f"no memory is left for the attention of {num_tokens} tokens")
    return output


class _AttentionGradient(ctypes.Structure):
    """Mirrors `AttentionGradient` of `attention_gradient.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_width", "window")),
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "output", "gradient", "totals")),
        *((name, ctypes.c_void_p) for name in ("of_queries", "of_keys", "of_values")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


def rows_by_prompt(spans: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts `spans` (n, 6) (see `span_table`) by prompt for `attend_gradient`.

    Returns (n, 4) rows, in which each prompt is followed by the rows that share it, those that share most of it first,
    and the (groups + 1,) bounds of these groups.
    """
    starts, lengths, _, prompt_lengths, prompts, _ = spans.unbind(1)
    is_behind = prompt_lengths > 0
    owners = torch.where(is_behind, prompts, starts)
    order = prompt_lengths.argsort(descending=True, stable=True)
    order = order[(2 * owners + is_behind)[order].argsort(stable=True)]
    rows = torch.stack([starts, lengths, prompts, prompt_lengths], 1)[order]
    counts = owners[order].unique_consecutive(return_counts=True)[1]
    return rows, torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def attend_gradient(
    kernels: ctypes.CDLL,
    tensors: Sequence[torch.Tensor],
    groups: tuple[torch.Tensor, torch.Tensor],
    options: Any,
) -> list[torch.Tensor]:
    """Gradients with respect to query (T, Hq, D), key and value (T, Hkv, D), from `rows_by_prompt`.

    `tensors` are query, key, value, the output, the gradient with respect to that, and the totals of `attend`.
    MemoryError if the keys of a row do not fit. There are no sinks.
    """
    query, key, *_ = tensors = [x.contiguous() for x in tensors]
    gradients = [torch.empty_like(x) for x in tensors[:3]]
    rows, bounds = groups
    call = _AttentionGradient(
        query.shape[1],
        *key.shape[1:],
        options.window or 0,
        *(x.data_ptr() for x in (*tensors, *gradients)),
        options.scale,
        options.softcap or 0.0,
    )
    failed = kernels.groupgrad_attend_gradient(
        ctypes.addressof(call), rows.data_ptr(), bounds.data_ptr(), len(bounds) - 1, torch.get_num_threads()
    )
    if failed:
        raise MemoryError(f"no memory is left for the gradient of attention of {len(query)} tokens")
    return gradients
