"""A reward for code: `CodeTester` runs the tests of a data set against it in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupgrad.errors import RewardError
from groupgrad.integrations.code_sandbox.sandbox import Limits, Sandbox
from groupgrad.rewards.text import completion_text


@dataclass(frozen=True)
class Outcome:
    """Result of one test."""

    kind: Literal["passed", "failed", "timeout", "unusable"]
    """After the last two, the remaining tests of the code fail unrun."""
    why: str = ""
    """Reason of a failure."""


@dataclass(frozen=True)
class CodeTester:
    """Runs code against tests. All times are wall-clock times without the start of a sandbox."""

    sandbox: Sandbox
    timeout_s: float
    """Time for one test, and for code to load before tests of its functions."""
    output_bytes: int
    """Limit of what code writes in one test, and of one message between code and tests."""
    stops_at_failure: bool = False
    """True if one failure decides; the remaining tests then fail unrun."""

    async def run_scripts(self, code: str, tests: Sequence[tuple[str, str]]) -> list[Outcome]:
        """Runs code as a script once a test, with text on standard input; one outcome a test.

        A test is passed if the script ends with code 0 and wrote what is expected. White space at the ends of lines
        and empty lines at the end do not count. The expected text stays in this process.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(tests) and not self._is_decided(outcomes):
            outcomes.append(await self._run_script(code, *tests[len(outcomes)]))
        return _fill(outcomes, len(tests))

    async def run_asserts(self, code: str, tests: Sequence[str]) -> list[Outcome]:
        """Runs tests, texts of Python that raise if they fail; one outcome a test. RewardError for an invalid test.

        Code and tests have a sandbox each. When the process of the code ends, it is started again for the next test.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(tests) and not self._is_decided(outcomes):
            async with contextlib.aclosing(self._run_session(code, tests[len(outcomes) :])) as session:
                async for outcome in session:
                    outcomes.append(outcome)
                    if self._is_decided(outcomes):
                        break
        return _fill(outcomes, len(tests))

    def _is_decided(self, outcomes: list[Outcome]) -> bool:
        kind = outcomes[-1].kind if outcomes else "passed"
        return kind in ("timeout", "unusable") or (self.stops_at_failure and kind == "failed")

    async def _run_script(self, code: str, text: str, expected: str) -> Outcome:
        try:
            output, exit_code = await self.sandbox.run_script(code, text, self.timeout_s, self.output_bytes)
        except asyncio.TimeoutError:
            return Outcome("timeout", f"no end after {self.timeout_s:g} s")
        if len(output) > self.output_bytes:
            return Outcome("failed", f"wrote more than {self.output_bytes} bytes")
        if exit_code != 0:
            return Outcome("failed", f"ended with code {exit_code}")
        is_right = _lines(output.decode(errors="replace")) == _lines(expected)
        return Outcome("passed") if is_right else Outcome("failed", "wrote something else")

    async def _run_session(self, code: str, tests: Sequence[str]) -> AsyncGenerator[Outcome, None]:
        """Runs tests until the code's process ends; at least one outcome."""
        limits = {"cpu_s": self.timeout_s * (len(tests) + 1), "output_bytes": self.output_bytes}
        async with (
            self.sandbox.run("serve_code", code, **limits) as subject,
            self.sandbox.run("run_tests", list(tests), **limits) as checker,
        ):
            replies = asyncio.create_task(_forward(subject.stdout, checker.stdin))
            try:
                message = await self._next(checker, subject)
                if "loaded" not in message:
                    why = message.get("unusable") or message["why"]
                    yield Outcome("unusable", f"the code did not load: {why}")
                    return
                for test in tests:
                    message = await self._next(checker, subject)
                    if message.get("invalid"):
                        raise RewardError(f"code_reward: the test {repr(test)[:200]} of the data set {message['why']}")
                    kind = "passed" if message["passed"] else "timeout" if message.get("timeout") else "failed"
                    yield Outcome(kind, str(message["why"]))
                    if message.get("gone"):
                        return
            finally:
                replies.cancel()
                await asyncio.wait([replies])  # one reader at a time: the sandbox reads what is left

    async def _next(self, checker: Any, subject: Any) -> dict[str, Any]:
        """The next verdict of the tests. Their requests to the code are passed on meanwhile."""
        try:
            return await asyncio.wait_for(_verdict(checker, subject), self.timeout_s)
        except asyncio.TimeoutError:
            why = f"no end after {self.timeout_s:g} s"
            return {"passed": False, "timeout": True, "gone": True, "why": why}


