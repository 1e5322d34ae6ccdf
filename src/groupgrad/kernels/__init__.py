"""The decode step and the choice of tokens in C++, compiled for the machine they run on when they are first needed."""

from groupgrad.kernels.build import library, status

__all__ = ["library", "status"]
