"""Runs the tests of a data set against the code of a completion, in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupgrad.errors import RewardError
from groupgrad.integrations.code_sandbox.sandbox import Sandbox


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
