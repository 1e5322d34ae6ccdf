"""Definitions of the workloads, their models' shapes and their targets. Plain data; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Source = Literal["random words", "gsm8k", "demo", "SmolLM2"]


@dataclass(slots=True, frozen=True)
class RecurrentLayers:
    """The layers of a hybrid model that carry a state (a matrix for each head) instead of keys and values."""

    family: Literal["qwen3_5", "nemotron_h"]
    """The architecture: gated delta rule and attention in turn, or Mamba-2, attention and MLPs."""
    layer_types: tuple[str, ...]
    """As in the model's configuration."""
    num_heads: int
    num_key_heads: int
    key_dim: int
    """Rows of a head's state."""
    value_dim: int

    @property
    def num_layers(self) -> int:
        """Layers with a state."""
        return sum(kind in ("linear_attention", "mamba") for kind in self.layer_types)

    @property
    def state_numbers(self) -> int:
        """Numbers in the states of a row, all layers together."""
        return self.num_layers * self.num_heads * self.key_dim * self.value_dim

    @property
    def state_operations(self) -> int:
        """Operations of a token with its row's states: three products with a state (delta rule), or two (Mamba-2)."""
        return (6 if self.family == "qwen3_5" else 4) * self.state_numbers

    def layer_parameters(self, hidden_size: int) -> int:
        """Weights of the matrices around the states, all layers together."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        scalars = 2 if self.family == "qwen3_5" else 1
        each = hidden_size * (2 * keys + 2 * values + scalars * self.num_heads) + values * hidden_size
        return self.num_layers * each


@dataclass(slots=True, frozen=True)
class ModelShape:
    """A model by its sizes: of the Qwen3 architecture, or a hybrid."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool = False
    """The output head is the embedding table."""
    recurrent: RecurrentLayers | None = None
    """The layers with a state; None: all layers are attention layers."""

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep keys and values."""
        if self.recurrent is None:
            return self.num_layers
        return sum("attention" in kind and "linear" not in kind for kind in self.recurrent.layer_types)

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' matrices (norms left out): each takes part in one multiplication a token."""
        is_gated = self.recurrent is not None and self.recurrent.family == "qwen3_5"
        attention = self.hidden_size * self.head_dim * ((3 if is_gated else 2) * self.num_heads + 2 * self.num_kv_heads)
        mlp, num_mlps = 3 * self.hidden_size * self.intermediate_size, self.num_layers
        if self.recurrent is not None and self.recurrent.family == "nemotron_h":
            mlp, num_mlps = mlp * 2 // 3, self.recurrent.layer_types.count("mlp")
        states = 0 if self.recurrent is None else self.recurrent.layer_parameters(self.hidden_size)
        return self.num_attention_layers * attention + num_mlps * mlp + states

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
        kind = f" ({self.recurrent.family}, {self.recurrent.num_layers} recurrent)" if self.recurrent else ""
        return (
            f"{self.num_layers} layers{kind}, hidden {self.hidden_size}, vocabulary {self.vocab_size:,}, "
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
    with a trained model, ends where the model ends it."""
    half_flat: bool = False
    """Every second group gets the same reward for all its rows."""
    micro_batches: int = 1
    """Over which a step's rows are accumulated; more than one where TRL would not fit into 24 GB otherwise."""
    source: Source = "random words"
    learning_rate: float = 1e-6
    target: float | None = None
    """TRL's step time over ours that a step shall reach."""

    @property
    def is_trained(self) -> bool:
        """The model has been trained, so it ends its completions itself."""
        return self.source in ("demo", "SmolLM2")

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
            completion = f"completion {'up to ' if self.is_trained else ''}{self.limit}"
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
HYBRID = replace(
    BASE,
    recurrent=RecurrentLayers(
        family="qwen3_5",
        layer_types=(*["linear_attention"] * 3, "full_attention", *["linear_attention"] * 2),
        num_heads=8,
        num_key_heads=8,
        key_dim=128,
        value_dim=128,
    ),
)
"""Qwen3.5's smallest model with half of its width and a quarter of its layers."""
HYBRID_MAMBA = replace(
    BASE,
    num_layers=8,
    recurrent=RecurrentLayers(
        family="nemotron_h",
        layer_types=("mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mamba", "mlp"),
        num_heads=16,
        num_key_heads=2,
        key_dim=128,
        value_dim=64,
    ),
)
"""Nemotron-H's kinds of layers in its proportions: the state is twice as wide as the hidden state."""
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
"""The model of `groupgrad.apps.demo.task`."""
SMOLLM2 = ModelShape(
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    tied=True,
)
"""SmolLM2-135M-Instruct, a Llama with pretrained weights."""

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
        Workload("hybrid_uniform", HYBRID, prompt_tokens=64, limit=128, num_generations=8, batch_rows=32, target=2.5),
        Workload(
            "hybrid_reasoning",
            HYBRID,
            prompt_tokens=256,
            limit=512,
            mean_length=96,
            num_generations=16,
            batch_rows=64,
            half_flat=True,
            micro_batches=4,
            target=12,
        ),
        Workload("hybrid_mamba", HYBRID_MAMBA, prompt_tokens=64, limit=128, num_generations=8, batch_rows=32),
        Workload("gsm8k", WIDE_VOCABULARY, limit=256, mean_length=96, num_generations=8, batch_rows=32, source="gsm8k"),
        Workload("demo", DEMO, limit=40, num_generations=16, batch_rows=256, source="demo"),
        Workload(
            "real",
            SMOLLM2,
            limit=256,
            num_generations=8,
            batch_rows=32,
            micro_batches=2,
            source="SmolLM2",
            target=10,
        ),
    )
}
LEARNING = Workload(
    "learning", SMOLLM2, limit=32, num_generations=8, batch_rows=32, source="SmolLM2", learning_rate=1e-5
)
"""What `bench/beside_trl.py` trains: the questions of `real`, with a reward for right answers."""


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
