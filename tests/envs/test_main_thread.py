"""The finding that a tool works on the main thread alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from groupgrad.envs.main_thread import MainThreadNeed, call_here

COMPLAINT = "Error: ValueError: signal only works in main thread of the main interpreter"


def test_a_repeated_call_shows_if_the_main_thread_helps(caplog: pytest.LogCaptureFixture) -> None:
    need = MainThreadNeed()
    assert not need.may_help("3", "look_up") and not need.may_help([{"type": "image"}], "look_up")
    assert need.may_help(COMPLAINT, "look_up") and not need.calls_here()
    need.learn("3", "look_up", COMPLAINT)
    need.learn("3", "look_up", COMPLAINT)
    assert need.calls_here()
    assert caplog.text.count("the tool 'look_up' works on the main thread alone") == 1
    other = MainThreadNeed()
    other.learn(COMPLAINT, "look_up", COMPLAINT)
    assert not other.may_help(COMPLAINT, "look_up") and not other.calls_here()


def test_a_page_with_the_same_words_is_a_result_like_any_other() -> None:
    page = f"How to use signals in Python. {COMPLAINT} " + "Read on in the next chapter. " * 20
    assert not MainThreadNeed().may_help(page, "read_page")


def test_a_run_on_another_thread_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    need = MainThreadNeed()
    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(need.may_help, COMPLAINT, "look_up").result() for _ in range(2)] == [False, False]
        assert not pool.submit(need.calls_here).result()
    assert caplog.text.count("set rollout_ahead=0") == 1


def test_a_call_on_this_thread_has_the_outcome_of_one_on_another() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    done = call_here(add, {"a": 1, "b": 2}, timeout_s=5, then=str, name="add")
    assert (done.value, done.error, done.timed_out) == ("3", None, False)
    for fault in (ValueError("no"), SystemExit(3)):

        def fail(error: BaseException = fault) -> None:
            raise error

        assert call_here(fail, {}, timeout_s=5, then=str, name="fail").error is fault
    late = call_here(threading.Event().wait, {}, timeout_s=0.1, then=str, name="wait")
    assert late.timed_out and late.seconds < 5

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_here(interrupted, {}, timeout_s=5, then=str, name="interrupted")
