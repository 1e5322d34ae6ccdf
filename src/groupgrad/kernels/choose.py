"""The compiled choice of tokens as the sampler calls it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Choice:
    """What was chosen for some rows."""

    tokens: torch.Tensor
    """(n,) int64."""
    logprobs: torch.Tensor
    """(n,) float32, of the tokens."""
    entropies: torch.Tensor
    """(n,) float32, of the distributions that they were drawn from."""


def choose(kernels: ctypes.CDLL, logits: torch.Tensor, temperature: float, draws: torch.Tensor) -> Choice | None:
    """The first token of each row whose cumulative share exceeds the row's draw.

    `logits` are (n, V) and are divided by `temperature`, `draws` (n,) float64 in [0, 1). None for logits that are not
    float32 in one piece on a CPU, and where memory is short. A row whose logits are no finite numbers gets a log-prob
    that is none either.
    """
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or not logits.is_contiguous() or not logits.numel():
        return None
    draws, tokens = draws.contiguous(), torch.empty(len(logits), dtype=torch.int64)
    logprobs, entropies = torch.empty(2, len(logits)).unbind()
    pointers = [x.data_ptr() for x in (draws, tokens, logprobs, entropies)]
    failed = kernels.groupgrad_choose(logits.data_ptr(), *logits.shape, temperature, *pointers, torch.get_num_threads())
    return None if failed else Choice(tokens, logprobs, entropies)
