"""Ends a run that hangs, that has lost a rank, or whose launcher was killed; the other ranks would wait forever.

One thread beside the training thread looks twice a second:

    what it sees                                       what it does
    no sign of life here for `hang_timeout_s`          all ranks write their stacks; Hung in the training thread
    a rank that fails, hangs, or whose process ends    OtherRankFailed in the training thread
    no word of a rank for `hang_timeout_s`             the same: something keeps Python's lock there
    the launcher has ended                             SIGTERM to this process, which stops after a checkpoint

Hung passes through `dist.errors_on_all_ranks`, so it reaches the other ranks as any error does. If the training thread
does not react to its error within seconds, the process ends with code 70. As long as a rank works and shows signs of
life (`activity.py`), the ranks that wait for it do not count as hanging. `faulthandler.dump_traceback_later(exit=True)`
cannot take the place of this thread: it also counts time in which a scheduler suspends the process, which it would end
as soon as that goes on.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from groupgrad import activity, dist
from groupgrad.activity import Activity, Hung, OtherRankFailed
from groupgrad.checkpoints.saving import checkpoints_in
from groupgrad.errors import RankError
from groupgrad.interrupt import Interrupt
from groupgrad.stopping import Stopped
from groupgrad.trainer.rank_links import Link, News, RankLinks, rank_name

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Time between two looks, and longest delay of a reaction."""

FIRST_NOTE_S = 60.0
"""Silence after which a message says what is running; the next ones come after twice the time each."""

REACTION_S = 6.0
"""Time that the training thread has to raise the error of its hang before its process is ended."""

GRACE_S = 1.0
"""Time that this rank has to raise an error of its own, or the one that all ranks agree on, after another failed."""

CAUSE_S = 3.0
"""Time that an error of the process group waits for the news of the rank that caused it."""

EXIT_DEADLINE_S = 3.0
"""Time that the interpreter has to shut down after another rank has ended this one."""

