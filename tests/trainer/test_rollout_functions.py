"""Training on the rollouts of a user's rollout function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer

PROMPTS = Dataset.from_list([{"prompt": "abcdefgh"[i]} for i in range(8)])


@pytest.fixture
def trained(tmp_path: Any, tokenizer: Any, make_model: Any) -> Callable[..., GRPOTrainer]:
    """A trainer after two steps on one generation batch; its function gives every token the log-prob -1, or none."""

    def train(*, gives_logprobs: bool) -> GRPOTrainer:
        def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
            completions = [[5 + i, 6, 1] for i in range(len(prompts))]
            logprobs = [[-1.0] * 3 for _ in prompts] if gives_logprobs else None
            ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
            return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

        trainer = GRPOTrainer(
            model=make_model(),
            reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=str(tmp_path),
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                per_device_train_batch_size=8,
                num_generations=4,
                num_iterations=2,
                max_steps=2,
                logging_steps=1,
                learning_rate=1e-3,
                disable_tqdm=True,
            ),
            train_dataset=PROMPTS,
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()
        return trainer

    return train


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


def test_only_what_can_happen_is_logged(trained, tmp_path, tokenizer, make_model):
    assert endings(trained(gives_logprobs=True)) == {"rollouts/eos", "rollouts/length", "rollouts/error"}
    trainer = GRPOTrainer(
        model=make_model(),
        args=GRPOConfig(
            output_dir=str(tmp_path / "greeter"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=3,
            max_steps=1,
            logging_steps=1,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}]),
        processing_class=tokenizer,
        environment_factory=Greeter,
    )
    trainer.train()
    reasons = {"eos", "length", "error", "context"}
    assert endings(trainer) == {"tools/wait_s", *(f"rollouts/{reason}" for reason in reasons)}
