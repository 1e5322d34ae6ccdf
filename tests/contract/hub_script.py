"""Trains and pushes as a user would, and prints what the calls returned as JSON; run by test_hub.py."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from groupgrad import GRPOConfig, GRPOTrainer

BASE = "Qwen/Qwen2-0.5B-Instruct"
LOGS: dict[str, Any] = {"log_completions": True, "num_completions_to_print": 0, "hub_token": "hf_in_config"}


def checksum(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(model_dir: str, output_dir: Path, peft_config: Any = None, **settings: Any) -> GRPOTrainer:
    """A trainer whose model says that it came from the hub."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.config._name_or_path = model.name_or_path = BASE
    args = GRPOConfig(
        output_dir=str(output_dir),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=3,
        logging_steps=1,
        learning_rate=1e-3,
        disable_tqdm=True,
        **settings,
    )
    return GRPOTrainer(
        model,
        checksum,
        args,
        Dataset.from_list([{"prompt": f"{a}+1="} for a in range(4)]),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        peft_config=peft_config,
    )


def by_hand(model_dir: str, folder: Path) -> dict[str, Any]:
    """`push_to_hub` called twice by the user; completions go to a data set."""
    trainer = make_trainer(
        model_dir,
        folder / "by-hand",
        max_steps=2,
        save_strategy="no",
        hub_model_id="ada/tiny-grpo",
        hub_private_repo=True,
        log_completions_hub_repo="ada/answers",
        **LOGS,
    )
    trainer.train()
    first = trainer.push_to_hub(
        "Trained on sums", token="hf_by_hand", dataset_name="openai/gsm8k", tags=["sums"], license="mit"
    )
    second = trainer.push_to_hub(blocking=False, revision="drafts", token="hf_by_hand", model_name="Tiny")
    return {
        "url": str(first.commit_url),
        "is_future": isinstance(second, Future),
        "later": str(second.result().commit_url),
    }


class WaitForPushes(TrainerCallback):
    """Lets a push end before the next one begins."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def on_push_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._finish_current_push()


def while_training(model_dir: str, folder: Path) -> dict[str, Any]:
    """`push_to_hub=True` in the configuration, of a model at every save and of an adapter at the end."""
    settings = {"save_steps": 1, "max_steps": 2, "push_to_hub": True, "hub_token": "hf_in_config"}
    trainer = make_trainer(
        model_dir,
        folder / "steady",
        hub_strategy="checkpoint",
        hub_always_push=True,
        hub_model_id="ada/steady",
        **settings,
    )
    # A push reads the folder in the background, and fails if the next one copies files into it meanwhile.
    trainer.add_callback(WaitForPushes(trainer))
    trainer.train()
    trainer.save_model()
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    at_end = make_trainer(model_dir, folder / "at-end", adapter, hub_strategy="end", **settings)
    at_end.train()
    at_end.push_to_hub()
    return {"names": [trainer.hub_model_id, at_end.hub_model_id]}


def refused(model_dir: str, folder: Path) -> dict[str, Any]:
    """A data set that cannot be made is told before anything is sampled."""
    try:
        make_trainer(model_dir, folder / "refused", max_steps=1, log_completions_hub_repo="ada/forbidden", **LOGS)
    except ValueError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    model_dir, folder = sys.argv[1], Path(sys.argv[2])
    results = {part.__name__: part(model_dir, folder) for part in (by_hand, while_training, refused)}
    print("RESULTS " + json.dumps(results))
