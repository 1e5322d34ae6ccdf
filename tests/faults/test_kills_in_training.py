"""A run killed at any change that it makes to its folder, and started again, ends as if nothing had happened.

    KILLS=200 python -m pytest -m slow -s tests/faults/test_kills_in_training.py

makes as many kills in all, at random changes, and prints what became of them.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import forked_ranks
from injected_kills import count_changes, run_and_kill
from peft import LoraConfig
from small_runs import letters_reward, without_times

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "generation_of_several_steps": {"steps_per_generation": 4, "max_steps": 5, "logging_steps": 2},
    "synced_reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "lora": {"peft": True},
    "tools": {"tools": True, "max_completion_length": 40, "max_tool_calling_iterations": 2},
    "async_rewards": {"reward": "async"},
    "program": {"program": True, "max_completion_length": 40, "agent_sampling": "request"},
    "stream": {"stream": True},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "completions_and_rotation": {"log_completions": True, "num_completions_to_print": 0, "save_total_limit": 1},
}

KILLS = math.ceil(int(os.environ.get("KILLS", "132")) / (len(KINDS) + 1))
"""Kills of each kind of run, of which two processes are one."""


async def async_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Depends on the tokens alone."""
    return letters_reward(completion_ids)


def settings_of(kind: str) -> dict[str, Any]:
    settings = dict(KINDS[kind])
    if settings.pop("peft", False):
        settings["peft"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
    if settings.get("reward") == "async":
        settings["reward"] = async_reward
    return settings


def ending(trainer: Any) -> dict[str, Any]:
    """Weights, moments and logs after a run, without measured times."""
    log = without_times(trainer.state.log_history)
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {"weights": list(trainer.model.parameters()), "moments": moments, "log": log[:-1]}


def is_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    for name in ("weights", "moments"):
        if len(first[name]) != len(second[name]) or not all(map(torch.equal, first[name], second[name])):
            return False
    return first["log"] == second["log"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_like_another(new_trainer, tmp_path: Path, kind):
    settings = settings_of(kind)
    undisturbed = new_trainer(tmp_path / "undisturbed", **settings)
    status, changes = run_and_kill(undisturbed.train, tmp_path / "undisturbed")
    assert status == 0 and changes > 100
    straight = new_trainer(tmp_path / "straight", **settings)
    straight.train()
    expected, equal = ending(straight), 0
    moments = random.Random(kind).sample(range(1, changes + 1), KILLS)
    for at in moments:
        folder = tmp_path / str(at)
        status, _ = run_and_kill(new_trainer(folder, **settings).train, folder, at=at)
        assert os.WTERMSIG(status) == signal.SIGKILL
        again = new_trainer(folder, **settings)
        again.train(resume_from_checkpoint="auto")
        equal += is_equal(ending(again), expected)
        shutil.rmtree(folder)
    print(f"{kind}: {KILLS} kills of {changes} possible, {KILLS} resumed by themselves, {equal} bit-equal")
    assert equal == KILLS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_of_which_one_is_killed_end_like_others(new_trainer, tmp_path: Path):
    settings = {"per_device_train_batch_size": 4, "beta": 0.1, "ddp_backend": "gloo"}
    straight = tmp_path / "straight"
    changes = []
    assert run_two(new_trainer, straight, settings, changes=changes) == [0, 0]
    expected = [torch.load(straight / f"ending_{rank}.pt", weights_only=False) for rank in range(2)]
    stream, equal = random.Random("two"), 0
    for number in range(KILLS):
        victim, folder = number % 2, tmp_path / str(number)
        at = stream.randrange(1, changes[victim] + 1)
        codes = run_two(new_trainer, folder, settings, victim=victim, at=at)
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] in (0, 1), (at, codes)
        assert run_two(new_trainer, folder, settings) == [0, 0]
        found = [torch.load(folder / f"ending_{rank}.pt", weights_only=False) for rank in range(2)]
        equal += all(map(is_equal, found, expected))
        shutil.rmtree(folder)
    print(f"two processes: {KILLS} kills of {sum(changes)} possible, {KILLS} resumed by themselves, {equal} bit-equal")
    assert equal == KILLS


def run_two(
    new_trainer: Any, folder: Path, settings: dict[str, Any], *, victim: int = 0, at: int = 0, changes: Any = None
) -> list[int | None]:
    """Exit codes of two ranks, of which the `victim` is killed at its change number `at`; adds their `changes`."""
    folder.mkdir(exist_ok=True)

    def action(rank: int) -> None:
        counter = os.open(folder / f"changes_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        trainer = new_trainer(folder / "run", **settings)
        count_changes(folder / "run", at if rank == victim else 0, counter)
        trainer.train(resume_from_checkpoint="auto")
        (folder / f"count_{rank}").write_text(str(os.fstat(counter).st_size))
        torch.save(ending(trainer), folder / f"ending_{rank}.pt")

    with forked_ranks(action, folder) as both:
        codes = both.wait(60)
        assert None not in codes, both.log(0) + both.log(1)
    if changes is not None:
        changes += [int((folder / f"count_{rank}").read_text()) for rank in range(2)]
    return codes
