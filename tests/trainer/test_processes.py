"""Two processes compute the same as one, and an error on one of them ends both."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from two_ranks import run_on_two

SCRIPT = Path(__file__).with_name("ranks.py")
CASES = [
    "dapo",
    "grpo",
    "luspo",
    "dr_grpo",
    "cispo",
    "sapo",
    "vespo",
    "entropy",
    "flat_groups",
    "reward_model",
    "cut_groups",
    "agents",
    "lora",
    "images",
    "resumed",
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of two processes."""
    out = tmp_path_factory.mktemp("two")
    run_on_two(SCRIPT, out, timeout_s=240)
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`one(case)` makes the same run in this process."""
    spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
    assert spec is not None and spec.loader is not None
    ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks)
    out = tmp_path_factory.mktemp("one")
    assert list(ranks.CASES) == CASES
    return lambda case: (ranks.run(case, out), out)


def results(out: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(out / f"{case}_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(one, two, tools, case):
    """Final weights to 1e-5 relative and equal on both ranks; every logged number, evaluation included, to 1e-4."""
    (alone, out), (first, second) = one(case), results(two, case)
    assert torch.equal(first["weights"], second["weights"])
    assert tools.relative(first["weights"], alone["weights"]) < 1e-5
    assert len(first["log"]) == len(alone["log"])
    for entry, expected in zip(first["log"][:-1], alone["log"][:-1]):
        assert entry == pytest.approx(expected, abs=1e-4, rel=1e-4)
    if case == "reward_model":
        assert 0 < alone["log"][0]["rewards/LlamaForSequenceClassification/truncated"] < 1
    if case == "dapo":
        assert_same_completions(two / "run" / case / "completions", out / "run" / case / "completions")
        last = {key for entry in alone["log"] for key in entry}
        assert {"eval_five_reward", "eval_five_loss", "eval_one_reward", "eval_one_loss", "eval_one_entropy"} <= last


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


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_both(two):
    first, second = results(two, "nonfinite")
    assert torch.equal(first["weights"], second["weights"])
    assert bool(first["weights"].isfinite().all())
    assert first["step"] == second["step"] == 2
    assert {*first["skipped"], *second["skipped"]} == {"step_000002_rank_0.jsonl", "step_000002_rank_1.jsonl"}


def test_a_hang_on_one_rank_ends_both_with_its_name(two):
    first, second = results(two, "hanging")
    assert second["error"].startswith("HangError: the reward function 'judge' has run for ")
    assert "rank 1" in first["error"] and "'judge' has run for" in first["error"]
    assert all(result["seconds"] < 5 + 10 for result in (first, second))
    assert (two / "run" / "hanging" / "hang_step_000002_rank_1.txt").exists()


def test_an_error_on_one_rank_ends_both(two):
    first, second = (result["error"] for result in results(two, "failing"))
    assert second is not None and second.startswith("RewardError") and "the judge is out" in second
    assert first is not None and first.startswith("RuntimeError") and "rank 1" in first and "the judge is out" in first
