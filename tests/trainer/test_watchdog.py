"""A phase that hangs is named, and ends the run on every rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from groupgrad import activity
from groupgrad.activity import Hung
from groupgrad.errors import HangError
from groupgrad.trainer import watchdog
from groupgrad.trainer.watchdog import Watchdog


def hanging(step: int, hang: Any) -> Any:
    def judge(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == step:
            hang()
        return [float(len(text)) for text in completions]

    return judge


@pytest.mark.fault(
    "a reward function hangs",
    "after `hang_timeout_s` an error names function, step, rank and rows; all stacks are in `hang_step_*.txt`",
    "the steps since the last checkpoint",
)
def test_a_reward_that_hangs_ends_the_run_with_its_name(make_trainer):
    trainer = make_trainer(reward_funcs=hanging(1, lambda: time.sleep(60)), hang_timeout_s=4.0)
    started = time.monotonic()
    with pytest.raises(
        HangError,
        match=r"the reward function 'judge' has run for \d+ s \(step 2, rank 0, rows 0 to 7, the first: row 0 \(prompt",
    ):
        trainer.train()
    assert time.monotonic() - started < 20
    stacks = (Path(trainer.args.output_dir) / "hang_step_000002_rank_0.txt").read_text()
    assert "in judge" in stacks
    assert "hang_timeout_s=4" in stacks
    assert not [thread for thread in threading.enumerate() if thread.name == "groupgrad-watchdog"]


@pytest.mark.fault(
    "an async reward function hangs",
    "the same",
    "the steps since the last checkpoint",
)
def test_an_asynchronous_reward_that_hangs_does_too(make_trainer):
    async def judge(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(60)
        return [0.0] * len(completions)

    with pytest.raises(HangError, match=r"the reward function 'judge' has run for \d+ s"):
        make_trainer(reward_funcs=judge, hang_timeout_s=4.0).train()


@pytest.mark.fault(
    "a callback hangs",
    "the same, named as the training loop",
    "the steps since the last checkpoint",
)
def test_a_callback_that_hangs_is_the_training_loops(make_trainer):
    class Stuck(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(60)

    trainer = make_trainer(hang_timeout_s=1.0, trainer={"callbacks": [Stuck()]})
    with pytest.raises(HangError, match=r"the training loop has run for \d+ s"):
        trainer.train()


@pytest.mark.fault(
    "a reward function that hangs swallows exceptions",
    "the error passes through `except Exception` and ends the run",
    "the steps since the last checkpoint",
)
def test_a_hang_is_not_swallowed_by_a_function_that_catches_exceptions(make_trainer):
    def hang() -> None:
        with contextlib.suppress(Exception):
            time.sleep(60)

    with pytest.raises(HangError, match="the reward function 'judge'"):
        make_trainer(reward_funcs=hanging(1, hang), hang_timeout_s=3.0).train()


@pytest.mark.slow
@pytest.mark.fault(
    "a reward function hangs inside a regular expression, which keeps Python's lock",
    "the system raises the error in its place after the same computing time",
    "the steps since the last checkpoint",
)
def test_a_regular_expression_that_hangs_ends_the_run(make_trainer):
    trainer = make_trainer(reward_funcs=hanging(1, lambda: re.match(r"(a+)+$", "a" * 60 + "b")), hang_timeout_s=3.0)
    with pytest.raises(HangError, match="the reward function 'judge' has run for"):
        trainer.train()


def test_work_that_shows_signs_of_life_may_take_its_time(tmp_path):
    with Watchdog(tmp_path, lambda: 1, 1.0), activity.doing("sampling"):
        for _ in range(6):
            time.sleep(0.3)
            activity.sign_of_life()


def test_long_work_is_named_while_it_runs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "FIRST_NOTE_S", 0.4)
    with (
        caplog.at_level(logging.WARNING),
        Watchdog(tmp_path, lambda: 12, 8.0),
        activity.doing("sampling", lambda: "row 3"),
    ):
        time.sleep(2.5)
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 2  # at the ticks after 1 s and 2 s
    assert all(note.startswith("sampling has run for ") and "(step 12, rank 0, row 3)" in note for note in notes)


def test_a_thread_that_is_not_the_main_one_is_watched_as_well(tmp_path):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Watchdog(tmp_path, lambda: 1, 0.5), activity.doing("sampling"):
                for _ in range(200):
                    time.sleep(0.05)
        except Hung as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "sampling has run for" in str(errors[0])
