"""Environments: accepted classes, the choice by rows, the pool of instances, and closing."""

from __future__ import annotations

import asyncio
import functools
import logging
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from example_environments import HASTY, PATIENT, Base, Child, Counter, Silent, call_method, names, start, variant

from groupgrad.chat import ToolCall
from groupgrad.concurrency.workers import Workers
from groupgrad.envs.environments import Environments
from groupgrad.envs.tools import make_tools

# What they may look like


def test_public_methods_of_the_class_are_tools(workers: Workers, make: Any):
    def ping() -> str:
        """Pings."""
        return "pong"

    environments = make(Counter, make_tools([ping]))
    handle = start(environments, workers)
    assert names(handle) == ["ping", "increment", "decrement", "limit", "hang"]
    assert environments.schemas == {"Counter": handle.toolbox.schemas}
    replies = [
        call_method(handle, workers, "ping"),
        call_method(handle, workers, "increment", step=5),
        call_method(handle, workers, "decrement", step=2),
        call_method(handle, workers, "limit"),
    ]
    assert [reply.content for reply in replies] == ["pong", "5", "3", "100"]
    assert handle.instance.count == 3
    for name in ("reset", "get_reward", "close", "twice", "_private", "count"):
        assert call_method(handle, workers, name).content.startswith(f"there is no tool '{name}'")
    child = start(make(Child), workers)  # it hides one of the inherited methods
    assert names(child) == ["increment", "decrement", "limit", "extra"]
    assert call_method(child, workers, "increment", step=5).content == "10"
    assert start(make(Silent), workers, {"prompt": []}).toolbox.schemas == []


def fails() -> Any:
    raise RuntimeError("no server")


def undocumented(self: Any, x: int) -> int:
    return x


@pytest.mark.parametrize(
    "factories, error, words",
    [
        (Base, ValueError, ["environment_factory made a Base", "no method 'reset'", "def reset(self, **kwargs)"]),
        ({"a": Counter, "b": Base}, ValueError, ["environment_factory['b'] made a Base"]),
        (fails, ValueError, ["environment_factory failed", "RuntimeError: no server"]),
        (lambda: None, ValueError, ["environment_factory made a NoneType", "no method 'reset'"]),
        ({"a": 3}, ValueError, ["environment_factory['a'] failed", "'int' object is not callable"]),
        (variant(look=undocumented), ValueError, ["'Variant.look' cannot be described", "docstring", "underscore"]),
        (variant(multiply=Counter.increment), ValueError, ["two tools named 'multiply'", "'Variant'"]),
    ],
)
def test_factories_that_cannot_be_used_are_refused(factories: Any, error: type[Exception], words: list[str]):
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


def test_a_factory_that_returns_one_instance_twice_is_refused(workers: Workers, make: Any):
    environments = make(functools.cache(Counter))
    first, second = (environments.acquire({}) for _ in range(2))
    assert first.reset({}, workers, 5).result(5).error is None
    problem = str(second.reset({}, workers, 5).result(5).error)
    assert "the same Counter twice" in problem
    with pytest.raises(ValueError, match="the same Counter twice"):
        one = Counter()
        Environments({"a": lambda: one, "b": lambda: one})


# Which one a row gets


def test_a_rows_column_chooses_and_is_not_given_to_reset(workers: Workers, make: Any):
    environments = make({"easy": Counter, "hard": Child, "silent": Silent})
    assert list(environments.schemas) == ["easy", "hard", "silent"]
    handle = start(environments, workers, {"prompt": [], "environment": "hard", "goal": 3})
    assert (handle.spec.name, handle.spec.reward_name, type(handle.instance)) == ("hard", "Child", Child)
    assert handle.instance.log == [{"prompt": [], "goal": 3}]
    handle = start(environments, workers, {"prompt": [], "environment": "silent"})
    assert (handle.spec.name, handle.spec.reward_name, names(handle)) == ("silent", "Silent", [])
    for row, words in [
        ({"environment": "other"}, "'other', which environment_factory does not have; it has 'easy', 'hard', 'silent'"),
        ({"environment": None}, "is None, which"),
        ({"environment": ["easy"]}, "which environment_factory does not have"),
        ({"prompt": []}, "no column 'environment'"),
    ]:
        with pytest.raises(ValueError) as raised:
            environments.acquire(row)
        assert words in str(raised.value)


def test_a_single_environment_is_given_every_column(workers: Workers, make: Any):
    environments = make(Counter)
    row = {"prompt": [{"role": "user", "content": "go"}], "environment": "any"}
    assert start(environments, workers, row).instance.log == [row]


def test_reset_is_given_the_columns_that_it_names(workers: Workers, make: Any):
    environments = make(Silent)
    handle = start(environments, workers, {"prompt": ["a"], "level": 4, "answer": 2})
    assert handle.instance.log == [(["a"], 4)]
    environments.release(handle)
    outcome = environments.acquire({}).reset({"level": 1}, workers, 5).result(5)
    assert str(outcome.error).startswith("Silent.reset failed: TypeError")
    assert "prompt" in str(outcome.error)


def test_reset_cannot_change_the_data_set(workers: Workers, make: Any):
    def reset(self: Any, prompt: Any, table: Any, numbers: Any, image: Any, **kwargs: Any) -> None:
        prompt[0]["content"] += "!"
        prompt.append("more")
        table["a"][0].append(3)
        numbers += 1
        self.image = image

    environments = make(variant(reset))
    image = object()
    row = {"prompt": [{"content": "x"}], "table": {"a": ([1, 2],)}, "numbers": np.zeros(2), "image": image}
    handle = start(environments, workers, row)
    assert row["prompt"] == [{"content": "x"}]
    assert row["table"] == {"a": ([1, 2],)}
    assert row["numbers"].tolist() == [0, 0]
    assert handle.instance.image is image  # what containers hold is not copied


