"""Fixtures of batches."""

from small_batches import batch_fixture, make_batch_fixture, row_logits_fixture

__all__ = ["batch_fixture", "make_batch_fixture", "row_logits_fixture"]
