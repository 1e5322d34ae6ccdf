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

from groupgrad.concurrency.workers import Outcome, Workers, call_here

DEADLINE_S = 0.2


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(4)
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


def answer(workers: Workers, function: Any, timeout_s: float | None = 5, **kwargs: Any) -> Outcome:
    return workers.call(function, kwargs, timeout_s=timeout_s).result(5)


@pytest.mark.parametrize(
    "function, thread",
    [(double, "tool-worker"), (double_later, "async-functions"), (start_double, "async-functions")],
)
@pytest.mark.parametrize("timeout_s", [5, None])
def test_a_call_has_its_value_made_on_its_thread(workers: Workers, function: Any, thread: str, timeout_s: Any):
    def then(value: int) -> tuple[int, str]:
        return value, threading.current_thread().name

    outcome = workers.call(function, {"x": 4}, timeout_s=timeout_s, then=then).result(5)
    assert (outcome.value, outcome.error, outcome.timed_out) == ((8, thread), None, False)
    assert 0 <= outcome.seconds < 5


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_of_any_kind_is_an_outcome(workers: Workers, is_async: bool):
    def fail(error: BaseException) -> None:
        raise error

    async def fail_later(error: BaseException) -> None:
        raise error

    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()):
        outcome = answer(workers, fail_later if is_async else fail, error=error)
        assert type(outcome.error) is type(error) and not outcome.timed_out
    assert isinstance(answer(workers, double_later if is_async else double, y=1).error, TypeError)
    assert answer(workers, double_later if is_async else double, x=1).value == 2


def test_a_call_on_this_thread_has_an_outcome_too():
    def fail(error: BaseException) -> None:
        raise error

    assert call_here(lambda: 3).value == 3
    for fault in (ValueError("no"), SystemExit(3)):
        assert call_here(lambda fault=fault: fail(fault)).error is fault
    with pytest.raises(KeyboardInterrupt):
        call_here(lambda: fail(KeyboardInterrupt()))


def test_of_32_calls_4_run_at_once(workers: Workers):
    inside = most = 0
    lock = threading.Lock()

    def work(x: int) -> int:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.01)
        with lock:
            inside -= 1
        return x

    futures = [workers.call(work, {"x": x}, timeout_s=5) for x in range(32)]
    assert [future.result(10).value for future in futures] == list(range(32))
    assert most == 4


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
        calls = [workers.call(hang, {}, timeout_s=DEADLINE_S, name="hang") for _ in range(8)]
        calls += [workers.call(hang, {}, timeout_s=DEADLINE_S)]  # nothing is said of a call without a name
        outcomes = [future.result(5) for future in calls]
    assert all(outcome.timed_out and isinstance(outcome.error, TimeoutError) for outcome in outcomes)
    assert all(DEADLINE_S <= outcome.seconds < 2 for outcome in outcomes)
    assert 3 * DEADLINE_S <= time.monotonic() - began < 4
    assert ["'hang' did not end" in record.getMessage() for record in caplog.records] == [True]

    barrier = threading.Barrier(4)
    together = [workers.call(barrier.wait, {}, timeout_s=5) for _ in range(4)]
    assert sorted(future.result(5).value for future in together) == [0, 1, 2, 3]

    release.set()
    assert eventually(lambda: ended == ["late"] * 9)
    assert all(outcome.value is None for outcome in outcomes)


def test_the_deadline_counts_from_the_start_of_the_run():
    pool = Workers(1)
    futures = [pool.call(lambda: time.sleep(0.15), {}, timeout_s=0.3) for _ in range(4)]
    assert not any(future.result(5).timed_out for future in futures)
    pool.close()


def test_a_late_async_function_is_answered_and_cancelled(workers: Workers, release: threading.Event):
    events: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    async def will_not_be_cancelled() -> str:
        while not release.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        events.append("ended")
        return "late"

    def begin() -> Any:  # its awaitable has the rest of the deadline
        time.sleep(0.15)
        return asyncio.sleep(0.15)

    functions: list[Any] = [hang, will_not_be_cancelled, begin]
    outcomes = [workers.call(function, {}, timeout_s=DEADLINE_S) for function in functions]
    assert [future.result(5).timed_out for future in outcomes] == [True] * 3
    assert outcomes[2].result().seconds == pytest.approx(DEADLINE_S, abs=0.1)
    assert answer(workers, double_later, x=3).value == 6
    assert eventually(lambda: events == ["cancelled"])
    release.set()
    assert eventually(lambda: events == ["cancelled", "ended"])


