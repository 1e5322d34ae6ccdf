"""Environments: what they may look like, how they are reset and asked, and that each is closed once."""

from __future__ import annotations

import asyncio
import functools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from groupgrad.concurrency.workers import Workers
from groupgrad.envs.environments import EnvHandle, Environments, add_observation
from groupgrad.envs.tools import ToolOptions, ToolReply, make_tools

PATIENT = ToolOptions(timeout_s=5)
HASTY = ToolOptions(timeout_s=0.2)


@dataclass
class Call:
    name: str
    arguments: Any = field(default_factory=dict)
    problem: str | None = None


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(8, blocked_s=0.2)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_instances() -> Iterator[None]:
    Base.made.clear()
    yield
    for instance in Base.made:
        instance.release.set()


class Base:
    """Keeps a list of its instances, and what was done to each."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.release = threading.Event()
        self.made.append(self)

    def close(self) -> None:
        self.log.append("close")


class Counter(Base):
    def reset(self, **kwargs: Any) -> str:
        self.count = 0
        self.log.append(kwargs)
        return "Counter reset to 0.\n"

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.count

    async def decrement(self, step: int) -> int:
        """Decrement it.

        Args:
            step: Value to take from the counter.
        """
        await asyncio.sleep(0)
        self.count -= step
        return self.count

    @staticmethod
    def limit() -> int:
        """The highest count."""
        return 100

    def hang(self) -> str:
        """Hangs."""
        self.release.wait()
        return "late"

    @property
    def twice(self) -> int:
        return 2 * self.count

    def _private(self) -> None: ...

    def get_reward(self) -> float:
        return self.count / 10


class Child(Counter):
    def increment(self, step: int) -> int:
        """Add twice as much.

        Args:
            step: Half of what is added.
        """
        return super().increment(2 * step)

    def extra(self) -> str:
        """Says something."""
        return "extra"

    hang = None  # type: ignore[assignment] # hides the inherited tool


class Silent(Base):
    async def reset(self, prompt: list[Any], level: int = 1) -> None:
        await asyncio.sleep(0)
        self.log.append((prompt, level))

    async def get_reward(self) -> float | None:
        await asyncio.sleep(0)
        return None


def names(handle: EnvHandle) -> list[str]:
    return [schema["function"]["name"] for schema in handle.toolbox.schemas]


def ask(handle: EnvHandle, workers: Workers, name: str, options: ToolOptions = PATIENT, **arguments: Any) -> ToolReply:
    return handle.toolbox.call(Call(name, arguments), workers, options).result(10)


def start(environments: Environments, workers: Workers, row: dict[str, Any] | None = None) -> EnvHandle:
    handle = environments.acquire(row or {})
    assert handle.reset(row or {}, workers, 5).result(10).problem == ""
    return handle


def variant(reset: Any = None, **methods: Any) -> type:
    """A class of environments with these methods."""
    return type("Variant", (Base,), {"reset": reset or (lambda self, **kwargs: None), **methods})


# What they may look like


def test_public_methods_of_the_class_are_tools(workers: Workers):
    def ping() -> str:
        """Pings."""
        return "pong"

    environments = Environments(Counter, make_tools([ping]))
    handle = start(environments, workers)
    assert names(handle) == ["ping", "increment", "decrement", "limit", "hang"]
    assert environments.schemas == {"Counter": handle.toolbox.schemas}
    assert [handle.toolbox.is_own(name) for name in names(handle)] == [False, True, True, True, True]
    replies = [
        ask(handle, workers, "ping"),
        ask(handle, workers, "increment", step=5),
        ask(handle, workers, "decrement", step=2),
        ask(handle, workers, "limit"),
    ]
    assert [reply.content for reply in replies] == ["pong", "5", "3", "100"]
    assert handle.instance.count == 3
    for name in ("reset", "get_reward", "close", "twice", "_private", "count"):
        assert ask(handle, workers, name).content.startswith(f"there is no tool '{name}'")
    environments.close()


def test_inherited_methods_are_tools_unless_a_subclass_hides_them(workers: Workers):
    environments = Environments(Child)
    handle = start(environments, workers)
    assert names(handle) == ["increment", "decrement", "limit", "extra"]
    assert ask(handle, workers, "increment", step=5).content == "10"
    environments.close()


def test_an_environment_without_tools(workers: Workers):
    environments = Environments(Silent)
    handle = start(environments, workers, {"prompt": []})
    assert handle.toolbox.schemas == []
    environments.close()


def fails() -> Any:
    raise RuntimeError("no server")


async def makes_later() -> Any:
    return Counter()


def undocumented(self: Any, x: int) -> int:
    return x


def unhinted(self: Any, x) -> int:  # type: ignore[no-untyped-def]
    """Gives it.

    Args:
        x: What.
    """
    return x


@pytest.mark.parametrize(
    "factories, error, words",
    [
        (Base, ValueError, ["environment_factory made a Base", "no method 'reset'", "def reset(self, **kwargs)"]),
        ({"a": Counter, "b": Base}, ValueError, ["environment_factory['b'] made a Base"]),
        (fails, ValueError, ["environment_factory failed", "RuntimeError: no server"]),
        (makes_later, ValueError, ["returned <coroutine", "not be async"]),
        (lambda: None, ValueError, ["environment_factory returned None"]),
        (lambda: Counter, ValueError, ["environment_factory returned <class"]),
        (3, TypeError, ["environment_factory is 3"]),
        ([Counter], TypeError, ["environment_factory is [<class"]),
        ({"a": 3}, TypeError, ["environment_factory['a'] is 3"]),
        ({1: Counter}, TypeError, ["the key 1"]),
        ({}, ValueError, ["environment_factory={}"]),
        (variant(look=undocumented), ValueError, ["'Variant.look' has no docstring", "underscore"]),
        (variant(look=unhinted), ValueError, ["'Variant.look' has no type hint for the argument 'x'", "underscore"]),
        (variant(multiply=Counter.increment), ValueError, ["two tools named 'multiply'", "'Variant'"]),
    ],
)
def test_what_cannot_be_an_environment_is_refused(factories: Any, error: type[Exception], words: list[str]):
    def multiply(a: int) -> int:
        """Doubles.

        Args:
            a: What.
        """
        return 2 * a

    with pytest.raises(error) as raised:
        Environments(factories, make_tools([multiply]))
    for word in words:
        assert word in str(raised.value)
    assert all(instance.log == ["close"] for instance in Base.made)


def test_a_factory_that_gives_one_instance_twice_is_found_out(workers: Workers):
    environments = Environments(functools.cache(Counter))
    first, second = (environments.acquire({}) for _ in range(2))
    assert first.reset({}, workers, 5).result(5).problem == ""
    problem = second.reset({}, workers, 5).result(5).problem
    assert "the same Counter twice" in problem
    with pytest.raises(ValueError, match="the same Counter twice"):
        one = Counter()
        Environments({"a": lambda: one, "b": lambda: one})
    environments.close()


# Which one a row gets


def test_a_rows_column_chooses_and_is_not_given_to_reset(workers: Workers):
    environments = Environments({"easy": Counter, "hard": Child, "silent": Silent})
    assert environments.names == ["easy", "hard", "silent"]
    handle = start(environments, workers, {"prompt": [], "environment": "hard", "goal": 3})
    assert (handle.name, handle.kind, type(handle.instance)) == ("hard", "Child", Child)
    assert handle.instance.log == [{"prompt": [], "goal": 3}]
    handle = start(environments, workers, {"prompt": [], "environment": "silent"})
    assert (handle.name, handle.kind, names(handle)) == ("silent", "Silent", [])
    for row, words in [
        ({"environment": "other"}, "'other', which environment_factory does not have; it has 'easy', 'hard', 'silent'"),
        ({"environment": None}, "is None, which"),
        ({"environment": ["easy"]}, "which environment_factory does not have"),
        ({"prompt": []}, "no column 'environment'"),
    ]:
        with pytest.raises(ValueError) as raised:
            environments.acquire(row)
        assert words in str(raised.value)
    environments.close()


def test_a_single_environment_is_given_every_column(workers: Workers):
    environments = Environments(Counter)
    row = {"prompt": [{"role": "user", "content": "go"}], "environment": "any"}
    assert start(environments, workers, row).instance.log == [row]
    environments.close()


def test_reset_is_given_the_columns_that_it_names(workers: Workers):
    environments = Environments(Silent)
    handle = start(environments, workers, {"prompt": ["a"], "level": 4, "answer": 2})
    assert handle.instance.log == [(["a"], 4)]
    environments.release(handle)
    outcome = environments.acquire({}).reset({"level": 1}, workers, 5).result(5)
    assert outcome.problem.startswith("Silent.reset failed: TypeError")
    assert "prompt" in outcome.problem
    environments.close()


def test_reset_cannot_change_the_data_set(workers: Workers):
    def reset(self: Any, prompt: Any, table: Any, numbers: Any, image: Any, **kwargs: Any) -> None:
        prompt[0]["content"] += "!"
        prompt.append("more")
        table["a"][0].append(3)
        numbers += 1
        self.image = image

    environments = Environments(variant(reset))
    image = object()
    row = {"prompt": [{"content": "x"}], "table": {"a": ([1, 2],)}, "numbers": np.zeros(2), "image": image}
    handle = start(environments, workers, row)
    assert row["prompt"] == [{"content": "x"}]
    assert row["table"] == {"a": ([1, 2],)}
    assert row["numbers"].tolist() == [0, 0]
    assert handle.instance.image is image  # what containers hold is not copied
    environments.close()


# Resets


BLOCKS = [{"type": "text", "text": "look"}, {"type": "image", "image": 1}]


@pytest.mark.parametrize("value", [None, "", "hello", BLOCKS, []])
@pytest.mark.parametrize("is_async", [False, True])
def test_observations(workers: Workers, value: Any, is_async: bool):
    async def later(self: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return value

    environments = Environments(variant(later if is_async else lambda self, **kwargs: value))
    outcome = environments.acquire({}).reset({}, workers, 5).result(5)
    assert (outcome.observation, outcome.problem, outcome.timed_out) == (value, "", False)
    environments.close()


@pytest.mark.parametrize("value, kind", [(3, "int"), ({"a": 1}, "dict"), (["a"], "list"), ([{"text": "a"}], "list")])
def test_what_is_no_observation_fails_the_reset(workers: Workers, value: Any, kind: str):
    environments = Environments(variant(lambda self, **kwargs: value))
    outcome = environments.acquire({}).reset({}, workers, 5).result(5)
    assert outcome.observation is None
    assert f"Variant.reset returned a {kind}" in outcome.problem
    environments.close()


def test_an_instance_whose_reset_fails_is_replaced(workers: Workers):
    def reset(self: Any, fail: bool) -> None:
        if fail:
            raise ConnectionError("no server")

    environments = Environments(variant(reset))
    handle = environments.acquire({})
    outcome = handle.reset({"fail": True}, workers, 5).result(5)
    assert (outcome.problem, outcome.timed_out) == ("Variant.reset failed: ConnectionError: no server", False)
    assert handle.is_spoiled
    environments.release(handle)
    assert start(environments, workers, {"fail": False}).instance is Base.made[1]
    environments.close()
    assert [instance.log for instance in Base.made] == [["close"], ["close"]]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reset_that_hangs_has_a_deadline(workers: Workers, is_async: bool):
    def hang(self: Any, **kwargs: Any) -> None:
        self.release.wait()

    async def hang_async(self: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    environments = Environments(variant(hang_async if is_async else hang))
    handle = environments.acquire({})
    began = time.monotonic()
    outcome = handle.reset({}, workers, 0.2).result(5)
    assert (outcome.problem, outcome.timed_out) == ("Variant.reset failed: no answer within 0.2 seconds", True)
    assert time.monotonic() - began < 2
    assert handle.is_spoiled
    environments.close()


class Flaky:
    """A factory with a script: at each call what it raises, waits for, or makes."""

    def __init__(self, *script: Any):
        self.script = list(script)

    def __call__(self) -> Any:
        step = self.script.pop(0) if self.script else Counter
        if isinstance(step, Exception):
            raise step
        if isinstance(step, threading.Event):
            step.wait()
            return Counter()
        return step()


def test_a_factory_that_fails_later_fails_the_reset(workers: Workers):
    environments = Environments(Flaky(Counter, OSError("full"), Silent, Counter))
    first = start(environments, workers)
    problems = []
    for _ in range(2):
        handle = environments.acquire({})
        problems.append(handle.reset({}, workers, 5).result(5).problem)
        assert handle.instance is None
        assert ask(handle, workers, "limit").content == "Error: the environment was not started"
        assert "not started" in handle.get_reward(workers, 5).result(5).problem
        environments.release(handle)
    assert problems[0] == "the environment 'Counter' could not be created: OSError: full"
    assert "made a Silent, but a Counter at first" in problems[1]
    assert start(environments, workers).instance is not first.instance
    environments.close()


def test_an_instance_that_is_made_too_late_serves_a_later_rollout(workers: Workers):
    event = threading.Event()
    environments = Environments(Flaky(Counter, event))
    first = start(environments, workers)
    handle = environments.acquire({})
    assert handle.reset({}, workers, 0.2).result(5).timed_out
    environments.release(handle)
    event.set()
    end = time.monotonic() + 5
    while (handle := environments.acquire({})).instance is None and time.monotonic() < end:
        time.sleep(0.01)
    assert handle.instance is Base.made[1] is not first.instance
    assert handle.instance.log == []  # it was not reset for the rollout that had given up
    environments.close()
    assert Base.made[1].log == ["close"]


# The pool


def test_instances_are_used_again_and_their_number_grows_with_need(workers: Workers):
    environments = Environments(Counter)
    assert len(Base.made) == 1
    for count in (3, 2, 4):
        seats = [start(environments, workers) for _ in range(count)]
        assert len({id(handle.instance) for handle in seats}) == count
        for handle in seats:
            assert ask(handle, workers, "increment", step=1).content == "1"
            environments.release(handle)
            environments.release(handle)  # the second time changes nothing
    assert len(Base.made) == 4
    environments.close()


def test_an_instance_with_a_call_inside_is_not_used_again(workers: Workers):
    environments = Environments(Counter)
    handle = start(environments, workers)
    reply = ask(handle, workers, "hang", HASTY)
    assert (reply.content, reply.timed_out) == ("Error: no answer within 0.2 seconds", True)
    assert handle.is_spoiled
    busy = ask(handle, workers, "increment", step=1)
    assert (busy.failed, "still busy with an earlier call" in busy.content) == (True, True)
    assert "still busy" in handle.get_reward(workers, 5).result(5).problem

    handle.instance.release.set()
    end = time.monotonic() + 5
    while handle.is_busy and time.monotonic() < end:
        time.sleep(0.005)
    assert ask(handle, workers, "increment", step=7).content == "7"  # the call has ended after all
    assert handle.get_reward(workers, 5).result(5).reward == 0.7

    environments.release(handle)
    assert start(environments, workers).instance is Base.made[1]
    environments.close()
    assert [instance.log.count("close") for instance in Base.made] == [1, 1]


def test_an_instance_given_back_in_the_midst_of_a_call_is_not_used_again(workers: Workers):
    environments = Environments(Counter)
    handle = start(environments, workers)
    running = handle.toolbox.call(Call("hang"), workers, PATIENT)
    queued = handle.toolbox.call(Call("increment", {"step": 1}), workers, PATIENT)
    while not handle.is_busy:
        time.sleep(0.005)
    environments.release(handle)
    assert start(environments, workers).instance is Base.made[1]
    handle.instance.release.set()
    assert running.result(5).content == "late"
    assert queued.result(5).content == "Error: the episode is over"
    environments.close()


def test_calls_of_one_message_reach_the_environment_in_their_order(workers: Workers):
    environments = Environments(Counter)
    seats = [start(environments, workers) for _ in range(8)]
    calls = [Call("increment", {"step": 5}), Call("decrement", {"step": 2}), Call("increment", {"step": 1})]
    futures = [[handle.toolbox.call(call, workers, PATIENT) for call in calls] for handle in seats]
    assert [[future.result(5).content for future in of_seat] for of_seat in futures] == [["5", "3", "4"]] * 8
    environments.close()


# Rewards


@pytest.mark.parametrize(
    "value, reward",
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (None, None),
        (float("nan"), None),
        (np.float32(0.25), 0.25),
        (np.bool_(False), 0.0),
        (torch.tensor(2.0), 2.0),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_rewards(workers: Workers, value: Any, reward: float | None, is_async: bool):
    async def later(self: Any) -> Any:
        await asyncio.sleep(0)
        return value

    environments = Environments(variant(get_reward=later if is_async else lambda self: value))
    outcome = start(environments, workers).get_reward(workers, 5).result(5)
    assert (outcome.reward, outcome.problem) == (reward, "")
    environments.close()


@pytest.mark.parametrize(
    "value, words",
    [
        ("1", "Variant.get_reward returned a str; return a number, or None"),
        ([1.0], "returned a list"),
        (torch.ones(2), "returned a Tensor"),
        (float("inf"), "returned inf; return a finite number"),
        (ZeroDivisionError("no steps"), "Variant.get_reward failed: ZeroDivisionError: no steps"),
    ],
)
def test_a_reward_that_cannot_be_used_is_recorded(workers: Workers, value: Any, words: str):
    def get_reward(self: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    environments = Environments(variant(get_reward=get_reward))
    handle = start(environments, workers)
    outcome = handle.get_reward(workers, 5).result(5)
    assert outcome.reward is None
    assert words in outcome.problem
    assert not handle.is_spoiled
    environments.close()


def test_a_reward_that_hangs_has_a_deadline(workers: Workers):
    environments = Environments(variant(get_reward=lambda self: self.release.wait()))
    handle = start(environments, workers)
    outcome = handle.get_reward(workers, 0.2).result(5)
    assert (outcome.reward, outcome.timed_out) == (None, True)
    assert outcome.problem == "Variant.get_reward failed: no answer within 0.2 seconds"
    assert handle.is_spoiled
    environments.close()


def test_rewards_go_by_the_names_of_classes(workers: Workers):
    other = type("Counter", (Counter,), {})
    environments = Environments({"a": Counter, "b": functools.partial(Counter), "c": Child, "d": other, "e": variant()})
    assert environments.reward_names == ["Counter", "Child", "Counter_2"]
    seats = [start(environments, workers, {"environment": name}) for name in environments.names]
    assert [handle.kind for handle in seats] == ["Counter", "Counter", "Child", "Counter_2", "Variant"]
    assert [handle.has_reward for handle in seats] == [True, True, True, True, False]
    outcome = seats[-1].get_reward(workers, 5).result(5)
    assert (outcome.reward, outcome.problem) == (None, "")
    environments.close()


# Closing


def test_every_instance_is_closed_once(workers: Workers):
    environments = Environments({"a": Counter, "b": Silent})
    seats = [start(environments, workers, {"environment": name, "prompt": []}) for name in "aabb"]
    environments.release(seats[0])
    environments.close()  # three of them are in use
    for handle in seats[1:]:
        environments.release(handle)
    environments.close()
    assert len(Base.made) == 4
    assert [instance.log.count("close") for instance in Base.made] == [1] * 4
    again = start(environments, workers, {"environment": "a"})
    assert again.instance is Base.made[4]
    environments.close()
    assert Base.made[4].log[-1] == "close"


def test_a_close_that_fails_or_hangs_is_logged(workers: Workers, caplog: pytest.LogCaptureFixture):
    closed: list[str] = []

    def hang(self: Any) -> None:
        self.release.wait()

    def fail(self: Any) -> None:
        raise OSError("gone")

    async def later(self: Any) -> None:
        await asyncio.sleep(0)
        closed.append("async")

    kinds = {
        "hang": type("Hangs", (Counter,), {"close": hang}),
        "fail": type("Fails", (Counter,), {"close": fail}),
        "later": type("Later", (Counter,), {"close": later}),
        "none": type("None_", (Counter,), {"close": None}),
    }
    environments = Environments(kinds, close_timeout_s=0.2)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        environments.close()
        environments.close()
    assert time.monotonic() - began < 3
    assert closed == ["async"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("Fails.close failed: OSError: gone") == 1
    assert messages.count("Hangs.close failed: no answer within 0.2 seconds") == 1


def test_what_went_wrong_is_logged_once_and_before_close_returns(monkeypatch, caplog: pytest.LogCaptureFixture):
    """Also if the thread that closed an instance has not come to say so."""
    note, come = Environments._note_closed, threading.Event()

    def late(self: Environments, *given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            come.wait(10)
        note(self, *given)

    def fail(self: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(Environments, "_note_closed", late)
    environments = Environments({"fail": type("Fails", (Counter,), {"close": fail})})
    message = "Fails.close failed: OSError: gone"
    environments.close()
    assert [record.getMessage() for record in caplog.records] == [message]
    come.set()
    environments.close()
    assert [record.getMessage() for record in caplog.records] == [message]


EXIT = """
import os
import threading
from groupgrad.envs.environments import Environments
from groupgrad.concurrency.workers import Workers

