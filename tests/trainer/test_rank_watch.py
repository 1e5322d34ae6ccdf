"""A rank that fails, hangs or is killed ends the others within seconds, with its name and the cause."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forked_ranks import forked_ranks, wait_for
from transformers import TrainerCallback

from groupgrad import GRPOTrainer, activity, dist
from groupgrad.activity import EXIT_HUNG
from groupgrad.trainer import rank_links, rank_watch, watchdog

TEXT = "the judge is out"

DEADLINE_S = 10.0
"""Time in which every rank ends after a failure, or after the deadline of a hang."""


class Do(TrainerCallback):
    """Calls an action at an event of the second step."""

    def __init__(self, event: str, action: Callable[[], Any]):
        def act(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                action()

        setattr(self, event, act)


def on_rank_1(action: Callable[[], Any]) -> Callable[[], Any]:
    """Calls `action` on rank 1."""
    return lambda: action() if dist.rank() == 1 else None


def train_and_tell(trainer: Any, out: Path, *, stays_s: float = 0.0) -> None:
    """Trains; writes the error, the time and the activity of this rank down, and lets its process live on for a while.

    A process that ends closes its connections, which would end the other rank without any word.
    """
    rank = dist.rank()
    try:
        trainer.train()
    except BaseException as error:
        (out / f"error_{rank}").write_text(f"{type(error).__name__}: {error}")
        (out / f"time_{rank}").write_text(str(time.monotonic()))
        if rank == 1:
            wait_for(out / "error_0", stays_s)
        raise


def errors(out: Path) -> list[str]:
    return [(out / f"error_{rank}").read_text() for rank in range(2)]


# ------------------------------------------------------------------------------------------------------------ failures


def at(place: str, name: str) -> Callable[[Any], None]:
    """A failure of rank 1 in a function that the trainer has or calls, in the second step."""

    def spoil(trainer: Any) -> None:
        def replace() -> None:
            owner = attrgetter(place)(trainer) if place else trainer
            setattr(owner, name, Mock(side_effect=ZeroDivisionError(TEXT)))

        trainer.add_callback(Do("on_step_begin", on_rank_1(replace)))

    return spoil


def at_event(event: str) -> Callable[[Any], None]:
    """A failure in a callback."""
    return lambda trainer: trainer.add_callback(Do(event, on_rank_1(Mock(side_effect=ZeroDivisionError(TEXT)))))


def in_module(name: str) -> Callable[[Any], None]:
    """A failure in a function that the trainer's module calls."""
    module = sys.modules[GRPOTrainer.__module__]
    replace = on_rank_1(lambda: setattr(module, name, Mock(side_effect=ZeroDivisionError(TEXT))))
    return lambda trainer: trainer.add_callback(Do("on_step_end", replace))


SAVING = {"save_strategy": "steps", "save_steps": 2}
PHASES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
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
}
DEFAULT = ("callback",)


@pytest.mark.parametrize(
    "phase", [phase if phase in DEFAULT else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]
)
@pytest.mark.fault(
    "an exception on one rank, wherever in a step, in a callback, a save or an evaluation",
    "every other rank ends within 10 s with that rank's name, process and text, also if the failed process lives on",
    "the steps since the last checkpoint",
)
def test_an_error_on_one_rank_ends_all_with_its_text(ranks, tmp_path, phase):
    spoil, settings = PHASES[phase]

    def action(rank: int) -> None:
        trainer = ranks.build(phase, tmp_path, **settings)
        spoil(trainer)
        train_and_tell(trainer, tmp_path, stays_s=2 * DEADLINE_S)

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [1, 1], both.log(0) + both.log(1)
    first, second = errors(tmp_path)
    assert TEXT in second
    assert first.startswith("RankError: stopped because rank 1") and TEXT in first
    assert time_between(tmp_path) < DEADLINE_S


def time_between(out: Path) -> float:
    first, second = (float((out / f"time_{rank}").read_text()) for rank in range(2))
    return abs(first - second)


# --------------------------------------------------------------------------------------------------- kills and hangs


def no_folder() -> None:
    """Lets no rank read the folder of the run while it names the checkpoint to go on from."""
    rank_watch.checkpoints_in = Mock(side_effect=OSError("Stale file handle"))


