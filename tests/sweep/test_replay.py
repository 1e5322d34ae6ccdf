"""Arms of a sweep are repeated by `groupgrad replay` and compared by `groupgrad bisect` like other runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupgrad.apps.cli.main import main


def times_of(folder: str) -> dict[str, int]:
    """The time of every file of a folder."""
    return {str(path): path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.slow
def test_an_arm_is_replayed_and_bisected(content: dict[str, Any], capsys: Any, monkeypatch: Any) -> None:
    content["base"] |= {"max_steps": 3, "env": {"SWEEP_JUDGE": "here", "SWEEP_API_KEY": "old"}}
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
    assert main(["bisect", first, second]) == 1
    assert f"learning_rate: 0.01 in {first}, 0.03 in {second}" in capsys.readouterr().out
    assert times_of("out") == before


def test_a_sweep_object_makes_trainers_of_its_arms_for_replays(make_sweep: Any, tmp_path: Path) -> None:
    from groupgrad.apps.replay import replay

    sweep = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"max_steps": 2})
    sweep.run()
    folder = tmp_path / "sweep" / "arms" / "02-learning_rate=0.03"
    assert replay(sweep.trainer_of(2), folder, 2).is_same
    with pytest.raises(ValueError, match="is no arm of the sweep"):
        sweep.trainer_of("03-none")
