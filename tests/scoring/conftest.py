"""Fixtures of batches, and of what prompts begin with alike."""

import pytest
from small_batches import batch_fixture, make_batch_fixture, row_logits_fixture

from groupgrad.scoring import beginnings

__all__ = ["batch_fixture", "make_batch_fixture", "row_logits_fixture"]


@pytest.fixture
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token that prompts begin with alike is computed once."""
    monkeypatch.setattr(beginnings, "LEAST_SHARED", 1)
