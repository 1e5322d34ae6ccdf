"""A step that is repeated has the same bits, and what does not is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from repeatable_runs import KINDS, letters_reward, make_trainer
from replay_rounds import numbers_of, random_replays

from groupgrad.apps.replay import ReplayError, replay
from groupgrad.apps.replay.wording import replay_report
from groupgrad.kernels import status


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of a kind, made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_trainer(made[kind], **KINDS[kind]).train()
        return made[kind]

    return get


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Time and size of every file of a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


@pytest.mark.quick("plain", "reused_rollouts")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_every_kind_of_run_has_the_same_bits(run_of, tmp_path, kind):
    folder = run_of(kind)
    before = files_of(folder)
    result = replay(make_trainer(tmp_path / "unused", **KINDS[kind]), folder, 8, row=3)
    assert result.is_same, replay_report(result)
    assert result.start.step == 4 and result.compared.digests == 4
    assert result.compared.rows >= 8 and result.compared.unmatched == 0
    assert result.compared.metrics > 20
    assert result.rows[0] is not None and result.rows[0]["completion_ids"] == result.rows[1]["completion_ids"]
    assert files_of(folder) == before
    report = replay_report(result)
    assert "steps 5 to 8 repeated from checkpoint-4" in report and "0 bits differ." in report
    assert not os.listdir(tmp_path / "unused") if (tmp_path / "unused").exists() else True


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_hundred_random_steps_and_rows_have_the_same_bits(run_of, tmp_path, capsys):
    numbers = steps = 0
    for kind, result in random_replays(run_of, tmp_path / "unused", 100):
        assert result.is_same, f"{kind}, step {result.step}, row {result.row}: {replay_report(result)}"
        assert result.rows[0] is not None and result.compared.unmatched == 0
        numbers += numbers_of(result)
        steps += result.step - result.start.step
    with capsys.disabled():
        print(f"\n100 random (step, row) of {len(KINDS)} kinds of run: {steps} steps repeated, {numbers:,} numbers, "
              "0 bits differ")  # fmt: skip


def altered(folder: Path, to: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A copy of a run in which the rows of one step have been changed."""
    shutil.copytree(folder, to)
    path = to / "rollouts" / f"step_{step:06d}.0.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    return to


def test_one_altered_token_is_named_by_step_row_and_position(run_of, tmp_path):
    def change(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["row"] == 5)
        row["completion_ids"][1] += 1

    folder = altered(run_of("plain"), tmp_path / "altered", 7, change)
    result = replay(make_trainer(tmp_path / "unused"), folder, 8, row=5)
    (found,) = result.compared.differences
    assert (found.step, found.row, found.token, found.what, found.count) == (7, 5, 1, "token id", 1)
    assert not result.is_same
    assert "first difference: step 7, row 5, token 1: token id is" in replay_report(result)


@pytest.mark.parametrize(
    ("column", "what"), [("logprobs", "log-prob"), ("advantage", "advantage"), ("reward/letters_reward", "reward of")]
)
def test_one_altered_number_is_named(run_of, tmp_path, column, what):
    def change(rows: list[dict[str, Any]]) -> None:
        if column == "logprobs":
            rows[2][column][0] *= 1 + 1e-7
        else:
            rows[2][column] += 1e-12

    folder = altered(run_of("plain"), tmp_path / "altered", 6, change)
    (found,) = replay(make_trainer(tmp_path / "unused"), folder, 6).compared.differences
    assert (found.step, found.row) == (6, 2) and found.what.startswith(what)


def test_a_run_without_checkpoints_is_repeated_from_its_start(tmp_path):
    folder = tmp_path / "run"
    make_trainer(folder, max_steps=3, save_strategy="no", adapter=True).train()
    result = replay(make_trainer(tmp_path / "unused", max_steps=3, save_strategy="no", adapter=True), folder, 3)
    assert result.is_same and result.start.step == 0 and result.compared.digests == 3
    assert "the replay makes 3 steps from the start" in replay_report(result)
    other = make_trainer(tmp_path / "unused", max_steps=3, save_strategy="no", adapter=True, model_seed=1)
    with pytest.raises(ReplayError, match="the model is not the one that"):
        replay(other, folder, 2)


