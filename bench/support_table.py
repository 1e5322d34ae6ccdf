"""Writes the two support tables of docs/models.md from test results: `python bench/support_table.py`.

`TESTS` compare every path of every architecture with plain calls of the model. A cell is yes (passed), no with a number
(skipped, with the reason below the table), or FAILED. `ADAPTER_TESTS` train every kind of adapter that peft has.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- {} table: begin -->", "<!-- {} table: end -->"
TESTS = (
    "tests/support/test_paths.py",
    "tests/scoring/test_vlm.py::test_path",
    "tests/engines/native/test_vision.py::test_path",
)
ADAPTER_TESTS = ("tests/trainer/test_adapter_kinds.py::test_kind",)
PATHS = {
    "dense": "training, dense",
    "packed": "training, packed",
    "shared": "training, shared",
    "native": "sampling, native",
    "transformers": "sampling, generate",
}
"""Columns, by the path's name in a test's id."""
ADAPTERS = ("full", "lora", "lora_text", "lora_all")

Results = dict[tuple[str, str, str], str]
"""Outcome of each architecture, adapter and path: "" for passed, "FAILED", or the reason of a skip."""


def run_tests(tests: tuple[str, ...]) -> str:
    """The JUnit report of these tests; RuntimeError if they could not be run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", f"--junitxml={report}", *tests]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"the tests did not run:\n{process.stdout[-2000:]}\n{process.stderr[-2000:]}")
        return report.read_text()


def read_report(text: str) -> Results:
    """Parses a JUnit report of tests whose ids are `name-path-adapters`."""
    results: Results = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        match = re.fullmatch(r"test_\w*path\[(.*)-(\w+)-(\w+)\]", case.get("name", ""))
        if match is None or match[2] not in PATHS:
            continue
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        result = "FAILED" if failed else "" if skipped is None else skipped.get("message", "skipped")
        results[match[1], match[3], match[2]] = result
    return results


def table(results: Results) -> str:
    """The table as Markdown, one line for each architecture and choice of trained weights."""
    reasons: list[str] = []
    lines = ["| architecture | trains | " + " | ".join(PATHS.values()) + " |", "|---" * (2 + len(PATHS)) + "|"]
    names = list(dict.fromkeys(name for name, _, _ in results))
    for name in names:
        for adapters in ADAPTERS:
            cells = [_cell(results.get((name, adapters, path)), reasons) for path in PATHS]
            if any(cells):
                lines.append(f"| {name} | {_TRAINED_WEIGHTS[adapters]} | " + " | ".join(cells) + " |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])


_TRAINED_WEIGHTS = {
    "full": "all weights",
    "lora": "LoRA",
    "lora_text": "LoRA, text layers",
    "lora_all": "LoRA, all layers",
}


def adapter_table(text: str) -> str:
    """The table of adapters as Markdown, from a JUnit report: one line for each kind."""
    lines = ["| kind | trains | merges into the weights |", "|---|---|---|"]
    for case in sorted(ElementTree.fromstring(text).iter("testcase"), key=lambda case: case.get("name", "")):
        match = re.fullmatch(r"test_kind\[(\w+)\]", case.get("name", ""))
        if match is None:
            continue
        found = {entry.get("name"): entry.get("value", "") for entry in case.iter("property")}
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            cells = "FAILED | "
        elif skipped is not None:
            cells = f"not tried: {skipped.get('message', '')} | "
        elif "refused" in found:
            cells = f"refused: it {found['refused']} | "
        else:
            cells = f"yes | {found.get('merged', 'no: a learned prompt')}"
        lines.append(f"| {match[1]} | {cells} |".replace("  |", " |"))
    return "\n".join(lines)


def _cell(result: str | None, reasons: list[str]) -> str:
    if result is None:
        return ""
    if not result:
        return "yes"
    if result == "FAILED":
        return "FAILED"
    if result not in reasons:
        reasons.append(result)
    return f"no ({reasons.index(result) + 1})"


def _write(name: str, lines: str) -> None:
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{lines}\n{end}{after}")


def main() -> int:
    """Runs the tests and updates the tables; 1 if any failed."""
    results = read_report(run_tests(TESTS))
    kinds = adapter_table(run_tests(ADAPTER_TESTS))
    _write("support", table(results))
    _write("adapter", kinds)
    failed = [key for key, result in results.items() if result == "FAILED"]
    num_failed = len(failed) + kinds.count("FAILED")
    print(f"{len(results)} cells, {num_failed} failed; written to {PAGE.relative_to(ROOT)}")
    return 1 if num_failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
