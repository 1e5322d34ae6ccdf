"""Reward functions under supervision: deadlines, worker processes, retries, and what a failure means."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from groupgrad.errors import RewardError
from groupgrad.rewards import accuracy_reward, function_calls
from groupgrad.rewards.function_calls import SupervisionOptions
from groupgrad.rewards.reward_runner import RewardRunner, check_failure_names


@pytest.fixture
def make(make_rollouts):
    """`make(functions, **options)`: a runner, and its `score` of two completions."""
    runners = []

    def make_runner(functions: Any, **options: Any) -> SimpleNamespace:
        runner = RewardRunner(functions, supervision=SupervisionOptions(**options))
        runners.append(runner)

        def score(completions=("a", "bb"), rows=None, **kwargs):
            return runner.score(make_rollouts(list(completions), rows), **kwargs)

        return SimpleNamespace(runner=runner, score=score)

    yield make_runner
    for runner in runners:
        runner.close_workers()


def sleeping(completions, **kwargs):
    time.sleep(30)


async def sleeping_async(completions, **kwargs):
    await asyncio.sleep(30)


async def blocking_async(completions, **kwargs):
    time.sleep(2)


def numbers(table: Any) -> dict[str, float | None]:
    return {name: metric.read() for name, metric in table.metrics.items() if not name.startswith("time/")}


@pytest.mark.quick("plain")
@pytest.mark.parametrize(
    ("function", "num_workers"),
    [(sleeping, 0), (lambda completions: time.sleep(30), 1), (sleeping_async, 0), (blocking_async, 0)],
    ids=["plain", "worker", "async", "async that blocks"],
)
def test_a_late_call_is_named_or_unscored(make, function, num_workers):
    late = make([function, lambda completions: [1.0, 2.0]], timeout_s=0.3, num_workers=num_workers)
    name = late.runner.names[0]
    started = time.monotonic()
    with pytest.raises(
        RewardError,
        match=rf"'{name}' took longer than reward_timeout_s=0.3 \(step 7, rank 0, rows 0 to 1, the first: row 0",
    ):
        late.score(step=7)
    assert time.monotonic() - started < 4
    going_on = make(
        [function, lambda completions: [1.0, 2.0]], timeout_s=0.3, num_workers=num_workers, on_failure={name: None}
    )
    table = going_on.score()
    assert table.rewards[:, 0].isnan().all() and table.rewards[:, 1].tolist() == [1.0, 2.0]
    second = going_on.runner.names[1]
    assert numbers(table) == {
        f"rewards/{name}/failures": 1.0,
        f"rewards/{name}/timeouts": 1.0,
        f"rewards/{second}/failures": 0.0,
        f"rewards/{second}/timeouts": 0.0,
    }
    assert 0.2 < table.metrics[f"time/rewards/{name}/max"].read() < 3


def test_calls_in_time_are_measured(make):
    waits = iter([0.0, 1.0, 0.0, 0.0])

    def judge(completions):
        time.sleep(next(waits))
        return [1.0, 2.0]

    measured = make(judge, timeout_s=5.0)
    tables = [measured.score() for _ in range(4)]
    times = [
        {key: table.metrics[f"time/rewards/judge/{key}"].read() for key in ("p50", "p95", "max")} for table in tables
    ]
    assert [round(found["max"]) for found in times] == [0, 1, 0, 0]
    assert times[3]["p50"] < 0.5 < times[3]["p95"] < 1.25
    assert "time/rewards/judge/p50" not in make(lambda completions: [1.0, 2.0]).score().metrics


def test_a_crash_costs_its_call(make, caplog):
    def judge(completions, prompts):
        kind = completions[0]
        if kind == "segfault":
            ctypes.string_at(0)
        if kind == "exit":
            os._exit(3)
        if kind == "memory":
            bytearray(4 << 30)
        return [float(os.getpid() != main)] * len(completions)

    main = os.getpid()
    strict = make(judge, num_workers=1, worker_memory_bytes=1 << 30)
    for kind, text in (
        (
            "segfault",
            r"the worker process of reward function 'judge' was killed by SIGSEGV \(step 3, rank 0, rows 0 to 1",
        ),
        ("exit", "ended with exit code 3"),
        ("memory", "reward function 'judge' failed at step 3 on row 0 .*MemoryError"),
    ):
        with pytest.raises(RewardError, match=text):
            strict.score([kind, "b"], step=3)
    mild = make(judge, num_workers=1, worker_memory_bytes=1 << 30, on_failure=-1.0)
    with caplog.at_level(logging.WARNING):
        tables = [mild.score([kind, "b"]) for kind in ("a", "segfault", "memory", "a")]
    assert [table.rewards.flatten().tolist() for table in tables] == [[1, 1], *[[-1, -1]] * 2, [1, 1]]
    assert [numbers(table)["rewards/judge/failures"] for table in tables] == [0, 1, 1, 0]
    assert [
        record.getMessage().count("These rows get the reward -1, as on_reward_failure says")
        for record in caplog.records
    ] == [1]


def test_what_failures_mean_is_said_by_name(make):
    def bad(completions):
        raise KeyError("x")

    async def bad_async(completions):
        raise KeyError("x")

    mixed = make([bad, bad_async], on_failure={"bad": None, "bad_async": 0.5})
    assert mixed.score().rewards.nan_to_num(-9).tolist() == [[-9, 0.5]] * 2
    with pytest.raises(RewardError, match=r"'bad_async' failed at step 0.*KeyError"):
        make([bad, bad_async], on_failure={"bad": None}).score()
    with pytest.raises(ValueError, match="on_reward_failure names 'worse', and the reward functions are 'bad'"):
        check_failure_names(SupervisionOptions(on_failure={"worse": None}), make(bad).runner.function_names)
    with pytest.raises(RewardError, match="it returned 1 rewards for 2"):  # a fault of the function, not of a call
        make(lambda completions: [1.0], on_failure=None).score()


@pytest.mark.parametrize("kind", ["plain", "worker", "async"])
def test_transient_errors_are_tried_again(make, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(function_calls, "FIRST_PAUSE_S", 0.01)
    calls = tmp_path / "calls"

    def judge(completions, log_metric):
        calls.write_text((calls.read_text() if calls.exists() else "") + "x")
        log_metric("seen", 1.0)
        if len(calls.read_text()) < 3:
            raise ConnectionResetError("try again")
        return [1.0, 2.0]

    async def judge_async(completions, log_metric):
        return judge(completions, log_metric)

    function, options = (judge_async if kind == "async" else judge), {"num_workers": int(kind == "worker")}
    table = make(function, retries=2, **options).score()
    assert table.rewards.flatten().tolist() == [1.0, 2.0] and len(calls.read_text()) == 3
    assert table.metrics["seen"].weight == 1  # of the attempt that counts
    others = ({"retries": 1}, {"retries": 2, "transient_errors": ("OSError2",)}) if kind == "plain" else ()
    for further in others:
        calls.unlink()
        with pytest.raises(RewardError, match=r"ConnectionResetError: try again"):
            make(function, **further, **options).score()


def test_an_error_that_cannot_leave_its_worker_keeps_its_name(make, monkeypatch):
    monkeypatch.setattr(function_calls, "FIRST_PAUSE_S", 0.01)
    seen: list[int] = []

    class Busy(ConnectionError):
        def __init__(self, code, text):
            super().__init__(f"{code} {text}")

    def judge(completions):
        seen.append(1)
        if len(seen) < 2:
            raise Busy(503, "busy")
        return [1.0, 2.0]

    busy = make(judge, retries=1, num_workers=1, transient_errors=("ConnectionError",))
    assert busy.score().rewards.flatten().tolist() == [1.0, 2.0]
    with pytest.raises(RewardError, match="Busy: 503 busy"):
        make(judge, num_workers=1).score()


def test_a_worker_has_closures_loggers_state_and_columns(make):
    seen: list[int] = []
    main = os.getpid()

    def judge(completions, solution, trainer_state, log_extra, log_metric, **kwargs):
        seen.append(1)
        log_extra("pid", [os.getpid()] * len(completions))
        log_extra(column="seen", values=[trainer_state.global_step] * len(completions))
        log_metric("calls", len(seen))
        return np.array([float(s == "x") for s in solution])

    def noise(completions):
        return [random.random() for _ in completions]

    def later(completions):
        async def wait():
            await asyncio.sleep(0)
            return [3.0, 4.0]

        return wait()

    rows = [{"prompt": "p", "solution": "x"}, {"prompt": "q", "solution": "y"}]
    worked = make([judge, noise, later, sleepless], num_workers=3)
    state = SimpleNamespace(global_step=5)
    one, two = (worked.score(rows=rows, trainer_state=state, step=step) for step in (1, 1))
    assert one.rewards[:, 0].tolist() == [1.0, 0.0] and one.rewards[:, 2].tolist() == [3.0, 4.0]
    assert one.columns["seen"] == [5, 5] and one.columns["pid"][0] not in (main, None)
    assert two.columns["pid"] == one.columns["pid"]  # a function keeps its process, and what it has counted
    assert [table.metrics["calls"].read() for table in (one, two)] == [1, 2] and seen == []
    assert torch.equal(one.rewards[:, 1], two.rewards[:, 1])  # noise is that of the step
    assert not torch.equal(one.rewards[:, 1], worked.score(rows=rows, trainer_state=state, step=2).rewards[:, 1])
    assert worked.runner.num_workers == 3
    worked.runner.close_workers()
    assert not psutil.pid_exists(one.columns["pid"][0])
    assert worked.score(rows=rows, trainer_state=state).metrics["calls"].read() == 1


async def sleepless(completions, **kwargs):
    return [float(os.getpid())] * len(completions)


def test_functions_in_workers_run_at_once(make):
    def wait(completions, log_extra, column):
        began = time.monotonic()
        time.sleep(0.5)
        log_extra(column, [(began, time.monotonic())] * 2)
        return [0.0, 0.0]

    columns = make([functools.partial(wait, column=name) for name in "xy"], num_workers=2).score().columns
    (began, ended), (other_began, other_ended) = columns["x"][0], columns["y"][0]
    assert began < other_ended and other_began < ended


def test_logs_that_cannot_be_are_errors_in_a_worker_too(make):
    def judge(completions, log_extra):
        log_extra("col", [1])
        return [0.0, 0.0]

    with pytest.raises(RewardError, match=r"'judge', step 3: log_extra\('col', ...\) got .* for 2 completions"):
        make(judge, num_workers=1).score(step=3)


def test_what_a_worker_cannot_run_is_refused_at_construction(make):
    lock = threading.Lock()

    def holds(completions):
        with lock:
            return [0.0]

    class Unloadable:
        __name__ = "unloadable"

        def __call__(self, completions):
            return [0.0]

        def __reduce__(self):
            return (__import__, ("no_such_module",))

    with pytest.raises(
        TypeError, match=r"'holds' cannot be sent to a worker process \(TypeError: cannot pickle '_thread"
    ):
        make(holds, num_workers=1)
    with pytest.raises(TypeError, match=r"reward_workers=2: the process for 'unloadable' cannot start: ModuleNotFound"):
        make(Unloadable(), num_workers=2)
    rows = [{"prompt": "p", "lock": lock}]
    plain = make(lambda completions, **kwargs: [0.0], num_workers=1)
    with pytest.raises(RewardError, match=r"its arguments .*lock cannot be sent to a worker process .*pickle '_thread"):
        plain.score(["a"], rows)


def test_accuracy_rewards_and_async_functions_have_no_worker(make):
    assert make([accuracy_reward, sleepless], num_workers=4).runner.num_workers == 0
    assert make([lambda completions: [0.0], accuracy_reward], num_workers=4).runner.num_workers == 1


def test_a_wait_that_is_left_ends_the_process(make, make_rollouts, tmp_path):
    path = tmp_path / "pid"

    def judge(completions):
        path.write_text(f"{os.getpid()}.")
        time.sleep(60)

    class Left(BaseException):
        pass

    def leave():
        while not path.exists() or not path.read_text().endswith("."):
            time.sleep(0.01)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Left))
        os.kill(os.getpid(), signal.SIGWINCH)  # wakes the wait

    left, main = make(judge, num_workers=1), threading.get_ident()
    before = signal.signal(signal.SIGWINCH, lambda *args: None)
    try:
        threading.Thread(target=leave).start()
        with pytest.raises(Left):
            left.score()
    finally:
        signal.signal(signal.SIGWINCH, before)
    pid = int(path.read_text()[:-1])
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(5)
    assert not psutil.pid_exists(pid)


def test_a_function_for_the_main_thread_alone_names_its_remedy(make):
    def alarmed(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0, 2.0]

    assert make(alarmed, timeout_s=60.0, num_workers=1).score().rewards.flatten().tolist() == [1.0, 2.0]
    with pytest.raises(RewardError, match="works on the main thread alone; set reward_workers=1"):
        make(alarmed, timeout_s=60.0).score()
