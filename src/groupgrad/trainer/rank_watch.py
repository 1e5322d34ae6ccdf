"""Ends all ranks of a run when one fails, hangs or is killed; the others would wait for it forever.

Beside the process group each rank has a TCP connection to rank 0, which passes news on. A rank that fails outside
`dist.errors_on_all_ranks`, or that hangs, says so; a connection that ends without a message is that of a process that
was killed. Then every rank ends with an error that names rank and cause, whatever it waits for. As long as a rank works
and shows signs of life, the ranks that wait for it do not count as hanging.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from groupgrad import activity, dist
from groupgrad.activity import OtherRankFailed
from groupgrad.checkpoints.saving import checkpoints_in
from groupgrad.errors import RankError
from groupgrad.stopping import Stopped
from groupgrad.trainer.rank_links import Link, News, connect, name_of
from groupgrad.trainer.thread_interrupt import ThreadInterrupt, write_stacks
from groupgrad.trainer.watchdog import REACTION_S

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Time between two signs of life of a rank, and longest delay of a reaction."""

GRACE_S = 1.0
"""Time that this rank has to raise an error of its own, or the one that all ranks agree on, after another failed."""

CAUSE_S = 3.0
"""Time that an error of the process group waits for the news of the rank that caused it."""

EXIT_DEADLINE_S = 3.0
"""Time that the interpreter has to shut down after another rank has ended this one."""


