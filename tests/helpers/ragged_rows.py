"""Random groups of rows of unlike lengths, and the gradients of a loss on them."""

from __future__ import annotations

import random
from typing import Any

import torch
from tiny_hybrids import VOCABULARY
from torch import nn

from groupgrad.modeling.scoring.forward import build_batch


def ragged_groups(seed: int) -> Any:
    """Groups of rows of unlike lengths, some longer than a chunk of 64 tokens, some empty."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice((1, 2, 5, 40, 90)))] for _ in range(3)]
    rows = [
        (prompt, [rng.randrange(3, VOCABULARY) for _ in range(rng.choice((0, 1, 2, 3, 17, 33, 80, 140)))])
        for prompt in range(len(prompts))
        for _ in range(rng.randint(1, 4))
    ]
    return prompts, rows


def batch_of(seed: int) -> Any:
    prompts, rows = ragged_groups(seed)
    return build_batch(prompts, [prompt for prompt, _ in rows], [ids for _, ids in rows])


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
