"""A run that hangs, fails, is killed or has lost its launcher ends on every rank, with its name and the cause."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from forked_ranks import forked_ranks, wait_for
from step_events import At

from groupgrad import GRPOTrainer, activity, dist
from groupgrad.activity import EXIT_HUNG, Hung
from groupgrad.errors import HangError
from groupgrad.trainer import hangs, rank_links
from groupgrad.trainer.hangs import Watch, launcher

TEXT = "the judge is out"

DEADLINE_S = 10.0
"""Time in which every rank ends after a failure, or after the deadline of a hang."""


def second(event: str, action: Callable[[], Any]) -> At:
    """Calls an action at an event of the second step."""
    return At(event, lambda _: action(), 1)


def hanging(hang: Callable[[], Any]) -> Any:
    def judge(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 1:
            hang()
        return [float(len(text)) for text in completions]

    return judge


def swallow() -> None:
    with contextlib.suppress(Exception):
        time.sleep(60)


async def asynchronous(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(60)
    return [0.0] * len(completions)


# ------------------------------------------------------------------------------------------------------- one process

JUDGE = r"the reward function '{}' has run for \d+ s \(step {}, rank 0, rows 0 to 7, the first: row 0 \(prompt"
BACKTRACKING = hanging(lambda: re.match(r"(a+)+$", "a" * 60 + "b"))
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "reward": ({"reward_funcs": hanging(swallow)}, JUDGE.format("judge", 2)),
    "async reward": ({"reward_funcs": asynchronous}, JUDGE.format("asynchronous", 1)),
    "callback": (
        {"trainer": {"callbacks": [second("on_step_end", swallow)]}},
        r"the training loop has run for \d+ s",
    ),
    "regular expression": ({"reward_funcs": BACKTRACKING}, JUDGE.format("judge", 2)),
}


@pytest.mark.quick("reward", "async reward", "callback")
@pytest.mark.parametrize("place", PLACES)
def test_what_hangs_ends_the_run_with_its_name(make_trainer, place):
    settings, name = PLACES[place]
    trainer = make_trainer(hang_timeout_s=2.0, **settings)
    with pytest.raises(HangError, match=name):
        trainer.train()
    if place == "reward":
        stacks = (Path(trainer.args.output_dir) / "hang_step_000002_rank_0.txt").read_text()
        assert "in swallow" in stacks and "in judge" in stacks and "hang_timeout_s=2" in stacks
    assert "groupgrad-watch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_what_hangs_in_an_evaluation_outside_of_training_ends_it_with_its_name(make_trainer, tools):
    trainer = make_trainer(hang_timeout_s=2.0, reward_funcs=asynchronous, trainer={"eval_dataset": tools.prompts(1)})
    with pytest.raises(HangError, match=r"the reward function 'asynchronous' has run for \d+ s \(step 0, rank 0"):
        trainer.evaluate()


def test_work_that_shows_signs_of_life_may_take_its_time(tmp_path):
    with Watch("sampling", tmp_path, lambda: 1, 1.0):
        for _ in range(6):
            time.sleep(0.3)
            activity.sign_of_life()


def test_long_work_is_named_while_it_runs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(hangs, "FIRST_NOTE_S", 0.4)
    work = activity.doing("sampling", lambda: "row 3")
    with caplog.at_level(logging.WARNING), Watch("the training loop", tmp_path, lambda: 12, 8.0), work:
        time.sleep(1.5)
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 2  # after 0.4 s and 0.8 s; the next one would come after 1.6 s
    assert all(note.startswith("sampling has run for ") and "(step 12, rank 0, row 3)" in note for note in notes)


def test_a_thread_that_is_not_the_main_one_is_watched_as_well(tmp_path):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Watch("sampling", tmp_path, lambda: 1, 0.5):
                for _ in range(200):
                    time.sleep(0.05)
        except Hung as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "sampling has run for" in str(errors[0])


# -------------------------------------------------------------------------------------------------- failures of a rank


def on_rank_1(action: Callable[[], Any]) -> Callable[[], Any]:
    """Calls `action` on rank 1."""
    return lambda: action() if dist.rank() == 1 else None


def train_and_tell(trainer: Any, out: Path, *, method: str = "train", stays_s: float = 0.0) -> None:
    """Trains or evaluates; writes the error and the time of this rank down, and lets its process live on for a while.

    A process that ends closes its connections, which would end the other rank without any word.
    """
    rank = dist.rank()
    try:
        getattr(trainer, method)()
    except BaseException as error:
        (out / f"error_{rank}").write_text(f"{type(error).__name__}: {error}")
        (out / f"time_{rank}").write_text(str(time.monotonic()))
        if rank == 1:
            wait_for(out / "error_0", stays_s)
        raise


def read_times(out: Path, *names: str) -> list[float]:
    return [float((out / name).read_text()) for name in names]


def fail_on_rank_1(owner: Any, name: str) -> None:
    """Lets a function fail there from now on."""
    if dist.rank() == 1:
        setattr(owner, name, Mock(side_effect=ZeroDivisionError(TEXT)))


def at(place: str, name: str) -> Callable[[Any], None]:
    """A failure of rank 1 in a function that the trainer has or calls, in the second step."""

    def spoil(trainer: Any) -> None:
        fail = lambda: fail_on_rank_1(attrgetter(place)(trainer) if place else trainer, name)  # noqa: E731
        trainer.add_callback(second("on_step_begin", fail))

    return spoil


def at_event(event: str) -> Callable[[Any], None]:
    """A failure in a callback."""
    return lambda trainer: trainer.add_callback(second(event, on_rank_1(Mock(side_effect=ZeroDivisionError(TEXT)))))


def in_module(name: str) -> Callable[[Any], None]:
    """A failure in a function that the trainer's module calls."""
    fail = lambda: fail_on_rank_1(sys.modules[GRPOTrainer.__module__], name)  # noqa: E731
    return lambda trainer: trainer.add_callback(second("on_step_end", fail))


