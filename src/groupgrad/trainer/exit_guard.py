"""Prevents rewards, tools and callbacks from exiting the process as if training had ended."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_ADVICE = (
    "which would end the run in the middle without an error; raise an exception, or set "
    "control.should_training_stop in a callback"
)


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raises RuntimeError, naming the calling line, where the body of the `with` statement exits the process.

    That is by SystemExit or `os._exit`. Processes that are forked in the body exit as they would, and
    `stopping.Stopped` passes.
    """
    process, exit_at_once = os.getpid(), os._exit

    def refuse(code: int) -> NoReturn:
        if os.getpid() != process:
            exit_at_once(code)
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_name} ({caller.f_code.co_filename}:{caller.f_lineno})"
        raise RuntimeError(f"{place} called os._exit({code}), {_ADVICE}")

    os._exit = refuse
    try:
        yield
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"{last.name} ({last.filename}:{last.lineno}) raised SystemExit({error.code!r}), {_ADVICE}"
        ) from error
    finally:
        os._exit = exit_at_once
