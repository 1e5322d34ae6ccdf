"""Data, models, rewards, settings and comparisons of small runs, for tests and for the scripts that ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from groupgrad.scoring.forward import ForwardOptions, score_without_gradient
from groupgrad.scoring.self_check import random_batch

PROMPTS = ["a", "bc", "def", "gh", "ij k", "l", "mn", "opqr", "st", "u", "vw", "xyz", "A", "BC", "DE", "F"]
TIMES = ("runtime", "per_second", "step_time", "time/", "tools/wait", "latency_s")

EOS = [1, *range(4, 24)]
"""Ids that end a completion of the small policies: about a fifth of their vocabulary."""

SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "max_steps": 3,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}
"""A few fast steps on a CPU."""

STATEFUL = {
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "entropy_target": 5.0,
    "entropy_coef_delta": 0.05,
    "gradient_accumulation_steps": 2,
}
"""Settings of a run in which everything that a checkpoint holds changes with each step."""


def letters_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward that depends on the tokens alone and differs within most groups."""
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


class Recorder:
    """A reward function of the tokens alone that keeps the arguments of its calls, and the step of each."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any) -> Any:
        rewards, step = letters_reward(completion_ids), trainer_state.global_step
        call = {"prompts": prompts, "completion_ids": completion_ids, "rewards": rewards, "step": step}
        self.calls.append({**call, **columns})
        return rewards

    def take(self, key: str) -> list[Any]:
        """The values of all rows of an argument, after which the calls are forgotten."""
        taken = [item for call in self.calls for item in call[key]]
        self.calls.clear()
        return taken


def make_experts(**config: Any) -> Qwen3MoeForCausalLM:
    """A random model of two layers with four experts, of which a token takes two."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8}
    counts = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 95, "eos_token_id": 1, "pad_token_id": 0}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, **ids, num_key_value_heads=2, **config))
    model.generation_config.eos_token_id = EOS  # pyright: ignore[reportOptionalMemberAccess]
    return model


def make_scorer(**config: Any) -> LlamaForSequenceClassification:
    """A random reward model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 95, "num_labels": 1, "initializer_range": 0.5, "pad_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(**{**sizes, **config})).eval()


def prompts(count: int = 16) -> Dataset:
    """Returns distinct short prompts, numbered in the column `row`."""
    texts = [PROMPTS[i % len(PROMPTS)] + "!" * (i // len(PROMPTS)) for i in range(count)]
    return Dataset.from_dict({"prompt": texts, "row": list(range(count))})


def weights(model: nn.Module) -> torch.Tensor:
    """Concatenates all parameters, as float64."""
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def logprobs(model: nn.Module) -> torch.Tensor:
    """Log-probs of a batch that is equal for models of one vocabulary."""
    return score_without_gradient(model, random_batch(model), ForwardOptions()).logprobs


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns |first - second| / |second| in the Euclidean norm."""
    return float((first - second).norm() / second.norm())


def without_times(log_history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the log history without measured times."""
    return [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in log_history]


def assert_like(
    found: Sequence[dict[str, Any]],
    expected: Sequence[dict[str, Any]],
    tolerance: float,
    *,
    without: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Two log histories are equal to `tolerance` but for measured times and their last entries.

    Keys that begin with one of `without` are not compared, keys of `optional` only where `found` has them.
    """
    assert len(found) == len(expected) > 1
    for entry, wanted in zip(without_times(found)[:-1], without_times(expected)[:-1]):
        entry, wanted = ({k: v for k, v in one.items() if not k.startswith(tuple(without))} for one in (entry, wanted))
        wanted = {key: value for key, value in wanted.items() if key not in optional or key in entry}
        assert entry.keys() == wanted.keys()
        assert entry == pytest.approx(wanted, abs=tolerance, rel=tolerance)
