"""Gives each rollout an instance of the user's environment, which later rollouts may reset and reuse."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from groupgrad.chat.tool_messages import is_image
from groupgrad.concurrency.callables import is_async
from groupgrad.concurrency.daemon_threads import DedicatedThread
from groupgrad.concurrency.workers import Outcome, Workers
from groupgrad.data.values import copy_containers, real_number
from groupgrad.envs.env_spec import (
    ENV_COLUMN,
    EnvironmentFault,
    EnvSpec,
    first_instance,
    inspect_factory,
)
from groupgrad.envs.tools import Tool, ToolBox, check_names, chosen_tools, error_text
from groupgrad.run_folder.completions import distinct_names
from groupgrad.types import Reward

logger = logging.getLogger(__name__)

Observation = str | list[dict[str, Any]] | None


class Environments:
    """The environments of a run: for each factory a pool of instances, which grows as rollouts need them.

    `factories` is a callable without arguments, or several by name, of which a row's column `environment` names one.
    Each is called once here for inspection: ValueError if it fails, for a class without `reset`, and for public methods
    that cannot be tools or have the name of one of `tools`.
    The public methods of the class, inherited ones too, are tools, except `reset`, `get_reward`, `close` and names that
    begin with `_`. All plain methods of an instance run on one thread, which is its own and on which the factory makes
    it, so that it may hold what one thread alone may use. With `reuse` an instance serves later rollouts too. None
    reuses only instances without a `close`, because nothing would release what they hold. The `close` of each instance
    is called once: by `close`, when the instance is discarded, or at the interpreter's end. Call `acquire` and
    `release` on one thread only.
    """

    def __init__(
        self,
        factories: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        tools: Sequence[Tool] = (),
        *,
        reuse: bool | None = None,
        close_timeout_s: float = 10.0,
    ):
        self._tools = list(tools)
        self._reuse = reuse
        self._chosen_by_column = isinstance(factories, Mapping)
        self._lock = threading.Lock()
        self._alive: dict[int, tuple[Any, DedicatedThread]] = {}
        """Instances that have not been closed, each with the thread of its plain methods, by `id`."""
        self._close_timeout_s = close_timeout_s
        self._closers = Workers(16)
        self._closing: set[Future[None]] = set()
        """Instances being closed; a future is done when its failure has been logged."""
        self._specs: dict[str, EnvSpec] = {}
        try:
            by_name = dict(factories) if isinstance(factories, Mapping) else {None: factories}
            for name, factory in by_name.items():
                thread = DedicatedThread("environment")
                instance = thread.submit(first_instance, factory, name).result()
                self._add(instance, name or type(instance).__name__, thread)
                spec = inspect_factory(instance, factory, name)
                check_names([*self._tools, *spec.tools], f"the environment '{spec.env_class.__name__}'")
                self._specs[spec.name] = spec
        except BaseException:
            self.close()
            raise
        classes = list(dict.fromkeys(spec.env_class for spec in self._specs.values()))
        reward_names = dict(zip(classes, distinct_names([env_class.__name__ for env_class in classes])))
        for spec in self._specs.values():
            spec.reward_name = reward_names[spec.env_class]
        rewarding = [spec.reward_name for spec in self._specs.values() if spec.has_reward]
        self.reward_names: list[str] = list(dict.fromkeys(rewarding))
        """Classes that compute rewards of their own, each once."""

    @property
    def reward_functions(self) -> list[Callable[..., Any]]:
        """One function for each of `reward_names`, which scripts may call with `environments=[...]`, as in TRL.

        It returns the reward of each environment of its class and None for the others; async if `get_reward` is.
        """
        classes = {spec.reward_name: spec.env_class for spec in self._specs.values()}
        return [_reward_function(classes[name]) for name in self.reward_names]

    @property
    def schemas(self) -> dict[str, list[dict[str, Any]]]:
        """Schemas of a rollout's tools, by the name of its environment's factory."""
        return {name: [tool.schema for tool in (*self._tools, *spec.tools)] for name, spec in self._specs.items()}

    @property
    def columns_named(self) -> set[str]:
        """Data-set columns that a `reset` names; `**kwargs` names none."""
        return {name for spec in self._specs.values() for name in spec.reset_names}

    def spec_of(self, row: Mapping[str, Any]) -> EnvSpec:
        """The environment that a row chooses. ValueError if its column `environment` names none."""
        if not self._chosen_by_column:
            return next(iter(self._specs.values()))
        names, chosen = ", ".join(map(repr, self._specs)), row.get(ENV_COLUMN)
        if ENV_COLUMN not in row:
            raise ValueError(
                f"environment_factory has several environments ({names}), but the data set has no column "
                f"'{ENV_COLUMN}' to choose by; add one with a name in each row"
            )
        if not isinstance(chosen, str) or chosen not in self._specs:
            raise ValueError(
                f"its column '{ENV_COLUMN}' is {chosen!r}, which environment_factory does not have; it has {names}"
            )
        return self._specs[chosen]

    def acquire(self, row: Mapping[str, Any]) -> EnvHandle:
        """An environment for one rollout of a row, to be released. `EnvHandle.reset` makes an instance if the pool is
        empty. ValueError if the row's column `environment` or `tools` names none."""
        spec, tools = self.spec_of(row), chosen_tools(self._tools, row)
        with self._lock:
            instance = spec.pool.pop() if spec.pool else None
            thread = DedicatedThread("environment") if instance is None else self._alive[id(instance)][1]
        return EnvHandle(self, spec, instance, tools, thread)

    def release(self, handle: EnvHandle) -> None:
        """Returns an instance to the pool. Closes it if it is not reused, failed, or a call may still be inside it."""
        is_reused = not handle.spec.has_close if self._reuse is None else self._reuse
        is_reusable = is_reused and not handle.must_discard and not handle.is_busy
        self.take_back(handle.spec, handle.detach(), is_reusable=is_reusable)

    def take_back(self, spec: EnvSpec, instance: Any, *, is_reusable: bool = True) -> None:
        """Returns an instance to the pool or closes it; does nothing if it is closed already or was never created."""
        with self._lock:
            if id(instance) not in self._alive:
                return
            if is_reusable:
                spec.pool.append(instance)
                return
            _, thread = self._alive.pop(id(instance))
        self._start_closing(instance, thread)

    def close(self) -> None:
        """Closes every instance, those in use too, and waits for it, `close_timeout_s` seconds at most.

        Failures are logged. May be called any number of times; a later `acquire` makes new instances.
        """
        with self._lock:
            atexit.unregister(self.close)
            instances = list(self._alive.values())
            self._alive.clear()
            for spec in self._specs.values():
                spec.pool.clear()
        for instance, thread in instances:
            self._start_closing(instance, thread)
        # Each has a deadline of its own, but only from when it starts.
        late = wait(self._closing.copy(), timeout=self._close_timeout_s + 0.5).not_done
        if late:
            logger.warning("%d environments were not closed within %g seconds", len(late), self._close_timeout_s)
            self._closing -= late
        self._closers.close()

    def create(self, spec: EnvSpec, thread: DedicatedThread) -> Any:
        """A new instance, whose methods run on `thread`, the calling one.

        EnvironmentFault if the factory fails or makes an instance of another class than at first.
        """
        try:
            instance = spec.factory()
        except Exception as error:
            text = error_text(error)
            raise EnvironmentFault(f"the environment '{spec.name}' could not be created: {text}") from error
        if type(instance) is not spec.env_class:
            raise EnvironmentFault(
                f"the factory of the environment '{spec.name}' made a {type(instance).__name__}, but a "
                f"{spec.env_class.__name__} at first; give a dict of factories by name for several classes"
            )
        self._add(instance, spec.name, thread)
        return instance

    def _add(self, instance: Any, name: str, thread: DedicatedThread) -> None:
        with self._lock:
            if id(instance) in self._alive:
                raise EnvironmentFault(
                    f"the factory of the environment '{name}' gave the same {type(instance).__name__} twice; rollouts "
                    "run side by side, so it must make a new one at each call"
                )
            self._alive[id(instance)] = instance, thread
            if len(self._alive) == 1:
                # The reference also keeps this object alive until its instances have been closed.
                atexit.register(self.close)

    def _start_closing(self, instance: Any, thread: DedicatedThread) -> None:
        close = getattr(instance, "close", None)
        if not callable(close):
            return
        name = f"{type(instance).__name__}.close"
        logged: Future[None] = Future()
        self._closing.add(logged)

        def log(running: Future[Outcome]) -> None:
            outcome = running.result()
            if outcome.error is not None and logged in self._closing:
                logger.warning("%s failed: %s", name, error_text(outcome.error))
            self._closing.discard(logged)
            logged.set_result(None)

        is_free = not thread.is_busy  # a call that hangs must not keep the instance open
        closing = self._closers.call(
            close, {}, timeout_s=self._close_timeout_s, name=name, thread=thread if is_free else None
        )
        closing.add_done_callback(log)


