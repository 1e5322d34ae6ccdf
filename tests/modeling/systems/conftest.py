"""Fixtures of a small policy and its batches."""

from bigram_step import policy, sample, step

__all__ = ["policy", "sample", "step"]