# The pool


def test_instances_are_reused_and_their_number_grows_with_need(workers: Workers, make: Any):
    environments = make(Counter, reuse=True)
    assert len(Base.made) == 1
    for count in (3, 2, 4):
        handles = [start(environments, workers) for _ in range(count)]
        assert len({id(handle.instance) for handle in handles}) == count
        for handle in handles:
            assert call_method(handle, workers, "increment", step=1).content == "1"
            environments.release(handle)
            environments.release(handle)  # the second time changes nothing
    assert len(Base.made) == 4


def test_instances_of_one_rollout_each_are_closed_after_it(workers: Workers):
    environments = Environments(Counter, reuse=False)
    for _ in range(3):
        handle = start(environments, workers)
        assert call_method(handle, workers, "increment", step=1).content == "1"
        environments.release(handle)
    environments.close()
    assert len(Base.made) == 3  # the one that was inspected serves the first rollout
    assert [instance.log.count("close") for instance in Base.made] == [1, 1, 1]


def test_an_instance_with_a_running_call_is_not_reused(workers: Workers):
    environments = Environments(Counter)
    handle = start(environments, workers)
    reply = call_method(handle, workers, "hang", HASTY)
    assert (reply.content, reply.timed_out) == ("Error: no answer within 0.2 seconds", True)
    assert handle.must_discard
    busy = call_method(handle, workers, "increment", step=1)
    assert (busy.failed, "still busy with an earlier call" in busy.content) == (True, True)
    assert "still busy" in str(handle.get_reward(workers, 5).result(5).error)

    handle.instance.release.set()
    end = time.monotonic() + 5
    while handle.is_busy and time.monotonic() < end:
        time.sleep(0.005)
    assert call_method(handle, workers, "increment", step=7).content == "7"  # the call has ended after all
    assert handle.get_reward(workers, 5).result(5).value == 0.7

    environments.release(handle)
    assert start(environments, workers).instance is Base.made[1]
    environments.close()
    assert [instance.log.count("close") for instance in Base.made] == [1, 1]


def test_an_instance_released_during_a_call_is_not_reused(workers: Workers, make: Any):
    environments = make(Counter)
    handle = start(environments, workers)
    running = handle.toolbox.call(ToolCall("hang"), workers, PATIENT)
    queued = handle.toolbox.call(ToolCall("increment", {"step": 1}), workers, PATIENT)
    while not handle.is_busy:
        time.sleep(0.005)
    environments.release(handle)
    assert start(environments, workers).instance is Base.made[1]
    handle.instance.release.set()
    assert running.result(5).content == "late"
    assert queued.result(5).content == "Error: the episode is over"


def test_calls_of_one_message_reach_the_environment_in_their_order(workers: Workers, make: Any):
    environments = make(Counter)
    handles = [start(environments, workers) for _ in range(8)]
    calls = [ToolCall("increment", {"step": 5}), ToolCall("decrement", {"step": 2}), ToolCall("increment", {"step": 1})]
    futures = [[handle.toolbox.call(call, workers, PATIENT) for call in calls] for handle in handles]
    assert [[future.result(5).content for future in of_handle] for of_handle in futures] == [["5", "3", "4"]] * 8


# Closing


def test_every_instance_is_closed_once(workers: Workers):
    environments = Environments({"a": Counter, "b": Silent})
    handles = [start(environments, workers, {"environment": name, "prompt": []}) for name in "aabb"]
    environments.release(handles[0])
    environments.close()  # three of them are in use
    for handle in handles[1:]:
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

    factories = {
        "hang": type("Hangs", (Counter,), {"close": hang}),
        "fail": type("Fails", (Counter,), {"close": fail}),
        "later": type("Later", (Counter,), {"close": later}),
        "none": type("None_", (Counter,), {"close": None}),
    }
    environments = Environments(factories, close_timeout_s=0.2)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        environments.close()
        environments.close()
    assert time.monotonic() - began < 3
    assert closed == ["async"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("Fails.close failed: OSError: gone") == 1
    assert messages.count("Hangs.close failed: no answer within 0.2 seconds") == 1


def test_a_failed_close_is_logged_once_and_before_close_returns():
    """Also if logging is slow on the thread that closed the instance."""
    messages: list[str] = []

    class SlowLog(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.3)
            messages.append(record.getMessage())

    def fail(self: Any) -> None:
        raise OSError("gone")

    environments = Environments({"fail": type("Fails", (Counter,), {"close": fail})})
    logger, handler = logging.getLogger("groupgrad.envs.environments"), SlowLog()
    logger.addHandler(handler)
    try:
        environments.close()
        assert messages == ["Fails.close failed: OSError: gone"]
        environments.close()
        assert len(messages) == 1
    finally:
        logger.removeHandler(handler)


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

Environments(Counter)  # dropped at once, as by a trainer whose constructor fails
environments, workers = Environments(Counter), Workers(2)
handles = [environments.acquire({}) for _ in range(2)]
for handle in handles:
    assert handle.reset({}, workers, 5).result(10).error is None
workers.call(handles[0].method("hang"), {}, timeout_s=60)
"""


@pytest.mark.slow
def test_the_interpreters_end_closes_open_environments():
    done = subprocess.run([sys.executable, "-c", EXIT], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n" * 3), done.stderr
    assert "Traceback" not in done.stderr
