"""Random groups of rows of unlike lengths, and the gradients of a loss on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from tiny_hybrids import VOCABULARY
from torch import nn

from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens


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
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad])
    actual = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, actual)}


def assert_same_gradients(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    rtol: float = 1e-4,
    atol: float = 1e-5,
    least: float = 1e-3,
) -> None:
    """Within tolerances, of which `atol` is of the largest number of all; that is above `least`."""
    assert found.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values())
    assert scale > least
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol * scale, msg=name)


def assert_scored_as_one_pass_a_row(model: nn.Module, batch: Any, row_logits: Callable[..., torch.Tensor]) -> None:
    """The shared layout gives the log-probs and gradients of a plain forward pass for each row (`row_logits`)."""
    weights = torch.linspace(-1, 2, batch.num_tokens)
    logits = row_logits(model, batch).float().log_softmax(-1)
    expected = logits.gather(-1, batch.completion_ids[:, None]).squeeze(-1)
    assert float(expected.detach().std()) > 0.1
    scores = score_tokens(model, batch, ForwardOptions(layout="shared"))
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=1e-5)
    assert_same_gradients(*(gradients(model, (weights * values).sum()) for values in (scores.logprobs, expected)))