class Counter:
    def reset(self, **kwargs):
        pass
    def hang(self) -> str:
        '''Hangs.'''
        threading.Event().wait()
    def close(self):
        os.write(1, b"closed\\n")  # whole, also where three close at once

Environments(Counter)  # forgotten at once, as by a trainer whose constructor fails
environments, workers = Environments(Counter), Workers(2)
seats = [environments.acquire({}) for _ in range(2)]
for seat in seats:
    assert seat.reset({}, workers, 5).result(10).problem == ""
workers.call(seats[0].method("hang"), {}, timeout_s=60)
"""


def test_the_interpreters_end_closes_what_is_open():
    done = subprocess.run([sys.executable, "-c", EXIT], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n" * 3), done.stderr
    assert "Traceback" not in done.stderr


# Observations in the prompt


USER = {"role": "user", "content": "Go."}
SYSTEM = {"role": "system", "content": "Be brief."}
IMAGE = {"type": "image", "image": 1}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    "messages, observation, expected",
    [
        ([SYSTEM, USER], " Now.", [SYSTEM, {"role": "user", "content": "Go. Now."}]),
        ([SYSTEM, USER], None, [SYSTEM, USER]),
        ([SYSTEM, USER], "", [SYSTEM, USER]),
        ([SYSTEM, USER], [], [SYSTEM, USER]),
        ([USER], [IMAGE], [{"role": "user", "content": [text("Go."), IMAGE]}]),
        (
            [{"role": "user", "content": [IMAGE]}],
            "Now.",
            [{"role": "user", "content": [IMAGE, text("Now.")]}],
        ),
        (
            [{"role": "user", "content": [IMAGE]}],
            [text("Now.")],
            [{"role": "user", "content": [IMAGE, text("Now.")]}],
        ),
        ([{"role": "user", "content": None}], "Now.", [{"role": "user", "content": "Now."}]),
        ([{"role": "user"}], [IMAGE], [{"role": "user", "content": [IMAGE]}]),
        ([SYSTEM], "Now.", [SYSTEM, {"role": "user", "content": "Now."}]),
        ([], [IMAGE], [{"role": "user", "content": [IMAGE]}]),
        (
            [USER, {"role": "assistant", "content": "Yes?"}, USER, {"role": "assistant", "content": "So"}],
            "!",
            [
                USER,
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Go.!"},
                {"role": "assistant", "content": "So"},
            ],
        ),
    ],
)
def test_an_observation_ends_the_last_user_message(messages: Any, observation: Any, expected: Any):
    before = repr(messages), repr(observation)
    found = add_observation(messages, observation)
    assert found == expected
    for message in found:
        if isinstance(message["content"], list):
            message["content"].append("changed")
            message["content"][0]["changed"] = True
        message["role"] = "changed"
    assert (repr(messages), repr(observation)) == before