async def _verdict(checker: Any, subject: Any) -> dict[str, Any]:
    while True:
        try:
            line = await checker.stdout.readline()
        except ValueError:  # longer than `output_bytes`
            line = b""
        if not line.endswith(b"\n"):
            return {"passed": False, "gone": True, "why": "the process of the test ended"}
        message = json.loads(line)
        if {"passed", "loaded", "unusable"} & message.keys():
            return message
        subject.stdin.write(line)
        with contextlib.suppress(ConnectionError):  # it has ended, which the tests learn from their own input
            await subject.stdin.drain()


async def _forward(source: Any, target: Any) -> None:
    """Passes the code's replies on, and their end."""
    with contextlib.suppress(ConnectionError, ValueError):  # the tests have ended, or a reply is too long
        while line := await source.readline():
            target.write(line)
            await target.drain()
    target.close()


def _fill(outcomes: list[Outcome], count: int) -> list[Outcome]:
    return outcomes + [Outcome("failed", "not run")] * (count - len(outcomes))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


logger = logging.getLogger(__name__)

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_Row = tuple[str | None, tuple[Any, ...]]
"""Code, None where a completion has none, and tests."""
_PYTHON_TAG = re.compile(r"py(thon)?[\d.]*")
_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})(.*)")
"""A CommonMark code fence: indentation, three or more backticks or tildes, and the info string."""
_LINE_END = re.compile(r"\r\n|\r|\n")
"""The ends of lines in Python; `str.splitlines` also cuts at characters that strings in the code may contain."""


def last_code_block(text: str) -> str | None:
    """The last fenced block that is marked as Python, else the last one without a mark; None without a closed one."""
    marked, unmarked = None, None
    indent, fence, tag = "", "", ""
    block: list[str] = []
    for line in _LINE_END.split(text):
        match = _FENCE.fullmatch(line)
        if not fence and match is not None:
            indent, fence, info = match[1], match[2], match[3].strip()
            tag, block = re.split(r"[\s:,{]", info.lower().lstrip("{."))[0].rstrip("}"), []
        elif fence and match is not None and match[2].startswith(fence) and not match[3].strip():
            if _PYTHON_TAG.fullmatch(tag):
                marked = "\n".join(block)
            elif tag == "":
                unmarked = "\n".join(block)
            fence = ""
        else:
            block.append(_without_indent(line, indent))
    return unmarked if marked is None else marked


def _without_indent(line: str, indent: str) -> str:
    """A line of a block without the indentation of its fence, or without as much of it as the line has."""
    num_blank = len(line) - len(line.lstrip(" \t"))
    return line[min(num_blank, len(indent)) :]


