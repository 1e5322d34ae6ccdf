"""Attention of a decode step on a GPU, in three launches of Triton kernels.

A first kernel stores each row's new key and value and attends to the row's suffix; a second one attends to the
prompt of a group, which it reads once for all rows of the group. Both cut the keys into chunks that run beside each
other, and read none beyond a row's length or before its window (split keys, as in Flash-Decoding by Dao, Haziza, Massa
and Sizov, 2023). A third one merges the chunks' outputs by their log-sum-exp. Scores and sums are float32. All lengths
are read on the device, so the launches of a step of fixed sizes (`StepShape`) can be recorded.
"""

# Triton is on machines with a GPU alone, and its kernels have no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from groupgrad.engines.native.decode_kernels import DecodeTables
from groupgrad.scoring.attention_layout import AttentionCall

MIN_CHUNK = 256
"""Keys of a chunk, which one program reads; more where a row would have more than `MAX_CHUNKS`."""
MAX_CHUNKS = 64
BLOCK_NUMBERS = {2: 8192, 4: 2048}
"""Numbers of the keys whose scores a program computes together, at most 64 keys, by the bytes of a number."""
MIN_SIDE = 16
"""Smallest side of a matrix in a product of Triton; smaller ones are filled up."""
MAX_QUERIES = {2: 64, 4: 16}
"""Queries of a program of the second kernel, by the bytes of a number; a larger group takes several programs."""


