"""A run's steps, rollouts and events as traces of its Trackio run and as OpenTelemetry spans."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from simulated_trackio import Trackio

from groupgrad.errors import ConfigError
from groupgrad.integrations import traces
from groupgrad.run_folder.run_files import read_lines
from groupgrad.trainer.changed_options import deciding

SETTINGS = {"report_to": "trackio", "run_name": "first", "trackio_static_space_id": False, "record_traces": True}


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Trackio:
    fake = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


@pytest.fixture
def trace() -> Any:
    return pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is not installed")


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, trace: Any) -> Any:
    """An exporter in memory, that of the process's tracer provider."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_rollouts_and_events_are_traces(train, tmp_path, trackio):
    """Those of the last step too, which are made behind training, before the callback of the tracker ends its run."""
    train(max_steps=2, **SETTINGS)
    rollouts = [(step, trace) for name, step, trace in trackio.traces if name == "rollouts"]
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
    events = [trace for name, _, trace in trackio.traces if name == "event"]
    lines = list(read_lines(tmp_path / "run" / "events.jsonl"))
    assert [event.metadata["event"] for event in events] == [
        line["event"] for line in lines if line["event"] != "ended"
    ]


def test_conversations_stay_messages_and_long_ones_are_cut(train, trackio, monkeypatch):
    monkeypatch.setattr(traces, "MAX_CHARS", 10)
    prompt = [{"role": "system", "content": "be short"}, {"role": "user", "content": "0123456789abc"}]
    rows = Dataset.from_list([{"prompt": prompt}] * 4)
    train(max_steps=1, train_dataset=rows, rollouts_keep="0", **SETTINGS)
    trace = next(trace for name, _, trace in trackio.traces if name == "rollouts")
    assert [message["role"] for message in trace.messages] == ["system", "user", "assistant"]
    assert [message["content"] for message in trace.messages[:2]] == ["be short", "0123456789"]


def test_a_failure_has_the_status_of_an_error(train, trackio, exported):
    def failing(completions: Any, **_: Any) -> list[float]:
        raise ValueError("no more")

    with pytest.raises(Exception, match="no more"):
        train(reward_funcs=failing, max_steps=1, record_spans=True, **SETTINGS)
    (failed,) = [trace for _, _, trace in trackio.traces if trace.metadata.get("event") == "failed"]
    assert failed.metadata["status"] == "error" and "no more" in failed.messages[0]["content"]
    (failed,) = [span for span in exported.get_finished_spans() if span.name == "groupgrad.failed"]
    assert not failed.status.is_ok and "no more" in failed.status.description


def test_traces_need_a_run_and_a_release_that_has_them(make_trainer, trackio, monkeypatch):
    with pytest.raises(ConfigError, match=r"record_traces=True, but report_to=\[\] does not name trackio"):
        make_trainer(**{**SETTINGS, "report_to": "none"})
    monkeypatch.delattr(Trackio, "Trace")
    with pytest.raises(ImportError, match=r"needs a trackio with traces: pip install -U trackio"):
        make_trainer(**SETTINGS)


def test_what_is_recorded_does_not_decide_results():
    """A resumed or repeated run may record something else, without a remark."""
    names = ("record_traces", "record_spans")
    assert deciding({**dict.fromkeys(names, True), "beta": 0.1}) == {"beta": 0.1}


@pytest.mark.parametrize("keep", ["1GB", "0"])
def test_steps_rollouts_and_events_are_spans(train, tmp_path, exported, keep):
    settings = {"save_strategy": "steps", "save_steps": 2, "rollouts_keep": keep}
    train(max_steps=2, record_spans=True, **settings)
    spans = exported.get_finished_spans()
    steps = [span for span in spans if span.name == "groupgrad.step"]
    assert [span.attributes["groupgrad.step"] for span in steps] == [1, 2]
    assert all(span.start_time < span.end_time for span in steps)
    children = [span for span in spans if span.name == "groupgrad.rollout"]
    first = [span for span in children if span.parent.span_id == steps[0].context.span_id]
    assert len(first) == 8 and len(children) == 16
    events = [span.name.removeprefix("groupgrad.") for span in spans if span not in (*steps, *children)]
    assert sorted(events) == sorted(line["event"] for line in read_lines(tmp_path / "run" / "events.jsonl"))
    if keep == "0":
        assert not (tmp_path / "run" / "rollouts").exists()
        return
    rows = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.0.parquet").to_pylist()
    for row, span in zip(rows, first):
        names = ("row", "group", "reward", "advantage", "finish_reason", "prompt", "completion")
        assert {name: span.attributes[f"groupgrad.{name}"] for name in names} == {name: row[name] for name in names}


def test_without_a_provider_the_trainer_is_refused(make_trainer, monkeypatch, trace):
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    with pytest.raises(ConfigError, match=r"record_spans=True.*set_tracer_provider"):
        make_trainer(record_spans=True)
