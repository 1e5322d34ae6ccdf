"""Sweeps from a script: halving, failures, commands between turns, clones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from typing import Any

import own_loss
import pytest
import torch

from groupgrad.apps.cli import main as cli
from groupgrad.apps.cli.sweep import CommandLinePanel
from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.sweep.arm_turns import FIRST_TURN
from groupgrad.apps.sweep.report import arms_in_turn, steps_so_far
from groupgrad.apps.sweep.store import ArmTurn, Store
from groupgrad.stopping import Stopped

RATES = {"learning_rate": [1e-2, 3e-2]}


def test_halving_drops_arms_and_says_why(halved):
    results, store = halved.results, Store(halved.folder)
    assert [result.state for result in results] == ["done", "dropped", "dropped", "dropped"]
    assert sorted(result.step for result in results) == [3, 3, 5, 6]
    assert len(store.decisions()) == 6
    dropped = [result for result in results if result.state == "dropped"]
    for result, rung in zip(dropped, (2, 1, 1)):  # the table has the numbers of the verdict
        assert result.behind is not None and (result.rung, result.behind.is_paired) == (rung, True)
        text = f"rung {rung}: mean {result.reward:.3f}, behind the best by {result.behind.text}, "
        assert result.reason.startswith(text)
        assert result.compared == {1: (2, 3), 2: (5, 5)}[rung]
    assert (results[0].compared, results[0].behind, results[0].rung) == ((6, 6), None, None)
    assert sum(turn.last_step - turn.first_step for turn in store.turns()) == 3 + 3 + 5 + 6


def test_log_command_line_page_and_report_have_the_same_numbers(halved, tmp_path, capsys):
    capsys.readouterr()
    assert cli.main(["sweep", "status", str(halved.folder)]) == 0
    shown = capsys.readouterr().out
    rows = {row.split()[1]: row for row in shown.splitlines() if "-learning_rate=" in row}
    drops = [line for line in halved.lines if line.startswith("rung ") and line.endswith("dropped")]
    assert len(drops) == 3
    pattern = r"rung (\d) \(steps (\d-\d)\), arm (\S+): mean (\S+), behind the best by (.*), [a-z ]+ worse, dropped"
    for line in drops:
        found = re.fullmatch(pattern, line)
        assert found is not None, line
        rung, steps, name, mean, behind = found.groups()
        row = rows[name]
        assert f"  dropped at rung {rung}  " in row and f"  {steps}  " in row and row.endswith(f"{mean}  {behind}")
    assert "is the mean of the steps in `compared`" in shown
    table = CommandLinePanel(halved.folder).table()
    assert [arm["name"] for arm in table["arms"]] == list(rows)
    for arm in table["arms"]:
        line = rows[arm["name"]]
        assert f"{arm['shown_state']}  " in line and f" {arm['step']}/{arm['max_steps']} " in line
        assert f"{arm['reward']:.3f}" in line and arm["behind"] in line
    assert table["steps"] == sum(turn.last_step - turn.first_step for turn in Store(halved.folder).turns())
    report = tmp_path / "report.html"
    assert cli.main(["view", str(halved.folder), "--export", str(report)]) == 0
    data = json.loads(re.findall(r'id="report">(.*?)</script>', report.read_text(), re.DOTALL)[0])
    assert data["sweeps"] == [json.loads(json.dumps(table))]


def test_turns_are_few_and_of_about_equal_length(make_sweep, tmp_path):
    sweeper = make_sweep(RATES, args={"max_steps": 100}, halving={"first": 0.4})._sweeper
    store, arm = sweeper.store, sweeper.store.arms()[0]
    assert sweeper.turns.turn_end(arm, 100) == FIRST_TURN  # nothing is known yet, and 40 steps are eight such turns
    store.end_turn(2, ArmTurn(0, 5, train_s=5.0, switch_s=0.25), 100, {})
    # At 2.5 %, 9.75 s pay for a switch: 4 turns of 10 steps.
    assert sweeper.turns.turn_end(store.arms()[0], 100) == 10
    store.set_state(2, "stopped")
    assert sweeper.turns.turn_end(store.arms()[0], 100) == 40  # alone, it takes turns that are five times as long


def test_an_arm_between_its_turns_is_paused_for_who_looks_at_it(make_sweep, tools, tmp_path, capsys):
    """And the line of each step begins with the arm's name."""
    states: list[dict[str, str]] = []
    in_turn: list[set[str]] = []

    def reward(completion_ids: Any, **columns: Any) -> list[float]:
        in_turn.append(arms_in_turn(Store(tmp_path / "sweep")))
        states.append({path.name: RunFolder(path).state() for path in (tmp_path / "sweep/arms").iterdir()})
        return tools.letters_reward(completion_ids)

    results = make_sweep(RATES, args={"max_steps": 2}, turn_steps=1, reward_funcs=[reward]).run()
    arms = [result.name for result in results]
    lines = [line for line in capsys.readouterr().out.splitlines() if "  reward  " in line]
    steps = [f"{arm}  step {step}" for arm in arms for step in (1, 2)]
    assert sorted(line.split("  reward")[0] for line in lines) == sorted(steps)
    assert {"paused", "running"} in [set(now.values()) for now in states]
    assert all(set(now.values()) <= {"paused", "running", "ended"} for now in states)
    assert in_turn == [{arm for arm, state in now.items() if state == "running"} for now in states]
    assert [RunFolder(tmp_path / "sweep/arms" / arm).state() for arm in arms] == ["ended", "ended"]


