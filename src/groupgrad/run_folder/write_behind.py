"""Runs writes on a thread of their own, so that a slow disk does not hold up training."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable


class WriteBehind:
    """Runs jobs one after another on a daemon thread. Where `capacity` large jobs wait, further ones are dropped.

    `on_error` gets what a job raises, on that thread.
    """

    def __init__(self, on_error: Callable[[Exception], object], *, capacity: int = 8):
        self._on_error = on_error
        self._jobs: queue.Queue[tuple[Callable[[], object], bool] | None] = queue.Queue()
        self._capacity, self._num_large = capacity, 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def put(self, job: Callable[[], object], *, is_large: bool = True) -> bool:
        """Queues `job`; False if it is dropped because the disk is too slow. A small job is never dropped."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="groupgrad-run-folder", daemon=True)
            self._thread.start()
        with self._lock:
            if is_large and self._num_large >= self._capacity:
                self.num_dropped += 1
                return False
            self._num_large += is_large
        context = contextvars.copy_context()  # a tracker's run is one of its variables
        self._jobs.put((lambda: context.run(job), is_large))
        return True

    def drain(self, timeout_s: float) -> bool:
        """Waits until all jobs are done; False if they are not after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._jobs.all_tasks_done:
            while self._jobs.unfinished_tasks:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._jobs.all_tasks_done.wait(left)
        return True

    def close(self, timeout_s: float) -> bool:
        """Does what is waiting and ends the thread; False if that takes longer than `timeout_s`."""
        if self._thread is None:
            return True
        done = self.drain(timeout_s)
        if done:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None
        return done

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, is_large = item
            with self._lock:
                self._num_large -= is_large
            try:
                job()
            except Exception as error:  # a record that is lost must not end a run
                self._on_error(error)
            finally:
                del job, item
                self._jobs.task_done()
        self._jobs.task_done()
