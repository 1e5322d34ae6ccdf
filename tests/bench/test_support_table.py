"""The support tables: what a report of tests becomes, and that the page has every architecture and kind of adapter."""

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


ADAPTERS = """<testsuites><testsuite>
<testcase name="test_kind[LORA]"><properties><property name="merged" value="yes"/></properties></testcase>
<testcase name="test_kind[A_PROMPT]"/>
<testcase name="test_kind[NOISY]"><properties><property name="refused" value="draws noise"/></properties></testcase>
<testcase name="test_kind[PACKED]"><skipped message="needs a package"/></testcase>
<testcase name="test_kind[WRONG]"><failure message="no"/></testcase>
<testcase name="test_other"/>
</testsuite></testsuites>"""


def test_a_report_becomes_a_table_of_adapters() -> None:
    assert support_table.adapter_table(ADAPTERS).splitlines()[2:] == [
        "| A_PROMPT | yes | no: a learned prompt |",
        "| LORA | yes | yes |",
        "| NOISY | refused: it draws noise | |",
        "| PACKED | not tried: needs a package | |",
        "| WRONG | FAILED | |",
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


def test_the_page_has_every_kind_of_adapter() -> None:
    from test_adapter_kinds import MERGED, PROMPTS, REFUSED

    page = (ROOT / "docs" / "models.md").read_text()
    rows = [f"| {name} | yes | yes |" for name in MERGED if name != "ADAMSS"]
    rows += [f"| {name} | yes | no: a learned prompt |" for name in PROMPTS]
    rows += [f"| {name} | refused: it " for name in REFUSED]
    assert [row for row in (*rows, "| ADAMSS |") if row not in page] == []
