"""Small runs of several kinds, which end bit for bit alike whenever they are made anew."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from scripted_agents import with_tools
from transformers import TrainerCallback

from groupgrad import GRPOConfig, GRPOTrainer

_SPEC = importlib.util.spec_from_file_location("base", Path(__file__).with_name("base_fixtures.py"))
assert _SPEC is not None and _SPEC.loader is not None
BASE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(BASE)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3, "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"},
    "reused_rollouts": {"steps_per_generation": 2, "num_iterations": 2, "shuffle_rows": "groups"},
    "several_batches_a_step": {"gradient_accumulation_steps": 2, "generation_batch_size": 8, "logging_steps": 3},
    "synced_reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "steps_per_generation": 2},
    "adapter": {"adapter": True, "beta": 0.1, "warmup_steps": 4},
    "tools": {"tools": True, "beta": 0.05},
    "adaptive_entropy": {
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.05,
    },
}
"""Kind of run → its settings."""


def letters_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward that depends on the tokens alone."""
    return [sum(token % 7 for token in ids) / 10 + (len(ids) % 3) for ids in completion_ids]


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


def make_trainer(
    folder: Path,
    *,
    reward: Callable[..., Any] = letters_reward,
    callbacks: Sequence[TrainerCallback] = (),
    rows: int = 16,
    model_seed: int = 0,
    peft: Any = None,
    **settings: Any,
) -> GRPOTrainer:
    """A trainer of a few fast steps that saves every fourth, equal for equal settings.

    Beside fields of the configuration `settings` may have `model`, `optimizers` and `eval_dataset`.
    """
    torch.set_num_threads(1)
    model, dropout = settings.pop("model", None), settings.pop("dropout", 0.0)
    if model is None:
        model = BASE.make_model(model_seed, initializer_range=0.15, attention_dropout=dropout)
        model.generation_config.eos_token_id = [1, *range(4, 24)]
    config: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 4,
        "logging_steps": 1,
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        **settings,
    }
    stream, tokenizer, extra = config.pop("stream", False), BASE.make_tokenizer(), {"peft_config": peft}
    extra |= {name: config.pop(name) for name in ("optimizers", "eval_dataset") if name in config}
    dataset = Dataset.from_dict({"prompt": [f"{letter}!" for letter in "abcdefghijklmnopqrstuvwxyz"[:rows]]})
    if config.pop("tools", False):
        tokenizer = with_tools(tokenizer)
        extra |= {"tools": [add], "response_parser": read_call}
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
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
