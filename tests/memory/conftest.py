"""Fixtures of batches, and of a small policy."""

from bigram_step import policy, sample, step
from small_batches import batch_fixture, make_batch_fixture, row_logits_fixture

__all__ = ["batch_fixture", "make_batch_fixture", "policy", "row_logits_fixture", "sample", "step"]
