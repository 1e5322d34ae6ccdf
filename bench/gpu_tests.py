"""Runs the suite's tests for a GPU, and writes how each one ended to a file at once.

    python bench/gpu_tests.py --answer FILE [--tiny]

The status is the number of tests that failed. `--tiny` is for a machine without a card, which skips all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_bench import write_answer

ROOT = Path(__file__).parents[1]


class Outcomes:
    """Writes the tests that have ended, and files that could not be collected, to `file`."""

    def __init__(self, file: Path) -> None:
        self.file, self.checks = file, list[dict[str, object]]()

    @property
    def num_failed(self) -> int:
        """Tests and files that failed."""
        return sum(not check["ok"] for check in self.checks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Is called after each part of a test; a test has one line, but one that fails at its end too has two."""
        if report.when == "call" or not report.passed:
            self._add(report, f"{report.outcome} in {report.duration:.1f} s")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Is called after each file."""
        if report.failed:
            self._add(report, "it cannot be collected")

    def _add(self, report: pytest.TestReport | pytest.CollectReport, text: str) -> None:
        if report.failed:
            told = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            text += f": {told[0]}" if told else ""
        elif isinstance(report.longrepr, tuple):  # of a test that was skipped
            text = str(report.longrepr[2]).removeprefix("Skipped: ")
        name = report.nodeid.removeprefix("tests/")
        self.checks.append({"name": name, "ok": not report.failed, "skipped": report.skipped, "text": text})
        write_answer(self.file, {"stage": "tests", "checks": self.checks})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests; the number of those that failed, or pytest's own status if it ran none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="changes nothing")
    parser.add_argument("files", nargs="*", help="default: all that have such tests")
    options = parser.parse_args(arguments)
    # Others may need what is not here.
    files = options.files or [str(file) for file in sorted(ROOT.glob("tests/**/test_*.py")) if _is_for_gpu(file)]
    outcomes = Outcomes(options.answer)
    status = pytest.main(["-m", "gpu", "-v", "--continue-on-collection-errors", *files], plugins=[outcomes])
    return min(outcomes.num_failed or int(status), 100)


def _is_for_gpu(file: Path) -> bool:
    return "mark.gpu" in file.read_text()


if __name__ == "__main__":
    sys.exit(main())
