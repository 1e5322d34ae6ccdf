"""Sweeps on two real worker processes: equal to the sweep in one, and after a kill of a worker or of the sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from groupgrad.apps.sweep.store import Store

pytestmark = pytest.mark.slow

RATES = {"learning_rate": [1e-4, 1e-2, 2e-2, 3e-2]}


def test_two_workers_train_what_one_process_trains(make_sweep, tools, tmp_path):
    places = tmp_path / "places"
    places.mkdir()

    def noted(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        (places / f"{os.getpid()}").write_text(os.environ.get("OMP_NUM_THREADS", ""))
        return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]

    given = {"halving": {"first": 0.34}, "reward_funcs": [noted]}
    alone = make_sweep(RATES, folder="alone", **given).run()
    assert [int(path.name) for path in places.iterdir()] == [os.getpid()]
    spread = make_sweep(RATES, devices=2, **given).run()
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
        assert tools.equal_files(tmp_path / "sweep/arms" / result.name, tmp_path / result.name)
        assert tools.logs(tmp_path / "sweep/arms" / result.name) == tools.logs(tmp_path / result.name)


@pytest.fixture
def start(sweep_file) -> Iterator[Any]:
    """`start(*flags)`: a process of `groupgrad sweep` with two workers, which ends with the test."""
    processes = []

    def begin(*flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "groupgrad", "sweep", sweep_file, "--devices", "2", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        with Path("errors").open("wb") as errors:
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def wait_for_steps(process: subprocess.Popen[bytes], num_steps: int) -> list[psutil.Process]:
    """Waits until the arms have made so many steps; the processes that the sweep has started."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if Path("out/sweep.sqlite").is_file() and sum(arm.step for arm in Store("out").arms()) >= num_steps:
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    raise AssertionError(f"the sweep has not made {num_steps} steps (exit code {process.poll()})")


def assert_arms_equal_runs_alone(tools: Any) -> None:
    from groupgrad.apps.cli import main as cli

    for arm in Store("out").arms():
        assert (arm.state, arm.step) == ("done", 6)
        folder, alone = Path("out/arms") / arm.name, Path("alone") / arm.name
        assert cli.main(["train", "--config", str(folder / "run.yaml"), "--output_dir", str(alone)]) == 0
        assert tools.equal_files(folder, alone)
        assert tools.logs(folder) == tools.logs(alone)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_was_ended_leaves_no_worker_and_goes_on_exactly(start, tools, number):
    process = start()
    children = wait_for_steps(process, 3)
    assert len([child for child in children if "loky" in " ".join(child.cmdline())]) >= 2
    process.send_signal(number)
    assert process.wait(120) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    alive = psutil.wait_procs(children, timeout=10)[1]
    assert not alive, "workers have outlived the sweep"
    assert 3 <= sum(arm.step for arm in Store("out").arms()) < 12, "it was not ended in the middle"
    assert start().wait(300) == 0
    assert "leaked" not in Path("errors").read_text(), "the workers were not ended in order"
    assert_arms_equal_runs_alone(tools)


def test_commands_are_taken_while_workers_train(start, tools):
    from groupgrad.apps.cli import main as cli

    process = start()
    wait_for_steps(process, 2)
    for action in (["stop", "out", "1"], ["clone", "out", "2", "--set", "learning_rate=2e-2"]):
        assert cli.main(["sweep", *action]) == 0
    assert process.wait(300) == 0
    states = {arm.id: arm.state for arm in Store("out").arms()}
    assert states == {1: "stopped", 2: "done", 3: "done"}
    assert cli.main(["sweep", "resume", "out", "1"]) == 0
    assert start().wait(300) == 0
    assert_arms_equal_runs_alone(tools)
    assert cli.main(["sweep", "delete", "out", "1"]) == 0
    assert len(list(Path("out/arms").iterdir())) == 2
