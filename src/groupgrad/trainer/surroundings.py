"""Contexts that `train` enters: the run's folder, the terminal, and the watches that end hung or abandoned runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from groupgrad import dist
from groupgrad.activity import doing
from groupgrad.run_folder.progress import ProgressCallback, bars_on_terminals_only
from groupgrad.run_folder.run_lock import locked
from groupgrad.trainer.launcher_watch import LauncherWatch
from groupgrad.trainer.rank_watch import RankWatch
from groupgrad.trainer.watchdog import Watchdog


@contextmanager
def shown(progress: ProgressCallback) -> Iterator[None]:
    """The bar of a training, which an error or an interrupt takes off the terminal; no other bars in files."""
    with progress, bars_on_terminals_only():
        yield


@contextmanager
def in_run_folder(trainer: Any) -> Iterator[None]:
    """Collective at its start. The run's folder by a whole path, locked by the main process, with its record.

    The path is whole since a reward function or a tool may change the folder that relative paths belong to.
    """
    given = trainer.args.output_dir
    trainer.args.output_dir = os.path.join(trainer._start_folder, str(given))
    try:
        with ExitStack() as stack:
            with dist.errors_on_all_ranks():
                if dist.is_main():
                    stack.enter_context(locked(trainer._get_output_dir(trainer.trial)))
            stack.enter_context(trainer.recorder)
            yield
    finally:
        trainer.args.output_dir = given


@contextmanager
def watched(folder: str, step: Callable[[], int], timeout_s: float | None) -> Iterator[None]:
    """Collective at its start. Ends a training that hangs, whose launcher was killed, or whose other ranks have ended.

    `step` gives the number of the optimizer step in progress; stacks are written to `folder`.
    """
    with (
        LauncherWatch(),
        RankWatch(folder, step, timeout_s) as ranks,
        Watchdog(folder, step, timeout_s, tell=ranks.tell_hang),
        doing("the training loop"),
    ):
        yield
