"""A run's rollouts and events as traces of its Trackio run."""

from __future__ import annotations

import contextvars
import importlib.machinery
import json
import sys
import types
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from groupgrad.errors import ConfigError
from groupgrad.run_folder import senders
from groupgrad.run_folder.run_files import read_lines
from groupgrad.trainer.changed_options import deciding

SETTINGS = {"report_to": "trackio", "run_name": "first", "trackio_static_space_id": False, "record_traces": True}


class Trace:
    """The documented class: messages, metadata and spans."""

    def __init__(self, messages: list[dict[str, Any]], metadata: Any = None, spans: Any = None) -> None:
        assert isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        json.dumps([messages, metadata])  # is sent as JSON
        self.messages, self.metadata = messages, metadata


class Trackio(types.ModuleType):
    """A stand-in for trackio, with its documented interface: `log` needs a current run and takes lists of traces."""

    __version__ = "0.43.0"
    Trace = Trace

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
        self.logged: list[tuple[str, int, Trace]] = []
        self.config: dict[str, Any] = {}
        names = ("current_run", "current_project", "current_space_id")
        self.context_vars = types.SimpleNamespace(**{n: contextvars.ContextVar(n, default=None) for n in names})

    def init(self, **kwargs: Any) -> None:
        self.context_vars.current_run.set(object())

    def finish(self) -> None:
        self.context_vars.current_run.set(None)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.context_vars.current_run.get() is None:
            raise RuntimeError("Call trackio.init() before trackio.log().")
        for name, value in metrics.items():
            if isinstance(value, list) and value and all(isinstance(item, Trace) for item in value):
                self.logged += [(name, step, item) for item in value]


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Trackio:
    fake = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def test_rollouts_and_events_are_traces(train, tmp_path, trackio):
    """Those of the last step too, which are made behind training, before the callback of the tracker ends its run."""
    train(max_steps=2, record_gradient_share=True, **SETTINGS)
    rollouts = [(step, trace) for name, step, trace in trackio.logged if name == "rollouts"]
    assert [step for step, _ in rollouts] == [1] * 8 + [2] * 8
    rows = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert len(rows) == 16
    for row, (step, trace) in zip(sorted(rows, key=lambda row: (row["step"], row["row"])), rollouts):
        assert trace.messages == [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        names = ("step", "row", "group", "reward", "advantage", "finish_reason", "num_tokens")
        assert {name: trace.metadata[name] for name in names} == {name: row[name] for name in names}
        assert trace.metadata["step"] == step and trace.metadata["status"] == "success"
    shares = [trace.metadata["gradient_share"] for step, trace in rollouts if step == 1]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    events = [trace for name, _, trace in trackio.logged if name == "event"]
    lines = list(read_lines(tmp_path / "run" / "events.jsonl"))
    assert [event.metadata["event"] for event in events] == [
        line["event"] for line in lines if line["event"] != "ended"
    ]


def test_conversations_stay_messages_and_long_ones_are_cut(train, trackio, monkeypatch):
    monkeypatch.setattr(senders, "MAX_CHARS", 10)
    prompt = [{"role": "system", "content": "be short"}, {"role": "user", "content": "0123456789abc"}]
    rows = Dataset.from_list([{"prompt": prompt}] * 4)
    train(max_steps=1, train_dataset=rows, rollouts_keep="0", **SETTINGS)
    trace = next(trace for name, _, trace in trackio.logged if name == "rollouts")
    assert [message["role"] for message in trace.messages] == ["system", "user", "assistant"]
    assert [message["content"] for message in trace.messages[:2]] == ["be short", "0123456789"]


def test_a_failure_has_the_status_of_an_error(train, trackio):
    def failing(completions: Any, **_: Any) -> list[float]:
        raise ValueError("no more")

    with pytest.raises(Exception, match="no more"):
        train(reward_funcs=failing, max_steps=1, **SETTINGS)
    failed = [trace for _, _, trace in trackio.logged if trace.metadata.get("event") == "failed"]
    assert [trace.metadata["status"] for trace in failed] == ["error"]
    assert "no more" in failed[0].messages[0]["content"]


def test_traces_need_a_run_and_a_release_that_has_them(make_trainer, trackio, monkeypatch):
    with pytest.raises(ConfigError, match=r"record_traces=True, but report_to=\[\] does not name trackio"):
        make_trainer(**{**SETTINGS, "report_to": "none"})
    monkeypatch.delattr(Trackio, "Trace")
    with pytest.raises(ImportError, match=r"needs a trackio with traces: pip install -U trackio"):
        make_trainer(**SETTINGS)


def test_what_is_recorded_does_not_decide_results():
    """A resumed or repeated run may record something else, without a remark."""
    names = ("record_traces", "record_spans", "record_gradient_share")
    assert deciding({**dict.fromkeys(names, True), "beta": 0.1}) == {"beta": 0.1}
