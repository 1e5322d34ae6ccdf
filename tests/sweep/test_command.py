"""`groupgrad sweep` from a file: a run, a kill in the middle, actions, and mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupgrad.apps.cli import main as cli
from groupgrad.apps.cli.sweep import read_file
from groupgrad.apps.sweep.commands import apply_commands
from groupgrad.apps.sweep.store import Store
from groupgrad.run_folder.run_lock import locked


def write(content: dict[str, Any]) -> str:
    Path("sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return "sweep.yaml"


@pytest.mark.slow
def test_a_killed_sweep_goes_on_exactly(start, sweep_file, tools, capsys):
    process = start()
    tools.wait_for_steps(process, 3)
    process.kill()
    process.wait()
    assert 3 <= sum(arm.step for arm in Store("out").arms()) < 12, "it was not killed in the middle"
    assert cli.main(["sweep", sweep_file]) == 0
    assert "behind the best" in capsys.readouterr().out
    tools.assert_arms_equal_runs_alone()


def test_actions_on_a_sweep_that_is_not_running(content, capsys, caplog):
    content["base"]["max_steps"] = 1
    assert cli.main(["sweep", write(content)]) == 0
    assert cli.main(["sweep", "clone", "out", "2", "--set", "learning_rate=1e-3", "--set", "beta=0.1"]) == 0
    assert "done, the new arm is 03-learning_rate=0.001-beta=0.1" in capsys.readouterr().out
    assert cli.main(["sweep", "clone", "out", "2", "--set", "beta=-1"]) == 2
    assert "beta" in capsys.readouterr().err
    assert cli.main(["sweep", "clone", "out", "2", "--from-weights"]) == 0
    assert cli.main(["sweep", "stop", "out", "1"]) == 2
    assert capsys.readouterr().err.count("only an arm that is waiting can be stopped") == 1
    assert not [record for record in caplog.records if "only an arm that is waiting" in record.getMessage()]
    assert cli.main(["sweep", "delete", "out", "01"]) == 0
    assert cli.main(["sweep", "sweep.yaml"]) == 0
    capsys.readouterr()
    assert cli.main(["sweep", "status", "out"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" done ") == 3
    assert "01-learning_rate=0.01" not in shown
    assert cli.main(["view", "out", "--export", "report.html"]) == 0
    assert "04-learning_rate=0.03" in Path("report.html").read_text()
    assert sorted(path.name for path in Path("out/arms").iterdir()) == [
        "02-learning_rate=0.03",
        "03-learning_rate=0.001-beta=0.1",
        "04-learning_rate=0.03-from=02",
    ]


def test_a_clone_is_checked_where_the_sweep_was_started(content, capsys, tmp_path, monkeypatch):
    (tmp_path / "digits_of_clones.py").write_text((tmp_path / "sweep_rewards.py").read_text())
    content["base"] |= {"max_steps": 1, "reward_funcs": ["digits_of_clones.letters"]}
    assert cli.main(["sweep", write({**content, "vary": {"learning_rate": [1e-2]}})]) == 0
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry) != tmp_path])
    monkeypatch.delitem(sys.modules, "digits_of_clones")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["sweep", "clone", "../out", "1", "--set", "learning_rat=0.004"]) == 2
    assert "did you mean learning_rate?" in capsys.readouterr().err
    assert cli.main(["sweep", "clone", "../out", "1", "--set", "learning_rate=0.004", "--from-weights"]) == 0
    assert "done, the new arm is 02-learning_rate=0.004-from=01" in capsys.readouterr().out
    assert (tmp_path / "out/arms/02-learning_rate=0.004-from=01/start").is_dir()
    assert Path.cwd() == tmp_path / "elsewhere"


def test_actions_but_clone_import_neither_torch_nor_transformers(tmp_path):
    store = Store(tmp_path / "out", create=True)
    store.set_fact("plan", {"kind": "command line", "base": {}, "vary": {"beta": [0.1, 0.2, 0.3]}})
    store.add_arms([(f"0{number}-beta=0.{number}", 0, {"beta": number / 10}) for number in (1, 2, 3)])
    store.set_state(2, "stopped")
    code = (
        "import sys; from groupgrad.apps.cli.main import main\n"
        "for action in (['status', 'out'], ['stop', 'out', '1'], ['resume', 'out', '2'], ['delete', 'out', '3']):\n"
        "    assert main(['sweep', *action]) == 0, action\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {arm.id: arm.state for arm in store.arms()} == {1: "stopped", 2: "waiting"}


def test_a_command_that_cannot_be_taken_is_not_queued(content, capsys):
    store = Store("out", create=True)
    store.set_fact("plan", {"kind": "command line", "base": content["base"], "vary": content["vary"]})
    store.add_arms([(name, 0, {"beta": beta}) for beta, name in enumerate(["01-a", "02-b", "03-c"])])
    store.set_state(2, "dropped", "clearly worse")
    store.set_state(3, "done")
    with locked("out"):
        for words, refusal in [
            ("stop 2", "arm 02-b is dropped, only an arm that is waiting can be stopped"),
            ("stop 3", "arm 03-c is done, only an arm that is waiting can be stopped"),
            ("resume 1", "arm 01-a is waiting, there is nothing to resume"),
            ("resume 3", "arm 03-c is done, there is nothing to resume"),
            ("resume 2", None),
            ("delete 1", None),
            ("stop 1", None),
        ]:
            assert cli.main(["sweep", words.split()[0], "out", *words.split()[1:]]) == (2 if refusal else 0)
            shown = capsys.readouterr()
            assert (refusal or "") in shown.err and ("queued; the sweep takes it" in shown.out) == (refusal is None)
    assert [(command.kind, command.arm) for command in store.queued()] == [("resume", 2), ("delete", 1), ("stop", 1)]
    assert [arm.state for arm in store.arms()] == ["waiting", "dropped", "done"], "they are taken between steps"
    refused = apply_commands(store, lambda: (None, None))  # pyright: ignore[reportArgumentType]
    assert not refused and [arm.state for arm in store.arms()] == ["waiting", "done"]


def test_a_dry_run_lists_the_arms_and_trains_nothing(content, capsys):
    content["vary"]["beta"] = [0.0, -1.0]
    assert cli.main(["sweep", write(content), "--dry-run"]) == 2
    shown = capsys.readouterr().out
    assert "01-learning_rate=0.01-beta=0\n" in shown
    assert "02-learning_rate=0.01-beta=-1  cannot work: beta=-1" in shown
    assert "worker process" not in shown
    assert cli.main(["sweep", "sweep.yaml", "--dry-run", "--devices", "1"]) == 2
    assert "Each of these would train arms in a worker process: process 1\n" in capsys.readouterr().out
    assert not Path("out").exists()


def test_a_base_is_read_from_the_file_or_another_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RATE", "")
    text = "{generation_kwargs: {min_p: 1e-2, stop_strings: ['1e-2']}, env: {RATE: 2}}"
    (tmp_path / "base.yaml").write_text(text)
    for base in (text, "base.yaml"):
        (tmp_path / "sweep.yaml").write_text(f"base: {base}\noutput_dir: out\nvary: {{beta: [1e-2, 1e-3]}}\n")
        _, settings, _, exported = read_file(tmp_path / "sweep.yaml")
        assert settings["generation_kwargs"] == {"min_p": 0.01, "stop_strings": ["1e-2"]}
        assert exported == {"RATE": "2"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"base": "nowhere.yaml"}, "base nowhere.yaml: No such file"),
        ({"base": None}, "base=None; set it to settings of `groupgrad train`"),
        ({"output_dir": None}, "output_dir is not set"),
        ({"halvnig": True}, "unknown key 'halvnig'; did you mean 'halving'"),
        ({"devices": "al"}, "devices='al' does not name devices, each once; set it to"),
        ({"devices": [0]}, "devices=[0] names GPUs, but the sweep trains on the CPU (use_cpu)"),
        ({"vary": {"learning_rat": [1, 2]}}, "unknown field 'learning_rat'; did you mean learning_rate?"),
        ({"vary": {"learning_rate": ["fast", 2]}}, "learning_rate='fast'"),
        ({"vary": {"resume_from_checkpoint": [True, False]}}, "resume_from_checkpoint is set, but the sweep resumes"),
        ({"vary": {"reward_funcs": [["letterz"], ["sweep_rewards.letters"]]}, "metric": "letters"}, "'letterz'"),
    ],
)
def test_mistakes_in_the_file_end_with_a_sentence(content, capsys, change, text):
    assert cli.main(["sweep", write({**content, **change})]) == 2
    assert text in capsys.readouterr().err
    assert not Path("out").exists() or "devices" not in change
    assert not Path("out/arms").exists()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["stpo", "out", "1"], "there is no action 'stpo'; did you mean 'stop'"),
        (["status"], "status needs the folder of a sweep"),
        (["status", "nowhere"], "'nowhere' holds no sweep"),
        (["nowhere.yaml"], "the sweep nowhere.yaml: No such file"),
        (["sweep.yaml", "--set", "a=b"], "belong to clone"),
        (["stop", "out", "1", "--dry-run"], "--dry-run belongs to `groupgrad sweep FILE`, not to stop"),
        (["status", "out", "--devices", "2"], "--devices belongs to `groupgrad sweep FILE`, not to status"),
    ],
)
def test_mistakes_on_the_command_line_end_with_a_sentence(capsys, tmp_path, monkeypatch, argv, text):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *argv]) == 2
    assert text in capsys.readouterr().err


def test_the_example_file_names_arms_that_work(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert cli.main(["sweep", "examples/sweep.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("learning_rate=") == 8


def test_a_sweep_of_a_script_takes_clones_from_the_command_line(make_sweep, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    sweep = make_sweep({"peft_config.r": [2, 4]}, peft_config=peft.LoraConfig(target_modules="all-linear"))
    folder = str(tmp_path / "sweep")
    assert cli.main(["sweep", "clone", folder, "1", "--set", "learning_rate=5e-3", "--set", "peft_config.r=8"]) == 0
    assert "queued; no process trains this sweep now, its script takes it when run" in capsys.readouterr().out
    assert cli.main(["sweep", "clone", folder, "1", "--set", "peft_config.rank=8"]) == 0
    (refusal,) = sweep._sweeper.apply_commands().values()
    assert "peft_config.rank=8 changes no field" in refusal
    assert [arm.changes for arm in Store(folder).arms()][2:] == [{"peft_config.r": 8, "learning_rate": 5e-3}]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("output_dir=elsewhere", "the sweep resumes and places its arms itself"),
        ("output-dir=elsewhere", "the sweep resumes and places its arms itself"),
        ("beta=[0.1", "--set beta=[0.1: the value is not YAML"),
        ("beta", "it has no value"),
    ],
)
def test_a_setting_of_a_clone_that_cannot_be_is_named(tmp_path, capsys, setting, text):
    store = Store(tmp_path, create=True)
    store.set_fact("plan", {"kind": "command line", "base": {}, "vary": {}})
    store.set_fact("base", {})
    store.add_arms([("01-a", 0, {"beta": 0.1})])
    assert cli.main(["sweep", "clone", str(tmp_path), "1", "--set", setting]) == 2
    assert text in capsys.readouterr().err
    assert store.queued() == []