SAVING = {"save_strategy": "steps", "save_steps": 2}
PHASES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    # where: (makes it fail, settings of the run); the last two evaluate, in training and by a call of `evaluate()`
    "reading rows": (in_module("keys_of_step"), {}),
    "sampling": (at("components.collector", "rollouts"), {}),
    "environments": (at("rollout_components.environments", "acquire"), {"agents": True, "max_completion_length": 40}),
    "rewards": (at("components.collector", "_score"), {}),
    "advantages": (at("components.collector", "_advantages"), {}),
    "reference": (at("components.scorer", "reference_logprobs"), {"beta": 0.1}),
    "cutting": (at("", "_rows_of_step"), {}),
    "micro-batches": (in_module("assign_micro_batches"), {}),
    "loss": (at("", "batch_loss"), {}),
    "optimizer": (at("optimizer", "step"), {}),
    "end of the step": (at("timings", "take"), {}),
    "callback": (at_event("on_step_begin"), {}),
    "log": (at("", "log"), {}),
    "saving": (at("run_state", "save"), SAVING),
    "evaluation": (at("eval_metric_store", "add"), {"eval": "sets", "eval_steps": 2}),
    "evaluate": (lambda trainer: fail_on_rank_1(trainer.eval_metric_store, "add"), {"eval": "sets"}),
}


@pytest.mark.quick("callback")
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_on_one_rank_ends_all_with_its_text(ranks, tmp_path, phase):
    """Rank 1 fails by itself, and rank 0 ends soon afterwards with the text of rank 1."""
    spoil, settings = PHASES[phase]

    def action(rank: int) -> None:
        trainer = ranks.build(phase, tmp_path, **settings)
        spoil(trainer)
        method = "evaluate" if phase == "evaluate" else "train"
        train_and_tell(trainer, tmp_path, method=method, stays_s=2 * DEADLINE_S)

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [1, 1], both.log(0) + both.log(1)
    first, second = ((tmp_path / f"error_{rank}").read_text() for rank in range(2))
    assert TEXT in second
    assert first.startswith("RankError: stopped because rank 1") and TEXT in first
    ended, failed = read_times(tmp_path, "time_0", "time_1")
    assert abs(ended - failed) < DEADLINE_S


# ------------------------------------------------------------------------------------------- kills and hangs of a rank


def no_folder() -> None:
    """Lets no rank read the folder of the run while it names the checkpoint to go on from."""
    hangs.checkpoints_in = Mock(side_effect=OSError("Stale file handle"))


def no_silence() -> None:
    """Has a part of the watch fail at every look."""
    hangs.Watch._look_for_silence = Mock(side_effect=ValueError("odd"))


CHECKPOINT_NAMED = "has checkpoint-1, and resume_from_checkpoint='auto' goes on"


