"""Prevents rewards, tools and callbacks from ending a script as if training had ended."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raises RuntimeError, naming the line, where the body of the `with` statement raises SystemExit.

    `stopping.Stopped`, with which a signal ends training, is raised outside of the body.
    """
    try:
        yield
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"{last.name} ({last.filename}:{last.lineno}) raised SystemExit({error.code!r}), which would end the run "
            "in the middle without an error; raise an exception, or set control.should_training_stop in a callback"
        ) from error
