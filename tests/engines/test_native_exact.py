"""On a CPU in float32 a token's log-prob is the same number, to the last bit, when it is sampled and when it is trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from groupgrad.data.collate import collate
from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.kernels import library, status
from groupgrad.models.attention import unplug
from groupgrad.models.forward import ForwardOptions, score_tokens, score_without_gradient
from groupgrad.models.head import Foreseen
from groupgrad.models.parts import own_parts
from groupgrad.types import Batch, Prompt, Rollout, TokenScores

pytestmark = pytest.mark.skipif(library() is None, reason=status())

OPTIONS = SamplingOptions(max_new_tokens=40, eos_ids=(1,), pad_id=0)
BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
ODD = {"hidden_size": 45, "intermediate_size": 77, "head_dim": 10, "vocab_size": 129, "num_attention_heads": 3}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, one key head": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama, tied, a large vocabulary": ("Llama", {"tie_word_embeddings": True, "vocab_size": 4500}),
    "mistral, window": ("Mistral", {"sliding_window": 9}),
    "mistral, window of one": ("Mistral", {"sliding_window": 1}),
    "mistral, odd widths": ("Mistral", {**ODD, "num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", {"hidden_size": 200, "intermediate_size": 250, "head_dim": 50}),
    "qwen2, tied, window in one layer": ("Qwen2", {"tie_word_embeddings": True, **WINDOWS}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": YARN}),
    "qwen3, tied, odd widths": ("Qwen3", {**ODD, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen3, eight queries a key": ("Qwen3", {"num_attention_heads": 16, "head_dim": 64}),
}


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Sets how many torch, and so the kernels, may use; as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make(kind: str, seed: int = 0) -> Any:
    """A model whose log-probs differ much: large weights, biases that are not 0, and norms that weigh."""
    family, changes = KINDS[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**{**BASE, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


@dataclass
class Row:
    """A completion, and which of its tokens were sampled with which numbers."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    sampled: list[bool] | None = None


def requests(vocabulary: int, num_rows: int = 14, longest: int = 40) -> list[Request]:
    """Rows of unequal budgets behind a prompt of one token, a short one and two long ones."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in (1, 11, 83, 230)]
    return [Request(prompts[i % 4], 7 * i, 1 + (i * 29) % longest if i else longest) for i in range(num_rows)]


def rows_of(asked: Sequence[Request], samples: Sequence[Sample]) -> list[Row]:
    return [Row(r.prompt_ids, s.ids, s.logprobs or [], s.entropies or []) for r, s in zip(asked, samples)]


def batch_of(rows: Sequence[Row]) -> Batch:
    groups: dict[tuple[int, ...], int] = {}
    rollouts = []
    for i, row in enumerate(rows):
        prompt = Prompt(row.prompt, {"prompt": ""}, groups.setdefault(tuple(row.prompt), len(groups)))
        numbers = {"sampling_logprobs": row.logprobs, "sampling_entropy": row.entropies}
        rollouts.append(Rollout(prompt, i, row.ids, "eos", "", "", sampled=row.sampled, **numbers))
    return collate(rollouts, [1.0] * len(rows), mask_truncated=False)


def assert_equal(scores: TokenScores, batch: Batch) -> None:
    """Log-probs and entropies of the trained tokens are those of sampling to the last bit."""
    for name, found, known in (
        ("log-probs", scores.logprobs, batch.sampling_logprobs),
        ("entropies", scores.entropy, batch.sampling_entropy),
    ):
        assert known is not None
        found, known = found.detach()[batch.trained], known[batch.trained]
        off = (found - known).abs()
        assert torch.equal(found, known), f"{name}: {int((off > 0).sum())} of {len(off)} differ, by up to {off.max()}"


def assert_trained_alike(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> Batch:
    """With and without gradients; the batch of the rows."""
    batch, options = batch_of(rows), ForwardOptions(temperature)
    known = batch.sampling_logprobs
    assert known is not None and known[batch.trained].std() > 0.3, "they are not all alike"
    assert_equal(score_without_gradient(model, batch, options), batch)
    scores = score_tokens(model, batch, options)
    assert scores.logprobs.requires_grad
    assert_equal(scores, batch)
    return batch


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("num_threads", [1, 2])
def test_trained_as_sampled(kind: str, num_threads: int, threads: Callable[[int], None]):
    threads(num_threads)
    model = make(kind)
    asked = requests(model.config.vocab_size)
    samples = NativeEngine(model).sample(asked, OPTIONS)
    threads(3 - num_threads)
    assert_trained_alike(model, rows_of(asked, samples))
