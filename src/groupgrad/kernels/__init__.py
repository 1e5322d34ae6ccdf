"""C++ kernels for CPUs, compiled on first use: decode steps, sampling, and parts of training passes."""

from groupgrad.kernels.compile import library, status

__all__ = ["library", "status"]
