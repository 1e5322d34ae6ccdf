"""Every architecture on every path; `python bench/support_table.py` turns the results into the table of docs/models.md.

Each path is compared with plain calls of the model, a row at a time, in float64 where the model runs in it. Paths that
groupgrad does not take for an architecture are skipped with its reason.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from base_fixtures import build
from peft import LoraConfig, get_peft_model
from torch import nn

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.scoring.attention import flat_obstacle
from groupgrad.scoring.forward import ForwardOptions, InputLayout, score_tokens
from groupgrad.scoring.self_check import build_batch

NAMES = (
    "qwen3",
    "qwen3-tied",
    "llama",
    "mistral (sliding window)",
    "gemma2 (soft caps)",
    "gemma4 (two sizes of heads)",
    "gemma4 (shared keys and values)",
    "gpt2",
    "gpt-j (head bias)",
    "phi (head bias)",
    "opt (learned positions)",
    "bloom (alibi)",
    "codegen",
    "gpt-neo (local attention)",
    "mpt (alibi)",
    "falcon",
    "falcon (alibi)",
    "xglm (own attention)",
    "cohere (logit scale)",
    "granite (logit scale)",
    "qwen3-moe",
    "gpt-oss (experts, sinks)",
    "qwen3.5 (linear attention)",
    "mamba (recurrent)",
    "mamba2 (recurrent)",
    "lfm2 (convolution)",
    "recurrent gemma (own recurrence)",
)
PADDING_CHANGES_STATES = ("recurrent gemma (own recurrence)",)
ONLY_FLOAT32 = (
    "xglm (own attention)",
    "qwen3-moe",
    "gpt-oss (experts, sinks)",
    "mamba (recurrent)",
    "mamba2 (recurrent)",
)
"""Models whose code in transformers computes in float32 alone."""
ADAPTERS = ("full", "lora")
PROMPTS = ([5, 6, 7, 8, 9], [10, 11, 12])
ROWS = (0, 1, 0, 1)
COMPLETIONS = [[13, 14, 15, 16], [17, 18], [19], [20, 21, 22, 23, 24, 25]]
WEIGHTS = torch.linspace(-1, 2, sum(map(len, COMPLETIONS)))
GREEDY = SamplingOptions(max_new_tokens=6, extra={"do_sample": False})


@dataclass(slots=True, frozen=True)
class Plain:
    """A model and what plain calls of it give; every path is compared with them."""

    model: Any
    obstacle: str | None
    """Why the model takes neither flat rows nor the native engine; None if it takes both."""
    logprobs: torch.Tensor
    """(L,) log-probs of the completions, computed a row at a time, in float64 where the model runs in it."""
    gradient: torch.Tensor
    """The gradient of the log-probs' sum with `WEIGHTS`, all parameters end to end."""
    texts: list[list[int]]
    """Greedy completion of each row, without a cache."""


@lru_cache(maxsize=len(ADAPTERS))
def plain(name: str, adapters: str) -> Plain:
    """The model of a name, with an adapter or without; paths of one model share it."""
    model = build(name)
    if adapters == "lora":
        torch.manual_seed(1)
        # PEFT refuses Mamba's other layers, whose kernels read the weights without the adapter.
        targets = ["in_proj"] if name.startswith("mamba") else "all-linear"
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    exact = model if name in ONLY_FLOAT32 else copy.deepcopy(model).double()
    logprobs = alone(exact)
    texts = [greedy(model, prompt) for prompt in PROMPTS]
    gradient = gradients(exact, (WEIGHTS * logprobs).sum())
    return Plain(model, flat_obstacle(model), logprobs.detach(), gradient, [texts[prompt] for prompt in ROWS])


def alone(model: nn.Module) -> torch.Tensor:
    """(L,) log-probs of the completions, computed a row at a time."""
    parts = []
    for prompt, completion in zip(ROWS, COMPLETIONS):
        ids = torch.tensor([PROMPTS[prompt] + completion])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[prompt]) - 1 : -1]
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
    return torch.cat(parts)


def gradients(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    actual = torch.autograd.grad(loss, trained, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(trained, actual)]).double()


@torch.no_grad()
def greedy(model: nn.Module, prompt: Sequence[int]) -> list[int]:
    """Greedy completion of six tokens without a cache."""
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.quick("qwen3", "gemma4 (shared keys and values)", "gpt2", "lfm2 (convolution)")
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("layout", ["dense", "packed", "shared"])
@pytest.mark.parametrize("name", NAMES)
def test_training_path(name: str, layout: InputLayout, adapters: str):
    expected = plain(name, adapters)
    if expected.obstacle is not None and layout != "dense":
        pytest.skip(expected.obstacle)
    batch = build_batch([list(ids) for ids in PROMPTS], ROWS, COMPLETIONS)
    scores = score_tokens(expected.model, batch, ForwardOptions(layout=layout)).logprobs
    torch.testing.assert_close(scores.double(), expected.logprobs.double(), rtol=0, atol=1e-5)
    actual = gradients(expected.model, (WEIGHTS * scores).sum())
    assert float((actual - expected.gradient).norm() / expected.gradient.norm()) <= 1e-5


@pytest.mark.quick("qwen3", "gemma4 (shared keys and values)", "gpt2", "lfm2 (convolution)")
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("name", NAMES)
def test_sampling_path(name: str, engine: str, adapters: str):
    expected = plain(name, adapters)
    if expected.obstacle is not None and engine == "native":
        pytest.skip(expected.obstacle)
    # `choose_engine` finds out for whom padding on the left changes the state.
    equal_lengths = name in PADDING_CHANGES_STATES
    model = expected.model
    sampler: Any = NativeEngine(model) if engine == "native" else TransformersEngine(model, equal_lengths=equal_lengths)
    requests = [Request(list(PROMPTS[prompt]), seed=row, max_new_tokens=6) for row, prompt in enumerate(ROWS)]
    assert [sample.ids for sample in sampler.sample(requests, GREEDY)] == expected.texts
