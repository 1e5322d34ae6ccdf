"""The page of a sweep in front of a real one: its table, and commands that it gives."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from groupgrad.apps.cli import main as cli
from groupgrad.apps.cli.sweep import CommandLinePanel
from groupgrad.apps.sweep.store import ArmTurn, Decision, PromptRewards, Store
from groupgrad.run_folder.run_files import LineFile
from groupgrad.run_folder.run_lock import locked


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path, create=True)


def add(store: Store, *names: str) -> CommandLinePanel:
    """Adds arms of these names; the panel of the sweep."""
    store.add_arms([(name, 0, {"beta": place / 10}) for place, name in enumerate(names)])
    return CommandLinePanel(store.folder)


def train(store: Store, arm: int, means: dict[int, tuple[float, float]], length: int) -> None:
    """A turn of an arm, in which the two prompts of each step had these rewards."""
    rewards = {step: PromptRewards(("one", "two"), {"reward": found}) for step, found in means.items()}
    store.end_turn(arm, ArmTurn(min(means) - 1, max(means), train_s=1.0, switch_s=0.1), length, rewards)


def test_the_table_follows_the_sweep(store):
    assert CommandLinePanel(store.folder).table()["arms"] == []
    panel = add(store, "01-a")
    (arm,) = panel.table()["arms"]
    assert (arm["state"], arm["reward"], arm["compared"]) == ("waiting", None, None)
    store.queue("clone", 1, {"beta": 0.2}, from_weights=True)
    store.take(store.queued()[0], refused=True, message="it has no weights")
    (command,) = panel.table()["commands"]
    assert (command["arm"], command["state"], command["message"]) == ("01-a", "refused", "it has no weights")


def test_an_arm_in_its_turn_has_the_steps_of_its_run(store, tmp_path, capsys):
    """A turn is written into the sweep's file when it ends; its steps are shown while it lasts."""
    panel = add(store, "01-a")
    weights = LineFile(tmp_path / "arms" / "01-a" / "weights.jsonl")
    weights.path.parent.mkdir(parents=True)

    def shown() -> tuple[int, str]:
        assert cli.main(["sweep", "status", str(tmp_path)]) == 0
        (number,) = re.findall(r"^  1  01-a  (?:waiting|training) *(.*)$", capsys.readouterr().out, re.MULTILINE)
        return panel.table()["arms"][0]["step"], number

    assert shown() == (0, "")
    with locked(tmp_path):
        for step in (3, 4):
            weights.append({"step": step, "digest": "0" * 16})
            assert shown() == (step, f"{step}/?")
    assert shown() == (0, "")  # a killed sweep goes on from the arm's last checkpoint
    store.set_fact("base", {"max_steps": 6})
    assert shown() == (0, "0/6")  # the length is known before the arm's first turn


def test_the_arm_in_its_turn_is_shown_as_training(store, tmp_path, capsys):
    panel = add(store, "01-a", "02-b")

    def shown() -> list[str]:
        table = panel.table()
        assert all(arm["state"] == "waiting" for arm in table["arms"])  # so that it can be stopped
        states = [arm["shown_state"] for arm in table["arms"]]
        assert cli.main(["sweep", "status", str(tmp_path)]) == 0
        assert re.findall(r"^ .*  (waiting|training)$", capsys.readouterr().out, re.MULTILINE) == states
        return states

    assert shown() == ["waiting", "waiting"]
    with locked(tmp_path):
        for place in (0, 1):
            with locked(tmp_path / "arms" / store.arms()[place].name):  # as the trainer does for a turn
                assert shown()[place] == "training" and shown()[1 - place] == "waiting"
        assert shown() == ["waiting", "waiting"]


def test_arms_that_left_the_race_stand_below_those_in_it(store, tmp_path):
    """In the race the larger reward is higher, whether an arm has come to its end or not."""
    arms = {"dropped": 0.9, "stopped": 0.8, "failed": 0.7, "done": 0.3, "waiting": 0.4, "new": None}
    panel = add(store, *arms)
    for number, (name, reward) in enumerate(arms.items(), start=1):
        if reward is not None:
            train(store, number, {1: (0.0, 0.0), 2: (reward, reward)}, 4)
            store.set_state(number, name)
    store.pass_rung([1], 1, {1: "clearly worse"}, [Decision(0, 0, 1, 0, 2, "clearly worse", None)])
    assert [arm["name"] for arm in panel.table()["arms"]] == [
        *("waiting", "done", "new", "stopped", "dropped", "failed")
    ]


