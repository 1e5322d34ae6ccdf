"""The support table: what a report of tests becomes, and that the page in the repository has every architecture."""

from __future__ import annotations

import sys
from pathlib import Path

import support_table

ROOT = Path(__file__).parents[2]

REPORT = """<testsuites><testsuite>
<testcase name="test_training_path[a (odd-one)-dense-full]"/>
<testcase name="test_training_path[a (odd-one)-shared-full]"><skipped message="it recurs"/></testcase>
<testcase name="test_sampling_path[a (odd-one)-native-full]"><failure message="no"/></testcase>
<testcase name="test_path[b-shared-lora_all]"/>
<testcase name="test_something_else[x-dense-full]"/>
</testsuite></testsuites>"""


def test_a_report_becomes_a_table() -> None:
    lines = support_table.table(support_table.read_report(REPORT)).splitlines()
    assert lines[2:] == [
        "| a (odd-one) | all weights | yes |  | no (1) | FAILED |  |",
        "| b | LoRA, all layers |  |  | yes |  |  |",
        "",
        "1. it recurs",
    ]


def test_the_page_has_every_architecture_of_the_tests() -> None:
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "helpers")]
    try:
        from test_paths import NAMES
        from vlm_batches import NAMES as SEEING
    finally:
        del sys.path[:2]
    page = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in (*NAMES, *SEEING) if f"| {name} |" not in page] == []
    assert "FAILED" not in page
