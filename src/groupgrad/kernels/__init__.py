"""Decode steps, the choice of tokens and parts of training passes in C++, compiled when they are first needed."""

from groupgrad.kernels.compile import library, status

__all__ = ["library", "status"]
