"""Ends a run that hangs: reports activities that run for long, and at a deadline writes all stacks and raises an error.

A thread looks at the activity of the training thread (`activity.py`). The error is raised in the training thread, so
that it passes through `dist.errors_on_all_ranks` and ends the other ranks too. A thread that does not react is ended
with its process. If the training thread holds the GIL but checks for signals, as a regular expression does, a CPU-time
timer raises the error instead.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from groupgrad import activity, dist
from groupgrad.activity import Hung
from groupgrad.trainer.thread_interrupt import ThreadInterrupt, write_stacks

logger = logging.getLogger(__name__)

FIRST_NOTE_S = 60.0
"""Silence after which a message says what is running; the next ones come after twice the time each."""

REACTION_S = 6.0
"""Time that the training thread has to raise the error before its process is ended."""


class Watchdog:
    """Watches the thread that enters it. `timeout_s` is the longest silence of one activity; None watches nothing.

    `step` gives the number of the optimizer step in progress, for messages. `tell` is called with the message of a hang
    before the error is raised.
    """

    def __init__(
        self,
        folder: str | Path,
        step: Callable[[], int],
        timeout_s: float | None,
        tell: Callable[[str], None] = lambda message: None,
    ):
        self._folder, self._step, self._timeout_s, self._tell = Path(folder), step, timeout_s, tell
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._interrupt = ThreadInterrupt()
        self._old_handler: Any = None
        """The earlier handler of the timer's signal; None if the timer is not used."""
        self._process = os.getpid()

    def __enter__(self) -> Watchdog:
        if self._timeout_s is None:
            return self
        self._process = os.getpid()
        self._interrupt.__enter__()
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGVTALRM"):
            self._old_handler = signal.signal(signal.SIGVTALRM, self._raise_in_frozen) or signal.SIG_DFL
        activity.sign_of_life()
        self._restart_timer()
        self._thread = threading.Thread(target=self._run, name="groupgrad-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is None:
            return
        self._closed.set()
        self._thread.join()
        if self._old_handler is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, self._old_handler)
        self._interrupt.__exit__()

    def _run(self) -> None:
        assert self._timeout_s is not None
        next_note_s = FIRST_NOTE_S
        tick_s = min(1.0, self._timeout_s / 4)
        ticked_at, computed_s = time.monotonic(), time.process_time()
        while not self._closed.wait(tick_s):
            self._restart_timer()
            now, computed = time.monotonic(), time.process_time()
            late_s = now - ticked_at - tick_s
            if late_s > self._timeout_s / 2 and computed - computed_s < late_s / 2:  # the process was suspended
                activity.sign_of_life()
            ticked_at, computed_s = now, computed
            present, silent_s = activity.present()
            if present is None or silent_s < FIRST_NOTE_S:
                next_note_s = FIRST_NOTE_S
            if present is None:
                continue
            # The rank that is waited for is the one to say what hangs.
            if silent_s >= self._timeout_s + (REACTION_S + 2 if present.what == activity.WAITING else 0):
                self._end(present, silent_s)
                continue
            if silent_s >= next_note_s:
                logger.warning("%s", self._text(present, silent_s))
                next_note_s *= 2

    def _restart_timer(self) -> None:
        """Restarts the timer, which expires if this is not called again within the timeout's CPU time."""
        if self._old_handler is not None and self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._timeout_s + REACTION_S)

    def _text(self, present: activity.Activity, silent_s: float) -> str:
        details = present.details()
        place = f"step {self._step()}, rank {dist.rank()}{f', {details}' if details else ''}"
        return f"{present.what} has run for {silent_s:.0f} s ({place})"

    def _end(self, present: activity.Activity, silent_s: float) -> None:
        """Writes the stacks, raises the error in the watched thread, and ends the process if that has no effect."""
        path = self._folder / f"hang_step_{self._step():06d}_rank_{dist.rank()}.txt"
        text = self._text(present, silent_s)
        message = (
            f"{text}, longer than hang_timeout_s={self._timeout_s:g} allows; what each thread does is in {path}. Give "
            "it a deadline of its own, or raise hang_timeout_s (None: no limit)"
        )
        self._tell(message)
        write_stacks(path, message)
        self._interrupt.throw(Hung(message))
        if not self._closed.wait(REACTION_S) and activity.present()[0] is present:
            activity.end_process(message)

    def _raise_in_frozen(self, number: int, frame: FrameType | None) -> None:
        present, silent_s = activity.present()
        if self._timeout_s is None or present is None or silent_s < self._timeout_s or os.getpid() != self._process:
            if callable(self._old_handler):
                self._old_handler(number, frame)
            return
        raise Hung(f"{self._text(present, silent_s)} without a pause in which another thread of Python could run")
