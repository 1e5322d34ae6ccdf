"""Two runs are compared step by step, and a fault is found at its step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from repeatable_runs import make_trainer
from replay_rounds import STEPS, faulty, random_faults

from groupgrad.apps.replay import bisect
from groupgrad.apps.replay.wording import bisection_report


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with nothing wrong."""
    folder = tmp_path_factory.mktemp("runs") / "clean"
    make_trainer(folder, max_steps=STEPS).train()
    return folder


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, in which a machine has flipped a bit of a weight after step 6."""
    folder = tmp_path_factory.mktemp("faults") / "bit"
    faulty(folder, 6, "bit")().train()
    return folder


def test_equal_runs_have_no_difference(clean, tmp_path):
    """Nor is there one in what only one run records: other logging steps mean other windows of logged means."""
    again = tmp_path / "again"
    make_trainer(again, max_steps=STEPS, logging_steps=3).train()
    result = bisect(clean, again)
    assert result.first_step is None and not result.settings
    assert result.known_same == STEPS and result.compared.rows == 8 * STEPS
    assert result.weights == {4: [], 8: [], 12: []}
    report = bisection_report(result)
    assert "No difference was found." in report and "configuration: the same" in report


def test_a_run_of_an_earlier_release_may_lack_columns_that_are_empty(clean, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(clean, older)
    for path in (older / "rollouts").iterdir():
        pq.write_table(pq.read_table(path).drop_columns(["turn_advantages", "turn_rewards"]), path)
    assert bisect(clean, older).first_step is None


def test_settings_are_named_first(clean, tmp_path):
    make_trainer(tmp_path / "other", max_steps=2, learning_rate=5e-3, model_seed=1).train()
    result = bisect(clean, tmp_path / "other")
    assert result.settings["learning_rate"] == (1e-2, 5e-3) and result.settings["max_steps"] == (12, 2)
    assert result.weights_at_start.startswith("different") and result.first_step == 1
    report = bisection_report(result)
    assert "learning_rate: 0.01 in" in report
    assert f"compared: step 1; {clean} has 12 and {tmp_path / 'other'} 2" in report


def test_what_decides_results_is_a_setting_and_earlier_releases_recorded_less(clean, tmp_path):
    """Reward functions of one name, adapters and dtypes differ as any other setting does."""
    config = json.loads((clean / "run_config.json").read_text())
    assert (config["rewards"], config["reward_functions"]) == (["letters_reward"], ["small_runs.letters_reward"])
    assert config["dtype"] == "float32" and config["adapter"] is None and config["quantization"] is None

    def run(name: str, without: tuple[str, ...] = (), **changes: object) -> Path:
        folder = shutil.copytree(clean, tmp_path / name)
        kept = {key: value for key, value in {**config, **changes}.items() if key not in without}
        (folder / "run_config.json").write_text(json.dumps(kept))
        return folder

    four = run("four", adapter={"r": 4, "lora_alpha": 16})
    eight = run("eight", adapter={"r": 8, "lora_alpha": 16}, dtype="bfloat16")
    assert bisect(four, eight).settings == {"dtype": ("float32", "bfloat16"), "adapter.r": (4, 8)}
    result = bisect(clean, run("other", reward_functions=["digits.letters_reward"]))
    assert result.settings == {"reward_functions": (["small_runs.letters_reward"], ["digits.letters_reward"])}
    assert "configuration: the same" not in bisection_report(result)
    assert not bisect(clean, run("earlier", ("adapter", "dtype", "reward_functions"))).settings


def test_a_flipped_bit_is_found(clean, flipped):
    result = bisect(clean, flipped)
    assert (result.first_step, result.open_steps) == (6, [])
    assert result.compared.differences[0].what == "digest of the weights after the step"
    assert "The runs part in step 6." in bisection_report(result)


def test_a_changed_reward_is_found(clean, tmp_path):
    faulty(tmp_path / "reward", 5, "reward")().train()
    result = bisect(clean, tmp_path / "reward")
    first = result.compared.differences[0]
    assert (first.step, first.row, first.what) == (5, 6, "reward of letters_reward")
    assert first.second - first.first == 0.5
    assert result.first_step == 5


def test_checkpoints_alone_leave_steps_open(clean, flipped, tmp_path):
    """Their weights differ at step 8, in the tensor that the machine has changed."""
    bare = [shutil.copytree(folder, tmp_path / folder.name) for folder in (clean, flipped)]
    for folder in bare:
        shutil.rmtree(folder / "rollouts")
        (folder / "weights.jsonl").unlink()
        (folder / "metrics.jsonl").unlink()
    result = bisect(*bare)
    assert (result.known_same, result.first_step, result.open_steps) == (4, 8, [5, 6, 7])
    report = bisection_report(result)
    assert "weights that it left are not recorded" in report
    assert re.search(r"checkpoint-8: weights differ in \d+ tensors, first \w", report)


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_random_faults_are_found_at_their_steps(clean, tmp_path):
    for fault, step, result in random_faults(clean, tmp_path, 10):
        assert result.first_step == step, f"{fault} at {step}: {bisection_report(result)}"
