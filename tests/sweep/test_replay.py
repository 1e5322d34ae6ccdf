"""Arms of a sweep are repeated by `groupgrad replay` and compared by `groupgrad bisect` like other runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupgrad.apps.cli.main import main

SCRIPT = """
from datasets import Dataset

from groupgrad import Sweep


def letters(completion_ids, **kwargs):
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


sweep = Sweep(
    "mine",
    {"learning_rate": [1e-2, 3e-2]},
    args={"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 3, "num_generations": 4,
          "per_device_train_batch_size": 8, "max_completion_length": 6},
    turn_steps=2,
    model="base",
    reward_funcs=letters,
    train_dataset=Dataset.from_dict({"prompt": list("abcdefgh")}),
)
sweep.run()
"""


def times_of(folder: str) -> dict[str, int]:
    """The time of every file of a folder."""
    return {str(path): path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.slow
def test_an_arm_is_replayed_and_bisected(content: dict[str, Any], capsys: Any, monkeypatch: Any) -> None:
    content["base"] |= {"max_steps": 3, "env": {"SWEEP_JUDGE": "here", "SWEEP_API_KEY": "old"}}
    content["cache_rewards"] = ["letters"]
    Path("sweep.yaml").write_text(yaml.safe_dump(content))
    assert main(["sweep", "sweep.yaml"]) == 0
    assert main(["sweep", "clone", "out", "1", "--set", "beta=0.1", "--from-weights"]) == 0
    assert main(["sweep", "sweep.yaml"]) == 0
    first, second, clone = sorted(f"{path}" for path in Path("out/arms").iterdir())
    monkeypatch.delenv("SWEEP_JUDGE")
    monkeypatch.setenv("SWEEP_API_KEY", "new")
    before = times_of("out")
    capsys.readouterr()

    for arm in (first, clone):
        assert main(["replay", arm, "--step", "3", "--row", "2"]) == 0
        shown = capsys.readouterr().out
        assert f"{arm}: steps 1 to 3 repeated from the start of the run" in shown
        assert "step 3, row 2:" in shown and "  reward/letters " in shown and shown.endswith("0 bits differ.\n")
        assert "holds the settings of the last start" not in shown  # those of an arm never change
    # Variables of the sweep's file are exported again, but for those whose value the record hides.
    assert (os.environ["SWEEP_JUDGE"], os.environ["SWEEP_API_KEY"]) == ("here", "new")
    assert main(["bisect", first, second, "--replay"]) == 1
    shown = capsys.readouterr().out
    assert f"learning_rate: 0.01 in {first}, 0.03 in {second}" in shown
    assert shown.count("is what it recorded, 0 bits differ") == 2
    assert times_of("out") == before


@pytest.mark.slow
def test_an_arm_of_a_script_is_replayed_by_it(content: dict[str, Any], capsys: Any) -> None:
    Path("mine.py").write_text(SCRIPT)
    exec(compile(SCRIPT, "mine.py", "exec"), {"__name__": "__main__"})
    first, second = sorted(f"{path}" for path in Path("mine/arms").iterdir())
    capsys.readouterr()
    assert main(["replay", second, "--step", "3"]) == 2
    shown = capsys.readouterr().err
    assert (
        f"{second} is an arm of a sweep that a Python script or an earlier release made" in shown
        and "--script" in shown
    )
    assert main(["bisect", first, second, "--replay"]) == 2
    shown = capsys.readouterr().err
    assert "groupgrad.apps.replay.bisect" in shown and "--script" not in shown
    assert main(["replay", second, "--step", "3", "--row", "1", "--script", "mine.py"]) == 0
    shown = capsys.readouterr().out
    assert "step 3, row 1:" in shown and shown.count("note:") == 1 and shown.endswith("0 bits differ.\n")
    Path("other.py").write_text(SCRIPT.replace('"mine"', '"other"'))
    assert main(["replay", second, "--step", "3", "--script", "other.py"]) == 2
    assert "other, and the run is an arm of the sweep in" in capsys.readouterr().err


def test_a_sweep_object_makes_trainers_of_its_arms_for_replays(make_sweep: Any, tmp_path: Path) -> None:
    from groupgrad.apps.replay import replay

    sweep = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"max_steps": 2})
    sweep.run()
    folder = tmp_path / "sweep" / "arms" / "02-learning_rate=0.03"
    assert replay(sweep.trainer_of(2), folder, 2).is_same
    with pytest.raises(ValueError, match="is no arm of the sweep"):
        sweep.trainer_of("03-none")
