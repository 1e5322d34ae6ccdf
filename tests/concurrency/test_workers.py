"""Workers: every call is answered by its deadline, also if the function hangs, blocks or exits."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from groupgrad.concurrency.workers import Workers

DEADLINE_S = 0.2


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(4, blocked_s=0.2)
    yield pool
    pool.close()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that hanging functions wait for; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def double(x: int) -> int:
    return 2 * x


async def double_later(x: int) -> int:
    await asyncio.sleep(0.01)
    return 2 * x


def start_double(x: int) -> Any:
    return double_later(x)


@pytest.mark.parametrize("function", [double, double_later])
def test_a_call_is_answered_with_its_value(workers: Workers, function: Any):
    outcome = workers.call(function, {"x": 4}, timeout_s=5).result(5)
    assert (outcome.value, outcome.error, outcome.timed_out) == (8, None, False)
    assert 0 <= outcome.seconds < 5


def test_an_awaitable_that_a_plain_function_returns_is_awaited(workers: Workers):
    assert workers.call(start_double, {"x": 4}, timeout_s=5).result(5).value == 8


@pytest.mark.parametrize("function", [double, double_later, start_double])
def test_then_runs_on_the_thread_of_the_call(workers: Workers, function: Any):
    def then(value: int) -> tuple[int, str]:
        return value, threading.current_thread().name

    value, thread = workers.call(function, {"x": 4}, timeout_s=5, then=then).result(5).value
    assert value == 8
    assert thread == ("tool-worker" if function is double else "async-functions")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_of_any_kind_is_an_outcome(workers: Workers, error: BaseException, is_async: bool):
    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    outcome = workers.call(fail_later if is_async else fail, {}, timeout_s=5).result(5)
    assert type(outcome.error) is type(error)
    assert not outcome.timed_out
    assert workers.call(double_later if is_async else double, {"x": 1}, timeout_s=5).result(5).value == 2


def test_arguments_that_do_not_fit_are_an_outcome(workers: Workers):
    for function in (double, double_later):
        assert isinstance(workers.call(function, {"y": 1}, timeout_s=5).result(5).error, TypeError)


def test_32_calls_share_4_threads(workers: Workers):
    seen: set[int] = set()
    inside = most = 0
    lock = threading.Lock()

    def work(x: int) -> int:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            seen.add(threading.get_ident())
        time.sleep(0.01)
        with lock:
            inside -= 1
        return x

    futures = [workers.call(work, {"x": x}, timeout_s=5) for x in range(32)]
    assert [future.result(10).value for future in futures] == list(range(32))
    assert most == len(seen) == 4


def test_a_plain_function_that_hangs_is_answered_and_its_thread_replaced(
    workers: Workers, release: threading.Event, caplog: pytest.LogCaptureFixture
):
    """Twice as many hung calls as threads, and the pool still runs four at once afterwards."""

    ended: list[str] = []

    def hang() -> str:
        release.wait()
        ended.append("late")
        return "late"

    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        outcomes = [future.result(5) for future in [workers.call(hang, {}, timeout_s=DEADLINE_S) for _ in range(8)]]
    assert all(outcome.timed_out and isinstance(outcome.error, TimeoutError) for outcome in outcomes)
    assert all(DEADLINE_S <= outcome.seconds < 2 for outcome in outcomes)
    assert 2 * DEADLINE_S <= time.monotonic() - began < 4
    assert len([record for record in caplog.records if "hang' did not end" in record.getMessage()]) == 1

    barrier = threading.Barrier(4)
    together = [workers.call(barrier.wait, {}, timeout_s=5) for _ in range(4)]
    assert sorted(future.result(5).value for future in together) == [0, 1, 2, 3]

    release.set()
    assert eventually(lambda: ended == ["late"] * 8)
    assert all(outcome.value is None for outcome in outcomes)


def test_the_deadline_counts_from_the_start_of_the_run():
    pool = Workers(1)
    try:
        futures = [pool.call(lambda: time.sleep(0.15), {}, timeout_s=0.3) for _ in range(4)]
        assert not any(future.result(5).timed_out for future in futures)
    finally:
        pool.close()


def test_an_async_function_past_its_deadline_is_cancelled(workers: Workers):
    events: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    outcome = workers.call(hang, {}, timeout_s=DEADLINE_S).result(5)
    assert outcome.timed_out
    assert eventually(lambda: events == ["cancelled"])
    assert workers.call(double_later, {"x": 3}, timeout_s=5).result(5).value == 6


def test_an_awaitable_of_a_plain_function_has_the_rest_of_the_deadline(workers: Workers):
    def begin() -> Any:
        time.sleep(0.15)
        return asyncio.sleep(0.15)

    outcome = workers.call(begin, {}, timeout_s=DEADLINE_S).result(5)
    assert outcome.timed_out
    assert outcome.seconds == pytest.approx(DEADLINE_S, abs=0.1)


def test_an_async_function_that_will_not_be_cancelled_is_answered_all_the_same(
    workers: Workers, release: threading.Event
):
    ended: list[str] = []

    async def stubborn() -> str:
        while not release.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        ended.append("late")
        return "late"

    assert workers.call(stubborn, {}, timeout_s=DEADLINE_S).result(5).timed_out
    assert workers.call(double_later, {"x": 3}, timeout_s=5).result(5).value == 6
    release.set()
    assert eventually(lambda: ended == ["late"])


def test_an_async_function_that_blocks_the_loop_is_answered_and_the_loop_replaced(
    workers: Workers, release: threading.Event, caplog: pytest.LogCaptureFixture
):
    async def block() -> None:
        await asyncio.sleep(0.05)
        release.wait()

    with caplog.at_level(logging.WARNING):
        started = workers.call(asyncio.sleep, {"delay": 0.3, "result": "slept"}, timeout_s=10)
        blocked = workers.call(block, {}, timeout_s=DEADLINE_S)
        time.sleep(0.1)
        functions = (double_later, double_later, start_double)
        waiting = [workers.call(function, {"x": x}, timeout_s=2) for x, function in enumerate(functions)]
        assert blocked.result(5).timed_out
        assert [future.result(5).value for future in waiting] == [0, 2, 4]
    release.set()
    assert started.result(5).value == "slept"  # on the old loop, once it was unblocked
    assert any("blocks its event loop" in record.getMessage() for record in caplog.records)


def test_a_loop_that_was_blocked_after_its_function_was_answered_is_replaced_too(
    workers: Workers, release: threading.Event
):
    blocked = threading.Event()

    async def block_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            blocked.set()
            release.wait()

    assert workers.call(block_when_cancelled, {}, timeout_s=DEADLINE_S).result(5).timed_out
    assert blocked.wait(5)
    assert workers.call(double_later, {"x": 3}, timeout_s=2).result(5).value == 6


@pytest.mark.parametrize("is_async", [False, True])
def test_context_variables_are_those_of_the_caller(workers: Workers, is_async: bool):
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def read() -> int:
        value = variable.get()
        variable.set(99)
        return value

    async def read_later() -> int:
        await asyncio.sleep(0)
        return read()

    futures = []
    for value in (1, 2):
        variable.set(value)
        futures.append(workers.call(read_later if is_async else read, {}, timeout_s=5))
    assert [future.result(5).value for future in futures] == [1, 2]
    assert variable.get() == 2


def test_calls_from_many_threads(workers: Workers):
    sums: list[int] = []

    def caller(base: int) -> None:
        futures = [workers.call((double, double_later)[i % 2], {"x": base + i}, timeout_s=5) for i in range(20)]
        sums.append(sum(future.result(10).value for future in futures) - 40 * base)

    callers = [threading.Thread(target=caller, args=(base,)) for base in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert sums == [380] * 8  # 2 * (0 + ... + 19)


def test_closing_answers_open_calls_and_can_be_repeated(release: threading.Event):
    pool = Workers(1)

    async def hang() -> None:
        await asyncio.sleep(60)

    started = pool.call(release.wait, {}, timeout_s=60)
    queued = pool.call(double, {"x": 1}, timeout_s=60)
    on_loop = pool.call(hang, {}, timeout_s=60)
    began = time.monotonic()
    pool.close()
    pool.close()
    for future in (started, queued, on_loop):
        assert "closed" in str(future.result(0).error)
        assert not future.result(0).timed_out
    assert time.monotonic() - began < 3
    assert pool.call(double, {"x": 5}, timeout_s=5).result(5).value == 10  # a new thread
    pool.close()


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("groupgrad.concurrency.daemon_threads.IDLE_S", 0.05)
    pool = Workers(4)
    before = set(threading.enumerate())
    assert pool.call(double, {"x": 5}, timeout_s=0.1).result(5).value == 10
    assert eventually(lambda: not any("tool-worker" in thread.name for thread in set(threading.enumerate()) - before))
    assert pool.call(double, {"x": 6}, timeout_s=5).result(5).value == 12


def test_closing_between_a_plain_function_and_its_awaitable_warns_of_nothing(
    release: threading.Event, recwarn: pytest.WarningsRecorder
):
    """The loop is blocked, so that the coroutine that a plain function returned is never awaited."""

    async def block() -> None:
        release.wait()

    pool = Workers(1, blocked_s=0.05)
    pool.call(block, {}, timeout_s=60)
    future = pool.call(start_double, {"x": 1}, timeout_s=60)
    pool.call(double, {"x": 1}, timeout_s=60).result(5)  # the only thread has finished the call before
    pool.close()
    assert "closed" in str(future.result(5).error)
    release.set()
    time.sleep(0.1)
    del future
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_an_answered_call_keeps_no_arguments_alive(workers: Workers):
    class Big:
        pass

    def count() -> int:
        gc.collect()
        return sum(type(item) is Big for item in gc.get_objects())

    workers.call(lambda item: None, {"item": Big()}, timeout_s=60).result(5)
    assert eventually(lambda: count() == 0)


EXIT = """
import asyncio, sys, threading, time
from groupgrad.concurrency.workers import Workers

