"""Environments: instances of the user's classes, one to a rollout, kept and reset from round to round."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import logging
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupgrad.chat.tool_messages import is_image
from groupgrad.concurrency.callables import is_async
from groupgrad.concurrency.workers import Outcome, Workers
from groupgrad.envs.env_spec import (
    ENV_COLUMN,
    EnvironmentFault,
    EnvSpec,
    copied,
    first_instance,
    inspect_factory,
    named,
)
from groupgrad.envs.tools import Tool, ToolBox, check_names, error_text
from groupgrad.rewards.functions import distinct_names

logger = logging.getLogger(__name__)

Observation = str | list[dict[str, Any]] | None


@dataclass(slots=True, frozen=True)
class ResetOutcome:
    """How a reset ended."""

    observation: Observation = None
    """What the environment says at the beginning, for the prompt (`add_observation`)."""
    problem: str = ""
    """Why it failed, for people; empty if it did not."""
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class RewardOutcome:
    """What an environment's `get_reward` gave."""

    reward: float | None = None
    """None if it gave none, or failed."""
    problem: str = ""
    """Why it failed, for people; empty if it did not."""
    timed_out: bool = False
    seconds: float = 0.0


class Environments:
    """The environments of a run: a pool for each factory, which grows as rollouts need it.

    `factories` is a callable without arguments, or several by name, of which a row's column `environment` names one.
    Each is called once here, to see what it makes: TypeError for what is no callable; ValueError for one that fails,
    for a class without `reset`, and for public methods that cannot be tools or are named like one of `tools`.
    Public methods of the class, inherited ones too, are tools, but for `reset`, `get_reward`, `close` and those whose
    name begins with `_`. Every instance's `close` is called once, by `close`, when it is discarded, or at the
    interpreter's end. `acquire` and `release` are for one thread.
    """

    def __init__(
        self,
        factories: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        tools: Sequence[Tool] = (),
        *,
        close_timeout_s: float = 10.0,
    ):
        self._tools = list(tools)
        self._by_column = isinstance(factories, Mapping)
        self._lock = threading.Lock()
        self._alive: dict[int, Any] = {}
        self._close_timeout_s = close_timeout_s
        self._closers = Workers(16)
        self._closing: dict[Future[Outcome], str] = {}
        """What closes instances, with the name for the log."""
        self._kinds: dict[str, EnvSpec] = {}
        try:
            for name, factory in named(factories).items():
                instance = first_instance(factory, name)
                self._add(instance, name or type(instance).__name__)
                kind = inspect_factory(instance, factory, name)
                kind.free.append(instance)
                check_names([*self._tools, *kind.tools], f"the environment '{kind.made.__name__}'")
                self._kinds[kind.name] = kind
        except BaseException:
            self.close()
            raise
        classes = list(dict.fromkeys(kind.made for kind in self._kinds.values()))
        reward_names = dict(zip(classes, distinct_names([made.__name__ for made in classes])))
        for kind in self._kinds.values():
            kind.reward_name = reward_names[kind.made]
        self.names: list[str] = list(self._kinds)
        """Of the factories."""
        self.reward_names: list[str] = list(
            dict.fromkeys(kind.reward_name for kind in self._kinds.values() if kind.has_reward)
        )
        """Classes that give rewards of their own, each once."""

    @property
    def schemas(self) -> dict[str, list[dict[str, Any]]]:
        """What a rollout's tools look like to the model, by the factories' names."""
        return {name: [tool.schema for tool in (*self._tools, *kind.tools)] for name, kind in self._kinds.items()}

    def acquire(self, row: Mapping[str, Any]) -> EnvHandle:
        """A place in an environment for one rollout of a row, to be given back; takes no time.

        ValueError if the row's column `environment` names none.
        """
        kind = self.spec_of(row)
        with self._lock:
            instance = kind.free.pop() if kind.free else None
        return EnvHandle(self, kind, instance, self._tools)

    def release(self, handle: EnvHandle) -> None:
        """Take an instance into the pool again, or discard and close it if a call may still be inside it."""
        instance = handle.leave()
        with self._lock:
            if id(instance) not in self._alive:  # none was made, or all have been closed meanwhile
                return
            if not handle.is_spoiled and not handle.is_busy:
                handle.kind_of.free.append(instance)
                return
            del self._alive[id(instance)]
        self._start_closing(instance)

    def close(self) -> None:
        """Close every instance, those in use too, and wait for it, `close_timeout_s` seconds at most.

        What goes wrong is logged. May be called any number of times; a later `acquire` makes new instances.
        """
        with self._lock:
            atexit.unregister(self.close)
            instances = list(self._alive.values())
            self._alive.clear()
            for kind in self._kinds.values():
                kind.free.clear()
        for instance in instances:
            self._start_closing(instance)
        with self._lock:
            closing = dict(self._closing)
        # Each has a deadline of its own, but only from when it starts.
        done, late = concurrent.futures.wait(closing, timeout=self._close_timeout_s + 0.5)
        for future in done:
            # Whoever waits for a future may go on before what it calls when it is done.
            self._note_closed(future)
        if late:
            logger.warning("%d environments were not closed within %g seconds", len(late), self._close_timeout_s)
        with self._lock:
            for future in late:
                self._closing.pop(future, None)
        self._closers.close()

    def create(self, kind: EnvSpec) -> Any:
        """A new instance; EnvironmentFault if the factory fails or makes something else than at first."""
        instance = kind.create()
        self._add(instance, kind.name)
        return instance

    def put_aside(self, kind: EnvSpec, instance: Any) -> None:
        """Take in an instance that was finished when its rollout no longer waited for it."""
        with self._lock:
            if id(instance) in self._alive:
                kind.free.append(instance)

    def _add(self, instance: Any, name: str) -> None:
        with self._lock:
            if id(instance) in self._alive:
                raise EnvironmentFault(
                    f"the factory of the environment '{name}' gave the same {type(instance).__name__} twice; rollouts "
                    "run side by side, so it must make a new one at each call"
                )
            self._alive[id(instance)] = instance
            if len(self._alive) == 1:
                # Known there until they are closed, so that nobody's forgetting them leaves an instance open.
                atexit.register(self.close)

    def spec_of(self, row: Mapping[str, Any]) -> EnvSpec:
        """The environment that a row chooses. ValueError if its column `environment` names none."""
        return self._kinds[self._name_of(row)]

    def _name_of(self, row: Mapping[str, Any]) -> str:
        if not self._by_column:
            return next(iter(self._kinds))
        names, chosen = ", ".join(map(repr, self._kinds)), row.get(ENV_COLUMN)
        if ENV_COLUMN not in row:
            raise ValueError(
                f"environment_factory has several environments ({names}), but the data set has no column "
                f"'{ENV_COLUMN}' to choose by; add one with a name in each row"
            )
        if not isinstance(chosen, str) or chosen not in self._kinds:
            raise ValueError(
                f"a row's column '{ENV_COLUMN}' is {chosen!r}, which environment_factory does not have; it has {names}"
            )
        return chosen

    def _start_closing(self, instance: Any) -> None:
        close = getattr(instance, "close", None)
        if not callable(close):
            return
        name = f"{type(instance).__name__}.close"
        future = self._closers.call(close, {}, timeout_s=self._close_timeout_s, name=name)
        with self._lock:
            self._closing[future] = name
        future.add_done_callback(self._note_closed)

    def _note_closed(self, future: Future[Outcome]) -> None:
        outcome = future.result()
        # In the log before anybody who asks for the lock goes on.
        with self._lock:
            name = self._closing.pop(future, None)
            if name is not None and outcome.error is not None:
                logger.warning("%s failed: %s", name, error_text(outcome, self._close_timeout_s))


