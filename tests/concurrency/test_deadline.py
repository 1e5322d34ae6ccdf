"""A call of this thread is interrupted at its deadline."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from groupgrad.concurrency.deadline import DeadlinePassed, call_within
from groupgrad.interrupt import Interrupt


def spin():
    while True:
        pass


def run(work, on_main_thread, seconds):
    """Runs a function on this thread or on another one, which ends within these seconds."""
    if on_main_thread:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(seconds)
        assert not thread.is_alive()


@pytest.mark.parametrize("call", [lambda: time.sleep(30), spin], ids=["waits", "computes"])
@pytest.mark.parametrize("on_main_thread", [True, False])
def test_a_late_call_is_interrupted(call, on_main_thread):
    if call is not spin and not on_main_thread:
        pytest.skip("another thread that waits is interrupted when it returns to Python")
    raised, started = [], time.monotonic()

    def work():
        try:
            call_within(0.2, call, "late")
        except DeadlinePassed:
            raised.append(time.monotonic() - started)

    run(work, on_main_thread, 20)
    assert 0.1 < raised[0] < 5


TRACED = """
import contextlib, sys, threading
from groupgrad.concurrency.deadline import DeadlinePassed, call_within

def spin():
    while True:
        pass

def work():
    call_within(30, list, "in time")
    with contextlib.suppress(DeadlinePassed):
        call_within(0.2, spin, "late")

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
    ran = subprocess.run([sys.executable, "-c", TRACED], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "went on"


@pytest.mark.slow
def test_a_regular_expression_that_hangs_is_interrupted():
    with pytest.raises(DeadlinePassed):
        call_within(0.2, lambda: re.match(r"(a+)+$", "a" * 60 + "b"), "late")


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_handlers_and_threads_are_as_before(on_main_thread):
    """Calls that end at their deadline, so that interrupts come at every instruction of the end."""
    before = signal.getsignal(signal.SIGVTALRM)
    num_threads, late, answers = threading.active_count(), [], []

    def work():
        for _ in range(300):
            try:
                until = time.monotonic() + 0.003
                answers.append(call_within(0.003, lambda until=until: wait(until), "late"))
            except DeadlinePassed:
                late.append(True)

    def wait(until):
        while time.monotonic() < until:
            pass
        return "answer"

    run(work, on_main_thread, 60)
    assert len(answers) + len(late) == 300
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    ends_at = time.monotonic() + 10.0
    while threading.active_count() > num_threads and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert threading.active_count() <= num_threads


@pytest.mark.parametrize("method", ["start", "end"])
def test_an_interrupt_of_the_start_or_the_end_keeps_neither_from_its_work(method, monkeypatch):
    original = getattr(Interrupt, method)

    def slow(self):
        original(self) if method == "start" else None
        time.sleep(0.1)  # the deadline passes here
        original(self) if method == "end" else None

    monkeypatch.setattr(Interrupt, method, slow)
    before = signal.getsignal(signal.SIGVTALRM)
    with contextlib.suppress(DeadlinePassed):
        call_within(0.05, lambda: None, "late")
    assert signal.getsignal(signal.SIGVTALRM) is before


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
            call_within(20.0, lambda: time.sleep(30), "late")
    finally:
        outer.end()
    with pytest.raises(DeadlinePassed):  # and nothing of it is left
        call_within(0.1, lambda: time.sleep(30), "late")


STUBBORN = """
import time
from groupgrad.concurrency import deadline
deadline.REACTION_S = 0.5


def stubborn():
    while True:
        try:
            time.sleep(30)
        except BaseException:
            pass


deadline.call_within(0.2, stubborn, "the reward function 'f' took too long")
"""


def test_a_call_that_does_not_react_ends_the_process_with_a_message():
    out = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=30, check=False)
    assert out.returncode == 70
    assert out.stderr == "groupgrad: error: the reward function 'f' took too long\n"
