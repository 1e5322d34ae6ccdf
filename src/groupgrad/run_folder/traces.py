"""Sends what a run folder records as Trackio traces: the rollouts of each step, and events."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad import compat
from groupgrad.errors import ConfigError
from groupgrad.run_folder.render import plain_value
from groupgrad.run_folder.rollout_table import StoredRows, rollout_values
from groupgrad.run_folder.spans import FAILURES, MAX_CHARS

ROLLOUTS, EVENT = "rollouts", "event"
"""Names under which traces are logged."""


class RunTraces:
    """Logs traces to the Trackio run that is current where they are logged; without one they are dropped.

    ConfigError if no run is to be expected, ImportError without a release of Trackio that has traces.
    """

    def __init__(self, report_to: Sequence[str] | str | None) -> None:
        compat.require("trackio", "record_traces=True")
        self._trackio: Any = importlib.import_module("trackio")
        if not hasattr(self._trackio, "Trace"):
            raise ImportError("record_traces=True needs a trackio with traces: pip install -U trackio")
        if {"trackio", "all"}.isdisjoint([report_to] if isinstance(report_to, str) else report_to or []):
            raise ConfigError(
                [
                    f"record_traces=True, but report_to={report_to!r} does not name trackio, so the run has no place "
                    "for traces. Set report_to='trackio', or record_traces=False"
                ]
            )

    def event(self, line: Mapping[str, Any]) -> None:
        """Logs a line of `events.jsonl` as a trace of one message."""
        metadata = {key: plain_value(value) for key, value in line.items() if key != "text"}
        text = str(line.get("text") or line["event"])
        status = "error" if line["event"] in FAILURES else "success"
        self._log(EVENT, line["step"], [self._trace([_message("system", text)], {**metadata, "status": status})])

    def step(self, step: int, times_ns: tuple[int, int], parts: Sequence[StoredRows]) -> None:
        """Logs a trace for each rollout that a step sampled: its conversation, and its numbers as metadata."""
        traces = []
        for part in parts:
            for row, rollout in enumerate(part.rollouts):
                status = "error" if rollout.finish_reason == "error" else "success"
                metadata = {"step": step, **rollout_values(part, row), "status": status}
                prompt = _messages("user", rollout.prompt.row["prompt"])
                traces.append(self._trace([*prompt, *_messages("assistant", rollout.completion)], metadata))
        self._log(ROLLOUTS, step, traces)

    def _trace(self, messages: list[dict[str, Any]], metadata: dict[str, Any]) -> Any:
        return self._trackio.Trace(messages=messages, metadata=metadata)

    def _log(self, name: str, step: int, traces: list[Any]) -> None:
        if traces and self._trackio.context_vars.current_run.get() is not None:
            self._trackio.log({name: traces}, step=step)


def _messages(role: str, value: Any) -> list[dict[str, Any]]:
    """A prompt or completion as messages of plain values; a text becomes one of `role`."""
    if isinstance(value, str):
        return [_message(role, value)]
    messages = [dict(message) for message in plain_value(value)]
    return [
        {**message, "content": message["content"][:MAX_CHARS]} if isinstance(message.get("content"), str) else message
        for message in messages
    ]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text[:MAX_CHARS]}
