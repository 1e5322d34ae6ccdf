"""Makes garbage collections that libraries request skip the objects that existed before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def existing_objects_skipped() -> Iterator[None]:
    """Garbage collections inside skip the objects that exist at the start, which takes a second off a large process.

    Where objects have been frozen already (`gc.freeze`) nothing changes: they could not be told apart at the end.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
