"""A reward function that is late or crashes on one of two ranks: both end with its name, or both go on alike."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import forked_ranks, on_ranks

TIMEOUT_S = 1.5


def failing(is_here: bool, fail: Callable[[], object]) -> Callable[..., list[float]]:
    """A reward that fails in the second step where `is_here`. It needs no module of the tests in a worker."""

    def judge(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if is_here and trainer_state.global_step == 1:
            fail()
        return [float(len(text)) for text in completions]

    return judge


def late_on_the_loop(is_here: bool, fail: Callable[[], object]) -> Callable[..., Any]:
    async def judge(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if is_here and trainer_state.global_step == 1:
            await asyncio.sleep(60)
        return [float(len(text)) for text in completions]

    return judge


def sleep() -> None:
    time.sleep(60)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


LATE = f"'judge' took longer than reward_timeout_s={TIMEOUT_S}"
CRASHED = "worker process of reward function 'judge' was killed by SIGSEGV"
CASES: dict[str, tuple[Callable[..., Any], Callable[[], None], int, str, str]] = {
    # the reward · how it fails · workers · in the error · metric that counts it
    "late": (failing, sleep, 0, LATE, "timeouts"),
    "late on the loop": (late_on_the_loop, sleep, 0, LATE, "timeouts"),
    "late in a worker": (failing, sleep, 1, LATE, "timeouts"),
    "crashed worker": (failing, crash, 1, CRASHED, "failures"),
}


def train(ranks: Any, rank: int, out: Path, case: str, **options: Any) -> Any:
    make, fail, workers, *_ = CASES[case]
    trainer = ranks.build(
        "rewards", out, reward=make(rank == 1, fail), reward_timeout_s=TIMEOUT_S, reward_workers=workers, **options
    )
    trainer.train()
    return trainer


@pytest.mark.quick("late")
@pytest.mark.parametrize("case", CASES)
def test_a_failure_on_one_rank_ends_both_with_its_name(ranks, tmp_path, case):
    def action(rank: int) -> None:
        try:
            train(ranks, rank, tmp_path, case)
        except Exception as error:
            (tmp_path / f"error_{rank}").write_text(f"{type(error).__name__}: {error}")
            raise

    with forked_ranks(action, tmp_path) as both:
        assert both.wait(60) == [1, 1], both.log(0) + both.log(1)
    first, second = ((tmp_path / f"error_{rank}").read_text() for rank in range(2))
    text = CASES[case][3]
    assert second.startswith("RewardError: ") and text in second
    assert "step 1, rank 1, rows " in second
    assert first.startswith("RankError: stopped because rank 1 ") and text in first


@pytest.mark.quick("late on the loop")
@pytest.mark.parametrize("case", CASES)
def test_both_go_on_where_a_failure_is_no_error(ranks, tmp_path, case):
    def action(rank: int) -> Any:
        trainer = train(ranks, rank, tmp_path, case, on_reward_failure="none")
        return ranks.HELP.weights(trainer.model), trainer.state.log_history

    endings = on_ranks(action, tmp_path, 2, connect=False)
    assert torch.equal(endings[0][0], endings[1][0])
    steps = [entry for entry in endings[0][1] if "loss" in entry]
    assert [entry[f"rewards/judge/{CASES[case][4]}"] for entry in steps] == [0, 1, 0]
    assert len(steps) == 3 and all(entry["grad_norm"] > 0 for entry in steps)
