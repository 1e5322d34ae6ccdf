"""The driver runs rollouts side by side over one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.rollout import driver
from groupgrad.rollout.driver import Abandoned, Driver, sample_turn, wait_for


class ScriptedSession:
    """Ends each request after `max_new_tokens` advances; a sample repeats the prompt's last id."""

    def __init__(self, advance_s: float = 0.0):
        self.log: list[Any] = []
        self._open: dict[int, list[Any]] = {}
        self._count = 0
        self._advance_s = advance_s

    def submit(self, request: Request) -> int:
        ticket, self._count = self._count, self._count + 1
        self._open[ticket] = [request, request.max_new_tokens]
        self.log.append(("submit", ticket, list(request.prompt_ids), request.continues))
        return ticket

    def advance(self) -> list[tuple[int, Sample]]:
        time.sleep(self._advance_s)
        self.log.append(("advance", sorted(self._open)))
        ended = []
        for ticket, entry in sorted(self._open.items()):
            entry[1] -= 1
            if not entry[1]:
                request = entry[0]
                ended.append((ticket, Sample([request.prompt_ids[-1]] * request.max_new_tokens, "eos")))
        for ticket, _ in ended:
            del self._open[ticket]
        return ended

    @property
    def num_open(self) -> int:
        return len(self._open)

    def release(self, ticket: int) -> None:
        self.log.append(("release", ticket))

    def abort(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self.log.append(("abort", ticket))
            del self._open[ticket]


def finished(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def later(value: Any, seconds: float) -> Future[Any]:
    future: Future[Any] = Future()
    threading.Timer(seconds, future.set_result, [value]).start()
    return future


def test_turns_of_several_rollouts_are_sampled_together():
    async def rollout(number: int) -> list[int]:
        ticket, first = await sample_turn(Request([number], seed=0, max_new_tokens=1 + number))
        _, second = await sample_turn(Request([number, 9], seed=0, max_new_tokens=1, continues=ticket))
        return first.ids + second.ids

    session = ScriptedSession()
    assert Driver(session, [rollout(0), rollout(1)]).run() == [[0, 9], [1, 1, 9]]
    assert session.log == [
        ("submit", 0, [0], None),
        ("submit", 1, [1], None),
        ("advance", [0, 1]),
        ("submit", 2, [0, 9], 0),
        ("advance", [1, 2]),
        ("submit", 3, [1, 9], 1),
        ("release", 2),
        ("advance", [3]),
        ("release", 3),
    ]
    assert Driver(ScriptedSession(), []).run() == []


def test_while_one_waits_the_others_are_sampled():
    answer: Future[str] = Future()

    async def waits() -> Any:
        return (await wait_for([answer, finished("b")])).results

    async def samples() -> int:
        for turn in range(5):
            await sample_turn(Request([turn], seed=0, max_new_tokens=1))
        answer.set_result("a")
        return 5

    assert Driver(ScriptedSession(), [waits(), samples()]).run() == [["a", "b"], 5]


def test_a_turn_that_nobody_waits_for_is_sampled_no_further():
    """The other one goes on; a rollout may sample again; an answer that is done in time aborts nothing."""
    answers: list[Future[str]] = [Future(), Future()]

    async def gives_up() -> str:
        try:
            await sample_turn(Request([1], seed=0, max_new_tokens=9), answers[0])
        except Abandoned:
            return str(len((await sample_turn(Request([2], seed=0, max_new_tokens=2)))[1].ids))
        return "sampled"

    async def goes_on() -> str:
        await sample_turn(Request([3], seed=0, max_new_tokens=1), answers[1])
        answers[1].set_result("a")
        answers[0].cancel()
        await sample_turn(Request([4], seed=0, max_new_tokens=2))
        return "on"

    session = ScriptedSession()
    assert Driver(session, [gives_up(), goes_on()]).run() == ["2", "on"]
    assert [entry[1] for entry in session.log if entry[0] == "abort"] == [0]
    assert [entry[1] for entry in session.log if entry[0] == "advance"] == [[0, 1], [2, 3], [2, 3]]


def test_what_is_kept_of_a_turn_that_the_next_one_does_not_continue_is_released():
    async def rollout() -> None:
        ticket, _ = await sample_turn(Request([1], seed=0, max_new_tokens=1))
        await sample_turn(Request([1, 1, 2], seed=0, max_new_tokens=1, continues=ticket))
        await sample_turn(Request([3], seed=0, max_new_tokens=1))

    session = ScriptedSession()
    Driver(session, [rollout()]).run()
    assert [entry[1] for entry in session.log if entry[0] == "release"] == [1, 2]


class Awaited(Future[Any]):
    """Done some seconds after somebody began to wait for it, so that no wait is shorter."""

    def __init__(self, seconds: float):
        super().__init__()
        self._timer = threading.Timer(seconds, self.set_result, [None])

    def add_done_callback(self, fn: Any) -> None:
        super().add_done_callback(fn)
        self._timer.start()


def test_waiting_and_the_engines_work_meanwhile_are_measured():
    async def waits() -> Any:
        return await wait_for([Awaited(0.6)])

    async def samples() -> Any:
        return await sample_turn(Request([1], seed=0, max_new_tokens=8))

    hidden = Driver(ScriptedSession(advance_s=0.15), [waits(), samples()]).run()[0]
    assert 0.6 <= hidden.seconds < 1.2
    assert hidden.hidden_s > 0.8 * hidden.seconds
    (alone,) = Driver(ScriptedSession(), [waits()]).run()
    assert 0.6 <= alone.seconds < 1.2
    assert alone.hidden_s < 0.01


def test_work_of_the_engine_before_a_wait_hides_none_of_it():
    async def samples_and_waits() -> Any:
        await sample_turn(Request([1], seed=0, max_new_tokens=2))
        return await wait_for([Awaited(0.2)])

    (wait,) = Driver(ScriptedSession(advance_s=0.1), [samples_and_waits()]).run()
    assert wait.seconds >= 0.2
    assert wait.hidden_s < 0.01


def test_many_futures_on_many_threads_wake_each_rollout_once():
    """Results are in the order of the futures, which may be done already."""

    async def rollout(number: int) -> Any:
        results = [(await wait_for([])).results, (await wait_for([later("slow", 0.05), finished("fast")])).results]
        for _ in range(3):
            results.append((await wait_for([later(number, 0.01) for _ in range(8)])).results)
        return results

    found = Driver(ScriptedSession(), [rollout(i) for i in range(8)]).run()
    assert found == [[[], ["slow", "fast"], *[[i] * 8] * 3] for i in range(8)]


def test_an_error_closes_the_other_rollouts():
    closed: list[int] = []

    async def waits(number: int) -> None:
        try:
            await wait_for([Future()])
        finally:
            closed.append(number)

    async def fails() -> None:
        await sample_turn(Request([1], seed=0, max_new_tokens=1))
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Driver(ScriptedSession(), [waits(0), fails(), waits(2)]).run()
    assert closed == [0, 2]


class SlowEngine(BatchEngine):
    """Takes `call_s` a call, whatever its rows; `calls` has the first ids of the rows of each."""

    def __init__(self, call_s: float):
        self.call_s, self.calls = call_s, []

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        time.sleep(self.call_s)
        self.calls.append([request.prompt_ids[0] for request in requests])
        return [Sample([1], "eos") for _ in requests]


@pytest.mark.parametrize(
    ("call_s", "least_s", "tools_s", "expected"),
    [
        (0.0, 1.5, [0.0, 0.1, 0.0, 0.2], [[0, 1, 2, 3], [0, 1, 2, 3]]),  # threads take a moment to answer
        (1.0, 0.1, [0.0, 0.4, 0.0, 0.2], [[0, 1, 2, 3], [0, 1, 2, 3]]),  # a call takes longer than waiting
        (0.0, 0.5, [0.0, 1.5, 0.0, 0.0], [[0, 1, 2, 3], [0, 2, 3], [1]]),  # a slow tool keeps nobody
    ],
)
def test_a_whole_batch_waits_for_tools_that_take_less_than_a_call(
    monkeypatch: Any, call_s: float, least_s: float, tools_s: list[float], expected: list[list[int]]
) -> None:
    monkeypatch.setattr(driver, "LEAST_PATIENCE_S", least_s)

    async def rollout(number: int) -> None:
        await sample_turn(Request([number], seed=0, max_new_tokens=1))
        await wait_for([later(None, tools_s[number])])
        await sample_turn(Request([number], seed=0, max_new_tokens=1))
        await wait_for([later(None, 0.3)], quick_s=0.0)

    engine = SlowEngine(call_s)
    with engine.session(SamplingOptions(1)) as session:
        Driver(session, [rollout(number) for number in range(4)]).run()
    assert [sorted(rows) for rows in engine.calls] == expected


def test_a_rollout_that_ends_is_not_waited_for() -> None:
    """Another's last wait, for a reward, takes as long as it likes."""

    async def ends() -> None:
        await wait_for([later(None, 2.0)], quick_s=0.0)
        ended.append("the wait")

    async def samples() -> None:
        for _ in range(2):
            await sample_turn(Request([1], seed=0, max_new_tokens=1))
        ended.append("a rollout")

    ended: list[str] = []
    engine = SlowEngine(0.5)
    with engine.session(SamplingOptions(1)) as session:
        Driver(session, [ends(), samples(), samples()]).run()
    assert engine.calls == [[1, 1], [1, 1]] and ended == ["a rollout", "a rollout", "the wait"]
