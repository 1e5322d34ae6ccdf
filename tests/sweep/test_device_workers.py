"""Sweeps on two real worker processes: equal to the sweep in one, and after a kill of a worker or of the sweep."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from groupgrad.apps.sweep.store import Store

pytestmark = pytest.mark.slow


def test_two_workers_train_what_one_process_trains(make_sweep, tools, tmp_path):
    places = tmp_path / "places"
    places.mkdir()

    def noted(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        (places / f"{os.getpid()}").write_text(os.environ.get("OMP_NUM_THREADS", ""))
        return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]

    given = {"halving": tools.halving, "reward_funcs": [noted]}
    alone = make_sweep(tools.rates, folder="alone", **given).run()
    assert [int(path.name) for path in places.iterdir()] == [os.getpid()]
    spread = make_sweep(tools.rates, devices=2, **given).run()
    processes = {path.name: path.read_text() for path in places.iterdir() if int(path.name) != os.getpid()}
    assert list(processes.values()) == ["1", "1"]
    assert not any(psutil.pid_exists(int(process)) for process in processes)
    assert spread == alone
    stores = [Store(tmp_path / name) for name in ("alone", "sweep")]
    assert sorted(stores[0].decisions()) == sorted(stores[1].decisions())
    for arm in stores[0].arms():
        folders = [tmp_path / name / "arms" / arm.name for name in ("alone", "sweep")]
        assert stores[0].rewards(arm.id, 0, 6) == stores[1].rewards(arm.id, 0, 6)
        assert tools.logs(folders[0]) == tools.logs(folders[1])
        if arm.step == 6:
            assert tools.equal_files(*folders)
    assert "step 1  reward" in (tmp_path / "sweep/worker-1.log").read_text()


def test_an_arm_whose_worker_was_killed_goes_on_exactly(make_sweep, train_alone, tools, tmp_path, caplog):
    marker = tmp_path / "killed"

    def deadly(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]

    vary = {"learning_rate": [1e-2, 3e-2]}
    results = make_sweep(vary, devices=2, turn_steps=2, reward_funcs=[deadly]).run()
    assert marker.exists()
    assert caplog.text.count("lost its worker process (was killed by SIGKILL") == 1
    for result in results:
        assert (result.state, result.step) == ("done", 6)
        train_alone(result.name, {"reward_funcs": [deadly]}, **result.changes)
        tools.assert_same(tmp_path / "sweep/arms" / result.name, tmp_path / result.name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_was_ended_leaves_no_worker_and_goes_on_exactly(start, tools, number):
    process = start("--devices", "2")
    children = tools.wait_for_steps(process, 3)
    assert len([child for child in children if "loky" in " ".join(child.cmdline())]) >= 2
    process.send_signal(number)
    assert process.wait(120) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    alive = psutil.wait_procs(children, timeout=10)[1]
    assert not alive, "workers have outlived the sweep"
    assert 3 <= sum(arm.step for arm in Store("out").arms()) < 12, "it was not ended in the middle"
    assert start("--devices", "2").wait(300) == 0
    assert "leaked" not in Path("errors").read_text(), "the workers were not ended in order"
    tools.assert_arms_equal_runs_alone()


def test_commands_are_taken_while_workers_train(start, tools):
    from groupgrad.apps.cli import main as cli

    process = start("--devices", "2")
    tools.wait_for_steps(process, 2)
    for action in (["stop", "out", "1"], ["clone", "out", "2", "--set", "learning_rate=2e-2"]):
        assert cli.main(["sweep", *action]) == 0
    assert process.wait(300) == 0
    states = {arm.id: arm.state for arm in Store("out").arms()}
    assert states == {1: "stopped", 2: "done", 3: "done"}
    assert cli.main(["sweep", "resume", "out", "1"]) == 0
    assert start("--devices", "2").wait(300) == 0
    tools.assert_arms_equal_runs_alone()
    assert cli.main(["sweep", "delete", "out", "1"]) == 0
    assert len(list(Path("out/arms").iterdir())) == 2
