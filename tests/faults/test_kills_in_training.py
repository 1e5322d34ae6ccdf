"""A run killed at any change that it makes to its folder, and started again, ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from injected_kills import run_and_kill
from peft import LoraConfig

TIMES = ("runtime", "per_second", "step_time", "time/", "latency_s")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "generation_of_several_steps": {"steps_per_generation": 4, "max_steps": 5, "logging_steps": 2},
    "synced_reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "lora": {"peft": True},
    "async_rewards": {"reward": "async"},
    "stream": {"stream": True},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "completions_and_rotation": {"log_completions": True, "num_completions_to_print": 0, "save_total_limit": 1},
}


async def async_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Depends on the tokens alone."""
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


def settings_of(kind: str) -> dict[str, Any]:
    settings = dict(KINDS[kind])
    if settings.pop("peft", False):
        settings["peft"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
    if settings.get("reward") == "async":
        settings["reward"] = async_reward
    return settings


def ending(trainer: Any) -> dict[str, Any]:
    """Weights, moments and logs after a run, without measured times."""
    log = [{k: v for k, v in e.items() if not any(t in k for t in TIMES)} for e in trainer.state.log_history]
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {"weights": list(trainer.model.parameters()), "moments": moments, "log": log[:-1]}


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("weights", "moments"):
        assert len(first[name]) == len(second[name])
        assert all(torch.equal(one, other) for one, other in zip(first[name], second[name]))
    assert first["log"] == second["log"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault(
    "a run is killed at any change that it makes to its folder, and its script starts again with "
    "resume_from_checkpoint='auto'",
    "weights, optimizer and logs end bit for bit like those of a run that nobody killed",
    "the steps since the last checkpoint, which are made again",
)
def test_a_killed_run_ends_like_another(new_trainer, tmp_path: Path, kind):
    settings = settings_of(kind)
    undisturbed = new_trainer(tmp_path / "undisturbed", **settings)
    status, changes = run_and_kill(undisturbed.train, tmp_path / "undisturbed")
    assert status == 0 and changes > 100
    straight = new_trainer(tmp_path / "straight", **settings)
    straight.train()
    expected, moments = ending(straight), random.Random(kind).sample(range(1, changes + 1), 12)
    for at in moments:
        folder = tmp_path / str(at)
        status, _ = run_and_kill(new_trainer(folder, **settings).train, folder, at=at)
        assert os.WTERMSIG(status) == signal.SIGKILL
        again = new_trainer(folder, **settings)
        again.train(resume_from_checkpoint="auto")
        assert_equal(ending(again), expected)
    print(f"{kind}: {len(moments)} kills of {changes} possible, {len(moments)} resumed by themselves, all bit-equal")
