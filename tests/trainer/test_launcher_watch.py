"""Ranks end when their launcher does; a run that a shell has started does not end with the shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked_ranks import wait_for

from groupgrad.trainer.launcher_watch import LauncherWatch, launcher

SCRIPT = Path(__file__).with_name("launched_ranks.py")
PLAIN = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")}
ENVIRONMENT = {**PLAIN, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def forked(action: Callable[[], object]) -> int:
    """The process of a copy of this one that calls `action`."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


@pytest.mark.fault(
    "the launcher (torchrun, `accelerate launch`) is killed",
    "its ranks notice within seconds and stop as after SIGTERM, with a checkpoint",
    "the step in progress",
)
def test_a_process_gets_sigterm_when_its_launcher_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("groupgrad.trainer.launcher_watch.TICK_S", 0.1)

    def rank() -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
        signal.signal(signal.SIGTERM, lambda *_: ((tmp_path / "stopped").touch(), os._exit(0)))
        with LauncherWatch():
            (tmp_path / "launched").touch()
            time.sleep(30)

    def launch() -> None:
        forked(rank)
        time.sleep(30)

    process = forked(launch)
    wait_for(tmp_path / "launched")
    time.sleep(0.5)
    assert not (tmp_path / "stopped").exists()
    os.kill(process, signal.SIGKILL)
    wait_for(tmp_path / "stopped", 5.0)
    assert (tmp_path / "stopped").exists()
    os.waitpid(process, 0)


def test_a_process_without_a_launcher_is_left_alone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher() is None
    # The launcher is the nearest process above that has not got torchrun's variables from it.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    parent, grandparent, *_ = psutil.Process().parents()
    assert launcher() == parent
    monkeypatch.setattr(psutil.Process, "environ", lambda self: {"TORCHELASTIC_RUN_ID": "1"} if self == parent else {})
    assert launcher() == grandparent


@pytest.mark.slow
def test_ranks_of_a_killed_torchrun_stop_with_a_checkpoint(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen([*command, str(SCRIPT), "launched", str(tmp_path)], env=ENVIRONMENT)
    files = [tmp_path / f"rank_{rank}" for rank in range(2)]
    for file in files:
        wait_for(file, 120)
    time.sleep(1.0)
    process.kill()
    process.wait()
    pids = [int(file.read_text().split()[0]) for file in files]
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert not alive
    last = min(int(file.read_text().split()[1]) for file in files)
    (checkpoint,) = (tmp_path / "run" / "launched").glob("checkpoint-*")
    assert int(checkpoint.name.split("-")[1]) >= last


@pytest.mark.slow
@pytest.mark.fault(
    "the shell or terminal that a run was started in by hand ends (nohup, disown)",
    "the run goes on to its end",
    "nothing",
)
def test_a_run_outlives_the_shell_that_has_started_it(tmp_path):
    command = f"nohup {sys.executable} {SCRIPT} by_hand {tmp_path} > {tmp_path}/log 2>&1 & wait"
    shell = subprocess.Popen(["sh", "-c", command], env=ENVIRONMENT)
    wait_for(tmp_path / "rank_0", 120)
    shell.kill()
    shell.wait()
    wait_for(tmp_path / "finished", 60)
    assert (tmp_path / "rank_0").read_text().split()[1] == "20"


@pytest.mark.slow
@pytest.mark.fault(
    "a rank has failed and its process lives on, which gloo waits for when another one exits",
    "the other one exits within seconds after its error",
    "nothing",
)
def test_a_failed_rank_that_lives_on_does_not_keep_the_others_from_their_exit(tmp_path):
    processes = []
    for rank in range(2):
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
        environment = {**ENVIRONMENT, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(SCRIPT), "lives_on", str(tmp_path)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        wait_for(tmp_path / "rank_1", 120)
        _, output = processes[0].communicate(timeout=20)
        assert processes[0].returncode == 1
        assert output.strip().endswith("failed with ValueError: no luck")
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
