"""The fixture that sets the number of threads of torch and the kernels."""

from thread_counts import threads

__all__ = ["threads"]
