"""Training on the rollouts of a user's rollout function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from groupgrad import GRPOTrainer


@pytest.fixture
def trained(train: Callable[..., GRPOTrainer]) -> Callable[..., GRPOTrainer]:
    """A trainer after two steps on one generation batch; its function gives every token the log-prob -1, or none."""

    def run(*, gives_logprobs: bool) -> GRPOTrainer:
        def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
            completions = [[5 + i, 6, 1] for i in range(len(prompts))]
            logprobs = [[-1.0] * 3 for _ in prompts] if gives_logprobs else None
            ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
            return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

        return train(
            reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
            num_iterations=2,
            max_steps=2,
            learning_rate=1e-3,
            trainer={"rollout_func": rollout},
        )

    return run


def test_old_logprobs_are_the_policys_own_whatever_the_function_reports(trained: Callable[..., GRPOTrainer]) -> None:
    """The engine's numbers may stand in for the policy's, a function's may not: -1 is no log-prob of this model's."""
    told, untold = trained(gives_logprobs=True), trained(gives_logprobs=False)
    for with_them, without in zip(told.state.log_history[:2], untold.state.log_history[:2]):
        assert with_them["loss"] == pytest.approx(without["loss"], abs=1e-7)
        assert with_them["clip_ratio/region_mean"] == without["clip_ratio/region_mean"]
        assert with_them["entropy"] == pytest.approx(without["entropy"], abs=1e-6)
        assert "sampling/logp_mismatch" not in with_them
    for one, other in zip(told.model.parameters(), untold.model.parameters()):
        assert torch.allclose(one, other, atol=1e-7)


class Greeter:
    """An environment without tools."""

    def reset(self, **columns: Any) -> str:
        return " hello"

    def get_reward(self) -> float:
        return 1.0


def endings(trainer: Any) -> set[str]:
    """The names of the metrics that a run logged about tools and endings."""
    names = {name for entry in trainer.state.log_history for name in entry}
    return {name for name in names if name.startswith(("rollouts/", "tools/"))} - {"tools/wait_hidden"}


def test_only_what_can_happen_is_logged(trained, train):
    assert endings(trained(gives_logprobs=True)) == {"rollouts/eos", "rollouts/length", "rollouts/error"}
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}])
    trainer = train(
        reward_funcs=None,
        train_dataset=rows,
        per_device_train_batch_size=4,
        max_steps=1,
        trainer={"environment_factory": Greeter},
    )
    reasons = {"eos", "length", "error", "context"}
    assert endings(trainer) == {"tools/wait_s", *(f"rollouts/{reason}" for reason in reasons)}