def decode_attention(
    query: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    suffixes: tuple[torch.Tensor, torch.Tensor],
    prompts: tuple[torch.Tensor, torch.Tensor],
    tables: DecodeTables,
    call: AttentionCall,
) -> torch.Tensor:
    """(n, Hq, Dv) outputs of one token for each of n rows, in the type of `query`.

    query: (Hq, n, D). new: its keys (Hkv, n, D) and values (Hkv, n, Dv), which are stored in `suffixes`. suffixes: keys
    (slots, Hkv, places, D) and values of the rows, which have the first n slots. prompts: those of prompts, by group.
    """
    (num_heads, num_rows, key_dim), value_dim, kv_heads = query.shape, new[1].shape[2], new[0].shape[0]
    repeat = num_heads // kv_heads
    chunks = [_chunk_of(size) for size in (tables.num_suffix, max(1, tables.num_prompt))]
    num_suffix, num_prompt = (-(-size // chunk) for size, chunk in zip((tables.num_suffix, tables.num_prompt), chunks))
    num_splits = num_suffix + num_prompt
    partial = query.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
    totals = query.new_empty(num_rows, num_heads, num_splits, 2, dtype=torch.float32)
    output = query.new_empty(num_rows, num_heads, value_dim)
    size, value_pad = query.element_size(), _padded(value_dim)
    shared = {
        **_options(call, key_dim, size),
        "num_heads": num_heads,
        "num_splits": num_splits,
        "REPEAT": repeat,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": value_pad,
    }
    suffix_queries = _padded(repeat)
    _attend_suffix[(num_rows, kv_heads, num_suffix)](
        query, *new, *suffixes, tables.lengths, partial, totals,
        *query.stride(), *new[0].stride(), *new[1].stride(), *suffixes[0].stride()[:3], *suffixes[1].stride()[:3],
        CHUNK=chunks[0], QUERIES=suffix_queries, **shared,
    )  # fmt: skip
    rows_per_group = tables.groups.shape[1] - 1
    most = max(MAX_QUERIES[size], suffix_queries)
    queries = min(most, _padded(rows_per_group * repeat))
    rows_at_once = queries // repeat
    num_blocks = -(-rows_per_group // rows_at_once)
    if num_prompt:
        _attend_prompt[(len(tables.groups) * num_blocks, kv_heads, num_prompt)](
            query, *prompts, tables.lengths, tables.groups, partial, totals,
            *query.stride(), *prompts[0].stride()[:3], *prompts[1].stride()[:3],
            num_blocks, num_suffix, rows_per_group, CHUNK=chunks[1], QUERIES=queries, ROWS=rows_at_once, **shared,
        )  # fmt: skip
    sinks = query.new_empty(1, dtype=torch.float32) if call.sinks is None else call.sinks.float()
    _merge[(num_rows, num_heads)](
        partial, totals, sinks, tables.lengths, tables.prompt_lengths, output, num_heads, num_splits, num_suffix,
        SUFFIX_CHUNK=chunks[0], PROMPT_CHUNK=chunks[1], VALUE_DIM=value_dim,
        VALUE_PAD=value_pad, HAS_SINKS=call.sinks is not None,
    )  # fmt: skip
    return output


def _options(call: AttentionCall, key_dim: int, size: int) -> dict[str, Any]:
    """Arguments of both attention kernels that depend on the call, and the sizes of their blocks and stages."""
    key_pad = _padded(key_dim)
    return {
        # With these no kernel has registers in memory, or takes more than the 99 KB that a block has on a 4090.
        "num_stages": 2,
        "num_warps": 4 if key_pad * size <= 256 else 8,
        "BLOCK": min(64, max(MIN_SIDE, BLOCK_NUMBERS[size] // key_pad)),
        "scale": call.scale,
        "softcap": call.softcap or 0.0,
        "window": call.window or 0,
        "KEY_PAD": key_pad,
        "HAS_CAP": call.softcap is not None,
        "HAS_WINDOW": call.window is not None,
        "PRECISION": "ieee",
    }


def _padded(number: int) -> int:
    """The side of a matrix in a product."""
    return max(MIN_SIDE, triton.next_power_of_2(number))


def _chunk_of(size: int) -> int:
    """Keys of a chunk, a power of two of whole blocks."""
    return max(MIN_CHUNK, triton.next_power_of_2(-(-size // MAX_CHUNKS)))


@triton.jit
def _scores(query, keys, scale, softcap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """(QUERIES, BLOCK) float32 scores."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
    if HAS_CAP:  # the hyperbolic tangent, by the logistic function
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _add(scores, values, peak, total, mixed, PRECISION: tl.constexpr):
    """Adds a block of keys to a running softmax. A query that has seen no key yet has a peak of minus infinity."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, shrink = tl.exp(scores - base[:, None]), tl.exp(peak - base)
    added = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weights, 1), mixed * shrink[:, None] + added


@triton.jit
def _store(place, is_there, dims, peak, total, mixed, partial, totals, VALUE_DIM: tl.constexpr):
    """Stores what a chunk has given each query, at its place among the chunks of all queries."""
    at = partial + place[:, None] * VALUE_DIM + dims[None, :]
    tl.store(at, mixed, mask=is_there[:, None] & (dims < VALUE_DIM)[None, :])
    tl.store(totals + 2 * place, peak, mask=is_there)
    tl.store(totals + 2 * place + 1, total, mask=is_there)


@triton.jit(do_not_specialize=["num_splits"])
def _attend_suffix(
    query, new_key, new_value, keys, values, lengths, partial, totals,
    query_head, query_row, query_dim, key_head, key_row, key_dim, value_head, value_row, value_dim,
    keys_slot, keys_head, keys_place, values_slot, values_head, values_place,
    scale, softcap, window, num_heads, num_splits,
    CHUNK: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, REPEAT: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each row, key head and chunk of the row's suffix."""
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    newest = tl.load(lengths + row)  # the place of the new token
    start = chunk * CHUNK
    if start <= newest:
        number, wide, long = tl.arange(0, QUERIES), tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
        at = query + (head * REPEAT + number)[:, None] * query_head + row * query_row + wide[None, :] * query_dim
        is_there = number < REPEAT
        asked = tl.load(at, mask=is_there[:, None] & (wide < KEY_DIM)[None, :], other=0.0).to(keys.dtype.element_ty)
        at = new_key + head * key_head + row * key_row + wide * key_dim
        fresh_key = tl.load(at, mask=wide < KEY_DIM, other=0.0).to(keys.dtype.element_ty)
        at = new_value + head * value_head + row * value_row + long * value_dim
        fresh_value = tl.load(at, mask=long < VALUE_DIM, other=0.0).to(values.dtype.element_ty)
        row_keys, row_values = (
            keys + row * keys_slot + head * keys_head,
            values + row * values_slot + head * values_head,
        )
        if newest < start + CHUNK:
            tl.store(row_keys + newest * keys_place + wide, fresh_key, mask=wide < KEY_DIM)
            tl.store(row_values + newest * values_place + long, fresh_value, mask=long < VALUE_DIM)
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, VALUE_PAD), tl.float32)
        begin = start
        if HAS_WINDOW:
            begin = tl.maximum(start, newest + 1 - window)  # tokens before it are not read
        for first in range(begin, tl.minimum(start + CHUNK, newest + 1), BLOCK):
            place = first + tl.arange(0, BLOCK)
            is_old, is_new = (place < newest) & (place < start + CHUNK), (place == newest)[:, None]
            of_keys = row_keys + place[:, None] * keys_place + wide[None, :]
            key = tl.load(of_keys, mask=is_old[:, None] & (wide < KEY_DIM)[None, :], other=0.0)
            scores = _scores(asked, tl.where(is_new, fresh_key[None, :], key), scale, softcap, HAS_CAP, PRECISION)
            is_seen = (place <= newest) & (place < start + CHUNK)
            if HAS_WINDOW:
                is_seen = is_seen & (newest - place < window)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            of_values = row_values + place[:, None] * values_place + long[None, :]
            value = tl.load(of_values, mask=is_old[:, None] & (long < VALUE_DIM)[None, :], other=0.0)
            value = tl.where(is_new, fresh_value[None, :], value)
            peak, total, mixed = _add(scores, value, peak, total, mixed, PRECISION)
        at = (row * num_heads + head * REPEAT + number) * num_splits + chunk
        _store(at, is_there, long, peak, total, mixed, partial, totals, VALUE_DIM)


@triton.jit(do_not_specialize=["num_blocks", "num_suffix", "rows_per_group", "num_splits"])
def _attend_prompt(
    query, keys, values, lengths, groups, partial, totals,
    query_head, query_row, query_dim, keys_slot, keys_head, keys_place, values_slot, values_head, values_place,
    num_blocks, num_suffix, rows_per_group, scale, softcap, window, num_heads, num_splits,
    CHUNK: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    REPEAT: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each group's block of rows, key head and chunk of the group's prompt."""
    group, block = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(0) % num_blocks
    head, chunk = tl.program_id(1), tl.program_id(2)
    table = groups + group * (1 + rows_per_group)
    length, start = tl.load(table), chunk * CHUNK
    if start < length:
        number, wide, long = tl.arange(0, QUERIES), tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
        member = block * ROWS + number // REPEAT
        is_there = (number < ROWS * REPEAT) & (member < rows_per_group)
        row = tl.load(table + 1 + member, mask=is_there, other=-1)
        is_there = is_there & (row >= 0)
        heads = head * REPEAT + number % REPEAT
        at = query + heads[:, None] * query_head + row[:, None] * query_row + wide[None, :] * query_dim
        asked = tl.load(at, mask=is_there[:, None] & (wide < KEY_DIM)[None, :], other=0.0).to(keys.dtype.element_ty)
        newest = length + tl.load(lengths + row, mask=is_there, other=0)
        all_keys, all_values = (
            keys + group * keys_slot + head * keys_head,
            values + group * values_slot + head * values_head,
        )
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, VALUE_PAD), tl.float32)
        begin = start
        if HAS_WINDOW:
            earliest = tl.min(tl.where(is_there, newest, length + window), 0)
            begin = tl.maximum(start, earliest + 1 - window)  # no row of the block sees the tokens before it
        for first in range(begin, tl.minimum(start + CHUNK, length), BLOCK):
            place = first + tl.arange(0, BLOCK)
            is_inside = (place < length) & (place < start + CHUNK)
            is_token = is_inside[:, None]
            of_keys = all_keys + place[:, None] * keys_place + wide[None, :]
            key = tl.load(of_keys, mask=is_token & (wide < KEY_DIM)[None, :], other=0.0)
            scores = _scores(asked, key, scale, softcap, HAS_CAP, PRECISION)
            is_seen = is_inside[None, :] & is_there[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (newest[:, None] - place[None, :] < window)
            scores = tl.where(is_seen, scores, float("-inf"))
            of_values = all_values + place[:, None] * values_place + long[None, :]
            value = tl.load(of_values, mask=is_token & (long < VALUE_DIM)[None, :], other=0.0)
            peak, total, mixed = _add(scores, value, peak, total, mixed, PRECISION)
        at = (row * num_heads + heads) * num_splits + num_suffix + chunk
        _store(at, is_there, long, peak, total, mixed, partial, totals, VALUE_DIM)


@triton.jit(do_not_specialize=["num_splits", "num_suffix"])
def _merge(
    partial, totals, sinks, lengths, prompt_lengths, output, num_heads, num_splits, num_suffix,
    SUFFIX_CHUNK: tl.constexpr, PROMPT_CHUNK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program for each row and head: the chunks' outputs in proportion to the sums of their weights."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, VALUE_PAD)
    suffix_chunks = tl.load(lengths + row) // SUFFIX_CHUNK + 1
    prompt_chunks = (tl.load(prompt_lengths + row) + PROMPT_CHUNK - 1) // PROMPT_CHUNK
    first = (row * num_heads + head) * num_splits
    peak, total, mixed = float("-inf"), 0.0, tl.zeros((VALUE_PAD,), tl.float32)
    if HAS_SINKS:
        peak, total = tl.load(sinks + head), 1.0
    for number in range(suffix_chunks + prompt_chunks):
        place = first + tl.where(number < suffix_chunks, number, num_suffix + number - suffix_chunks)
        its_peak, its_total = tl.load(totals + 2 * place), tl.load(totals + 2 * place + 1)
        higher = tl.maximum(peak, its_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, grow = tl.exp(peak - base), tl.exp(its_peak - base)
        its_mixed = tl.load(partial + place * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        mixed, total, peak = mixed * shrink + its_mixed * grow, total * shrink + its_total * grow, higher
    at = output + (row * num_heads + head) * VALUE_DIM + dims
    tl.store(at, (mixed / total).to(output.dtype.element_ty), mask=dims < VALUE_DIM)