_MARK = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun and `accelerate launch` give to the processes that they start."""


@dataclass(eq=False)
class _End:
    """An error for the training thread, and the end of the process where that has no effect."""

    error: BaseException
    raise_at: float
    reaction_s: float
    hung: Activity | None = None
    """The process ends only if the thread is still in this activity; None: whatever it does."""
    exit_at: float = math.inf


class Watch:
    """Watches the training thread, which enters it, the other ranks and the launcher.

    `what` names the activity around those inside, and `step` gives the number of the optimizer step in progress, both
    for messages; stacks are written to `folder`. `timeout_s` is the longest silence of an activity or of another rank;
    None: no limit.
    """

    def __init__(self, what: str, folder: str | Path, step: Callable[[], int], timeout_s: float | None):
        self._activity = activity.doing(what)
        self._folder, self._step, self._timeout_s = Path(folder), step, timeout_s
        self._ends: list[_End] = []
        self._cause: _End | None = None
        """The end that another rank is the cause of."""
        self._cause_is_known = threading.Event()
        self._error: BaseException | None = None
        """The error that the training thread raises next."""
        self._interrupt = Interrupt(self._due)
        self._is_leaving = False
        self._closed = threading.Event()
        self._ticked_at, self._computed_s = 0.0, 0.0
        self._others_work_until = 0.0
        self._next_note_s = FIRST_NOTE_S
        self._noted: set[type[Exception]] = set()

    def __enter__(self) -> Watch:
        """Collective. Connects the ranks; a warning where that fails."""
        self._links, self._launcher = RankLinks(), launcher()
        self._activity.__enter__()
        self._ticked_at, self._computed_s = time.monotonic(), time.process_time()
        self._interrupt.start()
        self._postpone_timer()
        self._thread = threading.Thread(target=self._run, name="groupgrad-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Sends the other ranks how this one has ended; raises RankError where another rank caused the error."""
        self._activity.__exit__(kind, error, traceback)
        self._is_leaving = True
        self._interrupt.end()
        is_agreed = error is None or isinstance(error, Stopped) or dist.is_agreed(error)
        if dist.is_active() and isinstance(error, RuntimeError) and not is_agreed:
            self._cause_is_known.wait(CAUSE_S)
        cause = self._cause if isinstance(error, (OtherRankFailed, RuntimeError)) and not is_agreed else None
        if is_agreed or cause is not None:
            self._tell("done", "")
        else:
            self._tell("failed", f"{rank_name()} failed with {type(error).__name__}: {error}")
        self._closed.set()
        self._links.close(self._thread)
        if cause is not None:
            _has_lost.append(True)
            raise RankError(str(cause.error)) from (None if isinstance(error, OtherRankFailed) else error)

    def _tell(self, kind: str, text: str) -> None:
        self._links.send(News(kind, dist.rank(), text))

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # whatever it is, the watch goes on
                if type(error) not in self._noted:
                    self._noted.add(type(error))
                    logger.warning("the watch over this run goes on after an error of it", exc_info=error)
                self._closed.wait(TICK_S)

    def _look(self) -> None:
        """Waits for news, for one tick at most, and acts on what it sees."""
        left_s = max(self._ticked_at + TICK_S - time.monotonic(), 0.0)
        if self._links.is_open:
            received = self._links.receive(left_s)
        else:
            received = []
            self._closed.wait(left_s)
        if self._closed.is_set():
            return
        for link, news in received:
            self._learn(link, news)
        now = time.monotonic()
        if now - self._ticked_at < TICK_S:
            return
        self._forgive_pause(now)
        self._postpone_timer()
        if self._timeout_s is not None:
            self._look_for_hang(now, self._timeout_s)
        self._carry_out(now)
        self._tell_life(now)
        if self._launcher is not None and os.getppid() != self._launcher:  # another process has adopted this one
            logger.warning("the launcher of this process (pid %d) was killed, so the run stops", self._launcher)
            self._launcher = None
            os.kill(os.getpid(), signal.SIGTERM)
        if self._timeout_s is not None:
            self._look_for_silence(now, self._timeout_s)

    def _postpone_timer(self) -> None:
        """Has the timer expire if something keeps this thread from running for too long."""
        if self._timeout_s is not None:
            self._interrupt.ask_after(self._timeout_s + 1.0)

    def _forgive_pause(self, now: float) -> None:
        """Counts no silence while this thread could not run, since the process was suspended or busy in C++."""
        late_s, computed = now - self._ticked_at - TICK_S, time.process_time()
        if late_s > 3 * TICK_S:
            for link in self._links:
                link.heard_at = now
        if self._timeout_s is not None and late_s > self._timeout_s / 2 and computed - self._computed_s < late_s / 2:
            activity.sign_of_life()  # it was suspended
        self._ticked_at, self._computed_s = now, computed

    # ----------------------------------------------------------------------------------------------- this rank

    def _look_for_hang(self, now: float, timeout_s: float) -> None:
        """Notes what runs for long, and ends what has shown no sign of life for too long."""
        present, silent_s = activity.present()
        if present is None or silent_s < FIRST_NOTE_S:
            self._next_note_s = FIRST_NOTE_S
        if present is None or self._is_leaving or any(end.hung is present for end in self._ends):
            return
        # The rank that is waited for is the one to say what hangs.
        if silent_s >= timeout_s + (REACTION_S + 2 if present.what == activity.WAITING else 0):
            message = (
                f"{self._text(present, silent_s)}, longer than hang_timeout_s={timeout_s:g} allows; what each thread "
                f"does is in {self._stacks_path()}. Give it a deadline of its own, or raise hang_timeout_s (None: no "
                "limit)"
            )
            self._tell("hangs", f"{rank_name()} hangs: {message}")
            self._write_stacks(message)
            self._ends.append(_End(Hung(message), now, REACTION_S, hung=present))
        elif silent_s >= self._next_note_s:
            logger.warning("%s", self._text(present, silent_s))
            self._next_note_s *= 2

    def _text(self, present: Activity, silent_s: float) -> str:
        details = present.details()
        place = f"step {self._step()}, rank {dist.rank()}{f', {details}' if details else ''}"
        return f"{present.what} has run for {silent_s:.0f} s ({place})"

    def _stacks_path(self) -> Path:
        return self._folder / f"hang_step_{self._step():06d}_rank_{dist.rank()}.txt"

    def _write_stacks(self, message: str) -> None:
        """Writes a message and the Python stacks of all threads, of those inside C++ too. A warning if it cannot."""
        path = self._stacks_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(f"{message}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)

    def _carry_out(self, now: float) -> None:
        """Raises the errors that are due in the training thread; ends the process if that had no effect."""
        for end in [] if self._is_leaving else list(self._ends):
            if now >= end.raise_at:
                end.raise_at, end.exit_at = math.inf, now + end.reaction_s
                self._error = end.error
                self._interrupt.throw()
            elif now >= end.exit_at:
                self._ends.remove(end)
                if end.hung is None or activity.present()[0] is end.hung:
                    activity.end_process(str(end.error))

    def _due(self) -> BaseException | None:
        """The error that the training thread is to raise; one of its own if it keeps this thread from running."""
        error, self._error = self._error, None
        present, silent_s = activity.present()
        if error is not None or self._timeout_s is None or present is None or silent_s < self._timeout_s:
            return error
        if time.process_time() - self._computed_s < self._timeout_s:
            return None
        return Hung(f"{self._text(present, silent_s)} without a pause in which another thread of Python could run")

    # --------------------------------------------------------------------------------------------- other ranks

    def _tell_life(self, now: float) -> None:
        """Sends a sign of life, and whether a rank works that others may wait for; rank 0 passes that on."""
        present, silent_s = activity.present()
        works = present is not None and present.what != activity.WAITING
        is_silent = self._timeout_s is not None and silent_s >= self._timeout_s
        works = (works and not is_silent) or (dist.is_main() and now < self._others_work_until)
        self._tell("works" if works else "waits", "" if present is None else present.what)

    def _learn(self, link: Link, news: News | None) -> None:
        if news is None:
            if not link.is_done:
                self._blame(link, News("gone", link.rank, self._loss_of(link)))
        elif news.kind in ("works", "waits"):
            link.doing = news.text
            if news.kind == "works":
                self._others_work_until = time.monotonic() + 3 * TICK_S
                present, _ = activity.present()
                if present is not None and present.what == activity.WAITING:
                    activity.sign_of_life()  # the rank that works says itself when it hangs
        elif news.kind == "done":
            link.is_done = True
        else:
            link.is_done = link.is_done or (news.kind == "failed" and news.rank == link.rank)
            self._blame(link, news)

    def _loss_of(self, link: Link) -> str:
        doing = f" during {link.doing!r}" if link.doing else ""
        try:
            checkpoints = [path.name for path in checkpoints_in(self._folder)]
        except OSError as error:
            way_out = f"cannot be read now ({error})"
        else:
            way_out = "has no checkpoint yet, so the run begins anew"
            if checkpoints:
                way_out = f"has {checkpoints[-1]}, and resume_from_checkpoint='auto' goes on from the newest whole one"
        return (
            f"{link.name} went away{doing} in step {self._step()}: its process was killed, perhaps since memory ran "
            f"out, or its machine is gone; its log and the system's (dmesg) say more. {self._folder} {way_out}"
        )

    def _look_for_silence(self, now: float, timeout_s: float) -> None:
        for link in self._links:
            silent_s = now - link.heard_at
            if not link.is_done and silent_s >= timeout_s + 2 * TICK_S:
                link.is_done = True
                text = (
                    f"{link.name} has shown no sign of life for {silent_s:.0f} s, longer than hang_timeout_s="
                    f"{timeout_s:g} allows; it was last busy with {link.doing or 'nothing known'!r}. Look at its "
                    "process (py-spy dump --pid), and have what keeps Python's lock there give it up"
                )
                self._blame(link, News("silent", link.rank, text))

    def _blame(self, link: Link, news: News) -> None:
        """Notes why this rank has to end, and passes it on if this is rank 0."""
        # A rank that hangs first has its time to raise the error, which all ranks may then agree on, or to end.
        delay_s = {"gone": 0.0, "hangs": REACTION_S + 2 * TICK_S}.get(news.kind, GRACE_S)
        raise_at = time.monotonic() + delay_s
        if self._cause is None:
            text = f"stopped because {news.text}"
            self._cause = _End(OtherRankFailed(text), raise_at, REACTION_S / 2)
            self._ends.append(self._cause)
            if news.kind in ("hangs", "silent"):
                present, _ = activity.present()
                here = "nothing" if present is None else f"{present.what} {present.details()}".strip()
                self._write_stacks(f"{text}\n\nMeanwhile rank {dist.rank()} was busy with: {here}")
            self._cause_is_known.set()
        elif self._cause.exit_at == math.inf:
            self._cause.raise_at = min(self._cause.raise_at, raise_at)
        if dist.is_main():
            self._links.send(news, but=link)


def launcher() -> int | None:
    """The pid of the process that started this one and other ranks: torchrun, or a parent that uses `multiprocessing`.

    A process started by a shell, a notebook or a scheduler has no launcher, so it may outlive its parent (nohup,
    disown).
    """
    return os.getppid() if _MARK in os.environ or multiprocessing.parent_process() is not None else None


def _end_at_exit() -> None:
    """Ends a shutdown of the interpreter in which gloo waits for ranks that never come to a collective."""
    if _has_lost:
        faulthandler.dump_traceback_later(EXIT_DEADLINE_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


_has_lost: list[bool] = []
"""Not empty once another rank has ended this one."""
atexit.register(_end_at_exit)  # here, so that it is called behind what trackers register later
