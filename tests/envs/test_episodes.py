"""Episodes: observations of resets, rewards, and their failures."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from example_environments import Base, Child, Counter, Silent, call_method, start, variant

from groupgrad.concurrency.workers import Workers
from groupgrad.envs.environments import Environments, add_observation

BLOCKS = [{"type": "text", "text": "look"}, {"type": "image", "image": 1}]


def returning(value: Any, is_async: bool) -> Any:
    """A method that returns or raises `value`."""

    def now(self: Any, **kwargs: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    async def later(self: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return now(self)

    return later if is_async else now


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "value, problem",
    [
        *((value, None) for value in (None, "", "hello", BLOCKS, [])),
        (3, "Variant.reset returned a int"),
        ({"a": 1}, "Variant.reset returned a dict"),
        (["a"], "Variant.reset returned a list"),
        ([{"text": "a"}], "Variant.reset returned a list"),
        (ConnectionError("no server"), "Variant.reset failed: ConnectionError: no server"),
    ],
)
def test_observations(workers: Workers, make: Any, value: Any, problem: str | None, is_async: bool):
    handle = make(variant(returning(value, is_async))).acquire({})
    outcome = handle.reset({}, workers, 5).result(5)
    assert outcome.value == (value if problem is None else None)
    assert outcome.error is None if problem is None else problem in str(outcome.error)
    assert handle.must_discard == (problem is not None)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "value, reward, problem",
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (0.5, 0.5, None),
        (None, None, None),
        (float("nan"), None, None),
        (np.float32(0.25), 0.25, None),
        (Decimal("0.25"), 0.25, None),
        (np.bool_(False), 0.0, None),
        (torch.tensor(2.0), 2.0, None),
        ("1", None, "Variant.get_reward returned a str; return a number, or None"),
        ([1.0], [1.0], None),
        ([1.0, 2.0], None, "returned 2 rewards by turn, but there were 1"),
        (["1"], None, "Variant.get_reward returned a str; return a number, or None"),
        (torch.ones(1), [1.0], None),
        (torch.ones(1, 1), None, "returned a Tensor"),
        (float("inf"), None, "returned inf; return a finite number"),
        (ZeroDivisionError("no steps"), None, "Variant.get_reward failed: ZeroDivisionError: no steps"),
    ],
)
def test_rewards(workers: Workers, make: Any, value: Any, reward: Any, problem: str | None, is_async: bool):
    handle = start(make(variant(get_reward=returning(value, is_async))), workers)
    outcome = handle.get_reward(workers, 5).result(5)
    assert outcome.value == reward
    assert outcome.error is None if problem is None else problem in str(outcome.error)
    assert not handle.must_discard


def test_resets_and_rewards_have_deadlines(workers: Workers, make: Any):
    def hang(self: Any, **kwargs: Any) -> None:
        self.release.wait()

    async def hang_async(self: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    for methods in ({"reset": hang}, {"reset": hang_async}, {"get_reward": hang}):
        handle = make(variant(**methods)).acquire({})
        began = time.monotonic()
        outcome = handle.reset({}, workers, 0.2).result(5)
        if "get_reward" in methods:
            assert outcome.error is None
            outcome = handle.get_reward(workers, 0.2).result(5)
        (method,) = methods
        assert outcome.value is None
        assert str(outcome.error) == f"Variant.{method} failed: no answer within 0.2 seconds"
        assert time.monotonic() - began < 2 and handle.must_discard


def test_an_instance_whose_reset_fails_is_replaced(workers: Workers):
    def reset(self: Any, fail: bool) -> None:
        if fail:
            raise ConnectionError("no server")

    environments = Environments(variant(reset))
    handle = environments.acquire({})
    assert handle.reset({"fail": True}, workers, 5).result(5).error is not None
    environments.release(handle)
    assert start(environments, workers, {"fail": False}).instance is Base.made[1]
    environments.close()
    assert [instance.log for instance in Base.made] == [["close"], ["close"]]


class Flaky:
    """A factory with a script: an exception to raise, an event to wait for, or a class to call, for each call."""

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
        problems.append(str(handle.reset({}, workers, 5).result(5).error))
        assert handle.instance is None
        assert call_method(handle, workers, "limit").content == "Error: the environment was not started"
        assert "not started" in str(handle.get_reward(workers, 5).result(5).error)
        environments.release(handle)
    assert problems[0] == "the environment 'Counter' could not be created: OSError: full"
    assert "made a Silent, but a Counter at first" in problems[1]
    assert start(environments, workers).instance is not first.instance
    environments.close()


def test_an_instance_that_is_created_too_late_serves_a_later_rollout(workers: Workers):
    event = threading.Event()
    environments = Environments(Flaky(Counter, event))
    first = start(environments, workers)
    handle = environments.acquire({})
    assert "no answer within" in str(handle.reset({}, workers, 0.2).result(5).error)
    environments.release(handle)
    event.set()
    end = time.monotonic() + 5
    while (handle := environments.acquire({})).instance is None and time.monotonic() < end:
        time.sleep(0.01)
    assert handle.instance is Base.made[1] is not first.instance
    assert handle.instance.log == []  # it was not reset for the rollout that had given up
    environments.close()
    assert Base.made[1].log == ["close"]


def test_rewards_go_by_the_names_of_classes(workers: Workers):
    other = type("Counter", (Counter,), {})
    environments = Environments({"a": Counter, "b": functools.partial(Counter), "c": Child, "d": other, "e": variant()})
    assert environments.reward_names == ["Counter", "Child", "Counter_2"]
    handles = [start(environments, workers, {"environment": name}) for name in environments.schemas]
    assert [handle.spec.reward_name for handle in handles] == ["Counter", "Counter", "Child", "Counter_2", "Variant"]
    assert [handle.spec.has_reward for handle in handles] == [True, True, True, True, False]
    environments.close()


# Observations in the prompt


SYSTEM = {"role": "system", "content": "Be brief."}
IMAGE = {"type": "image", "image": 1}


def user(content: Any = "Go.") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    "messages, observation, expected",
    [
        ([SYSTEM, user()], " Now.", [SYSTEM, user("Go. Now.")]),
        *(([SYSTEM, user()], nothing, [SYSTEM, user()]) for nothing in (None, "", [])),
        ([user()], [IMAGE], [user([text("Go."), IMAGE])]),
        ([user([IMAGE])], "Now.", [user([IMAGE, text("Now.")])]),
        ([user([IMAGE])], [text("Now.")], [user([IMAGE, text("Now.")])]),
        ([user(None)], "Now.", [user("Now.")]),
        ([{"role": "user"}], [IMAGE], [user([IMAGE])]),
        ([SYSTEM], "Now.", [SYSTEM, user("Now.")]),
        ([], [IMAGE], [user([IMAGE])]),
        (
            [user(), assistant("Yes?"), user(), assistant("So")],
            "!",
            [user(), assistant("Yes?"), user("Go.!"), assistant("So")],
        ),
    ],
)
def test_an_observation_ends_the_last_user_message(messages: Any, observation: Any, expected: Any):
    before = repr(messages), repr(observation)
    extended = add_observation(messages, observation)
    assert extended == expected
    for message in extended:
        if isinstance(message["content"], list):
            message["content"].append("changed")
            message["content"][0]["changed"] = True
        message["role"] = "changed"
    assert (repr(messages), repr(observation)) == before
