"""Changes one line after another in a copy of the source, and reports which changes the tests that prove it catch.

    python tests/mutate.py            run the whole table (about half an hour on one core)
    python tests/mutate.py --list     print the table
    python tests/mutate.py --only beta --only "top_p*"
    python tests/mutate.py --write docs/mutations.md

The table is `tests/mutations.yaml`. A mutation is caught if an assertion of its test fails; a test that breaks in any
other way proves nothing. First the tests run on the source as it is and must pass. The exit code is 1 if a mutation
survives.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src") / "groupgrad"
LIBRARIES = (
    "accelerate",
    "datasets",
    "pandas",
    "peft",
    "transformers.trainer",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Modules that most tests import; they are imported once, before the tests fork."""
ASSERTIONS = ("assert ", "AssertionError", "Failed:")
"""The message of a failed assertion begins with one of these."""


@dataclass(slots=True, frozen=True)
class Mutation:
    """One line of the source that is changed, and the test that must then fail."""

    name: str
    """The option, and which of its wires is cut where there are several; or what no longer holds."""
    file: str
    """Below `src/groupgrad`."""
    old: str
    """Text that occurs in the file once."""
    new: str
    test: str
    """As pytest names it."""


def read_mutations() -> list[Mutation]:
    """The rows of `tests/mutations.yaml`."""
    files = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text(encoding="utf-8"))
    return [Mutation(file=file, **row) for file, rows in files.items() for row in rows]


@dataclass(slots=True, frozen=True)
class Result:
    """The outcome of one mutation."""

    mutation: Mutation | None
    """None for the source as it is."""
    caught_by: str
    """The test whose assertion failed; empty if none did."""
    problem: str
    """Why it was not caught; empty if it was."""
    seconds: float


def stale_rows(mutations: Sequence[Mutation]) -> list[str]:
    """One sentence for each row that does not fit the source: text that is not there once, a test that is gone."""
    found = []
    for row in mutations:
        path = ROOT / PACKAGE / row.file
        count = path.read_text(encoding="utf-8").count(row.old) if path.is_file() else 0
        if count != 1:
            found.append(f"{row.name}: {row.old!r} occurs {count} times in {row.file}; it must occur once")
        file, _, name = row.test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        if not (ROOT / file).is_file() or f"def {function}(" not in (ROOT / file).read_text(encoding="utf-8"):
            found.append(f"{row.name}: there is no test {row.test}")
    names = [row.name for row in mutations]
    return [*found, *(f"{name}: the name is used twice" for name in sorted({n for n in names if names.count(n) > 1}))]


class Trial:
    """A child process that runs tests on a copy of the source, with `row` in it if there is one.

    The child is forked from this process, which has imported the libraries but nothing of the package.
    """

    def __init__(self, row: Mutation | None, tests: Sequence[str]):
        self.row, self._started = row, time.perf_counter()
        self._folder = tempfile.TemporaryDirectory()
        source, self._report = Path(self._folder.name) / "src", Path(self._folder.name) / "report.xml"
        shutil.copytree(ROOT / "src", source)
        if row is not None:
            path = source / "groupgrad" / row.file
            path.write_text(path.read_text(encoding="utf-8").replace(row.old, row.new), encoding="utf-8")
        self.pid = os.fork()
        if self.pid == 0:
            self._run(source, tests)

    def _run(self, source: Path, tests: Sequence[str]) -> None:
        """The child: runs the tests and ends."""
        code = 3
        try:
            os.chdir(ROOT)
            output = os.open(self._report.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1), os.dup2(output, 2)
            sys.path.insert(0, str(source))
            os.environ["PYTHONPATH"] = str(source)
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--junitxml={self._report}", *tests]))
        finally:
            os._exit(code)

    def result(self, status: int) -> Result:
        """The outcome, once the child has ended with this status."""
        code, test, message = os.waitstatus_to_exitcode(status), "", ""
        cases = ElementTree.parse(self._report).iter("testcase") if self._report.is_file() else ()
        for case in cases:
            for failure in (*case.findall("failure"), *case.findall("error")):
                test, message = str(case.get("name")), str(failure.get("message"))
        self._folder.cleanup()
        seconds = time.perf_counter() - self._started
        if code == 0:
            return Result(self.row, "", "the tests pass", seconds)
        if message.startswith(ASSERTIONS) and "pytest-timeout" not in message:
            return Result(self.row, test, "", seconds)
        return Result(self.row, "", f"no assertion failed: {message.splitlines()[0] if message else code}", seconds)


