"""Gives memory of freed CPU tensors back to the system where glibc would keep it.

PyTorch takes the memory of CPU tensors from the C library. glibc takes tensors of up to 32 MB from one heap, and
returns only the heap's end, after the last block in use. A pass over a long row frees its tensors around others that
stay, so the next pass finds gaps of other sizes, and the process grows by almost as much again. A block in a mapping of
its own is returned at once. The system then clears new pages for each tensor, which costs a pass some percent more
processor time at 4,096 and 8,192 tokens and more than that for short rows.
`large_tensors_mapped` is therefore for long rows. `return_free_memory` is for all passes of large models: between two
passes it gives the free blocks of the heap back, wherever they lie.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in glibc's `malloc.h`."""
_MEGABYTE = 2**20
_LARGE = 4 * _MEGABYTE
"""Minimum bytes of a block with a mapping of its own inside `large_tensors_mapped`."""
_MOST_LARGE = 32 * _MEGABYTE
"""Maximum of that minimum in glibc, which raises it to the size of each mapped block that is freed."""
_MUCH_FREE = 64 * _MEGABYTE
"""Free bytes of the heap from which on `return_free_memory` returns them; fewer are not worth the new pages."""


class _HeapSizes(ctypes.Structure):
    """glibc's `struct mallinfo2`. `fordblks` is the free bytes of all arenas, also those whose pages were returned."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def return_free_memory() -> None:
    """Returns the pages of the heap's free blocks to the system, if glibc counts 64 MB or more of them.

    A process has its peak in the backward pass: gradients above 32 MB get mappings of their own, and cannot use blocks
    that the forward pass has left in the heap. The call does nothing with a glibc older than 2.33, without glibc, or
    where the environment configures glibc's allocator.
    """
    library = _glibc()
    heap_sizes = getattr(library, "mallinfo2", None)
    if library is not None and heap_sizes is not None:
        heap_sizes.restype = _HeapSizes
        if heap_sizes().fordblks >= _MUCH_FREE:
            library.malloc_trim(0)


@contextmanager
def large_tensors_mapped() -> Iterator[None]:
    """Gives each tensor of 4 MB or more a mapping of its own inside the context, after it has returned the heap's gaps.

    Afterwards blocks below 32 MB come from the heap again. The setting holds for all threads and changes no number. It
    does nothing without glibc, or where the environment configures glibc's allocator.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.malloc_trim(0)
    library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        # Setting one of them ends glibc's own adjustment, which would have arrived at these.
        library.mallopt(_M_MMAP_THRESHOLD, _MOST_LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_LARGE)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library of this process; None if it is not glibc or the environment sets its allocator."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    try:
        library = ctypes.CDLL(None)
        return library if library.gnu_get_libc_version and library.mallopt and library.malloc_trim else None
    except (OSError, TypeError, AttributeError):  # no such library, or another C library
        return None
