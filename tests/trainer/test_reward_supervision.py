"""Runs whose reward functions are supervised: deadlines, worker processes, failures and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from forked_ranks import wait_for

from groupgrad import GRPOConfig
from groupgrad.errors import HangError, RewardError
from groupgrad.stopping import Stopped


def letters() -> Any:
    """A reward that needs no module of the tests, so that a worker need not import torch."""

    def letters(completion_ids, log_extra, log_metric, trainer_state, **columns):
        log_extra("row_of_data", columns["row"])
        log_metric("seen_step", trainer_state.global_step)
        return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]

    return letters


def acting(step: int, action: Any) -> Any:
    """A reward that acts at a step."""

    def judge(completions, trainer_state, **kwargs):
        if trainer_state.global_step == step:
            action()
        return [float(len(text)) for text in completions]

    return judge


_before: set[int] = set()
"""Processes that ran before the test, such as the worker that checks mathematical answers."""


@pytest.fixture(autouse=True)
def _note_processes() -> None:
    _before.clear()
    _before.update(child.pid for child in psutil.Process().children())


def workers_left() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.pid not in _before]
    return [child for child in children if "reward-worker" in " ".join(child.cmdline())]


def test_a_worker_trains_as_the_process_itself(make_trainer, tools):
    def crash() -> None:
        os._exit(3)

    runs = {}
    for workers in (0, 2):
        shaky = acting(1, crash if workers else lambda: 1 / 0)
        options = {"on_reward_failure": {"judge": "none"}, "reward_timeout_s": 60, "reward_workers": workers}
        runs[workers] = make_trainer(reward_funcs=[letters(), shaky], **options)
        assert len(workers_left()) == workers
        runs[workers].train()
        assert workers_left() == []
    plain, worked = runs[0], runs[2]
    assert torch.equal(tools.weights(worked.model), tools.weights(plain.model))
    logs = [tools.without_times(trainer.state.log_history) for trainer in (worked, plain)]
    assert logs[0] == logs[1]
    steps = logs[0][:-1]
    assert [entry["rewards/judge/failures"] for entry in steps] == [0, 1, 0]
    assert [entry["rewards/judge/timeouts"] for entry in steps] == [0, 0, 0]
    assert [entry["seen_step"] for entry in steps] == [0, 1, 2]
    assert {f"time/rewards/letters/{key}" for key in ("p50", "p95", "max")} <= set(worked.state.log_history[0])


def test_a_late_reward_ends_the_run_before_the_watchdog(make_trainer):
    trainer = make_trainer(
        reward_funcs=acting(1, lambda: time.sleep(60)), reward_timeout_s=1.0, hang_timeout_s=8.0, max_steps=2
    )
    started = time.monotonic()
    with pytest.raises(
        RewardError,
        match=r"'judge' took longer than reward_timeout_s=1 \(step 1, rank 0, rows 0 to 7, the first: row 0 ",
    ):
        trainer.train()
    assert time.monotonic() - started < 10


def slow_judge(place: str, begun: str) -> Any:
    """A reward of a second's work, which says when it begins."""

    def judge(completions, **kwargs):
        with open(begun, "w"):
            pass
        for _ in range(10):
            time.sleep(0.1)
        return [float(len(text)) for text in completions]

    async def asynchronous(completions, **kwargs):
        with open(begun, "w"):
            pass
        for _ in range(10):
            await asyncio.sleep(0.1)
        return [float(len(text)) for text in completions]

    return asynchronous if place == "loop" else judge


@pytest.mark.slow
@pytest.mark.parametrize("place", ["thread", "loop", "worker"])
def test_a_suspended_run_goes_on(train, tmp_path, place):
    begun = tmp_path / "begun"
    options = {"reward_timeout_s": 2.0, "reward_workers": int(place == "worker"), "max_steps": 1}
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            train(reward_funcs=slow_judge(place, str(begun)), **options)
            os._exit(0)
        finally:
            os._exit(1)
    wait_for(begun)
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.killpg(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
def test_a_worker_that_hangs_without_a_deadline_is_the_watchdogs(make_trainer):
    trainer = make_trainer(reward_funcs=acting(0, lambda: time.sleep(60)), reward_workers=1, hang_timeout_s=2.0)
    with pytest.raises(HangError, match="the reward function 'judge' has run for"):
        trainer.train()
    assert workers_left() == []


def test_a_signal_leaves_a_call_in_a_worker(make_trainer):
    def stop() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler sends it to every process
        time.sleep(60)

    trainer = make_trainer(reward_funcs=acting(1, stop), reward_workers=1)
    started = time.monotonic()
    with pytest.raises(Stopped, match="SIGTERM stopped the run after step 1"):
        trainer.train()
    assert time.monotonic() - started < 20 and workers_left() == []


def test_options_reach_the_calls(make_trainer):
    trainer = make_trainer(
        reward_funcs=[letters(), acting(0, lambda: None)],
        reward_timeout_s=7,
        reward_retries=2,
        reward_transient_errors=["KeyError"],
        reward_worker_memory_gb=0.5,
        reward_workers=1,
        on_reward_failure='{"judge": "none", "letters": -1}',
        seed=5,
    )
    options = trainer.rewards.supervision
    assert (options.timeout_s, options.retries, options.transient_errors, options.seed) == (7, 2, ("KeyError",), 5)
    assert (options.num_workers, options.worker_memory_bytes) == (1, 1 << 29)
    assert (options.action("judge"), options.action("letters"), options.action("other")) == (None, -1.0, "error")
    for value, resolved in (("none", None), (None, None), ("0.5", 0.5), (2, 2.0), ("error", "error")):
        config = GRPOConfig(use_cpu=True, on_reward_failure=value)
        assert config.on_reward_failure_resolved == resolved
        assert GRPOConfig(**config.to_dict()) == config


def test_what_cannot_be_supervised_is_refused_at_construction(make_trainer):
    held = threading.Lock()
    with pytest.raises(TypeError, match=r"'judge' cannot be sent to a worker process .*cannot pickle"):
        make_trainer(reward_funcs=acting(0, held.locked), reward_workers=1)
    with pytest.raises(ValueError, match="on_reward_failure names 'jugde', and the reward functions are 'judge'"):
        make_trainer(reward_funcs=acting(0, None), on_reward_failure={"jugde": "none"})
    with pytest.warns(UserWarning, match="reward_workers=3 starts 1: each function runs in one process"):
        trainer = make_trainer(reward_funcs=acting(0, None), reward_workers=3)
    assert len(workers_left()) == 1
    trainer.rewards.close_workers()
    assert workers_left() == []


def test_what_a_reward_sets_for_the_whole_process_is_put_back(make_trainer, tools):
    def sets(completion_ids, **_):
        rewards = tools.letters_reward(completion_ids)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(2)
        return rewards

    plain, changing = make_trainer(max_steps=2), make_trainer(max_steps=2, reward_funcs=sets)
    for trainer in (plain, changing):
        trainer.train()
    assert torch.equal(tools.weights(changing.model), tools.weights(plain.model))
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu" and torch.get_num_threads() == 1