def test_calls_beside_an_async_function_that_blocks_the_loop_are_answered_at_their_deadlines(
    workers: Workers, release: threading.Event, caplog: pytest.LogCaptureFixture
):
    async def block() -> None:
        release.wait()

    with caplog.at_level(logging.WARNING):
        blocked = workers.call(block, {}, timeout_s=DEADLINE_S)
        functions = {"double_later": double_later, "start_double": start_double}
        waiting = [workers.call(f, {"x": 1}, timeout_s=DEADLINE_S, name=name) for name, f in functions.items()]
        assert all(future.result(5).timed_out for future in (blocked, *waiting))
    release.set()
    assert "'double_later' did not begin, since another async function blocks the event loop," in caplog.text
    assert answer(workers, double_later, x=3).value == 6


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


def test_closing_answers_open_calls_and_can_be_repeated(release: threading.Event, recwarn: pytest.WarningsRecorder):
    """The loop is blocked, so that the coroutine that a plain function returned is never awaited."""
    pool = Workers(1)

    async def block() -> None:
        release.wait()

    on_loop = pool.call(block, {}, timeout_s=60)
    between = pool.call(start_double, {"x": 1}, timeout_s=60)
    answer(pool, double, x=1)  # the only thread has finished the call before
    started = pool.call(release.wait, {}, timeout_s=60)
    queued = pool.call(double, {"x": 1}, timeout_s=60)
    began = time.monotonic()
    pool.close()
    pool.close()
    for future in (started, queued, on_loop, between):
        assert "closed" in str(future.result(0).error)
        assert not future.result(0).timed_out
    assert time.monotonic() - began < 3
    assert answer(pool, double, x=5).value == 10  # a new thread
    pool.close()
    release.set()
    time.sleep(0.1)
    del future, between
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_an_answered_call_keeps_no_arguments_alive(workers: Workers):
    class Big:
        pass

    def count() -> int:
        gc.collect()
        return sum(type(item) is Big for item in gc.get_objects())

    answer(workers, lambda item: None, 60, item=Big())
    assert eventually(lambda: count() == 0)


EXIT = """
import asyncio, threading, time
from groupgrad.concurrency.workers import Workers

def hang():
    while True:
        time.sleep(3600)

async def block():
    time.sleep(3600)

async def hang_in_thread():
    await asyncio.to_thread(hang)

workers = Workers(6)
late = [workers.call(function, {}, timeout_s=0.1) for function in (hang, hang_in_thread) for _ in range(3)]
print([future.result(5).timed_out for future in late])
running = [workers.call(function, {}, timeout_s=60) for function in (hang, block) for _ in range(3)]
time.sleep(0.1)
print("running")
"""


@pytest.mark.slow
def test_hanging_calls_do_not_keep_the_interpreter_from_ending():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", EXIT], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[True] * 6}\nrunning\n"
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 45


SUSPENDED = """
import asyncio, os, time
from groupgrad.concurrency.workers import Workers


def plain():
    os.write(1, b"begun\\n")
    for _ in range(10):
        time.sleep(0.05)
    return "answer"


async def on_loop():
    os.write(1, b"begun\\n")
    for _ in range(10):
        await asyncio.sleep(0.05)
    return "answer"


workers = Workers()
called = [workers.call(tool, {}, timeout_s=2.5) for tool in (plain, on_loop, lambda: on_loop())]
print(*(future.result().value for future in called), flush=True)
"""


@pytest.mark.slow
def test_time_in_which_the_process_is_suspended_does_not_count() -> None:
    with subprocess.Popen([sys.executable, "-c", SUSPENDED], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(3)] == ["begun\n"] * 3
        time.sleep(0.2)  # until their supervisors wait for them
        child.send_signal(signal.SIGSTOP)
        time.sleep(4.5)  # longer than the deadlines, of which the suspension takes at most a second
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "answer answer answer\n"
