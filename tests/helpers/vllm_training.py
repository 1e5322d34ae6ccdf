"""Training runs with a real vLLM, and a reward that checks vLLM's weights during the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import small_runs
import torch
from datasets import Dataset
from real_vllm import SIZES, requests, true_logprobs

from groupgrad import GRPOConfig, GRPOTrainer

LARGE = {**SIZES, "max_position_embeddings": 1024}
"""Room for a prompt that describes a tool."""
QUICK: dict[str, Any] = {
    **small_runs.SETTINGS,
    "gradient_checkpointing": None,
    "disable_tqdm": True,
    "per_device_train_batch_size": 8,
    "max_completion_length": 12,
    "use_vllm": True,
}


class Watch:
    """A reward of the tokens alone that first lets vLLM continue fixed prompts greedily.

    It runs after a generation batch was sampled and before any training on it, so vLLM's continuations must be those of
    the trainer's weights. `gap` is the largest difference in nats between the model's most likely token and vLLM's.
    """

    __name__ = "watch"

    def __init__(self) -> None:
        self.trainer: Any = None
        self.gap = 0.0
        self.policy_steps: list[int] = []
        self.texts: list[list[int]] = []
        self.before: Callable[[int], None] = lambda number: None
        """Called with the number of batches rewarded so far."""

    def __call__(self, completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
        self.before(len(self.policy_steps))
        if self.trainer is not None:
            self._compare()
        return small_runs.letters_reward(list(completion_ids))

    def _compare(self) -> None:
        vllm_policy = self.trainer.vllm_policy
        options = replace(self.trainer.components.sampling, temperature=0.0, max_new_tokens=8, eos_ids=(), extra={})
        rows = requests(4, tokens=8)
        for row, sample in zip(rows, vllm_policy.sample(rows, options)):
            table = true_logprobs(self.trainer.model, row.prompt_ids, sample.ids).float()
            own = table.gather(-1, torch.tensor(sample.ids)[:, None]).squeeze(-1)
            self.gap = max(self.gap, float((table.max(-1).values - own).max()))
            self.texts.append(sample.ids)
        self.policy_steps.append(vllm_policy.policy_step)


def make_trainer(
    model: Any, tokenizer: Any, folder: Path, *, arguments: dict[str, Any] | None = None, **settings: Any
) -> GRPOTrainer:
    """A trainer of a few quick steps; its default reward is a `Watch`, in `trainer.watch`."""
    watch = Watch()
    trainer = GRPOTrainer(
        model,
        **{
            "reward_funcs": watch,
            "train_dataset": Dataset.from_dict({"prompt": small_runs.PROMPTS[:12]}),
            "processing_class": tokenizer,
            **(arguments or {}),
        },
        args=GRPOConfig(output_dir=str(folder), **{**QUICK, **settings}),
    )
    watch.trainer = trainer
    trainer.watch = watch  # pyright: ignore[reportAttributeAccessIssue]
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    """The values of a metric, in the order of the log."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
