"""A stand-in for trackio that records its calls."""

from __future__ import annotations

import contextvars
import importlib.machinery
import json
import types
from typing import Any


class Trace:
    """The documented class: messages, metadata and spans."""

    def __init__(self, messages: list[dict[str, Any]], metadata: Any = None, spans: Any = None) -> None:
        assert isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        json.dumps([messages, metadata])  # is sent as JSON
        self.messages, self.metadata = messages, metadata


class Trackio(types.ModuleType):
    """The documented interface: `log` needs a current run, and takes numbers and lists of traces."""

    __version__ = "0.43.0"
    Trace = Trace

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
        self.calls: dict[str, dict[str, Any]] = {}
        self.logged: list[dict[str, Any]] = []
        self.traces: list[tuple[str, int, Trace]] = []
        self.config: dict[str, Any] = {}
        names = ("current_run", "current_project", "current_space_id")
        self.context_vars = types.SimpleNamespace(**{n: contextvars.ContextVar(n, default=None) for n in names})

    def init(self, **kwargs: Any) -> None:
        self.calls["init"] = kwargs
        self.context_vars.current_run.set(object())
        self.context_vars.current_space_id.set(kwargs.get("space_id"))

    def finish(self) -> None:
        self.context_vars.current_run.set(None)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.context_vars.current_run.get() is None:
            raise RuntimeError("Call trackio.init() before trackio.log().")
        self.logged.append(metrics)
        for name, value in metrics.items():
            if isinstance(value, list) and value and all(isinstance(item, Trace) for item in value):
                self.traces += [(name, step, item) for item in value]

    def freeze(self, **kwargs: Any) -> str:
        self.calls["freeze"] = kwargs
        return str(kwargs["new_space_id"])
