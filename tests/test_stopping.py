"""A signal ends some work at once, lets other work finish, and gives a third kind a limited time."""

from __future__ import annotations

import os
import signal
import time

import pytest

from groupgrad.stopping import StopRequested, finishing, interruptible, received_signals, requested


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interruptible_work_is_left_at_once() -> None:
    with received_signals(), pytest.raises(StopRequested, match="SIGINT"), interruptible():
        interrupt()
        time.sleep(20)


@pytest.mark.fault(
    "a signal comes while weights are pushed to a vLLM server that hangs",
    "the push is left ten seconds after the signal, and the last whole step is saved; where ranks hold parts of the "
    "model (ZeRO-3, FSDP) the push is waited for, `vllm_server_timeout` at most",
    "the step in progress",
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_work_that_hangs_is_left_within_its_seconds(name: str) -> None:
    with received_signals():
        began = time.monotonic()
        with pytest.raises(StopRequested, match=name), finishing(within_s=0.3), interruptible():
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(20)
        assert 0.3 <= time.monotonic() - began < 10.0


def test_a_signal_that_came_before_bounds_the_work_too() -> None:
    with received_signals():
        interrupt()
        with pytest.raises(StopRequested), finishing(within_s=0.3), interruptible():
            time.sleep(20)


def test_parts_that_are_not_interruptible_are_finished() -> None:
    with received_signals():
        with finishing(within_s=0.1):
            interrupt()
            time.sleep(0.5)
        assert requested() == "SIGINT"


def test_work_that_ends_in_time_is_not_left() -> None:
    with received_signals():
        with finishing(within_s=0.3), interruptible():
            interrupt()
        time.sleep(0.6)  # the seconds are over, and nothing comes any more
        assert requested() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            interrupt()
            time.sleep(20)


def test_a_second_interrupt_does_not_wait() -> None:
    with received_signals(), pytest.raises(KeyboardInterrupt), finishing(within_s=15.0), interruptible():
        interrupt()
        interrupt()
        time.sleep(20)


@pytest.mark.parametrize("leaves_work", [True, False])
def test_a_checkpoint_and_the_work_of_sharded_ranks_are_finished(leaves_work: bool) -> None:
    patience = {} if leaves_work else {"within_s": 0.1}
    with received_signals(leaves_work=leaves_work):
        with finishing(**patience), interruptible():
            interrupt()
            time.sleep(0.5)
        assert requested() == "SIGINT"
