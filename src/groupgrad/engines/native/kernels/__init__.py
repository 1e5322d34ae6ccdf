"""The decode step in C++, compiled for the machine it runs on when it is first needed."""

from groupgrad.engines.native.kernels.build import library, status

__all__ = ["library", "status"]