class RankWatch:
    """Watches the other ranks while it is entered. Alone it does nothing.

    `step` gives the number of the optimizer step in progress; stacks are written to `folder`. A rank without a sign of
    life for longer than `timeout_s` hangs in a way that its own watchdog cannot see; None: no limit.
    """

    def __init__(self, folder: str | Path, step: Callable[[], int], timeout_s: float | None):
        self._folder, self._step, self._timeout_s = Path(folder), step, timeout_s
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._known = threading.Event()
        self._cause = ""
        """Why this rank has to end; empty as long as there is no reason."""
        self._throw_at = float("inf")
        self._is_leaving = False
        self._beat_at = 0.0
        self._busy_until = 0.0
        """Time until which another rank counts as working."""
        self._noted: set[type[Exception]] = set()
        self._interrupt = ThreadInterrupt()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RankWatch:
        """Collective. Connects the ranks; a warning where that fails."""
        if dist.is_active():
            self._links = connect()
        if self._links:
            self._interrupt.__enter__()
            self._thread = threading.Thread(target=self._run, name="groupgrad-rank-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Sends the other ranks how this one has ended; raises RankError where another rank caused the error."""
        if self._thread is None:
            return
        self._is_leaving = True
        is_agreed = error is None or isinstance(error, Stopped) or dist.is_agreed(error)
        if isinstance(error, RuntimeError) and not is_agreed:
            self._known.wait(CAUSE_S)
        is_caused = bool(self._cause) and isinstance(error, (OtherRankFailed, RuntimeError)) and not is_agreed
        if is_agreed or is_caused:
            self._send(News("done", dist.rank(), ""))
        else:
            self._send(News("failed", dist.rank(), f"{_own_name()} failed with {type(error).__name__}: {error}"))
        self._closed.set()
        for link in self._links:
            link.end()
        self._thread.join()
        for link in self._links:
            link.close()
        self._interrupt.__exit__()
        if is_caused:
            _has_lost.append(True)
            raise RankError(self._cause) from (None if isinstance(error, OtherRankFailed) else error)

    def tell_hang(self, message: str) -> None:
        """Makes all ranks write their stacks, and end if this one does not raise its error."""
        self._send(News("hangs", dist.rank(), f"{_own_name()} hangs: {message}"))

    def _send(self, news: News, *, but: Link | None = None) -> None:
        with self._lock:
            for link in self._links:
                if link is not but:
                    link.send(news)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link, selectors.EVENT_READ, link)
            while not self._closed.is_set():
                try:
                    self._look(selector)
                except Exception as error:  # whatever it is, the watch goes on
                    if type(error) not in self._noted:
                        self._noted.add(type(error))
                        logger.warning("the watch over the other ranks goes on after an error of it", exc_info=error)
                    self._closed.wait(TICK_S)

    def _look(self, selector: selectors.BaseSelector) -> None:
        """Waits for news, for one tick at most, and acts on them."""
        ready = selector.select(TICK_S)
        if self._closed.is_set():
            return
        now = time.monotonic()
        if now - self._beat_at > 4 * TICK_S:  # this process was suspended, or busy in C++
            for link in self._links:
                link.heard_at = now
        if now - self._beat_at >= TICK_S:
            self._beat_at = now
            self._tell_life(now)
        self._act(now)
        for link in (key.data for key, _ in ready):
            for news in link.read():
                self._learn(news, link)
            if link.is_closed:
                selector.unregister(link)
                self._learn_of_end(link)
        self._look_for_silence(now)

    def _tell_life(self, now: float) -> None:
        """Sends a sign of life, and whether a rank works that others may wait for; rank 0 passes that on."""
        present, silent_s = activity.present()
        self._send(News("lives", dist.rank(), "" if present is None else present.what))
        works = present is not None and present.what != activity.WAITING
        is_silent = self._timeout_s is not None and silent_s >= self._timeout_s
        if (works and not is_silent) or (dist.is_main() and now < self._busy_until):
            self._send(News("busy", dist.rank(), ""))

    def _learn(self, news: News, link: Link) -> None:
        if news.kind == "lives":
            link.doing = news.text
        elif news.kind == "busy":
            self._busy_until = time.monotonic() + 2 * TICK_S
            present, _ = activity.present()
            if present is not None and present.what == activity.WAITING:
                activity.sign_of_life()  # the watchdog of the rank that works says when that hangs
        elif news.kind == "done":
            link.is_done = True
        else:
            link.is_done = link.is_done or (news.kind == "failed" and news.rank == link.rank)
            self._end(news, link)

    def _learn_of_end(self, link: Link) -> None:
        if link.is_done:
            return
        doing = f" during {link.doing!r}" if link.doing else ""
        try:
            checkpoints = [path.name for path in checkpoints_in(self._folder)]
        except OSError as error:
            way_out = f"cannot be read now ({error})"
        else:
            way_out = "has no checkpoint yet, so the run begins anew"
            if checkpoints:
                way_out = f"has {checkpoints[-1]}, and resume_from_checkpoint='auto' goes on from the newest whole one"
        text = (
            f"{link.name} went away{doing} in step {self._step()}: its process was killed, perhaps since memory ran "
            f"out, or its machine is gone; its log and the system's (dmesg) say more. {self._folder} {way_out}"
        )
        self._end(News("gone", link.rank, text), link)

    def _look_for_silence(self, now: float) -> None:
        for link in self._links:
            silent_s = now - link.heard_at
            if self._timeout_s is None or link.is_done or link.is_closed or silent_s < self._timeout_s + 2 * TICK_S:
                continue
            link.is_done = True
            text = (
                f"{link.name} has shown no sign of life for {silent_s:.0f} s, longer than hang_timeout_s="
                f"{self._timeout_s:g} allows; it was last busy with {link.doing or 'nothing known'!r}. Look at its "
                "process (py-spy dump --pid), and have what keeps Python's lock there give it up"
            )
            self._end(News("silent", link.rank, text), link)

    def _end(self, news: News, link: Link) -> None:
        """Notes why this rank has to end, and passes it on if this is rank 0."""
        now = time.monotonic()
        if news.kind in ("failed", "gone", "silent"):
            self._throw_at = min(self._throw_at, now + (0.0 if news.kind == "gone" else GRACE_S))
        if not self._cause:
            self._cause = text = f"stopped because {news.text}"
            if news.kind == "hangs":
                self._throw_at = min(self._throw_at, now + REACTION_S)
            if news.kind in ("hangs", "silent"):
                path = self._folder / f"hang_step_{self._step():06d}_rank_{dist.rank()}.txt"
                present, _ = activity.present()
                here = "nothing" if present is None else f"{present.what} {present.details()}".strip()
                write_stacks(path, f"{text}\n\nMeanwhile rank {dist.rank()} was busy with: {here}")
            self._known.set()
        if dist.is_main():
            self._send(news, but=link)

    def _act(self, now: float) -> None:
        """Raises the error in the training thread; ends the process if that has no effect."""
        if self._is_leaving or now < self._throw_at:
            return
        self._interrupt.throw(OtherRankFailed(self._cause))
        end = now + REACTION_S / 2
        while time.monotonic() < end:
            if self._closed.wait(0.05) or self._is_leaving:
                self._throw_at = float("inf")
                return
        activity.end_process(self._cause)


def _own_name() -> str:
    return name_of(dist.rank(), os.getpid(), socket.gethostname())


def _end_at_exit() -> None:
    """Ends a shutdown of the interpreter in which gloo waits for ranks that never come to a collective."""
    if _has_lost:
        faulthandler.dump_traceback_later(EXIT_DEADLINE_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


_has_lost: list[bool] = []
"""Not empty once another rank has ended this one."""
atexit.register(_end_at_exit)  # here, so that it is called behind what trackers register later