def prepare() -> None:
    """Imports the libraries that all trials share, in the environment of the tests."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The folders of the tests have names of packages.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT / "tests"]
    for name in LIBRARIES:
        import_module(name)
    assert "groupgrad" not in sys.modules


def try_all(rows: Sequence[Mutation], jobs: int = 1) -> Iterator[Result]:
    """Tries each mutation in a process of its own, up to `jobs` at a time; results as they come."""
    waiting, running = list(rows), dict[int, Trial]()
    while waiting or running:
        while waiting and len(running) < jobs:
            trial = Trial(waiting[0], [waiting.pop(0).test])
            running[trial.pid] = trial
        pid, status = os.wait()
        yield running.pop(pid).result(status)


def table(results: Sequence[Result]) -> str:
    """The results as a page of Markdown."""
    caught = sum(not result.problem for result in results)

    def code(text: str) -> str:
        return "`` " + " ".join(text.split()).replace("|", "\\|") + " ``"

    lines = [
        "# Mutations",
        "",
        "Each row changes one line in a copy of the source: it disconnects an option, or makes a mistake of a careless",
        "change. The test beside it then fails; that of an option goes from the configuration to the effect.",
        f"{caught} of {len(results)} are caught. `python tests/mutate.py --write docs/mutations.md` writes this page;",
        "`tests/mutations.yaml` has the table.",
        "",
        "| what is cut | file | instead of | stands | caught by |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        row = result.mutation
        by = f"`{row.test}`" if not result.problem else f"**not caught**: {result.problem}"
        lines.append(f"| {row.name} | `{row.file}` | {code(row.old)} | {code(row.new)} | {by} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the table: 0 if all are caught, 1 if one survives, 2 for a table or tests that are out of order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this row only, or those that a pattern fits")
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried at the same time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results as a table")
    options = parser.parse_args(argv)
    rows = [
        row for row in read_mutations() if not options.only or any(fnmatch.fnmatch(row.name, n) for n in options.only)
    ]
    if stale := stale_rows(rows):
        print("\n".join(stale))
        return 2
    if options.list:
        for row in rows:
            print(f"{row.name}: {row.file}: {row.old!r} -> {row.new!r} ({row.test})")
        return 0
    tests = list(dict.fromkeys(row.test for row in rows))
    prepare()
    plain = Trial(None, tests)
    outcome = plain.result(os.waitpid(plain.pid, 0)[1])
    if outcome.problem != "the tests pass":
        print(f"the tests fail on the source as it is: {outcome.caught_by} {outcome.problem}")
        return 2
    print(f"{len(tests)} tests pass on the source as it is; {len(rows)} mutations follow", flush=True)
    started, results = time.perf_counter(), []
    for result in try_all(rows, options.jobs):
        outcome = f"SURVIVED ({result.problem})" if result.problem else f"caught by {result.caught_by}"
        print(f"{result.seconds:6.1f} s  {result.mutation.name}: {outcome}", flush=True)
        results.append(result)
    results.sort(key=lambda result: rows.index(result.mutation))
    survived = [result.mutation.name for result in results if result.problem]
    print(f"{len(results) - len(survived)} of {len(results)} caught in {time.perf_counter() - started:.0f} s")
    if survived:
        print(f"survived: {', '.join(survived)}")
    if options.write:
        options.write.write_text(table(results), encoding="utf-8")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
