"""What every engine takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(slots=True, frozen=True)
class SamplingOptions:
    """How completions are drawn. The tokens' distribution is the temperature softmax, cut by top-k, top-p, min-p."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no cut."""
    min_p: float | None = None
    repetition_penalty: float = 1.0
    eos_ids: tuple[int, ...] = ()
    """Any of these ends a completion and is its last token."""
    pad_id: int = 0
    cache_implementation: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Further options by the engine's own names; they win over the fields above."""


@dataclass(slots=True, frozen=True)
class Request:
    """One completion to be sampled."""

    prompt_ids: list[int]
    seed: int
    """Of the row's own random stream: its text depends on nothing else, neither neighbours nor batch size."""
    max_new_tokens: int


@dataclass(slots=True, frozen=True)
class Sample:
    """One sampled completion."""

    ids: list[int]
    """The ending EOS included."""
    finish_reason: Literal["eos", "length"]
    logprobs: list[float] | None = None
    """Log-probability (nats) of each token under the temperature softmax, before any cut; None if not measured."""
    entropies: list[float] | None = None
    """Entropy (nats) of the temperature softmax that each token came from, before any cut; None if not measured."""


class Engine(Protocol):
    """Samples completions from the policy's present weights.

    An engine may have an attribute `exact: bool`: true if its log-probs and entropies are, but for rounding, those that
    training's modules assign in evaluation mode. Training then takes them as they are instead of computing them again.
    Read it with `getattr(engine, "exact", False)`.
    """

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        ...