@dataclass(eq=False)
class code_reward:
    """A reward function that runs the Python code of completions against tests of the data set, in a sandbox.

    ```python
    trainer = GRPOTrainer(model=..., reward_funcs=code_reward(tests="test_list"), train_dataset=mbpp, ...)
    ```

    The column `tests` has a list a row: either texts of Python that raise if they fail, such as
    `"assert add(1, 2) == 3"`, or pairs of standard input and expected standard output (`["1 2\\n", "3\\n"]`, or
    `{"input": ..., "output": ...}`) for code that is a script. A row without tests is not scored. Code has no network,
    no files but those of its interpreter and a folder in memory, an empty environment, and neither the expected values
    nor the expected output in its process; docs/code-rewards.md says what each mechanism prevents. Metrics:
    `code/no_code`, `code/timeouts` and `code/unusable` (code that does not load), shares of the call's completions.
    The completions table gets a column `code_failure`, the first failed test of each row and its reason.

    Raises:
        ValueError: an option cannot work.
        SandboxError: no mechanism holds on this machine.
        RewardError: a row's tests have another form, or are no Python.
    """

    tests: str = "tests"
    """Name of the column with the tests."""
    score: Literal["share", "all"] = "share"
    """"share": the share of tests that are passed; "all": 1 if all are, else 0."""
    no_code: float | None = 0.0
    """Reward of a completion without code; None leaves it unscored."""
    extract: Literal["block", "all"] = "block"
    """"block": the last fenced block of Python; "all": the whole completion is code."""
    timeout_s: float = 10.0
    """Wall-clock and CPU time of one test. After a test that exceeds it, the remaining tests of its code fail unrun."""
    memory_mb: int = 512
    """Memory of each process."""
    folder_mb: int = 16
    """Size of all files that code writes; they are in memory and go with the sandbox."""
    output_kb: int = 1024
    """Limit of the output of one test, and of one value that a test gets from code."""
    max_processes: int = 1
    """Processes and threads of code together; 1: it can start no process, and up to 32 threads."""
    max_concurrency: int | None = None
    """Completions at the same time; None: as many as this process has CPUs."""
    python: str | None = None
    """Interpreter, Python 3.10 or newer; None: that of the trainer. Its packages can be imported by code."""
    mechanism: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """Kind of sandbox; "auto" is replaced by the first of these that holds on this machine, which is logged."""

    def __post_init__(self) -> None:
        for name, choices in (("score", ("share", "all")), ("extract", ("block", "all"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; set it to {' or '.join(choices)}")
        for name in ("timeout_s", "folder_mb", "output_kb", "max_processes", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} lets no code run; set it above 0")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb={self.memory_mb} is less than an interpreter needs; set it to 64 or more")
        limits = Limits(self.memory_mb << 20, self.folder_mb << 20, self.max_processes)
        sandbox = Sandbox(limits, self.python, self.mechanism)
        self.mechanism = sandbox.mechanism  # pyright: ignore[reportAttributeAccessIssue]
        logger.info("code_reward runs code in a sandbox made by %s", self.mechanism)
        self._tester = CodeTester(sandbox, self.timeout_s, self.output_kb << 10, self.score == "all")
        self.__name__ = "code_reward"
        # The trainer reads here which column the rows must have.
        names = ("prompts", "completions", self.tests)
        optional = [inspect.Parameter(name, _KEYWORD, default=None) for name in ("log_metric", "log_extra")]
        self.__signature__ = inspect.Signature([*(inspect.Parameter(name, _KEYWORD) for name in names), *optional])

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The reward of each completion. Equal code with equal tests runs once. Cancellation ends all sandboxes."""
        texts = map(completion_text, completions)
        codes = [text if self.extract == "all" else last_code_block(text) for text in texts]
        rows: list[_Row] = [(code, tuple(read_tests(value))) for code, value in zip(codes, columns[self.tests])]
        limit = asyncio.Semaphore(self.max_concurrency or len(os.sched_getaffinity(0)))
        jobs = {
            row: asyncio.create_task(self._run(limit, row))
            for row in dict.fromkeys(rows)
            if row[1] and (row[0] or "").strip()
        }
        try:
            await asyncio.gather(*jobs.values())
        finally:
            for job in jobs.values():
                job.cancel()
            await asyncio.gather(*jobs.values(), return_exceptions=True)
        outcomes = [jobs[row].result() if row in jobs else [] for row in rows]
        if log_metric is not None:
            kinds = [{outcome.kind for outcome in row} for row in outcomes]
            log_metric("code/no_code", sum(row not in jobs and bool(row[1]) for row in rows) / len(rows))
            log_metric("code/timeouts", sum("timeout" in row for row in kinds) / len(rows))
            log_metric("code/unusable", sum("unusable" in row for row in kinds) / len(rows))
        if log_extra is not None:
            log_extra("code_failure", list(map(_first_failure, outcomes)))
        return [self._reward(*row) for row in zip(rows, outcomes)]

    async def _run(self, limit: asyncio.Semaphore, row: _Row) -> list[Outcome]:
        code, tests = row[0] or "", row[1]
        async with limit:
            run = self._tester.run_asserts if isinstance(tests[0], str) else self._tester.run_scripts
            return await run(code, tests)

    def _reward(self, row: _Row, outcomes: list[Outcome]) -> float | None:
        if not outcomes:
            return self.no_code if row[1] else None
        share = sum(outcome.kind == "passed" for outcome in outcomes) / len(outcomes)
        return share if self.score == "share" else float(share == 1)


def read_tests(value: Any) -> list[Any]:
    """The tests of a row: texts of Python, or pairs of input and output. RewardError for another form."""
    if isinstance(value, dict):  # lists of inputs and of outputs
        parts = [value.get(name, value.get(f"{name}s")) for name in ("input", "output")]
        items: list[Any] = (
            list(zip(*parts, strict=True)) if all(isinstance(part, (list, tuple)) for part in parts) else [value]
        )
    else:
        items = list(value or ()) if isinstance(value, (list, tuple, type(None))) else [value, None]
    if all(isinstance(item, str) for item in items):
        return items
    pairs = [(item.get("input"), item.get("output")) if isinstance(item, dict) else item for item in items]
    if all(isinstance(pair, (list, tuple)) and list(map(type, pair)) == [str, str] for pair in pairs):
        return [(text, expected) for text, expected in pairs]
    raise RewardError(
        f"code_reward: the tests of a row are {repr(value)[:200]}; give a list of texts such as 'assert f(1) == 2', or "
        "of pairs (standard input, expected output), both texts"
    )


def _first_failure(outcomes: list[Outcome]) -> str | None:
    for number, outcome in enumerate(outcomes, 1):
        if outcome.kind != "passed":
            return f"test {number}: {outcome.why}"
    return None