@pytest.mark.parametrize(
    ("victim", "trouble", "way_out"),
    [
        (1, lambda: None, CHECKPOINT_NAMED),
        pytest.param(0, lambda: None, CHECKPOINT_NAMED, marks=pytest.mark.slow),
        pytest.param(1, no_folder, "cannot be read now (Stale file handle)", marks=pytest.mark.slow),
        pytest.param(1, no_silence, CHECKPOINT_NAMED, marks=pytest.mark.slow),
    ],
    ids=["1", "0", "folder that cannot be read", "error in the watch"],
)
def test_a_rank_that_is_killed_ends_the_others_with_its_name(ranks, tmp_path, victim, trouble, way_out):
    def die() -> None:
        if dist.rank() == victim:
            time.sleep(1.5)
            (tmp_path / "killed_at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def action(rank: int) -> None:
        trouble()
        trainer = ranks.build("killed", tmp_path, reward=hanging(die), save_strategy="steps", save_steps=1)
        train_and_tell(trainer, tmp_path)

    with forked_ranks(action, tmp_path) as both:
        codes = both.wait(60)
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1, both.log(0) + both.log(1)
    error = (tmp_path / f"error_{1 - victim}").read_text()
    name = f"rank {victim} (pid {both.pids[victim]} on {socket.gethostname()})"
    assert error.startswith(f"RankError: stopped because {name} went away during ")
    assert "the reward function 'judge'\" in step 2" in error
    assert way_out in error
    ended, killed = read_times(tmp_path, f"time_{1 - victim}", "killed_at")
    assert ended - killed < DEADLINE_S


def keep_the_lock() -> None:
    """Hangs in C with Python's lock, as a broken extension does."""
    ctypes.PyDLL(None).sleep(100)


def wait_in_a_collective() -> None:
    """Hangs in C++, where no signal's handler runs."""
    torch.distributed.recv(torch.zeros(1), src=0)


HANGS: dict[str, tuple[Callable[[], None], str, int | None]] = {
    "Python": (lambda: time.sleep(100), r"HangError: the training loop has run for \d+ s", 1),
    "reward": (lambda: time.sleep(100), r"HangError: the reward function 'judge' has run for \d+ s", 1),
    "collective": (wait_in_a_collective, "groupgrad: error: the training loop has run for", EXIT_HUNG),
    "lock": (keep_the_lock, "", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", HANGS)
def test_a_hang_on_one_rank_ends_all_with_its_cause(ranks, tmp_path, place):
    hang, own, code = HANGS[place]
    timeout_s = 3.0

    def begin() -> None:
        (tmp_path / "began_at").write_text(str(time.monotonic()))
        hang()

    def action(rank: int) -> None:
        hangs_there = on_rank_1(begin)
        settings = {"reward": hanging(hangs_there)} if place == "reward" else {}
        trainer = ranks.build("hang", tmp_path, hang_timeout_s=timeout_s, **settings)
        if place != "reward":
            trainer.add_callback(second("on_step_end", hangs_there))
        train_and_tell(trainer, tmp_path, stays_s=2 * DEADLINE_S)

    with forked_ranks(action, tmp_path) as both:
        wait_for(tmp_path / "error_0")
        codes = both.wait(DEADLINE_S)
        assert codes == [1, code], both.log(0) + both.log(1)
        assert re.search(own, both.log(1))
    told = "failed with Hung: the reward function 'judge'" if place == "reward" else f"(pid {both.pids[1]} on "
    error = (tmp_path / "error_0").read_text()
    assert error.startswith(f"RankError: stopped because rank 1 {told}") and "hang_timeout_s=3 allows" in error
    began, ended = read_times(tmp_path, "began_at", "time_0")
    seconds = ended - began - timeout_s
    print(f"{place}: rank 0 ended {seconds:.1f} s after the deadline with: {error[:160]}")
    assert seconds < DEADLINE_S
    folder = tmp_path / "run" / "hang"
    stacks = [path.read_text() for path in sorted(folder.glob("hang_step_000002_rank_*.txt"))]
    assert "in all_gather_objects" in stacks[0] and "Meanwhile rank 0 was busy with: waiting for the other" in stacks[0]
    if place != "lock":
        assert "in begin" in stacks[1]


def test_a_rank_that_waits_long_for_one_that_works_is_no_hang(ranks, tmp_path):
    """One rank may sample much longer rows than the others."""

    def work() -> None:
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            activity.sign_of_life()
            time.sleep(0.1)

    def action(rank: int) -> None:
        hangs.REACTION_S = 0.0  # a rank that waits has 3 s then
        trainer = ranks.build("long", tmp_path, hang_timeout_s=1.0)
        trainer.add_callback(second("on_step_end", on_rank_1(work)))
        trainer.train()

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [0, 0], both.log(0) + both.log(1)


@pytest.mark.slow
def test_ranks_leave_without_a_word_to_each_other(ranks, tmp_path):
    """A run that ends well ends well on both, and again in the same processes; a stranger at the door is not let in."""

    def action(rank: int) -> None:
        trainer = ranks.build("well", tmp_path, max_steps=1)
        accept = socket.create_server

        def with_stranger(*args: Any, **kwargs: Any) -> socket.socket:
            server = accept(*args, **kwargs)
            strangers.append(socket.create_connection(server.getsockname()))
            strangers[0].sendall(b'stranger 1\n["failed", 1, "a lie"]\n')
            return server

        strangers: list[socket.socket] = []
        rank_links.socket.create_server = with_stranger
        trainer.train()
        trainer.train()
        assert "groupgrad-watch" not in [thread.name for thread in threading.enumerate()]

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [0, 0], both.log(0) + both.log(1)


# ------------------------------------------------------------------------------------------------------- the launcher

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


def test_a_process_gets_sigterm_when_its_launcher_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "TICK_S", 0.1)

    def rank() -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
        signal.signal(signal.SIGTERM, lambda *_: ((tmp_path / "stopped").touch(), os._exit(0)))
        with Watch("sampling", tmp_path, lambda: 1, None):
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
def test_a_run_outlives_the_shell_that_has_started_it(tmp_path):
    command = f"nohup {sys.executable} {SCRIPT} by_hand {tmp_path} > {tmp_path}/log 2>&1 & wait"
    shell = subprocess.Popen(["sh", "-c", command], env=ENVIRONMENT)
    wait_for(tmp_path / "rank_0", 120)
    shell.kill()
    shell.wait()
    wait_for(tmp_path / "finished", 60)
    assert (tmp_path / "rank_0").read_text().split()[1] == "20"


@pytest.mark.slow
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
