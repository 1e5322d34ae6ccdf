"""Small runs of several kinds, which end bit for bit alike whenever they are made anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import base_fixtures as BASE
import torch
from datasets import Dataset
from scripted_agents import with_tools
from small_runs import EOS, SETTINGS, letters_reward
from transformers import TrainerCallback

from groupgrad import GRPOConfig, GRPOTrainer


def turns_reward(completions: list[Any], **kwargs: Any) -> list[list[float]]:
    """A reward for each turn of the model, by its length."""
    return [
        [len(message["content"]) % 5 / 4 for message in messages if message["role"] == "assistant"]
        for messages in completions
    ]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3, "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"},
    "reused_rollouts": {"steps_per_generation": 2, "num_iterations": 2, "shuffle_rows": "groups"},
    "several_batches_a_step": {"gradient_accumulation_steps": 2, "generation_batch_size": 8, "logging_steps": 3},
    "synced_reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "steps_per_generation": 2},
    "adapter": {"adapter": True, "beta": 0.1, "warmup_steps": 4},
    "tools": {"tools": True, "beta": 0.05},
    "turns": {"tools": True, "reward": turns_reward, "advantage_estimator": "gigpo", "max_completion_length": 80},
    "program": {"program": True, "beta": 0.05, "max_completion_length": 60, "agent_sampling": "request"},
    "adaptive_entropy": {
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.05,
    },
}
"""Kind of run → its settings."""


def add(number: int) -> int:
    """Adds one.

    Args:
        number: What to add to.
    """
    return number + 1


def read_call(text: str, ids: list[int]) -> dict[str, Any]:
    """Makes every other turn a tool call."""
    call = {"name": "add", "arguments": {"number": len(ids)}}
    return {"role": "assistant", "content": text, "tool_calls": [call] if ids[0] % 2 else []}


def ask_twice(row: dict[str, Any], session: Any) -> None:
    """An agent that asks again behind the answer, hotter, and then about something else."""
    client, messages = session.openai(), [{"role": "user", "content": row["prompt"]}]
    for options in ({}, {"temperature": 1.5}):
        answer = client.chat.completions.create(model=session.model, messages=messages, max_tokens=6, **options)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        messages = [*messages, said, {"role": "user", "content": "b"}]
    client.chat.completions.create(model=session.model, messages=messages[-1:], max_tokens=4)


def make_trainer(
    folder: Path,
    *,
    reward: Any = letters_reward,
    callbacks: Sequence[TrainerCallback] = (),
    rows: int = 16,
    model_seed: int = 0,
    peft: Any = None,
    **settings: Any,
) -> GRPOTrainer:
    """A trainer of a few fast steps that saves every fourth, equal for equal settings.

    Beside fields of the configuration `settings` may have a model, data and other arguments of the trainer; `tools` is
    a list, or True for a tool that adds one.
    """
    torch.set_num_threads(1)
    model, dropout = settings.pop("model", None), settings.pop("dropout", 0.0)
    if model is None:
        model = BASE.make_model(model_seed, initializer_range=0.15, attention_dropout=dropout)
        model.generation_config.eos_token_id = EOS
    config: dict[str, Any] = {
        **SETTINGS,
        "output_dir": str(folder),
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 4,
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        **settings,
    }
    stream, tokenizer, extra = config.pop("stream", False), BASE.make_tokenizer(), {"peft_config": peft}
    extra |= {name: config.pop(name) for name in ("optimizers", "eval_dataset", "response_parser") if name in config}
    dataset = config.pop("dataset", None)
    if dataset is None:
        dataset = Dataset.from_dict({"prompt": [f"{letter}!" for letter in "abcdefghijklmnopqrstuvwxyz"[:rows]]})
    if tools := config.pop("tools", False):
        tokenizer = with_tools(tokenizer)
        extra = {"response_parser": read_call, **extra, "tools": [add] if tools is True else tools}
        if isinstance(dataset[0]["prompt"], str):
            dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    if config.pop("program", False):
        tokenizer, extra["agent"] = with_tools(tokenizer), ask_twice
    if config.pop("adapter", False):
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=dataset.to_iterable_dataset() if stream else dataset,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        **extra,
    )


class FlippedBit(TrainerCallback):
    """Flips one bit of one weight after a step: a fault of the machine."""

    def __init__(self, trainer_step: int, bit: int = 20):
        self._step, self._bit = trainer_step, bit

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self._step:
            weight = model.model.layers[1].mlp.up_proj.weight
            with torch.no_grad():
                bits = weight.view(torch.int32)
                bits[3, 5] ^= 1 << self._bit
