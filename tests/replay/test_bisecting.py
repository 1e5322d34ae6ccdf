"""Two runs are compared step by step, and a fault is found in as few replays as a binary search would need."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from repeatable_runs import make_trainer
from replay_rounds import STEPS, faulty, random_faults, without_records

from groupgrad.apps.replay import bisect
from groupgrad.apps.replay.wording import bisection_report


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with nothing wrong."""
    folder = tmp_path_factory.mktemp("runs") / "clean"
    make_trainer(folder, max_steps=STEPS).train()
    return folder


def test_equal_runs_have_no_difference(clean, tmp_path):
    make_trainer(tmp_path / "again", max_steps=STEPS).train()
    result = bisect(clean, tmp_path / "again")
    assert result.first_step is None and not result.settings
    assert result.known_same == STEPS and result.compared.rows == 8 * STEPS
    assert [step for step, (count, found) in result.weights.items() if count > 1000 and found is None] == [4, 8, 12]
    report = bisection_report(result)
    assert "No difference was found." in report and "configuration: the same" in report


def test_settings_are_named_first(clean, tmp_path):
    make_trainer(tmp_path / "other", max_steps=2, learning_rate=5e-3, model_seed=1).train()
    result = bisect(clean, tmp_path / "other")
    assert result.settings["learning_rate"] == (1e-2, 5e-3) and result.settings["max_steps"] == (12, 2)
    assert result.weights_at_start.startswith("different") and result.first_step == 1
    report = bisection_report(result)
    assert "learning_rate: 0.01 in" in report
    assert f"compared: step 1; {clean} has 12 and {tmp_path / 'other'} 2" in report


def test_reward_functions_of_one_name_are_told_apart(clean, tmp_path):
    config = json.loads((clean / "run_config.json").read_text())
    assert config["rewards"] == ["letters_reward"]
    assert config["reward_functions"] == ["repeatable_runs.letters_reward"]
    other, earlier = (shutil.copytree(clean, tmp_path / name) for name in ("other", "earlier"))
    (other / "run_config.json").write_text(json.dumps({**config, "reward_functions": ["digits.letters_reward"]}))
    del config["reward_functions"]
    (earlier / "run_config.json").write_text(json.dumps(config))
    result = bisect(clean, other)
    assert result.settings == {"reward_functions": (["repeatable_runs.letters_reward"], ["digits.letters_reward"])}
    assert "configuration: the same" not in bisection_report(result)
    assert not bisect(clean, earlier).settings


def test_adapters_and_dtypes_are_settings(clean, tmp_path):
    """Runs of `groupgrad train` differ in them as in any other setting; earlier releases have not recorded them."""
    folders = []
    for name, rank in (("four", 4), ("eight", 8), ("earlier", None)):
        folders.append(shutil.copytree(clean, tmp_path / name))
        path = folders[-1] / "run_config.json"
        config = json.loads(path.read_text())
        assert config["dtype"] == "float32" and config["adapter"] is None and config["quantization"] is None
        config |= {"adapter": {"r": rank, "lora_alpha": 16}, "dtype": "bfloat16" if rank == 8 else "float32"}
        if rank is None:
            del config["adapter"], config["dtype"]
        path.write_text(json.dumps(config))
    assert bisect(folders[0], folders[1]).settings == {"dtype": ("float32", "bfloat16"), "adapter.r": (4, 8)}
    assert "dtype" not in bisect(folders[0], folders[2]).settings


def test_a_flipped_bit_is_found_without_a_replay(clean, tmp_path):
    faulty(tmp_path / "bit", 6, "bit")().train()
    result = bisect(clean, tmp_path / "bit")
    assert (result.first_step, result.replays, result.open_steps) == (6, 0, [])
    assert result.compared.differences[0].what == "digest of the weights after the step"
    assert "The runs part in step 6." in bisection_report(result)


def test_a_changed_reward_is_found_without_a_replay(clean, tmp_path):
    faulty(tmp_path / "reward", 5, "reward")().train()
    result = bisect(clean, tmp_path / "reward")
    first = result.compared.differences[0]
    assert (first.step, first.row, first.what) == (5, 6, "reward of letters_reward")
    assert first.second - first.first == 0.5
    assert (result.first_step, result.replays) == (5, 0)


def test_checkpoints_alone_leave_steps_open_which_replays_close(clean, tmp_path):
    make = faulty(tmp_path / "bit", 6, "bit")
    make().train()
    one, two = without_records(clean, tmp_path / "one"), without_records(tmp_path / "bit", tmp_path / "two")
    result = bisect(one, two)
    assert (result.known_same, result.first_step, result.open_steps) == (4, 8, [5, 6, 7])
    assert "weights that it left are not recorded" in bisection_report(result)
    again = tmp_path / "again"
    result = bisect(
        one, two, make_first=lambda: make_trainer(again, max_steps=STEPS), make_second=faulty(again, 6, "bit")
    )
    assert (result.first_step, result.replays) == (6, 2)
    assert "the replays part at step 6" in bisection_report(result)


def test_a_run_that_does_not_repeat_itself_is_named(clean, tmp_path):
    """A bit that a machine has flipped is not flipped in a replay."""
    faulty(tmp_path / "bit", 6, "bit")().train()
    make = lambda: make_trainer(tmp_path / "again", max_steps=STEPS)  # noqa: E731
    result = bisect(clean, tmp_path / "bit", make_first=make, make_second=make)
    assert result.first_step == 6 and result.replays == 2
    report = bisection_report(result)
    assert f"{clean} repeated from checkpoint-4 to step 6 is what it recorded, 0 bits differ" in report
    assert f"{tmp_path / 'bit'} repeated from checkpoint-4 to step 6 is NOT what it recorded" in report
    assert "the difference does not repeat" in report


@pytest.mark.slow
@pytest.mark.timeout(1400)
@pytest.mark.parametrize("records", ["all", "checkpoints"])
def test_random_faults_are_found_in_at_most_log2_of_the_steps(clean, tmp_path, capsys, records):
    most = 0
    for fault, step, result in random_faults(clean, tmp_path, records, 10):
        assert result.first_step == step, f"{fault} at {step}: {bisection_report(result)}"
        most = max(most, result.replays)
    assert most <= math.ceil(math.log2(STEPS))
    with capsys.disabled():
        print(f"\n10 faults, records: {records}: each found at its step, at most {most} replays (log2 of {STEPS} "
              f"steps: {math.log2(STEPS):.1f})")  # fmt: skip


def test_what_only_one_run_records_is_no_difference(clean, tmp_path):
    """Other logging steps mean other windows of logged means, and gradient shares are recorded on request."""
    other = tmp_path / "other"
    make_trainer(other, max_steps=STEPS, logging_steps=3, record_gradient_share=True).train()
    found = bisect(clean, other)
    assert found.first_step is None and found.last_compared == STEPS