class EnvHandle:
    """One rollout's place in an environment. `reset` comes first, then calls of the toolbox, then `get_reward`."""

    def __init__(self, environments: Environments, kind: EnvSpec, instance: Any, tools: Sequence[Tool]):
        self.instance: Any = instance
        """The environment itself, for reward functions; None until a first `reset` has made one."""
        self.name: str = kind.name
        """Which of the factories it is from."""
        self.kind: str = kind.reward_name
        """The name of its class, under which its own reward goes."""
        self.has_reward: bool = kind.has_reward
        self.toolbox = ToolBox(tools, kind.tools, self)
        self.kind_of = kind
        self.is_spoiled = False
        """True if it must not be used again: a reset failed, or a call may still be inside it."""
        self._environments = environments
        self._lock = threading.Lock()
        self._num_inside = 0
        self._has_left = False

    def reset(self, row: Mapping[str, Any], workers: Workers, timeout_s: float) -> Future[ResetOutcome]:
        """Begin an episode with the row's columns, in a new instance if the pool had none. Never raises."""
        running = workers.call(
            self._begin,
            {"arguments": self.kind_of.reset_arguments(row)},
            timeout_s=timeout_s,
            then=self._check_observation,
            name=f"{self.kind}.reset",
        )

        def read(outcome: Outcome) -> ResetOutcome:
            problem = self._failure("reset", outcome, timeout_s)
            return ResetOutcome(outcome.value if not problem else None, problem, outcome.timed_out, outcome.seconds)

        return _then(running, read)

    def get_reward(self, workers: Workers, timeout_s: float) -> Future[RewardOutcome]:
        """The environment's own reward of the episode; a finite number, or None. Never raises."""
        if not self.has_reward or (problem := self.problem()) is not None:
            future: Future[RewardOutcome] = Future()
            text = f"{self.kind}.get_reward: {problem}" if self.has_reward else ""
            future.set_result(RewardOutcome(problem=text))
            return future
        running = workers.call(
            self.method("get_reward"),
            {},
            timeout_s=timeout_s,
            then=self._check_reward,
            name=f"{self.kind}.get_reward",
        )

        def read(outcome: Outcome) -> RewardOutcome:
            problem = self._failure("get_reward", outcome, timeout_s)
            return RewardOutcome(outcome.value if not problem else None, problem, outcome.timed_out, outcome.seconds)

        return _then(running, read)

    def method(self, name: str) -> Callable[..., Any]:
        """A method of the instance, which is known to be inside it while it runs."""
        method = getattr(self.instance, name)

        @functools.wraps(method)
        def run(**kwargs: Any) -> Any:
            with self._inside():
                return method(**kwargs)

        @functools.wraps(method)
        async def run_async(**kwargs: Any) -> Any:
            with self._inside():
                return await method(**kwargs)

        return run_async if is_async(method) else run

    def problem(self) -> str | None:
        """Why the environment cannot be asked now; None if it can."""
        if self._has_left:
            return "the episode is over"
        if self.instance is None:
            return "the environment was not started"
        return "the environment is still busy with an earlier call that did not end in time" if self.is_busy else None

    @property
    def is_busy(self) -> bool:
        """True while one of the instance's methods runs."""
        with self._lock:
            return self._num_inside > 0

    def spoil(self) -> None:
        """Have the instance discarded rather than used again."""
        self.is_spoiled = True

    def leave(self) -> Any:
        """The instance, once; then and where there is none, None."""
        with self._lock:
            instance = None if self._has_left else self.instance
            self._has_left = True
        return instance

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1

    def _begin(self, arguments: dict[str, Any]) -> Any:
        """What `reset` returns, an awaitable perhaps; runs on a worker."""
        if self._has_left:
            raise EnvironmentFault(f"{self.kind}: the rollout no longer waits for it")
        if self.instance is None:
            instance = self._environments.create(self.kind_of)
            with self._lock:
                given_up = self.is_spoiled or self._has_left
                if not given_up:
                    self.instance = instance
            if given_up:
                self._environments.put_aside(self.kind_of, instance)
                raise EnvironmentFault(f"{self.kind}: the rollout no longer waits for it")
        return self.method("reset")(**arguments)

    def _failure(self, method: str, outcome: Outcome, timeout_s: float) -> str:
        """What went wrong, for people; the instance is not used again after a failed reset or a call that hangs."""
        if outcome.error is None:
            return ""
        if outcome.timed_out or method == "reset":
            self.spoil()
        logger.debug("%s.%s failed", self.kind, method, exc_info=outcome.error)
        if isinstance(outcome.error, EnvironmentFault):
            return str(outcome.error)
        return f"{self.kind}.{method} failed: {error_text(outcome, timeout_s)}"

    def _check_observation(self, value: Any) -> Observation:
        blocks = value if isinstance(value, list) else [None]
        if value is None or isinstance(value, str):
            return value
        if is_image(value):
            return [{"type": "image", "image": value}]
        if all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
            return value
        raise EnvironmentFault(
            f"{self.kind}.reset returned a {type(value).__name__}, but what it returns goes to the model: return None, "
            "a text, an image, or a list of content blocks such as {'type': 'text', 'text': ...}"
        )

    def _check_reward(self, value: Any) -> float | None:
        if value is None:
            return None
        if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
            value = value.item()  # of an array or tensor
        if not isinstance(value, (numbers.Real, np.bool_)):
            raise EnvironmentFault(
                f"{self.kind}.get_reward returned a {type(value).__name__}; return a number, or None for no reward"
            )
        reward = float(value)
        if math.isinf(reward):
            raise EnvironmentFault(f"{self.kind}.get_reward returned {reward}; return a finite number, or None")
        return None if math.isnan(reward) else reward


def add_observation(messages: Sequence[Mapping[str, Any]], observation: Observation) -> list[dict[str, Any]]:
    """The messages with an observation at the end of the last user message, or in a user message of its own.

    Copies; where text meets content blocks, the text becomes a block.
    """
    found = [copied(dict(message)) for message in messages]
    if not observation:
        return found
    last = next((message for message in reversed(found) if message.get("role") == "user"), None)
    if last is None:
        return [*found, {"role": "user", "content": copied(observation)}]
    content = last.get("content") or ("" if isinstance(observation, str) else [])
    if isinstance(content, str) and isinstance(observation, str):
        last["content"] = content + observation
    else:
        last["content"] = _blocks(content) + _blocks(copied(observation))
    return found


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _then(running: Future[Outcome], read: Callable[[Outcome], Any]) -> Future[Any]:
    """A future of what `read` makes of the outcome."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    running.add_done_callback(lambda done: future.set_result(read(done.result())))
    return future
