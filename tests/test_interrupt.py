"""An error is raised in a thread from outside of it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from groupgrad.interrupt import Interrupt


class Late(BaseException):
    pass


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns what the call returns. After `seconds` Late is raised in the call."""
    due = time.monotonic() + seconds
    interrupt = Interrupt(lambda: Late() if time.monotonic() >= due else None)
    timer = threading.Timer(seconds, interrupt.throw)
    try:
        try:
            interrupt.start()
            interrupt.ask_after(seconds + 0.5)
            timer.start()
            return call()
        finally:
            interrupt.end()
    finally:  # on another thread the exception may come at the first instruction of the first `end`
        interrupt.end()
        timer.cancel()


def spin() -> None:
    while True:
        pass


def on_another_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("call", [lambda: time.sleep(30), spin], ids=["waits", "computes"])
def test_a_late_call_on_the_main_thread_is_interrupted(call: Callable[[], None]):
    started = time.monotonic()
    with pytest.raises(Late):
        within(0.2, call)
    assert time.monotonic() - started < 5


def test_a_late_call_on_another_thread_is_interrupted():
    raised: list[bool] = []

    def work() -> None:
        try:
            within(0.2, spin)
        except Late:
            raised.append(True)

    on_another_thread(work)
    assert raised == [True]


TRACED = """
import contextlib, sys, threading
sys.path.insert(0, {folder!r})
from test_interrupt import Late, spin, within

def work():
    with contextlib.suppress(Late):
        within(0.2, spin)

def traced():
    return "went on"

thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.settrace(lambda frame, event, arg: None)
print(traced())
"""


def test_traced_code_goes_on_after_a_call_on_another_thread_was_late():
    """Python up to 3.12 never comes to the next line while it looks for an error that does not arrive."""
    script = TRACED.format(folder=__file__.rpartition("/")[0])
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "went on"


@pytest.mark.slow
def test_a_regular_expression_that_hangs_is_interrupted():
    with pytest.raises(Late):
        within(0.2, lambda: re.match(r"(a+)+$", "a" * 60 + "b"))


def test_handler_and_timer_are_as_before():
    """Calls that end when they are late, so that interrupts come at every instruction of the end."""
    before, answers = signal.getsignal(signal.SIGVTALRM), []

    def wait(until: float) -> None:
        while time.monotonic() < until:
            pass

    for _ in range(200):
        with contextlib.suppress(Late):
            answers.append(within(0.003, lambda: wait(time.monotonic() + 0.003)))
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_the_end_of_a_run_comes_before_that_of_a_call_in_it():
    class Ended(BaseException):
        pass

    outer = Interrupt(lambda: Ended("the run hangs") if begun.is_set() else None)
    begun = threading.Event()
    thread = threading.Timer(0.2, lambda: (begun.set(), outer.throw()))
    outer.start()
    try:
        thread.start()
        with pytest.raises(Ended, match="the run hangs"):
            within(20.0, lambda: time.sleep(30))
    finally:
        outer.end()
    with pytest.raises(Late):  # and nothing of it is left
        within(0.1, lambda: time.sleep(30))
