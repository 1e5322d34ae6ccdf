"""Fixtures of a step over a policy small enough to see through."""

from bigram_step import policy, sample, step

__all__ = ["policy", "sample", "step"]
