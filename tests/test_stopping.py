"""A signal ends some work at once, and lets other work finish."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext

import pytest

from groupgrad.stopping import StopRequested, finishing, interruptible, received_signals, requested


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interruptible_work_is_left_at_once() -> None:
    with received_signals(), pytest.raises(StopRequested, match="SIGINT"), interruptible():
        interrupt()
        time.sleep(20)


def test_a_second_interrupt_does_not_wait() -> None:
    with received_signals(), pytest.raises(KeyboardInterrupt), finishing(), interruptible():
        interrupt()
        interrupt()
        time.sleep(20)


@pytest.mark.parametrize("leaves_work", [True, False])
def test_a_checkpoint_and_the_work_of_sharded_ranks_are_finished(leaves_work: bool) -> None:
    with received_signals(leaves_work=leaves_work):
        with finishing() if leaves_work else nullcontext(), interruptible():
            interrupt()
            time.sleep(0.2)
        assert requested() == "SIGINT"
