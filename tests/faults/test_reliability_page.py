"""Each fault of docs/reliability.md has a test that causes it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_names_a_test_that_is_there():
    rows = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").partition("## Faults\n")[2].splitlines()[3:]
    assert len(rows) > 50 and len(set(rows)) == len(rows)
    for row in rows:
        found = re.fullmatch(r"\| .+ \| .+ \| .+ \| `(tests/\S+\.py)::(test_\w+)` \|", row)
        assert found is not None, row
        assert f"def {found[2]}(" in (ROOT / found[1]).read_text(encoding="utf-8"), row