def hang():
    while True:
        time.sleep(3600)

async def block():
    time.sleep(3600)

async def hang_in_thread():
    await asyncio.to_thread(hang)

workers = Workers(2)
futures = [workers.call({function}, {{}}, timeout_s={timeout_s}) for _ in range(3)]
if {timeout_s} < 1:
    print([future.result(5).timed_out for future in futures])
else:
    time.sleep(0.1)
    print("running")
"""


@pytest.mark.parametrize("function, timeout_s", [("hang", 0.1), ("hang", 60), ("hang_in_thread", 0.1), ("block", 60)])
def test_hanging_calls_do_not_keep_the_interpreter_from_ending(function: str, timeout_s: float):
    script = EXIT.format(function=function, timeout_s=timeout_s)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("running" if timeout_s > 1 else "[True, True, True]")
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 45


def test_a_cancelled_function_cleans_up_on_a_loop_that_is_given_up():
    """Its loop is blocked by another call and replaced while it cleans up."""
    cleaned = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(1.0)
            cleaned.set()

    async def blocking() -> None:
        await asyncio.sleep(0.5)
        time.sleep(1.5)

    workers = Workers(blocked_s=0.2)
    try:
        late, other = workers.call(slow, {}, timeout_s=1.2), workers.call(blocking, {}, timeout_s=0.6)
        assert other.result(timeout=20).timed_out
        assert late.result(timeout=20).timed_out
        assert cleaned.wait(timeout=20)
    finally:
        workers.close()


SUSPENDED = """
import asyncio, sys, time
from groupgrad.concurrency.workers import Workers


def plain():
    print("begun", flush=True)
    for _ in range(10):
        time.sleep(0.05)
    return "answer"


async def on_loop():
    print("begun", flush=True)
    for _ in range(10):
        await asyncio.sleep(0.05)
    return "answer"


async def of_plain():
    return await on_loop()


tool = {"plain": plain, "async": on_loop, "awaitable": lambda: of_plain()}[sys.argv[1]]
print(Workers().call(tool, {}, timeout_s=2.5).result().value, flush=True)
"""


@pytest.mark.fault(
    "a scheduler suspends the process (SIGSTOP) for longer than a tool's `tool_timeout_s`, and lets it go on",
    "the tool goes on: time in which the process is suspended does not count",
    "nothing",
)
@pytest.mark.parametrize(
    "tool", ["plain", *(pytest.param(tool, marks=pytest.mark.slow) for tool in ("async", "awaitable"))]
)
def test_time_in_which_the_process_is_suspended_does_not_count(tool: str) -> None:
    with subprocess.Popen([sys.executable, "-c", SUSPENDED, tool], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(4.5)  # longer than the deadline, of which the suspension takes at most a second
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "answer\n"
