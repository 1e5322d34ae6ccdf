"""Batches, and the reference computation of their logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.scoring.forward import build_batch
from groupgrad.types import Prompt, Rollout

PROMPTS = ([5, 6, 7, 8, 9], [11], [12, 13, 14])
ROWS = ((0, [20, 21, 1]), (1, [22, 23, 24, 25, 26, 27, 28]), (0, []), (2, [29]), (1, [30, 31, 1]))


def make_batch(rows: tuple[tuple[int, list[int]], ...] = ROWS) -> Batch:
    """Two long and short rows, shared prompts, an empty row in the middle."""
    rollouts = [
        Rollout(Prompt(PROMPTS[group], {"prompt": "x"}, group), i, ids, "eos", "", "")
        for i, (group, ids) in enumerate(rows)
    ]
    return collate(rollouts, [0.0] * len(rollouts), mask_truncated=False)


def random_rows(prompts: list[int], rows: list[tuple[int, int]], vocab: int = 48, seed: int = 0) -> Batch:
    """Prompts of these lengths and rows of (prompt, length), of random tokens."""
    stream = torch.Generator().manual_seed(seed)
    lengths = [*prompts, *(length for _, length in rows)]
    ids = [torch.randint(3, vocab, (length,), generator=stream).tolist() for length in lengths]
    return build_batch(ids[: len(prompts)], [prompt for prompt, _ in rows], ids[len(prompts) :])


def row_logits(model: nn.Module, batch: Batch, **arguments: Any) -> torch.Tensor:
    """(L, V) logits of the completion tokens from one unpadded forward pass a row."""
    parts = []
    for i in range(batch.num_rows):
        q = batch.prompt_of_row[i]
        prompt = batch.prompt_ids[batch.prompt_offsets[q] : batch.prompt_offsets[q + 1]]
        completion = batch.completion_ids[batch.offsets[i] : batch.offsets[i + 1]]
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False, **arguments).logits[0]
        parts.append(logits[len(logits) - len(completion) - 1 : -1])
    return torch.cat(parts)


@pytest.fixture(name="make_batch")
def make_batch_fixture() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture(name="batch")
def batch_fixture() -> Batch:
    return make_batch()


@pytest.fixture(name="row_logits")
def row_logits_fixture() -> Callable[..., torch.Tensor]:
    return row_logits
