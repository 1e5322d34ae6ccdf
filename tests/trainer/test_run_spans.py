"""A run's steps, rollouts and events as OpenTelemetry spans."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest

from groupgrad.errors import ConfigError
from groupgrad.run_folder.run_files import read_lines

trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is not installed")


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An exporter in memory, that of the process's tracer provider."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.mark.parametrize("keep", ["1GB", "0"])
def test_steps_rollouts_and_events_are_spans(train, tmp_path, exported, keep):
    settings = {"save_strategy": "steps", "save_steps": 2, "record_gradient_share": True, "rollouts_keep": keep}
    train(max_steps=2, record_spans=True, **settings)
    spans = exported.get_finished_spans()
    steps = [span for span in spans if span.name == "groupgrad.step"]
    assert [span.attributes["groupgrad.step"] for span in steps] == [1, 2]
    assert all(span.start_time < span.end_time for span in steps)
    children = [span for span in spans if span.name == "groupgrad.rollout"]
    first = [span for span in children if span.parent.span_id == steps[0].context.span_id]
    assert len(first) == 8 and len(children) == 16
    assert sum(span.attributes["groupgrad.gradient_share"] for span in first) == pytest.approx(1, abs=1e-5)
    events = [span.name.removeprefix("groupgrad.") for span in spans if span not in (*steps, *children)]
    assert sorted(events) == sorted(line["event"] for line in read_lines(tmp_path / "run" / "events.jsonl"))
    if keep == "0":
        assert not (tmp_path / "run" / "rollouts").exists()
        return
    rows = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.0.parquet").to_pylist()
    for row, span in zip(rows, first):
        names = ("row", "group", "reward", "advantage", "finish_reason", "prompt", "completion")
        assert {name: span.attributes[f"groupgrad.{name}"] for name in names} == {name: row[name] for name in names}


def test_a_failure_has_the_status_of_an_error(train, exported):
    def failing(completions: Any, **_: Any) -> list[float]:
        raise ValueError("no more")

    with pytest.raises(Exception, match="no more"):
        train(reward_funcs=failing, max_steps=1, record_spans=True)
    (failed,) = [span for span in exported.get_finished_spans() if span.name == "groupgrad.failed"]
    assert not failed.status.is_ok and "no more" in failed.status.description


def test_without_a_provider_the_trainer_is_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    with pytest.raises(ConfigError, match=r"record_spans=True.*set_tracer_provider"):
        make_trainer(record_spans=True)
