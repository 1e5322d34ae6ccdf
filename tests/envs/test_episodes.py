"""Episodes: observations of resets, rewards, and their failures."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from example_environments import Base, Child, Counter, Silent, call_method, start, variant

from groupgrad.concurrency.workers import Workers
from groupgrad.envs.environments import Environments, add_observation

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
    assert (outcome.value, outcome.problem) == (value, "")
    environments.close()


@pytest.mark.parametrize(
    "value, type_name", [(3, "int"), ({"a": 1}, "dict"), (["a"], "list"), ([{"text": "a"}], "list")]
)
def test_a_return_value_that_is_no_observation_fails_the_reset(workers: Workers, value: Any, type_name: str):
    environments = Environments(variant(lambda self, **kwargs: value))
    outcome = environments.acquire({}).reset({}, workers, 5).result(5)
    assert outcome.value is None
    assert f"Variant.reset returned a {type_name}" in outcome.problem
    environments.close()


def test_an_instance_whose_reset_fails_is_replaced(workers: Workers):
    def reset(self: Any, fail: bool) -> None:
        if fail:
            raise ConnectionError("no server")

    environments = Environments(variant(reset))
    handle = environments.acquire({})
    outcome = handle.reset({"fail": True}, workers, 5).result(5)
    assert outcome.problem == "Variant.reset failed: ConnectionError: no server"
    assert handle.must_discard
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
    assert outcome.problem == "Variant.reset failed: no answer within 0.2 seconds"
    assert time.monotonic() - began < 2
    assert handle.must_discard
    environments.close()


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
        problems.append(handle.reset({}, workers, 5).result(5).problem)
        assert handle.instance is None
        assert call_method(handle, workers, "limit").content == "Error: the environment was not started"
        assert "not started" in handle.get_reward(workers, 5).result(5).problem
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
    assert "no answer within" in handle.reset({}, workers, 0.2).result(5).problem
    environments.release(handle)
    event.set()
    end = time.monotonic() + 5
    while (handle := environments.acquire({})).instance is None and time.monotonic() < end:
        time.sleep(0.01)
    assert handle.instance is Base.made[1] is not first.instance
    assert handle.instance.log == []  # it was not reset for the rollout that had given up
    environments.close()
    assert Base.made[1].log == ["close"]


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
    assert (outcome.value, outcome.problem) == (reward, "")
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
    assert outcome.value is None
    assert words in outcome.problem
    assert not handle.must_discard
    environments.close()


def test_a_reward_that_hangs_has_a_deadline(workers: Workers):
    environments = Environments(variant(get_reward=lambda self: self.release.wait()))
    handle = start(environments, workers)
    outcome = handle.get_reward(workers, 0.2).result(5)
    assert outcome.value is None
    assert outcome.problem == "Variant.get_reward failed: no answer within 0.2 seconds"
    assert handle.must_discard
    environments.close()


def test_rewards_go_by_the_names_of_classes(workers: Workers):
    other = type("Counter", (Counter,), {})
    environments = Environments({"a": Counter, "b": functools.partial(Counter), "c": Child, "d": other, "e": variant()})
    assert environments.reward_names == ["Counter", "Child", "Counter_2"]
    handles = [start(environments, workers, {"environment": name}) for name in environments.schemas]
    assert [handle.spec.reward_name for handle in handles] == ["Counter", "Counter", "Child", "Counter_2", "Variant"]
    assert [handle.spec.has_reward for handle in handles] == [True, True, True, True, False]
    environments.close()


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
    extended = add_observation(messages, observation)
    assert extended == expected
    for message in extended:
        if isinstance(message["content"], list):
            message["content"].append("changed")
            message["content"][0]["changed"] = True
        message["role"] = "changed"
    assert (repr(messages), repr(observation)) == before
