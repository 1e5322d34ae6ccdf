"""Two processes compute the same as one, and an error on one of them ends both."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from forked_ranks import on_ranks, two_once
from rank_cases import CASES, QUICK

from groupgrad.checkpoints.choosing import choose
from groupgrad.errors import CheckpointError

SLOW = [case for case in CASES if case not in QUICK]
COMPARED = [case for case in CASES if case != "rows_stay"]  # of which the costs alone are compared, below


@pytest.fixture(scope="module")
def two(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and results of two processes."""

    def action(out: Path) -> dict[str, Any]:
        found = {case: ranks.run(case, out) for case in QUICK}
        return {**found, **{case: trouble(out) for case, trouble in ranks.TROUBLE.items()}}

    return two_once(tmp_path_factory, "processes", action)


@pytest.fixture(scope="module")
def two_slow(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of the slow cases."""

    def action(out: Path) -> dict[str, Any]:
        return {case: ranks.run(case, out) for case in SLOW}

    return two_once(tmp_path_factory, "slow-processes", action)


@pytest.fixture(scope="module")
def one(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`one(case)` makes the same run in this process."""
    out = tmp_path_factory.mktemp("one")
    return lambda case: (ranks.run(case, out), out)


def results(two: Any, case: str) -> list[dict[str, Any]]:
    return [rank[case] for rank in two[1]]


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("case", COMPARED)
def test_two_processes_equal_one(one, request, tools, case):
    """Final weights to 1e-5 relative and equal on both ranks; every logged number, evaluation included, to 1e-4."""
    two = request.getfixturevalue("two_slow" if case in SLOW else "two")
    (alone, out), (first, second) = one(case), results(two, case)
    assert torch.equal(first["weights"], second["weights"])
    assert tools.relative(first["weights"], alone["weights"]) < 1e-5
    # Rows with images are decoded by the modules, and one of the two processes may have none.
    tools.assert_like(first["log"], alone["log"], 1e-4, without=["sampling/path/"])
    for rank in (first, second):  # the mean over all steps, those after the last log event included
        assert rank["log"][-1]["train_loss"] == pytest.approx(alone["log"][-1]["train_loss"], abs=1e-5, rel=1e-4)
    if case == "reward_model":
        assert 0 < alone["log"][0]["rewards/LlamaForSequenceClassification/truncated"] < 1
    if case == "dapo":
        assert_same_completions(two[0] / "run" / case / "completions", out / "run" / case / "completions")
        assert_same_rollouts(two[0] / "run" / case / "rollouts", out / "run" / case / "rollouts")
        last = {key for entry in alone["log"] for key in entry}
        assert {"eval_five_reward", "eval_five_loss", "eval_one_reward", "eval_one_loss", "eval_one_entropy"} <= last


def test_ranks_share_the_work_of_long_rows(two):
    """Few rows have a gradient: with balance_ranks each rank trains about half of their tokens, without it one rank."""
    slowest = {}
    for case in ("flat_groups", "rows_stay"):
        first, second = (result["costs"] for result in results(two, case))
        assert len(first) == len(second) == 4
        slowest[case] = [max(pair) / (sum(pair) / 2) for pair in zip(first, second)]
    assert max(slowest["flat_groups"]) < 1.2
    assert max(slowest["rows_stay"]) > 1.3


def assert_same_completions(folder: Path, expected: Path) -> None:
    """The files have the rows of all ranks, each once and in order; 32 of each generation batch."""
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert Counter(name.split("_0")[0] for name in names) == {"completions": 2, "eval_five": 2, "eval_one": 2}
    for name in names:
        rows, wanted = (pq.read_table(where / name).to_pylist() for where in (folder, expected))
        assert len(rows) == (32 if name.startswith("completions") else 5 if "five" in name else 1)
        assert [(r["prompt"], r["completion"]) for r in rows] == [(r["prompt"], r["completion"]) for r in wanted]
        assert [r["advantage"] for r in rows] == pytest.approx([r["advantage"] for r in wanted], abs=1e-6)


def assert_same_rollouts(folder: Path, expected: Path) -> None:
    """Each rank has a file of its rows; together they are those of one process."""
    rows, wanted = (
        sorted(pq.read_table(where).to_pylist(), key=lambda row: (row["step"], row["row"]))
        for where in (folder, expected)
    )
    assert len(rows) == len(wanted) == 64
    for row, other in zip(rows, wanted):
        assert [row[name] for name in ("step", "row", "completion")] == [
            other[name] for name in ("step", "row", "completion")
        ]
    assert {path.name.split(".")[1] for path in folder.iterdir()} == {"0", "1"}


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_both(two):
    first, second = results(two, "nonfinite")
    assert torch.equal(first["weights"], second["weights"])
    assert bool(first["weights"].isfinite().all())
    assert first["step"] == second["step"] == 2
    assert first["skipped"] == second["skipped"] == 1


def test_an_error_on_one_rank_ends_both(two):
    first, second = (result["error"] for result in results(two, "failing"))
    assert second is not None and second.startswith("RewardError") and "the judge is out" in second
    assert first is not None and first.startswith("RankError") and "rank 1" in first and "the judge is out" in first


def test_a_checkpoint_of_two_processes_is_resumed_on_one(ranks, two, tools, tmp_path, caplog):
    trainer = ranks.build("resumed", tmp_path, save_strategy="no")
    trainer.train(str(two[0] / "run" / "resumed" / "checkpoint-2"))
    straight = results(two, "resumed")[0]
    assert tools.relative(tools.weights(trainer.model), straight["weights"]) < 1e-5
    # The logged loss averages steps before and after the checkpoint; other metrics start after it.
    assert trainer.state.log_history[0]["loss"] == pytest.approx(straight["log"][0]["loss"], rel=1e-4)
    assert "2 processes wrote" in caplog.text and "metrics, memory start anew" in caplog.text
    assert "sampled again" not in caplog.text
    (table,) = [r.getMessage() for r in caplog.records if "options differ" in r.getMessage()]
    assert "world_size" in table and "per_device_train_batch_size" in table


def test_a_damaged_rank_state_is_named(two, tmp_path):
    for step in (1, 2):
        shutil.copytree(two[0] / "run" / "resumed" / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    assert choose(tmp_path, True).manifest.world_size == 2
    for name in ("groupgrad_state_1.pt", "rng_state_1.pth"):
        (tmp_path / "checkpoint-2" / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            choose(tmp_path, str(tmp_path / "checkpoint-2"))
    assert choose(tmp_path, True).folder.name == "checkpoint-1"


def test_a_full_disk_on_one_rank_costs_one_checkpoint(two):
    first, second = results(two, "full")
    assert torch.equal(first["weights"], second["weights"])
    checkpoints = [name for name in first["found"] if name.startswith("checkpoint")]
    assert checkpoints == ["checkpoint-1", "checkpoint-3"]
    assert choose(two[0] / "run" / "full", True).folder.name == "checkpoint-3"


@pytest.mark.slow
def test_a_checkpoint_of_one_process_is_resumed_on_two(ranks, tools, tmp_path):
    alone = ranks.run("resumed", tmp_path / "one")
    checkpoint = tmp_path / "one" / "run" / "resumed" / "checkpoint-2"
    for result in on_ranks(lambda rank: ranks.go_on(tmp_path, checkpoint), tmp_path, 2, connect=False):
        assert tools.relative(result["weights"], alone["weights"]) < 1e-5
        assert result["log"][0]["loss"] == pytest.approx(alone["log"][0]["loss"], rel=1e-4)
