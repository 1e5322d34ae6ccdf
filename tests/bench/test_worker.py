"""A worker takes one optimizer step a command, measures it, and waits in between."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import run
from materials import prepare
from workloads import WORKLOADS, groups_of


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_steps_are_taken_on_demand(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    workload = WORKLOADS["demo"]
    folder = prepare(workload, tmp_path, warm_up_steps=2)
    worker = run.start_worker("groupgrad", Path(sys.executable), workload, folder)
    try:
        assert set(worker.read("ready")["versions"]) == {"groupgrad", "torch", "transformers"}
        first = worker.ask("step")
        held = worker.ask("baseline")["bytes"]
        second = worker.ask("step")
    finally:
        worker.stop()
    assert worker.process.returncode == 0, worker.tail()
    assert second["held_bytes"] == held > 0 == first["held_bytes"]
    assert second["peak_bytes"] > 0
    assert second["phases"]["sampling"] + second["phases"]["training"] <= second["seconds"] * 1.01
    groups = groups_of(second, workload.num_generations)
    assert [len(group.lengths) for group in groups] == [16] * 16
    assert all(1 <= length <= workload.limit for group in groups for length in group.lengths)
    assert {group.prompt_tokens for group in groups} == {8}


@pytest.mark.slow
def test_workers_of_two_checkouts_train_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    workload = WORKLOADS["demo"]
    folder = prepare(workload, tmp_path, warm_up_steps=2)
    workers = [
        run.start_worker("groupgrad", Path(sys.executable), workload, folder),
        run.start_worker("before", Path(sys.executable), workload, folder, checkout=run.BENCH.parent),
    ]
    try:
        for worker in workers:
            worker.read("ready")
        assert all(worker.ask("step")["seconds"] > 0 for worker in workers)
    finally:
        for worker in workers:
            worker.stop()


@pytest.mark.slow
def test_a_worker_that_dies_is_reported_with_its_last_words(tmp_path):
    worker = run.start_worker("groupgrad", Path(sys.executable), WORKLOADS["demo"], tmp_path / "nothing")
    with pytest.raises(RuntimeError, match=r"groupgrad ended before its `ready` answer(.|\n)*nothing"):
        worker.read("ready")
    worker.stop()
