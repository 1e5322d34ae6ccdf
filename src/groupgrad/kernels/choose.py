"""Sampling of tokens from logits by the compiled kernels, with log-probs and entropies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from groupgrad.kernels.head import BITS


@dataclass(slots=True, frozen=True)
class Choice:
    """Sampled tokens of some rows."""

    tokens: torch.Tensor
    """(n,) int64."""
    logprobs: torch.Tensor
    """(n,) float32 log-probs of the tokens, nats."""
    entropies: torch.Tensor
    """(n,) float32 entropies of the distributions, nats."""


def choose(kernels: ctypes.CDLL, logits: torch.Tensor, temperature: float, draws: torch.Tensor) -> Choice | None:
    """Samples each row by inversion: the first token whose cumulative probability exceeds the row's draw.

    `logits` are (n, V) and are divided by `temperature`, `draws` (n,) float64 in [0, 1). Returns None for logits that
    are not contiguous float32 on a CPU, and without memory. Rows with logits of NaN or infinity get such log-probs.
    """
    if not _is_readable(logits):
        return None
    draws, tokens = draws.to(torch.float64).contiguous(), logits.new_empty(len(logits), dtype=torch.int64)
    logprobs, entropies = logits.new_empty(2, len(logits)).unbind()
    pointers = [x.data_ptr() for x in (draws, tokens, logprobs, entropies)]
    factor, threads = bits_factor(temperature), torch.get_num_threads()
    failed = kernels.groupgrad_choose(logits.data_ptr(), *logits.shape, factor, *pointers, threads)
    return None if failed else Choice(tokens, logprobs, entropies)


def score(kernels: ctypes.CDLL, logits: torch.Tensor, temperature: float, tokens: torch.Tensor) -> Choice | None:
    """Log-probs and entropies of given `tokens` (n,), bit-exactly as `choose` computes them."""
    if not _is_readable(logits):
        return None
    tokens = tokens.to(torch.int64).contiguous()
    logprobs, entropies = logits.new_empty(2, len(logits)).unbind()
    pointers = [x.data_ptr() for x in (tokens, logprobs, entropies)]
    factor, threads = bits_factor(temperature), torch.get_num_threads()
    kernels.groupgrad_score(logits.data_ptr(), *logits.shape, factor, *pointers, threads)
    return Choice(tokens, logprobs, entropies)


def bits_factor(temperature: float) -> float:
    """Factor that divides logits by the temperature and converts them to bits."""
    return 1.0 / temperature * BITS


def _is_readable(logits: torch.Tensor) -> bool:
    is_float = logits.dtype == torch.float32 and logits.device.type == "cpu"
    return is_float and logits.is_contiguous() and logits.numel() > 0
