"""The interface of all engines: requests of token ids in, samples with log-probs out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from groupgrad.metrics import Metric
from groupgrad.types import FinishReason, Media


@dataclass(slots=True, frozen=True)
class SamplingOptions:
    """Sampling options. Tokens follow the temperature softmax, filtered by top-k, top-p and min-p."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no filter."""
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
    """One completion to sample. It depends on the prompt, the seed and the budget alone."""

    prompt_ids: list[int]
    """The whole context, including turns that an engine may have retained."""
    seed: int
    """Seed of the completion's own random stream, so that neither neighbours nor batch size matter."""
    max_new_tokens: int
    continues: int | None = None
    """Ticket of a finished request of the same session with `keep`, whose `prompt_ids` and sampled tokens begin this
    `prompt_ids`. The engine reuses their keys and values; the completion is the same without."""
    keep: bool = False
    """Retain the finished request, so that another may continue it."""
    media: Media | None = None
    """Images of the placeholders in `prompt_ids`, in order; None without images."""
    temperature: float | None = None
    """Temperature of this completion alone, 0 for the most likely tokens; None: that of the options. Only for engines
    that have `takes_temperatures`."""
    stops: tuple[str, ...] = ()
    """Texts at the first of which the caller cuts the completion. An engine may end it, as by an EOS, with the token
    that completes one; so does the native engine."""


@dataclass(slots=True, frozen=True)
class Sample:
    """One sampled completion."""

    ids: list[int]
    """Token ids, with the ending EOS."""
    finish_reason: FinishReason
    """`eos` or `length` of an engine; `context` where the model's context gave it fewer tokens than asked for."""
    logprobs: list[float] | None = None
    """Log-probability (nats) of each token under the temperature softmax, before any filter; None if not measured."""
    entropies: list[float] | None = None
    """Entropy (nats) of the temperature softmax at each token, before any filter; None if not measured."""
    policy_versions: list[int] | None = None
    """Optimizer step whose weights sampled each token; None for an engine whose weights cannot change meanwhile."""


class Engine(Protocol):
    """Samples completions from the policy's present weights.

    Engines that sample whole batches inherit `BatchEngine`.
    """

    @property
    def is_exact(self) -> bool:
        """True if log-probs and entropies equal, up to rounding, what the trained modules compute in evaluation mode.

        Training then uses them instead of computing them again.
        """
        ...

    @property
    def takes_temperatures(self) -> bool:
        """True if a request may have a temperature of its own. Its log-probs and entropies are then those at it."""
        ...

    @property
    def path(self) -> str:
        """Which decode path the last sampling took, and each slower fallback with its reason; empty if unknown."""
        ...

    def metrics(self) -> dict[str, Metric]:
        """Numbers of the completions sampled last, beyond those of every engine."""
        ...

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order."""
        ...

    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """Opens a `Session`, which accepts requests at any time."""
        ...


class Session(Protocol):
    """Continuous sampling: requests may arrive at any time. A session belongs to one thread.

    An open session prepares the model for sampling (evaluation mode, this thread's autocast, faster layers). Weights
    must not change while it is open: close it before training.
    """

    def submit(self, request: Request) -> int:
        """Accepts a request; returns its ticket."""
        ...

    def advance(self) -> list[tuple[int, Sample]]:
        """Samples one token or a few of each open request; returns those that finished, in ticket order."""
        ...

    @property
    def num_open(self) -> int:
        """Requests submitted that have not finished."""
        ...

    def release(self, ticket: int) -> None:
        """Frees what is retained of a finished request, if anything."""
        ...

    def abort(self, tickets: Iterable[int]) -> None:
        """Stops sampling these requests, which then never finish; does nothing for those that have finished."""
        ...


class EngineWithWeights(Engine, Protocol):
    """An engine with a copy of the policy's weights (vLLM), which samples from those of the last `refresh`."""

    @property
    def max_model_len(self) -> int:
        """Limit on the tokens of a prompt and its completion together."""
        ...

    def refresh(self, policy_step: int, *, keeps_rows: bool = False) -> None:
        """Sends the policy's weights of this optimizer step, unless the engine has them already. Collective.

        Nothing may be sampled meanwhile, unless `keeps_rows`: then rows in progress go on with the new weights.
        """
        ...

    def invalidate(self) -> None:
        """Makes the next `refresh` send the weights even if the step is the same: the policy may have changed."""
        ...

    def freeze_weights(self) -> AbstractContextManager[None]:
        """Inside, no weights are sent: sampling fails with WeightsLost if the engine loses those that it has."""
        ...

    def sleep(self) -> None:
        """Frees memory until the next `refresh`, if the engine was started for that."""
        ...

    def stop(self) -> None:
        """Makes sampling in another thread fail soon."""
        ...

    def close(self) -> None:
        """Ends what this process started of the engine."""
        ...


def sample_all(session: Session, requests: Sequence[Request]) -> list[Sample]:
    """One sample per request, in order, of a session without other requests."""
    tickets = [session.submit(request) for request in requests]
    samples: dict[int, Sample] = {}
    while session.num_open:
        samples.update(session.advance())
    return [samples[ticket] for ticket in tickets]


class TicketSession:
    """Base of sessions that retain nothing: numbers requests, and collects new ones until `advance` takes them."""

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        """Requests that have not finished, by ticket."""
        self._unsent: list[int] = []
        """Tickets of requests that `advance` has to take."""
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """Accepts a request for the next `advance`; returns its ticket."""
        self._unsent.append(self._register(request))
        return self._unsent[-1]

    def _register(self, request: Request) -> int:
        """A new ticket for this request."""
        ticket = self._num_submitted
        self._num_submitted += 1
        self._open[ticket] = request
        return ticket

    @property
    def num_open(self) -> int:
        """Requests submitted that have not finished."""
        return len(self._open)

    def release(self, ticket: int) -> None:
        """Does nothing, since nothing is retained."""

    def abort(self, tickets: Iterable[int]) -> None:
        """Takes these requests out: none of them is sent to the engine or returned any more."""
        aborted = set(tickets)
        self._unsent = [ticket for ticket in self._unsent if ticket not in aborted]
        self._open = {ticket: request for ticket, request in self._open.items() if ticket not in aborted}


class BatchSession(TicketSession):
    """A session over an engine that samples whole batches: `advance` samples all requests submitted since the last one.

    A request that continues another is sampled from its whole context.
    """

    def __init__(self, engine: Engine, options: SamplingOptions):
        super().__init__()
        self._engine, self._options = engine, options

    def advance(self) -> list[tuple[int, Sample]]:
        """Samples all requests submitted since the last call, in ticket order."""
        tickets, self._unsent = self._unsent, []
        requests = [replace(self._open.pop(ticket), continues=None, keep=False) for ticket in tickets]
        return list(zip(tickets, self._engine.sample(requests, self._options))) if requests else []


class BatchEngine(ABC):
    """Base class of engines that sample whole batches. Log-probs are not exact unless a subclass says so."""

    is_exact: bool = False
    takes_temperatures: bool = False
    path: str = ""

    def metrics(self) -> dict[str, Metric]:
        """No numbers of its own."""
        return {}

    @abstractmethod
    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order."""

    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """Opens a `BatchSession`."""
        return nullcontext(BatchSession(self, options))
