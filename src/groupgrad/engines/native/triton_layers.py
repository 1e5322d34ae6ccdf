"""Residuals, norms, rotary embeddings and gates of a decoder layer on a GPU, in four launches of Triton kernels.

A layer of a decode step has few numbers, so that it takes the time of its launches. In torch's operations residuals,
norms, rotary embeddings and gates are about 30 of them. Sums and products are float32 and are rounded where the
modules round their results, not after each operation.
"""

# Triton is on machines with a GPU alone, and its kernels have no types.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATE_BLOCK = 1024
"""Numbers of one program of the kernel for gates."""


def add_and_norm(
    hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, H) the sum of `hidden` and `added`, in the wider of both types, and its RMS norm in `dtype`; weight: (H,)."""
    num_rows, width = hidden.shape
    hidden, added = hidden.contiguous(), None if added is None else added.contiguous()
    total, normed = hidden, torch.empty_like(hidden, dtype=dtype)
    if added is not None:
        total = torch.empty_like(hidden, dtype=torch.promote_types(hidden.dtype, added.dtype))
    _add_and_norm[(num_rows,)](
        hidden, hidden if added is None else added, weight, total, normed, epsilon,
        WIDTH=width, PAD=triton.next_power_of_2(width), HAS_ADDED=added is not None,
        num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return total, normed


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, Hq, D) queries and (n, Hkv, D) keys, normed and turned; the result is in their type.

    cosines and sines: (n, R); the first R numbers of a head are turned, and the first half of the sines has the sign of
    the turn. norms: the weights (D,) of the RMS norms of
    queries and of keys, and their epsilon; None without.
    """
    num_rows, num_heads, width = query.shape
    query, key = query.contiguous(), key.contiguous()
    query_weight, key_weight, epsilon = norms or (query, key, 0.0)
    turned = torch.empty_like(query), torch.empty_like(key)
    _rotate[(num_rows, num_heads + key.shape[1])](
        query, key, query_weight, key_weight, cosines, sines, *turned, num_heads, key.shape[1], epsilon,
        WIDTH=width, PAD=triton.next_power_of_2(width), TURNED=cosines.shape[1], HAS_NORM=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return turned


def gate(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """silu(gates) * values, of one shape and type."""
    gates, values = gates.contiguous(), values.contiguous()
    output, count = torch.empty_like(values), values.numel()
    _gate[(triton.cdiv(count, GATE_BLOCK),)](gates, values, output, count, BLOCK=GATE_BLOCK)
    return output


@triton.jit
def _add_and_norm(
    hidden, added, weight, total, normed, epsilon,
    WIDTH: tl.constexpr, PAD: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """One program for each row."""
    dims = tl.arange(0, PAD)
    is_there, at = dims < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + dims
    row = tl.load(hidden + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_ADDED:
        row += tl.load(added + at, mask=is_there, other=0.0).to(tl.float32)
        rounded = row.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=is_there)
        row = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    scaled = row * factor * tl.load(weight + dims, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + at, scaled.to(normed.dtype.element_ty), mask=is_there)


@triton.jit
def _rotate(
    query, key, query_weight, key_weight, cosines, sines, turned_query, turned_key, num_heads, kv_heads, epsilon,
    WIDTH: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program for each row and head; the heads of keys come after the heads of queries."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < num_heads:
        at = (row * num_heads + head) * WIDTH
        _rotate_head(
            query + at, query_weight, cosines, sines, turned_query + at, row, epsilon, WIDTH, PAD, TURNED, HAS_NORM
        )
    else:
        at = (row * kv_heads + head - num_heads) * WIDTH
        _rotate_head(key + at, key_weight, cosines, sines, turned_key + at, row, epsilon, WIDTH, PAD, TURNED, HAS_NORM)


@triton.jit
def _rotate_head(
    head, weight, cosines, sines, turned, row, epsilon,
    WIDTH: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, PAD)
    # The number that is turned together with each: half of the turned ones away.
    is_first, is_there, is_turned = dims < TURNED // 2, dims < WIDTH, dims < TURNED
    others = tl.where(is_turned, tl.where(is_first, dims + TURNED // 2, dims - TURNED // 2), dims)
    values = tl.load(head + dims, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(head + others, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
        values = values * factor * tl.load(weight + dims, mask=is_there, other=0.0).to(tl.float32)
        other = other * factor * tl.load(weight + others, mask=is_there, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + row * TURNED + dims, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * TURNED + dims, mask=is_turned, other=0.0).to(tl.float32)
    result = values * cosine + other * sine
    tl.store(turned + dims, result.to(turned.dtype.element_ty), mask=is_there)


@triton.jit
def _gate(gates, values, output, count, BLOCK: tl.constexpr):
    """One program for `BLOCK` numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < count
    given = tl.load(gates + at, mask=is_there, other=0.0).to(tl.float32)
    opened = (given * tl.sigmoid(given)).to(output.dtype.element_ty).to(tl.float32)
    product = opened * tl.load(values + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(output + at, product.to(output.dtype.element_ty), mask=is_there)
