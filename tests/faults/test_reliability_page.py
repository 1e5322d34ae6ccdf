"""docs/reliability.md lists the faults that the tests cause, and no others."""

from __future__ import annotations

import reliability


def test_the_page_is_that_of_the_tests():
    assert reliability.PAGE.read_text(encoding="utf-8") == reliability.page(), "run python tests/faults/reliability.py"
    assert len(reliability.rows()) >= 5
