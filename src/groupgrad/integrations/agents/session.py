"""The session that a program gets for its rollout: an address, a key, ready clients, and methods that log rewards."""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from groupgrad.integrations.agents.in_process import make_client
from groupgrad.integrations.agents.server import Address
from groupgrad.integrations.agents.wire import MODEL, Answer, BadRequest, Question
from groupgrad.types import Reward


@dataclass(slots=True, frozen=True, eq=False)
class Asking:
    """A question that waits for its answer."""

    question: Question
    answer: Future[Answer]
    """Cancelled by a client that goes away."""

    def reply(self, answer: Answer) -> None:
        """Gives the answer to a client that still waits for it."""
        if not self.answer.done() and self.answer.set_running_or_notify_cancel():
            self.answer.set_result(answer)

    def refuse(self, error: BadRequest) -> None:
        """Gives the error to a client that still waits for an answer."""
        if not self.answer.done() and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class Questions:
    """A queue of questions, asked on any thread and answered by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._askings: deque[Asking | None] = deque()
        self._waiter: Future[Asking | None] | None = None
        self._has_ended = False

    def ask(self, question: Question) -> Future[Answer]:
        """Asks for a completion."""
        answer: Future[Answer] = Future()
        self._push(Asking(question, answer))
        return answer

    def next_asking(self) -> Future[Asking | None]:
        """The next question; None once the program has ended. One caller at a time."""
        waiter: Future[Asking | None] = Future()
        with self._lock:
            if not self._askings:
                self._waiter = waiter
                return waiter
            item = self._askings.popleft()
        waiter.set_result(item)
        return waiter

    def end(self) -> None:
        """Takes no more questions."""
        self._push(None)

    def _push(self, item: Asking | None) -> None:
        with self._lock:
            if self._has_ended:
                if item is None:
                    return
                raise BadRequest("this session has ended: its program returned or ran out of time", status=409)
            self._has_ended = item is None
            waiter, self._waiter = self._waiter, None
            if waiter is None:
                self._askings.append(item)
        if waiter is not None:
            waiter.set_result(item)


class AgentSession(Questions):
    """One rollout, as its program sees it.

    `base_url`, `api_key` and `model` are for any client of OpenAI's API; `env` has them as environment variables, for
    child processes, and for clients of Anthropic's API. All requests with this key belong to this rollout. Thread-safe.
    """

    def __init__(self, address: Address, api_key: str, timeout_s: float):
        super().__init__()
        self.base_url, self.api_key, self.model = address.url, api_key, MODEL
        # The deadline is the rollout's; a client's own retries would ask again for what is being sampled.
        options = {"api_key": api_key, "timeout": timeout_s, "max_retries": 0}
        self._make_client = functools.partial(make_client, address, **options)
        self._rewards: list[tuple[float, str | None, int | None]] = []
        self._metrics: dict[str, float] = {}
        self.num_answered = 0
        """Requests that the model has answered so far."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that clients read.

        `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_API_BASE`; and `ANTHROPIC_BASE_URL`, to whose end clients add
        `/v1/messages`, and `ANTHROPIC_API_KEY`.
        """
        url, key = self.base_url, self.api_key
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }

    def openai(self, **options: Any) -> Any:
        """An `openai.OpenAI` client of this session; `options` are those of the client."""
        return self._make_client(is_async=False, **options)

    def async_openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` client of this session; `options` are those of the client."""
        return self._make_client(is_async=True, **options)

    def log_reward(self, value: float, name: str | None = None, *, turn: int | None = None) -> None:
        """Adds to the rollout's reward. A `name` makes it a metric of its own, too.

        `turn` credits it to one answered request, 0 for the first (`num_answered - 1` is the last one). ValueError for
        a number that is not finite or a turn that is not there.
        """
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"log_reward got {value!r}; a reward is a finite number")
        if turn is not None and not 0 <= turn < self.num_answered:
            raise ValueError(f"log_reward got turn={turn}; the model has answered {self.num_answered} requests")
        with self._lock:
            self._rewards.append((float(value), name, turn))

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the metric `rewards/<agent>/<name>`, the mean over rollouts. It is no part of the reward."""
        with self._lock:
            self._metrics[name] = self._metrics.get(name, 0.0) + float(value)

    def rewards(self, returned: Any, order: list[int]) -> tuple[Reward, dict[str, float]]:
        """The rollout's reward from what the program returned and logged, and its named parts and metrics.

        `order` has, for each trained turn of the row, the number of its request; what is logged for another one is the
        whole rollout's. TypeError for what is no reward.
        """
        parts = dict(self._metrics)
        total: float | None = None
        by_turn: list[float | None] = [None] * len(order)
        if isinstance(returned, Mapping):
            logged = [(_number(value), str(name), None) for name, value in returned.items() if value is not None]
        else:
            logged = [] if returned is None else [(_number(returned), None, None)]
        with self._lock:
            logged += self._rewards
        for value, name, turn in logged:
            if name is not None:
                parts[name] = parts.get(name, 0.0) + value
            if turn is None or turn not in order:
                total = (total or 0.0) + value
            else:
                place = order.index(turn)
                by_turn[place] = (by_turn[place] or 0.0) + value
        if all(value is None for value in by_turn):
            return total, parts
        if total is not None:
            by_turn[-1] = (by_turn[-1] or 0.0) + total
        return by_turn, parts


def _number(value: Any) -> float:
    """A reward as a float; TypeError for anything else."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise TypeError(f"the agent returned {value!r}; return a finite number, a dict of numbers by name, or None")
    return float(number)
