"""`groupgrad replay` and `groupgrad bisect` on runs of `groupgrad train` and `groupgrad demo`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from groupgrad.apps.cli.main import main
from groupgrad.apps.cli.parsing import command_of

FILE = """\
max_steps: 5
num_generations: 4
per_device_train_batch_size: 8
max_completion_length: 4
learning_rate: 1.0e-2
save_steps: 3
use_cpu: true
report_to: none
model_name_or_path: model
dataset_name: rows.jsonl
reward_funcs: [counts.count]
output_dir: out
"""


@pytest.fixture
def work(work: Path, make_model: Any) -> Path:
    """The working folder with a model of larger weights, and `FILE`."""
    make_model(initializer_range=0.15).save_pretrained(work / "model")
    (work / "run.yaml").write_text(FILE)
    return work


@pytest.mark.slow
def test_a_run_of_the_command_is_repeated_and_compared(work: Path, capsys: Any, monkeypatch: Any) -> None:
    """The stored command line is enough: its file may change, and the replay starts in another folder."""
    assert main(["train", "--config", "run.yaml", "--hub_token", "hf_private"]) == 0
    config = json.loads((work / "out" / "run_config.json").read_text())
    assert config["command"]["argv"] == ["--config", "run.yaml", "--hub_token", "<hidden>"]
    assert config["data"]["rows"] == 8 and "architectures" in json.loads((work / "out" / "config.json").read_text())
    (work / "run.yaml").write_text("max_steps: 1\n")
    (work / "elsewhere").mkdir()
    monkeypatch.chdir(work / "elsewhere")
    capsys.readouterr()

    assert main(["replay", "../out", "--step", "5", "--row", "2", "--keep", "kept"]) == 0
    shown = capsys.readouterr().out
    assert "../out: steps 4 to 5 repeated from checkpoint-3" in shown
    assert "step 5, row 2:" in shown and "note:" not in shown and "an optimizer step trains" not in shown
    assert re.search(r"^  reward/count      \d", shown, re.MULTILINE)
    assert "weights: digests after 2 steps" in shown and shown.endswith("0 bits differ.\n")
    assert (work / "elsewhere" / "kept" / "rollouts" / "step_000005.0.parquet").is_file()

    monkeypatch.chdir(work)
    (work / "run.yaml").write_text(FILE)
    assert main(["train", "--config", "run.yaml", "--output_dir", "other", "--beta", "0.1"]) == 0
    capsys.readouterr()
    assert main(["bisect", "out", "other"]) == 1
    shown = capsys.readouterr().out
    assert "beta: 0.0 in out, 0.1 in other" in shown and "The runs part in step" in shown
    assert main(["bisect", "out", "out"]) == 0
    assert "No difference was found." in capsys.readouterr().out


def test_mistakes_are_named(work: Path, capsys: Any) -> None:
    assert main(["train", "--config", "run.yaml", "--max_steps", "1"]) == 0
    (work / "counts.py").rename(work / "gone.py")
    del sys.modules["counts"]
    rows = (work / "rows.jsonl").read_text()
    capsys.readouterr()
    for argv, text in [
        (["replay", "model", "--step", "1"], "model' holds no run: there is none of"),
        (["replay", "out", "--step", "9"], "out has no step 9; it has recorded steps 1 to 1"),
        (["replay", "out", "--step", "1", "--row", "8"], "step 1 of out has no row 8; it has rows 0 to 7"),
        (["replay", "out", "--step", "1"], "reward function 'counts.count' cannot be imported"),
        (["bisect", "out", "nothing"], "holds no run"),
    ]:
        assert main(argv) == 2
        assert re.search(text, capsys.readouterr().err), argv
    (work / "gone.py").rename(work / "counts.py")
    (work / "rows.jsonl").write_text(rows.replace("3+1=", "3+2="))
    assert main(["replay", "out", "--step", "1"]) == 2
    assert "the data set is not the one that out was trained on" in capsys.readouterr().err


def test_a_run_of_several_processes_is_refused_before_anything_is_loaded(work: Path, capsys: Any) -> None:
    assert main(["train", "--config", "run.yaml", "--max_steps", "1"]) == 0
    path = work / "out" / "run_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processes": 2}))
    (work / "model").rename(work / "gone")
    capsys.readouterr()
    assert main(["replay", "out", "--step", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "groupgrad replay: error: out was trained by 2 processes, and only runs of one process can be repeated; "
        "`groupgrad bisect` compares its records with those of another run",
        "(GROUPGRAD_TRACEBACK=1 shows where)",
    ]
    assert main(["bisect", "out", "out"]) == 0


@pytest.mark.slow
def test_a_run_of_the_demo_is_repeated(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    demo = ["demo", "--tiny", "--seed", "3", "--output-dir", "runs/demo", "--warm-up-steps", "2", "--grpo-steps", "2"]
    assert main(demo) == 1
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "runs").rglob("*"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["replay", "../runs/demo", "--step", "2", "--row", "1"]) == 0
    shown = capsys.readouterr().out
    assert "step 2, row 1:" in shown and "weights: digests after 2 steps" in shown
    assert shown.endswith("0 bits differ.\n")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "runs").rglob("*")) == before
    (tmp_path / "runs" / "demo" / "base").rename(tmp_path / "gone")
    assert main(["replay", "../runs/demo", "--step", "2"]) == 2
    assert "runs/demo has no base/" in capsys.readouterr().err


def test_secrets_of_a_command_line_are_hidden() -> None:
    argv = ["--hub_token", "hf_a", "--hub-token=hf_b", "--set", "model_init_kwargs.token=hf_c", "--beta", "0.1"]
    stored = command_of(argv, {"env": {"WANDB_API_KEY": "w"}, "beta": 0.1})
    assert stored["argv"] == [
        *("--hub_token", "<hidden>", "--hub-token=<hidden>", "--set", "model_init_kwargs.token=<hidden>"),
        *("--beta", "0.1"),
    ]
    assert stored["yaml"] == {"env": {"WANDB_API_KEY": "<hidden>"}, "beta": 0.1}


def test_a_run_of_a_script_is_to_be_repeated_in_python(work: Path, capsys: Any) -> None:
    assert main(["train", "--config", "run.yaml", "--max_steps", "1"]) == 0
    path = work / "out" / "run_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "command": None}))
    capsys.readouterr()
    assert main(["replay", "out", "--step", "1"]) == 2
    shown = capsys.readouterr().err
    assert "out was not made by `groupgrad train`" in shown and "groupgrad.apps.replay.replay(trainer, run" in shown