def test_checkpoints_that_are_gone_or_damaged_are_passed_over(run_of, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_of("plain"), folder)
    (folder / "checkpoint-8" / "optimizer.pt").write_bytes(b"torn")
    result = replay(make_trainer(tmp_path / "unused"), folder, 10)
    assert result.is_same and result.start.step == 4
    assert "checkpoint-8 is damaged and passed over: optimizer.pt has 4 bytes" in replay_report(result)
    shutil.rmtree(folder / "checkpoint-4")
    result = replay(make_trainer(tmp_path / "unused"), folder, 5)
    assert result.start.step == 0
    assert "the run has kept checkpoint 8, 12 only: the replay makes 5 steps from the start" in replay_report(result)


def test_rewards_that_vary_are_named_or_taken_from_the_record(tmp_path):
    folder, calls = tmp_path / "run", []

    def judge(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        calls.append(1)
        return [value + len(calls) * (row == 2) for row, value in enumerate(letters_reward(completion_ids))]

    judge.__name__ = "letters_reward"
    make_trainer(folder, reward=judge, max_steps=4).train()
    count = len(calls)
    result = replay(make_trainer(tmp_path / "unused", reward=judge, max_steps=4), folder, 3)
    first = result.compared.differences[0]
    assert len(calls) == count + 3 and (first.step, first.row, first.what) == (1, 2, "reward of letters_reward")
    taken = make_trainer(tmp_path / "unused", reward=judge, max_steps=4)
    result = replay(taken, folder, 4, recorded_rewards=True)
    assert result.is_same and result.compared.digests == 4
    assert len(calls) == count + 3


def test_rewards_of_turns_are_taken_from_the_record(run_of, tmp_path):
    folder = run_of("turns")
    stored = pq.read_table(next((folder / "rollouts").glob("step_000005.*"))).to_pylist()
    assert {len(row["turn_rewards"]) for row in stored} > {1}
    for row in stored:
        assert row["reward"] == pytest.approx(sum(reward for (reward,) in row["turn_rewards"]))
        assert len(row["turn_advantages"]) == len(row["turn_rewards"]) == row["turns"]
    assert any(len(set(row["turn_advantages"])) > 1 for row in stored)

    def turns_reward(completions: list[Any], **kwargs: Any) -> list[float]:
        raise AssertionError("a replay with recorded rewards calls no function")

    unused = make_trainer(tmp_path / "unused", **{**KINDS["turns"], "reward": turns_reward})
    result = replay(unused, folder, 8, recorded_rewards=True)
    assert result.is_same


def test_mistakes_are_said_before_anything_is_repeated(run_of, tmp_path):
    folder = run_of("plain")
    fresh = make_trainer(tmp_path / "unused")
    for step, row, text in [
        (13, None, "has no step 13; it has recorded steps 1 to 12"),
        (0, None, "has no step 0"),
        (5, 8, "step 5 of .* has no row 8; it has rows 0 to 7"),
    ]:
        with pytest.raises(ReplayError, match=text):
            replay(fresh, folder, step, row)
    with pytest.raises(ValueError, match="holds no run"):
        replay(fresh, tmp_path, 5)
    with pytest.raises(ReplayError, match=r"the data set is not the one .* has 15 rows .* the run's had 16 rows"):
        replay(make_trainer(tmp_path / "unused", rows=15), folder, 5)
    other = make_trainer(tmp_path / "unused", reward=lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(ReplayError, match=r"those of .* were letters_reward"):
        replay(other, folder, 5)
    assert fresh.state.global_step == 0


def test_other_versions_and_settings_are_noted(run_of, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_of("plain"), folder)
    config = folder / "run_config.json"
    record = json.loads(config.read_text())
    record["versions"] |= {"torch": "1.0", "CPU kernels": "packaged for another processor"}
    config.write_text(json.dumps(record))
    result = replay(make_trainer(tmp_path / "unused", learning_rate=5e-3), folder, 5)
    report = replay_report(result)
    assert f"note: CPU kernels was packaged for another processor and is {status()}, which may change bits" in report
    assert "note: torch was 1.0 and is" in report and "note: learning_rate was 0.01 and is 0.005" in report
