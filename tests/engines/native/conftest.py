"""How many threads the kernels use."""

from thread_counts import threads

__all__ = ["threads"]