def test_a_command_ends_the_turn_after_the_present_step(make_sweep, tools, tmp_path, monkeypatch):
    monkeypatch.setattr("groupgrad.apps.sweep.arm_turns.COMMAND_CHECK_S", 0.0)
    store = Store(tmp_path / "sweep", create=True)

    def stops(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 2 and not store.turns():
            store.queue("stop", 1)
        return tools.letters_reward(completion_ids)

    sweep = make_sweep(RATES, reward_funcs=[stops], args={"max_steps": 40}, turn_steps=30)
    sweep._sweeper._turn(store.arms()[0])
    assert store.turns()[0].last_step == 3
    sweep._sweeper.apply_commands()
    assert store.arms()[0].state == "stopped"


def test_a_failing_arm_is_reported_and_the_others_go_on(make_sweep, tools, tmp_path, caplog):
    def fails(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 3:
            raise RuntimeError("no such thing")
        return [0.0] * len(completion_ids)

    rewards = {"letters": [tools.letters_reward], "failing": [fails, tools.letters_reward]}
    results = make_sweep({"reward_funcs": rewards}, metric="letters_reward", turn_steps=2).run()
    assert [result.state for result in results] == ["done", "failed"]
    assert "RewardError" in results[1].reason
    assert results[1].step == 2
    assert steps_so_far(Store(tmp_path / "sweep"))[results[1].name] == 3
    assert f"arm {results[1].name} failed after step 3: " in caplog.text
    assert "no such thing" in (tmp_path / "sweep/arms" / results[1].name / "error.txt").read_text()


def test_a_signal_says_how_the_sweep_goes_on(make_sweep, tools):
    def kills(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return tools.letters_reward(completion_ids)

    sweep = make_sweep({"learning_rate": [1e-2]}, reward_funcs=[kills], turn_steps=6)
    with pytest.raises(Stopped, match="and the sweep, started again by the same command, goes on from there"):
        sweep.run()


def test_arms_that_break_a_rule_are_refused_before_anything_is_trained(make_sweep, tmp_path):
    with pytest.raises(ValueError, match="02-beta=-1: ") as error:
        make_sweep({"beta": [0.0, -1.0]})
    assert "01-" not in str(error.value)
    with pytest.raises(ValueError, match="unknown field 'learning_rat'; did you mean 'learning_rate'"):
        make_sweep({"learning_rat": [0.0, -1.0]})
    assert not (tmp_path / "sweep/arms").exists()


@pytest.mark.slow
def test_commands_are_taken_between_turns(make_sweep, train_alone, tools, tmp_path):
    """A stopped and resumed arm, and clones of one, equal runs alone."""
    sweep = make_sweep(RATES, turn_steps=2)
    sweeper, store = sweep._sweeper, Store(tmp_path / "sweep")
    for _ in range(2):
        sweeper._turn(sweeper._next())
    store.queue("stop", 1)
    store.queue("delete", 2)
    store.queue("clone", 1, {"learning_rate": 5e-3})
    store.queue("clone", 1, {"learning_rate": 5e-3}, from_weights=True)
    wrong = store.queue("clone", 1, {"learning_rate": -1.0})
    sweep.run()
    arms = {arm.id: arm for arm in store.arms()}
    assert {number: arm.state for number, arm in arms.items()} == {1: "stopped", 3: "done", 4: "done"}
    folders = {number: tmp_path / "sweep/arms" / arm.name for number, arm in arms.items()}
    assert arms[1].step == 2 and len(list((tmp_path / "sweep/arms").iterdir())) == 3
    state, message = store.command_state(wrong)
    assert state == "refused" and "learning_rate" in message
    store.queue("resume", 1)
    assert {result.state for result in sweep.run()} == {"done"}
    train_alone("stopped", learning_rate=1e-2)
    train_alone("clone", learning_rate=5e-3)
    train_alone("from_weights", {"model": str(folders[4] / "start")}, learning_rate=5e-3)
    for number, name in ((1, "stopped"), (3, "clone"), (4, "from_weights")):
        assert tools.equal_files(folders[number], tmp_path / name), name


@pytest.mark.slow
def test_a_sweep_made_again_goes_on_and_refuses_to_become_another_one(make_sweep, train_alone, tools, tmp_path):
    sweep = make_sweep(RATES, turn_steps=2)
    for _ in range(3):
        sweep._sweeper._turn(sweep._sweeper._next())
    # A process that was killed in a turn has left a checkpoint that the sweep does not know of.
    arm = sweep._sweeper._next()
    sweep._sweeper.turns.run_of(arm).turn(arm.step, lambda length: 4)
    with pytest.raises(ValueError, match="holds a sweep with another vary"):
        make_sweep({"learning_rate": [1e-2, 4e-2]}, turn_steps=2)
    torch.manual_seed(123)
    for result in make_sweep(RATES, turn_steps=2).run():
        train_alone(result.name, **result.changes)
        tools.assert_same(tmp_path / "sweep/arms" / result.name, tmp_path / result.name)


def test_an_unknown_metric_is_reported(make_sweep):
    results = make_sweep(RATES, metric="letter_reward").run()
    assert [result.state for result in results] == ["failed", "failed"]
    assert "set it to reward, or to one of letters_reward" in results[0].reason


@pytest.mark.slow
def test_an_arm_may_have_a_loss_of_ones_own(make_sweep, tmp_path, monkeypatch):
    (tmp_path / "losses_of_a_sweep").mkdir()
    shutil.copy(own_loss.__file__, tmp_path / "losses_of_a_sweep" / "scaled.py")
    monkeypatch.syspath_prepend(tmp_path)
    own = [{"loss_type": "losses_of_a_sweep.scaled", "loss_settings": {"factor": factor}} for factor in (1.0, 2.0)]
    results = make_sweep(arms=[{"loss_type": "dapo"}, *own], args={"max_steps": 2}).run()
    assert [result.state for result in results] == ["done"] * 3, [result.reason for result in results]
