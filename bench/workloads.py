"""Definitions of the workloads, their models' shapes and their targets. Plain data; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["random words", "gsm8k", "demo"]


@dataclass(slots=True, frozen=True)
class ModelShape:
    """A Qwen3-architecture model, by its sizes."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool = False
    """The output head is the embedding table."""

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' matrices (norms left out): each takes part in one multiplication a token."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights but the norms'."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    def describe(self) -> str:
        """The shape in a few words."""
        return (
            f"{self.num_layers} layers, hidden {self.hidden_size}, vocabulary {self.vocab_size:,}, "
            f"{self.num_parameters / 1e6:.1f} M parameters"
        )


@dataclass(slots=True, frozen=True)
class Workload:
    """One optimizer step's work: on-policy, every completion sampled at temperature 1."""

    name: str
    model: ModelShape
    limit: int
    """Most tokens that a completion may have (`max_completion_length`)."""
    num_generations: int
    batch_rows: int
    prompt_tokens: int | None = None
    """None: prompts have their own lengths."""
    mean_length: float | None = None
    """Mean of the geometric lengths before they are cut at the limit; None: each completion reaches the limit, or,
    with the demo's model, ends where the model ends it."""
    half_flat: bool = False
    """Every second group gets the same reward for all its rows."""
    micro_batches: int = 1
    """Over which a step's rows are accumulated; more than one where TRL would not fit into 24 GB otherwise."""
    source: Source = "random words"
    target: float | None = None
    """TRL's step time over ours that a step shall reach."""

    @property
    def num_groups(self) -> int:
        """Distinct prompts of a step."""
        return self.batch_rows // self.num_generations

    def describe(self) -> str:
        """The work of a step, in a few words."""
        prompt = f"prompt {self.prompt_tokens}" if self.prompt_tokens else f"{self.source} prompts"
        if self.mean_length:
            completion = f"lengths geometric, mean {self.mean_length:g}, limit {self.limit}"
        else:
            completion = f"completion {'up to ' if self.source == 'demo' else ''}{self.limit}"
        flat = ", half of the groups without reward variance" if self.half_flat else ""
        micro = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{prompt}, {completion}, group {self.num_generations}, batch {self.batch_rows}{micro}{flat}"


BASE = ModelShape(
    vocab_size=8192,
    hidden_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
)
WIDE_VOCABULARY = ModelShape(
    vocab_size=151_936,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    tied=True,
)
DEMO = ModelShape(
    vocab_size=19,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=256,
    tied=True,
)
"""The model of `examples/tiny_task.py`."""

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("uniform", BASE, prompt_tokens=64, limit=128, num_generations=8, batch_rows=32, target=1.7),
        Workload(
            "ragged", BASE, prompt_tokens=128, limit=512, mean_length=96, num_generations=8, batch_rows=32, target=5
        ),
        Workload(
            "long_prompt",
            BASE,
            prompt_tokens=768,
            limit=64,
            num_generations=8,
            batch_rows=32,
            micro_batches=2,
            target=5,
        ),
        Workload(
            "large_vocab", WIDE_VOCABULARY, prompt_tokens=64, limit=128, num_generations=8, batch_rows=32, target=3
        ),
        Workload(
            "reasoning",
            BASE,
            prompt_tokens=256,
            limit=512,
            mean_length=96,
            num_generations=16,
            batch_rows=64,
            half_flat=True,
            micro_batches=4,
            target=10,
        ),
        Workload("gsm8k", WIDE_VOCABULARY, limit=256, mean_length=96, num_generations=8, batch_rows=32, source="gsm8k"),
        Workload("demo", DEMO, limit=40, num_generations=16, batch_rows=256, source="demo"),
    )
}


@dataclass(slots=True, frozen=True)
class GroupWork:
    """One group of a measured step: its prompt's tokens, its completions' tokens, whether rewards differed."""

    prompt_tokens: int
    lengths: tuple[int, ...]
    live: bool = True


def groups_of(step: dict[str, Any], num_generations: int) -> list[GroupWork]:
    """The groups of a step from a worker's per-row lists `prompt_tokens`, `lengths` and `rewards`, in group order."""
    groups = []
    for start in range(0, len(step["lengths"]), num_generations):
        rows = slice(start, start + num_generations)
        rewards = step["rewards"][rows]
        groups.append(
            GroupWork(step["prompt_tokens"][start], tuple(step["lengths"][rows]), max(rewards) - min(rewards) > 1e-9)
        )
    return groups


def scattered_reward(ids: Iterable[int]) -> float:
    """A number in [0, 1) that is a function of the token ids alone and that looks random (FNV-1a, 32 bits)."""
    state = 2166136261
    for token in ids:
        state = ((state ^ token) * 16777619) % 2**32
    return state / 2**32