def test_an_arm_that_is_ahead_of_the_first_in_the_same_steps_says_so(store, tmp_path, capsys):
    """The first row has the best mean in its own last steps; the other arm may have been better when it was as far."""
    panel = add(store, "01-a", "02-b")
    train(store, 1, {1: (0.1, 0.2), 2: (0.9, 1.0)}, 2)
    train(store, 2, {1: (0.3, 0.5)}, 2)
    text = "ahead of the first by 0.250 ± 0.050 on 2 paired prompts (p = 0.063) in the same steps"
    assert [arm["behind"] for arm in panel.table()["arms"]] == ["", text]
    assert cli.main(["sweep", "status", str(tmp_path)]) == 0
    assert text in capsys.readouterr().out


def test_the_order_of_arms_that_have_made_unlike_steps_is_called_provisional(store, tmp_path, capsys):
    """The latest reward of an arm that is further along is larger, whichever arm is better."""
    panel = add(store, "01-a", "02-b", "03-new", "04-stopped")

    def go_on(number: int, first: int, last: int) -> None:
        train(store, number, {n: (n / 10 - number / 100, n / 10) for n in range(first + 1, last + 1)}, 6)

    def shown() -> tuple[bool, bool]:
        """True for a provisional order, and for a comparison in other steps, both on page and terminal."""
        table = panel.table()
        assert cli.main(["sweep", "status", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert (table["note"] in printed) and ("provisional" in printed) == bool(table["note"])
        behind = {arm["name"]: arm["behind"] for arm in table["arms"]}["02-b"]
        assert behind.startswith("0.005 ± 0.005 on 2 paired prompts") and behind in printed
        return bool(table["note"]), "in the same steps" in behind

    for number, last in ((1, 4), (2, 4), (4, 2)):
        go_on(number, 0, last)
    store.set_state(4, "stopped")
    assert shown() == (False, False)  # an arm without steps and one that is out of the race have no part in it
    go_on(1, 4, 6)
    assert shown() == (True, True)
    assert "have made 4 to 6 steps" in panel.table()["note"]
    store.set_state(1, "done")
    assert shown() == (True, True)
    store.set_state(2, "done")  # a run of another length, at its end
    assert shown() == (False, True)


def test_arms_whose_rewards_are_of_unlike_steps_are_compared_in_the_same_steps(store, tmp_path):
    """A tenth of a long run is more steps than a tenth of a short one."""
    panel = add(store, "01-long", "02-short")
    for number, length in ((1, 40), (2, 20)):
        train(store, number, {step: (step / 10 - number, step / 10) for step in range(1, 11)}, length)
    table = panel.table()
    assert [arm["compared"] for arm in table["arms"]] == [[7, 10], [9, 10]] and not table["note"]
    assert table["arms"][1]["behind"].endswith("on 4 paired prompts (p = 0.091) in the same steps")


def test_the_share_of_steps_is_rounded_as_on_the_page(store, tmp_path, capsys):
    add(store, "01-a")
    store.end_turn(1, ArmTurn(0, 13, train_s=1.0, switch_s=0.1), 40, {})
    assert cli.main(["sweep", "status", str(tmp_path)]) == 0
    assert "13 steps, 33% of training all arms" in capsys.readouterr().out  # of 32.5 %


@pytest.mark.slow
def test_commands_of_the_page_follow_the_rules_of_the_command_line(sweep_file, monkeypatch):
    source = str(Path(__file__).parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    assert cli.main(["sweep", sweep_file]) == 0
    panel = CommandLinePanel(Path("out"))
    with pytest.raises(ValueError, match=r"^beta=-1"):
        panel.act("clone", 1, ["beta=-1"], from_weights=False)
    with pytest.raises(ValueError, match="only an arm that is waiting can be stopped"):
        panel.act("stop", 1, [], from_weights=False)
    with pytest.raises(ValueError, match="has no value"):
        panel.act("clone", 1, ["--help"], from_weights=False)
    said = panel.act("clone", 1, ["learning_rate=5e-3"], from_weights=True)
    assert "done, the new arm is 03-learning_rate=0.005-from=01" in said
    assert panel.act("delete", 2, [], from_weights=False).startswith("delete of 02-")
    assert [arm["id"] for arm in panel.table()["arms"]] == [1, 3]
    assert cli.main(["sweep", sweep_file]) == 0
    assert {arm.state for arm in Store("out").arms()} == {"done"}
