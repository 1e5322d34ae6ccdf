"""Changes one line after another in a copy of the source, and reports which changes the tests that prove it catch.

    python tests/mutate.py            run the whole table (about half an hour on one core)
    python tests/mutate.py --list     print the table
    python tests/mutate.py --only beta --only "top_p*" --only "masks/k2 *"
    python tests/mutate.py --write docs/mutations.md

The table is `tests/mutations.yaml`, and what `of_definitions` makes of the files of losses, estimators and masks. A
mutation is caught if an assertion of its tests fails or a formula refuses their numbers; a test that breaks in any
other way proves nothing. First the tests run on the source as it is and must pass. The exit code is 1 if a mutation
survives.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import os
import re
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
ASSERTIONS = ("assert ", "AssertionError", "Failed:", "ValueError:", "ZeroDivisionError:")
"""The message of a failed assertion begins with one of these, or what a changed formula raises."""
DEFINITIONS = {
    "methods": "test_a_loss_and_its_gradient_are_those_of_its_twin",
    "estimators": "test_an_estimator_gives_the_advantages_of_its_twin",
    "masks": "test_a_mask_keeps_what_its_twin_does",
}
"""Folder of `objectives/` -> the test that compares its definitions with their formulas in NumPy."""
FACTS = {
    "grows_with_ratio": "test_methods.py::test_a_loss_grows_with_the_ratio_where_its_method_says",
    "select": "test_dense.py::test_a_loss_selects_what_its_twin_does",
    **dict.fromkeys(("folds_mismatch", "leaves_out_selected"), ""),
}
"""Argument of a `Method` -> a further test that such a loss has."""
TURNED = {
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
"""Operators, and what stands in their place."""
OTHERS: dict[object, object] = {
    **dict.fromkeys(("sequence_mean", "sequence_sum", "constant", "local_token_mean"), "token_mean"),
    **dict.fromkeys(("negative", "always"), "never"),
    "token_mean": "sequence_mean",
    True: False,
}
"""Values of the arguments of a `Method`, and others."""
SIZES = ("arange", "full", "range", "reshape", "view")
"""Calls whose arguments are sizes, not formulas."""
OWNERS = re.compile(r"^options$|settings$|Settings\(\)$")
"""Expressions that are records of settings."""


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
    tests: tuple[str, ...]
    """As pytest names them."""


def read_mutations() -> list[Mutation]:
    """The rows of `tests/mutations.yaml`, and those of definitions."""
    files = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text(encoding="utf-8"))
    listed = [(file, row) for file, rows in files.items() for row in rows]
    return [
        *(Mutation(row["name"], file, row["old"], row["new"], (row["test"],)) for file, row in listed),
        *of_definitions(),
    ]


def of_definitions() -> Iterator[Mutation]:
    """Rows of each loss, estimator and mask: one for each operator and each setting in its functions, and for the facts
    of its definition. A test of its worked numbers or of its formula in NumPy must notice."""
    for kind, twin in DEFINITIONS.items():
        for path in sorted((ROOT / PACKAGE / "objectives" / kind).glob("[!_]*.py")):
            source, name = path.read_text(encoding="utf-8"), path.stem
            tests = [
                f"test_worked_numbers.py::test_the_docstring_has_the_numbers_that_the_code_gives[{kind}-{name}]",
                f"test_dense.py::{twin}[{name}]",
                *(f"{test}[{name}]" for fact, test in FACTS.items() if test and f"{fact}=" in source),
            ]
            for number, (start, end, new) in enumerate(changes(source), 1):
                first, last = source.rfind("\n", 0, start) + 1, source.find("\n", end)
                while source.count(source[first:last]) > 1:
                    first = source.rfind("\n", 0, first - 1) + 1
                yield Mutation(
                    *(f"{kind}/{name} {number}", f"objectives/{kind}/{name}.py", source[first:last]),
                    source[first:start] + new + source[end:last],
                    tuple(f"tests/objectives/{test}" for test in tests),
                )


def changes(source: str) -> Iterator[tuple[int, int, str]]:
    """Start and end of a part of a definition's source, and what to put in its place.

    Sizes and rounding stay as they are.
    """
    tree, lines = ast.parse(source), [0, *(found.end() for found in re.finditer("\n", source))]
    sizes = {id(part) for node in ast.walk(tree) for argument in size_arguments(node) for part in ast.walk(argument)}

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in (part for function in functions for part in ast.walk(function) if id(part) not in sizes):
        match node:
            case ast.Attribute(value=owner, attr=name) if OWNERS.search(ast.unparse(owner)) and name != "settings":
                yield *span(node), f"(2 * {source[slice(*span(node))]})"
            case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
                if not isinstance(operand, ast.Constant) and not has_rounding(operand):
                    yield span(node)[0], span(node)[0] + 1, ""
            case ast.BinOp(left=left, op=op) | ast.Compare(left=left, ops=[op]) if type(op) in TURNED:
                if isinstance(node, ast.Compare) or not has_rounding(node):
                    sign, other = TURNED[type(op)]
                    at = source.index(sign, span(left)[1])
                    yield at, at + len(sign), other
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Method":
            for value in (*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in FACTS)):
                if isinstance(value, ast.Constant) and value.value in OTHERS:
                    yield *span(value), repr(OTHERS[value.value])


def size_arguments(node: ast.AST) -> list[ast.expr]:
    """The arguments of a call or an index that are sizes or places."""
    if isinstance(node, ast.Subscript):
        return [node.slice]
    is_size = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SIZES
    return node.args if is_size else []


def has_rounding(node: ast.expr) -> bool:
    """True for an expression with a number below 1e-6 or a name in capitals."""
    parts = list(ast.walk(node))
    small = (isinstance(part, ast.Constant) and isinstance(part.value, float) and part.value < 1e-6 for part in parts)
    return any(small) or any(isinstance(part, ast.Name) and part.id.isupper() for part in parts)


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
        for test in row.tests:
            file, _, name = test.partition("::")
            function = name.partition("[")[0].rpartition("::")[2]
            if not (ROOT / file).is_file() or f"def {function}(" not in (ROOT / file).read_text(encoding="utf-8"):
                found.append(f"{row.name}: there is no test {test}")
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
            trial = Trial(waiting[0], waiting.pop(0).tests)
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
        "`tests/mutations.yaml` has the table. The rows of losses, estimators and masks are made of their files.",
        "",
        "| what is cut | file | instead of | stands | caught by |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        row = result.mutation
        by = ", ".join(f"`{test}`" for test in row.tests) if not result.problem else f"**not caught**: {result.problem}"
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
            print(f"{row.name}: {row.file}: {row.old!r} -> {row.new!r} ({', '.join(row.tests)})")
        return 0
    tests = list(dict.fromkeys(test for row in rows for test in row.tests))
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