class EnvHandle:
    """One rollout's use of an environment: first `reset`, then calls of the toolbox, then `get_reward`.

    The outcome of a failed `reset` or `get_reward` has an `EnvironmentFault` that says why, for people.
    """

    def __init__(
        self, environments: Environments, spec: EnvSpec, instance: Any, tools: Sequence[Tool], thread: DedicatedThread
    ):
        self.instance: Any = instance
        """The user's object, for reward functions; None until a first `reset` has made one."""
        self.thread = thread
        """The thread on which all plain methods of the instance run."""
        self.spec = spec
        self.toolbox = ToolBox(tools, spec.tools, self)
        self.must_discard = False
        """True if `release` must close the instance: a reset failed, or a call may still be inside it."""
        self._environments = environments
        self._lock = threading.Lock()
        self._is_detached = False

    def reset(self, row: Mapping[str, Any], workers: Workers, timeout_s: float) -> Future[Outcome]:
        """Begins an episode with the row's columns, in a new instance if the pool had none. Never raises.

        The value is the observation: text, content blocks or None.
        """
        begin = functools.partial(self._begin, self.spec.reset_arguments(row))
        return self._call("reset", begin, self._check_observation, workers, timeout_s)

    def get_reward(self, workers: Workers, timeout_s: float, num_turns: int = 1) -> Future[Outcome]:
        """The reward of an environment that computes one: a finite number or None, or one a turn. Never raises."""
        if (problem := self.problem()) is not None:
            future: Future[Outcome] = Future()
            future.set_result(Outcome(error=EnvironmentFault(f"{self.spec.reward_name}.get_reward: {problem}")))
            return future
        check = functools.partial(self._check_reward, num_turns=num_turns)
        function = self.method("get_reward")
        if self.spec.reward_takes_turns:
            function = functools.partial(function, num_turns=num_turns)
        return self._call("get_reward", function, check, workers, timeout_s)

    def method(self, name: str) -> Callable[..., Any]:
        """A method of the instance, to be called with keywords."""
        return getattr(self.instance, name)

    def state(self, attribute: str, workers: Workers, timeout_s: float) -> Future[Outcome]:
        """A digest of an attribute of the instance, equal for equal values. Never raises."""

        def read() -> Any:
            return getattr(self.instance, attribute)

        return self._call("state", read, functools.partial(self._digest, attribute), workers, timeout_s)

    def problem(self) -> str | None:
        """The reason why no method can be called now, in words for the model; None if one can."""
        if self._is_detached:
            return "the episode is over"
        if self.instance is None:
            return "the environment was not started"
        return "the environment is still busy with an earlier call that did not end in time" if self.is_busy else None

    @property
    def is_busy(self) -> bool:
        """True while one of the instance's plain methods runs; a late async one is cancelled."""
        return self.thread.is_busy

    def detach(self) -> Any:
        """Ends the episode and returns the instance; None if there is none, and from the second call on."""
        with self._lock:
            instance = None if self._is_detached else self.instance
            self._is_detached = True
        return instance

    def _begin(self, arguments: dict[str, Any]) -> Any:
        """Calls `reset` on a worker, in a new instance if there is none yet. It may return an awaitable."""
        abandoned = EnvironmentFault(f"{self.spec.reward_name}: the rollout no longer waits for it")
        if self._is_detached:
            raise abandoned
        if self.instance is None:
            instance = self._environments.create(self.spec, self.thread)
            with self._lock:
                is_wanted = not (self.must_discard or self._is_detached)
                if is_wanted:
                    self.instance = instance
            if not is_wanted:
                self._environments.take_back(self.spec, instance)
                raise abandoned
        return self.method("reset")(**arguments)

    def _call(
        self, method: str, function: Callable[..., Any], check: Callable[[Any], Any], workers: Workers, timeout_s: float
    ) -> Future[Outcome]:
        """Runs `check(function())` on the workers. After a failed reset or a timeout the instance is discarded."""
        name = f"{self.spec.reward_name}.{method}"
        answered: Future[Outcome] = Future()

        def answer(running: Future[Outcome]) -> None:
            outcome = running.result()
            if outcome.error is not None:
                if outcome.timed_out or method == "reset":
                    self.must_discard = True
                logger.debug("%s failed", name, exc_info=outcome.error)
                if not isinstance(outcome.error, EnvironmentFault):
                    fault = EnvironmentFault(f"{name} failed: {error_text(outcome.error)}")
                    outcome = dataclasses.replace(outcome, error=fault)
            answered.set_result(outcome)

        running = workers.call(function, {}, timeout_s=timeout_s, then=check, name=name, thread=self.thread)
        running.add_done_callback(answer)
        return answered

    def _digest(self, attribute: str, value: Any) -> str:
        try:
            text = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(
                f"{self.spec.reward_name}.{attribute} is a {type(value).__name__}, which cannot be compared as a "
                "state. Name an attribute or property that is a text, a number, or lists and dicts of these"
            ) from error
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _check_observation(self, value: Any) -> Observation:
        if value is None or isinstance(value, str):
            return value
        if is_image(value):
            return [{"type": "image", "image": value}]
        if isinstance(value, list) and all(isinstance(b, dict) and isinstance(b.get("type"), str) for b in value):
            return value
        raise EnvironmentFault(
            f"{self.spec.reward_name}.reset returned a {type(value).__name__}, but what it returns goes to the model: "
            "return None, a text, an image, or a list of content blocks such as {'type': 'text', 'text': ...}"
        )

    def _check_reward(self, value: Any, num_turns: int) -> Reward:
        name = f"{self.spec.reward_name}.get_reward"
        value = value.tolist() if getattr(value, "ndim", 0) == 1 else value
        if isinstance(value, (list, tuple)):
            if len(value) != num_turns:
                raise EnvironmentFault(
                    f"{name} returned {len(value)} rewards by turn, but there were {num_turns}; return one for each "
                    "time that the model was asked, the last included, or one number for all"
                )
            return [self._check_number(turn, name) for turn in value]
        return self._check_number(value, name)

    @staticmethod
    def _check_number(value: Any, name: str) -> float | None:
        if value is None:
            return None
        reward = real_number(value)
        if reward is None:
            raise EnvironmentFault(f"{name} returned a {type(value).__name__}; return a number, or None for no reward")
        if math.isinf(reward):
            raise EnvironmentFault(f"{name} returned {reward}; return a finite number, or None")
        return None if math.isnan(reward) else reward


def _reward_function(env_class: type) -> Callable[..., Any]:
    """The rewards of environments of this very class, as a reward function."""

    def get_reward(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [each.get_reward() if type(each) is env_class else None for each in environments]

    async def get_reward_async(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [await each.get_reward() if type(each) is env_class else None for each in environments]

    return get_reward_async if is_async(env_class.get_reward) else get_reward  # pyright: ignore[reportAttributeAccessIssue]


def add_observation(messages: Sequence[Mapping[str, Any]], observation: Observation) -> list[dict[str, Any]]:
    """The messages with an observation at the end of the last user message, or in a user message of its own.

    Copies; where text meets content blocks, the text becomes a block.
    """
    extended = [copy_containers(dict(message)) for message in messages]
    if not observation:
        return extended
    last = next((message for message in reversed(extended) if message.get("role") == "user"), None)
    if last is None:
        return [*extended, {"role": "user", "content": copy_containers(observation)}]
    content = last.get("content") or ("" if isinstance(observation, str) else [])
    if isinstance(content, str) and isinstance(observation, str):
        last["content"] = content + observation
    else:
        last["content"] = _blocks(content) + _blocks(copy_containers(observation))
    return extended


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
