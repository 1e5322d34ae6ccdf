"""Batched matrix products of half-precision tensors that keep float32 results on a GPU."""

from __future__ import annotations

import torch


def wide_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(B, T, S) products of (B, T, D) and (B, D, S): float32 for half precision on CUDA, else in the inputs' type.

    bfloat16 would round a score between 8 and 16 by up to 0.03. Not differentiable on CUDA.
    """
    if not left.is_cuda or left.dtype not in (torch.float16, torch.bfloat16):
        return torch.bmm(left, right)
    if "dtype" in torch.ops.aten.bmm.overloads():  # torch 2.8
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
