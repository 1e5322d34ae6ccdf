"""The folder of a run belongs to one process at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from step_events import At

from groupgrad.errors import OutputDirInUse
from groupgrad.run_folder.run_files import LOCK_OWNER
from groupgrad.run_folder.run_lock import LOCK, locked

HOLD = """
import json, os, socket, sys, time
from filelock import FileLock
folder, lock, owner = sys.argv[1:]
os.makedirs(folder)
with FileLock(os.path.join(folder, lock)):
    with open(os.path.join(folder, owner), "w") as file:
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": "2026-11-22"}, file)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Any:
    """A process that holds the lock of the run's folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), LOCK, LOCK_OWNER]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_trainer_is_refused_by_name_until_the_first_has_ended(make_trainer, other_run):
    trainer = make_trainer(max_steps=1)
    name = f"in use by a run that process {other_run.pid} on {socket.gethostname()} began at 2"
    with pytest.raises(OutputDirInUse, match=name):
        trainer.train()
    assert trainer.state.global_step == 0
    other_run.kill()
    other_run.wait()
    trainer.train()  # what the killed process has left does not count
    assert trainer.state.global_step == 1
    assert not (Path(trainer.args.output_dir) / LOCK_OWNER).exists()


def test_the_lock_names_this_process_while_it_trains(train):
    seen: list[dict[str, Any]] = []

    read = lambda at: seen.append(json.loads((Path(at.args.output_dir) / LOCK_OWNER).read_text()))  # noqa: E731
    train(max_steps=1, trainer={"callbacks": [At("on_step_end", read)]})
    assert (seen[0]["pid"], seen[0]["host"]) == (os.getpid(), socket.gethostname())


def test_a_lock_that_a_child_of_an_ended_process_holds_is_taken_over(tmp_path, caplog):
    held = FileLock(tmp_path / LOCK, is_singleton=False)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = {"host": socket.gethostname(), "pid": ended.pid, "started": "2026-01-01"}
    with held:
        (tmp_path / LOCK_OWNER).write_text(json.dumps(owner))
        with locked(tmp_path):
            pass
        assert "has ended, so this run takes it over" in caplog.text
        (tmp_path / LOCK_OWNER).write_text(json.dumps({**owner, "host": "elsewhere"}))
        with pytest.raises(OutputDirInUse, match="on elsewhere began at 2026"), locked(tmp_path):
            pass
