"""Sends what a run folder records elsewhere: steps, rollouts and events as OpenTelemetry spans or Trackio traces."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad import compat
from groupgrad._version import __version__
from groupgrad.errors import ConfigError
from groupgrad.run_folder.render import plain_value

MAX_CHARS = 4000
"""Characters of a prompt or completion in a span, and of a message in a trace."""
FAILURES = ("failed", "error", "skipped_step")
"""Events that have the status of an error."""
ROLLOUTS, EVENT = "rollouts", "event"
"""Names under which traces are logged."""


class RunSpans:
    """Makes spans with the process's tracer provider, which decides where they go. `rows` are those of `summaries`.

    ConfigError if none is set, since every span would be lost; ImportError without the package.
    """

    def __init__(self) -> None:
        compat.require("opentelemetry-sdk", "record_spans=True")
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            problem = (
                "record_spans=True, but this process has no tracer provider, so the spans would go nowhere. Call "
                "opentelemetry.trace.set_tracer_provider(...) before the trainer is made, start the script by "
                "`opentelemetry-instrument`, or set record_spans=False"
            )
            raise ConfigError([problem])
        self._trace, self._tracer = trace, provider.get_tracer("groupgrad", __version__)

    def event(self, line: Mapping[str, Any]) -> None:
        """Sends a line of `events.jsonl` as a span without length."""
        time_ns = int(line["time"] * 1e9)
        attributes = {f"groupgrad.{key}": _plain(value) for key, value in line.items() if key not in ("time", "event")}
        span = self._tracer.start_span(f"groupgrad.{line['event']}", start_time=time_ns, attributes=attributes)
        if line["event"] in FAILURES:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(line.get("text", ""))))
        span.end(time_ns)

    def step(self, step: int, times_ns: tuple[int, int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends a step, from its begin to its end, and a span below it for each rollout that it sampled."""
        begin, end = times_ns
        span = self._tracer.start_span("groupgrad.step", start_time=begin, attributes={"groupgrad.step": step})
        context = self._trace.set_span_in_context(span)
        for row in rows:
            texts = {name: row[name][:MAX_CHARS] for name in ("prompt", "completion")}
            attributes = {f"groupgrad.{name}": value for name, value in {**_numbers(row), **texts}.items()}
            self._tracer.start_span("groupgrad.rollout", context, start_time=begin, attributes=attributes).end(end)
        span.end(end)


def _plain(value: Any) -> Any:
    """A value that an attribute can hold."""
    return value if isinstance(value, (str, bool, int, float)) else json.dumps(value, default=str)


class RunTraces:
    """The same as traces of the Trackio run that is current where they are logged; without one they are dropped.

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

    def step(self, step: int, times_ns: tuple[int, int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a trace for each rollout that a step sampled: its conversation, and its numbers as metadata."""
        traces = []
        for row in rows:
            status = "error" if row["finish_reason"] == "error" else "success"
            metadata = {"step": step, **_numbers(row), "status": status}
            traces.append(self._trace([*_messages("user", row), *_messages("assistant", row)], metadata))
        self._log(ROLLOUTS, step, traces)

    def _trace(self, messages: list[dict[str, Any]], metadata: dict[str, Any]) -> Any:
        return self._trackio.Trace(messages=messages, metadata=metadata)

    def _log(self, name: str, step: int, traces: list[Any]) -> None:
        if traces and self._trackio.context_vars.current_run.get() is not None:
            self._trackio.log({name: traces}, step=step)


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a row without its texts."""
    return {name: value for name, value in row.items() if name not in ("prompt", "completion", "is_messages")}


def _messages(role: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt (`user`) or the completion of a row as messages; a text becomes one of `role`."""
    text = row["prompt" if role == "user" else "completion"]
    messages = json.loads(text) if row["is_messages"] else [_message(role, text)]
    return [
        {**message, "content": message["content"][:MAX_CHARS]} if isinstance(message.get("content"), str) else message
        for message in messages
    ]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text[:MAX_CHARS]}
