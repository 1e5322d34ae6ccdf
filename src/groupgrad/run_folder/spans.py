"""Sends what a run folder records as OpenTelemetry spans: steps, their rollouts, and events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad import compat
from groupgrad._version import __version__
from groupgrad.errors import ConfigError
from groupgrad.run_folder.rollout_table import StoredRows, message_text, rollout_values

MAX_CHARS = 4000
"""Characters of a prompt or completion in a span, and of a message in a trace."""
FAILURES = ("failed", "error", "skipped_step")
"""Events that have the status of an error."""


class RunSpans:
    """Makes spans with the process's tracer provider, which decides where they go.

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

    def step(self, step: int, times_ns: tuple[int, int], parts: Sequence[StoredRows]) -> None:
        """Sends a step, from its begin to its end, and a span below it for each rollout that it sampled."""
        begin, end = times_ns
        span = self._tracer.start_span("groupgrad.step", start_time=begin, attributes={"groupgrad.step": step})
        context = self._trace.set_span_in_context(span)
        for part in parts:
            for row, rollout in enumerate(part.rollouts):
                texts = {
                    "prompt": message_text(rollout.prompt.row["prompt"])[:MAX_CHARS],
                    "completion": message_text(rollout.completion)[:MAX_CHARS],
                }
                values = {**rollout_values(part, row), **texts}
                attributes = {f"groupgrad.{key}": value for key, value in values.items()}
                child = self._tracer.start_span("groupgrad.rollout", context, start_time=begin, attributes=attributes)
                child.end(end)
        span.end(end)


def _plain(value: Any) -> Any:
    """A value that an attribute can hold."""
    return value if isinstance(value, (str, bool, int, float)) else json.dumps(value, default=str)