def no_silence() -> None:
    """Has a part of the watch fail at every look."""
    rank_watch.RankWatch._look_for_silence = Mock(side_effect=ValueError("odd"))


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
@pytest.mark.fault(
    "a rank is killed, as the system does when memory runs out",
    "the others end within 10 s, and say which rank went away, in what, and where the run goes on",
    "the steps since the last checkpoint",
)
def test_a_rank_that_is_killed_ends_the_others_with_its_name(ranks, tmp_path, victim, trouble, way_out):
    def judge(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 1 and dist.rank() == victim:
            time.sleep(1.5)
            (tmp_path / "killed_at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(len(text)) for text in completions]

    def action(rank: int) -> None:
        trouble()
        trainer = ranks.build("killed", tmp_path, reward=judge, save_strategy="steps", save_steps=1)
        train_and_tell(trainer, tmp_path)

    with forked_ranks(action, tmp_path) as both:
        codes = both.wait(60)
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1, both.log(0) + both.log(1)
    error = (tmp_path / f"error_{1 - victim}").read_text()
    name = f"rank {victim} (pid {both.pids[victim]} on {socket.gethostname()})"
    assert error.startswith(f"RankError: stopped because {name} went away during ")
    assert "the reward function 'judge'\" in step 2" in error
    assert way_out in error
    ended, killed = (float((tmp_path / name).read_text()) for name in (f"time_{1 - victim}", "killed_at"))
    assert ended - killed < DEADLINE_S


def keep_the_lock() -> None:
    """Hangs in C with Python's lock, as a broken extension does."""
    ctypes.PyDLL(None).sleep(100)


def wait_in_a_collective() -> None:
    """Hangs in C++, where no signal's handler runs."""
    torch.distributed.recv(torch.zeros(1), src=0)


HANGS: dict[str, tuple[Callable[[], None], str, int | None]] = {
    "Python": (lambda: time.sleep(100), r"HangError: the training loop has run for \d+ s", 1),
    "collective": (wait_in_a_collective, "groupgrad: error: the training loop has run for", EXIT_HUNG),
    "lock": (keep_the_lock, "", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", HANGS)
@pytest.mark.fault(
    "a rank hangs, in Python, in a collective or in an extension that keeps Python's lock",
    "all ranks write their stacks to `output_dir`, and end within 10 s of `hang_timeout_s` with the rank and the cause",
    "the steps since the last checkpoint",
)
def test_a_hang_on_one_rank_ends_all_with_its_cause(ranks, tmp_path, place):
    hang, own, code = HANGS[place]
    timeout_s = 3.0

    def begin() -> None:
        (tmp_path / "began_at").write_text(str(time.monotonic()))
        hang()

    def action(rank: int) -> None:
        trainer = ranks.build("hang", tmp_path, hang_timeout_s=timeout_s)
        trainer.add_callback(Do("on_step_end", on_rank_1(begin)))
        train_and_tell(trainer, tmp_path, stays_s=2 * DEADLINE_S)

    with forked_ranks(action, tmp_path) as both:
        wait_for(tmp_path / "error_0")
        codes = both.wait(DEADLINE_S)
        assert codes == [1, code], both.log(0) + both.log(1)
        assert re.search(own, both.log(1))
    name, error = f"rank 1 (pid {both.pids[1]} on ", (tmp_path / "error_0").read_text()
    assert error.startswith(f"RankError: stopped because {name}") and "hang_timeout_s=3 allows" in error
    began, ended = (float((tmp_path / name).read_text()) for name in ("began_at", "time_0"))
    seconds = ended - began - timeout_s
    print(f"{place}: rank 0 ended {seconds:.1f} s after the deadline with: {error[:160]}")
    assert seconds < DEADLINE_S
    folder = tmp_path / "run" / "hang"
    stacks = [path.read_text() for path in sorted(folder.glob("hang_step_000002_rank_*.txt"))]
    assert "in all_gather_objects" in stacks[0] and "Meanwhile rank 0 was busy with: waiting for the other" in stacks[0]
    if place != "lock":
        assert "in begin" in stacks[1]


@pytest.mark.fault(
    "a rank waits longer than `hang_timeout_s` for one that still works, as with rows of unlike length",
    "it goes on waiting, as long as that one shows signs of life and `ddp_timeout` allows",
    "nothing",
)
def test_a_rank_that_waits_long_for_one_that_works_is_no_hang(ranks, tmp_path):
    """One rank may sample much longer rows than the others."""

    def work() -> None:
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            activity.sign_of_life()
            time.sleep(0.1)

    def action(rank: int) -> None:
        watchdog.REACTION_S = 0.0  # a rank that waits has 3 s then
        trainer = ranks.build("long", tmp_path, hang_timeout_s=1.0)
        trainer.add_callback(Do("on_step_end", on_rank_1(work)))
        trainer.train()

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [0, 0], both.log(0) + both.log(1)


def test_the_first_message_may_come_in_pieces():
    hello = b"secret 1".ljust(rank_links.HELLO_BYTES)

    def connect(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for piece in (hello[:3], hello[3:40], hello[40:]):
                connection.sendall(piece)
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=connect, args=(server.getsockname()[1],))
        thread.start()
        (link,) = rank_links._accept(server, ["rank 0", "rank 1"], "secret")
        thread.join()
    assert (link.rank, link.name) == (1, "rank 1")
    link.close()


@pytest.mark.slow
def test_ranks_leave_without_a_word_to_each_other(ranks, tmp_path):
    """A run that ends well ends well on both, and again in the same processes; a stranger at the door is not let in."""

    def action(rank: int) -> None:
        trainer = ranks.build("well", tmp_path, max_steps=1)
        accept = socket.create_server

        def with_stranger(*args: Any, **kwargs: Any) -> socket.socket:
            server = accept(*args, **kwargs)
            strangers.append(socket.create_connection(server.getsockname()))
            strangers[0].sendall(b"stranger 1\n")
            return server

        strangers: list[socket.socket] = []
        rank_links.socket.create_server = with_stranger
        trainer.train()
        trainer.train()
        assert not [thread for thread in threading.enumerate() if thread.name == "groupgrad-rank-watch"]

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [0, 0], both.log(0) + both.log(1)
