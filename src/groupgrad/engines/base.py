"""What every engine takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from groupgrad.types import Media


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
    """One completion to be sampled; its text is a function of the prompt, the seed and the budget alone."""

    prompt_ids: list[int]
    """The whole context, whatever of it an engine may have kept."""
    seed: int
    """Of the row's own random stream: its text depends on nothing else, neither neighbours nor batch size."""
    max_new_tokens: int
    continues: int | None = None
    """The ticket of an ended request of the same session that was kept: `prompt_ids` begins with its `prompt_ids` and
    what was sampled for it, and what was kept is taken over. It saves work and changes nothing else."""
    keep: bool = False
    """Keep, when this request has ended, what another may continue."""
    media: Media | None = None
    """The images whose placeholders `prompt_ids` has, in their order; None without images."""


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

    Engines that sample whole batches inherit `BatchEngine`.
    """

    @property
    def is_exact(self) -> bool:
        """True if log-probs and entropies are, but for rounding, those that training's modules assign in evaluation
        mode. Training then uses them instead of computing them again."""
        ...

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order."""
        ...

    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """Opens a `Session`, which accepts requests at any time."""
        ...


class Session(Protocol):
    """Sampling under way, to which requests may come at any time; of one thread only.

    While it is open the model is as the engine samples from it (evaluation mode, the precision's context on this
    thread, layers replaced by faster ones), and its weights must not change: close it before anything is trained.
    """

    def submit(self, request: Request) -> int:
        """The ticket of a request that is sampled from now on."""
        ...

    def advance(self) -> list[tuple[int, Sample]]:
        """Compute a little, a token or a few for each request under way; those that ended by it, in ticket order."""
        ...

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        ...

    def release(self, ticket: int) -> None:
        """Forget what was kept of an ended request; nothing happens if nothing is."""
        ...


def sample_all(session: Session, requests: Sequence[Request]) -> list[Sample]:
    """One sample a request, in order, of a session that does nothing else meanwhile."""
    tickets = [session.submit(request) for request in requests]
    samples: dict[int, Sample] = {}
    while session.num_open:
        samples.update(session.advance())
    return [samples[ticket] for ticket in tickets]


class BatchSession:
    """A session over an engine that samples whole batches: `advance` samples all that was submitted since the last.

    Nothing is kept between turns; a request that continues another is sampled from its whole context.
    """

    def __init__(self, engine: Engine, options: SamplingOptions):
        self._engine, self._options = engine, options
        self._waiting: dict[int, Request] = {}
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """The ticket of a request that the next `advance` samples."""
        ticket = self._num_submitted
        self._num_submitted += 1
        self._waiting[ticket] = replace(request, continues=None, keep=False)
        return ticket

    def advance(self) -> list[tuple[int, Sample]]:
        """All requests submitted since the last call, in ticket order."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return []
        return list(zip(waiting, self._engine.sample(list(waiting.values()), self._options)))

    @property
    def num_open(self) -> int:
        """Requests submitted since the last `advance`."""
        return len(self._waiting)

    def release(self, ticket: int) -> None:
        """Nothing is kept, so nothing happens."""


class BatchEngine(ABC):
    """Base class of engines that sample whole batches. Log-probs are not exact unless a subclass says so."""

    is_exact: bool = False

    @abstractmethod
    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order."""

    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """Opens a `BatchSession`."""
        return nullcontext(BatchSession(self, options))
