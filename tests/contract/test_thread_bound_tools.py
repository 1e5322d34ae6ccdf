"""Tools and environments that work on one thread only, as scripts write them where everything runs on the main one."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from scripted_agents import call


@pytest.fixture
def train(make_agents: Any, calling: Any) -> Callable[..., dict[str, Any]]:
    """Trains two steps of eight rollouts that call a tool once; the last step's log."""

    def train(text: str, config: dict[str, Any] | None = None, /, **arguments: Any) -> dict[str, Any]:
        calling(lambda number: text)
        trainer = make_agents({"max_completion_length": 400, "max_steps": 2, **(config or {})}, **arguments)
        trainer.train()
        return [log for log in trainer.state.log_history if "reward" in log][-1]

    return train


class Ledger:
    """Keeps a connection of sqlite3, which refuses every thread but the one that made it."""

    threads: ClassVar[dict[int, set[int]]] = {}
    num_closed: ClassVar[int] = 0

    def __init__(self) -> None:
        self.rows = sqlite3.connect(":memory:")
        self.rows.execute("create table entries (amount)")
        self._note()

    def _note(self) -> None:
        Ledger.threads.setdefault(id(self), set()).add(threading.get_ident())

    def reset(self, **row: Any) -> None:
        self._note()
        self.rows.execute("delete from entries")

    def add(self, amount: int) -> int:
        """Adds an entry.

        Args:
            amount: How much.
        """
        self._note()
        self.rows.execute("insert into entries values (?)", (amount,))
        return self.rows.execute("select sum(amount) from entries").fetchone()[0]

    def get_reward(self) -> float:
        self._note()
        return float(self.rows.execute("select sum(amount) from entries").fetchone()[0])

    def close(self) -> None:
        self._note()
        self.rows.close()
        Ledger.num_closed += 1


def test_an_environment_may_keep_a_connection_that_one_thread_may_use(train: Any) -> None:
    """From its first instance's creation to its close, each environment is used on one thread, which is its own."""
    Ledger.threads, Ledger.num_closed = {}, 0
    log = train(call("add", amount=3), {"reuse_environments": True}, environment_factory=Ledger)
    assert log["rollouts/error"] == log["tools/failure_frequency"] == 0.0
    assert log["reward"] == 3.0
    assert len(Ledger.threads) == Ledger.num_closed == 8
    assert all(len(threads) == 1 for threads in Ledger.threads.values())
    assert len(set.union(*Ledger.threads.values())) == 8


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Bounds the time of a block, as many scripts do; Python allows it on the main thread alone."""

    def end(*_: Any) -> None:
        raise TimeoutError("too slow")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def look_up(number: int) -> int:
    """Looks a number up.

    Args:
        number: Which.
    """
    with alarm(5):
        return 10 * number


def look_up_text(number: int) -> str:
    """Looks a number up, and returns its own errors as text.

    Args:
        number: Which.
    """
    try:
        with alarm(5):
            return str(10 * number)
    except ValueError as error:
        return f"it went wrong: {error}"


class Shelf:
    """Counts its visits, in a method that sets an alarm first."""

    def reset(self, **row: Any) -> None:
        self.num_visits = 0

    def look_up(self, number: int) -> int:
        """Looks a number up.

        Args:
            number: Which.
        """
        with alarm(5):
            self.num_visits += 1
            return 10 * number


def found(completions: Any, **kwargs: Any) -> list[float]:
    return [float(messages[1]["content"] == "70") for messages in completions]


@pytest.mark.parametrize("tool", [look_up, look_up_text])
def test_a_tool_may_set_an_alarm(tool: Any, train: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its calls run on the main thread, which one warning says."""
    log = train(call(tool.__name__, number=7), tools=[tool], reward_funcs=found)
    assert log["reward"] == 1.0
    assert log["tools/failure_frequency"] == 0.0
    (warning,) = [r.getMessage() for r in caplog.records if "main thread" in r.getMessage()]
    assert warning.startswith(f"the tool '{tool.__name__}' works on the main thread alone (")
    assert "tool_timeout_s" in warning


def test_a_method_of_an_environment_may_set_an_alarm(train: Any) -> None:
    visits: list[int] = []

    def visited(environments: Any, completions: Any, **kwargs: Any) -> list[float]:
        visits.extend(environment.num_visits for environment in environments)
        return found(completions)

    log = train(call("look_up", number=7), environment_factory=Shelf, reward_funcs=visited)
    assert log["reward"] == 1.0
    assert visits == [1] * 16


def test_a_tool_that_fails_on_the_main_thread_too_is_repeated_once(train: Any) -> None:
    """The words of the error may be about something else, such as code of the model that a tool runs."""
    threads: list[bool] = []

    def run_code(number: int) -> str:
        """Runs code.

        Args:
            number: Which.
        """
        threads.append(threading.current_thread() is threading.main_thread())
        return "ValueError: signal only works in main thread of the main interpreter"

    log = train(call("run_code", number=7), tools=[run_code], reward_funcs=found)
    assert log["reward"] == 0.0
    assert threads.count(True) == 1
    assert threads.count(False) == 16
