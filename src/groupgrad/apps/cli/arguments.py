"""Arguments of `groupgrad train` beside `GRPOConfig`: the data, the rewards and the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# ruff: noqa: RUF009 - _option makes dataclass fields


def _option(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class TaskArguments:
    """The data set, how its rows become prompts, and the reward functions."""

    # --- Data ---
    dataset_name: str | None = _option(
        None,
        "Data set: a hub id, a local folder, a .json, .jsonl, .parquet or .csv file, or reasoning_gym:TASK, which "
        "brings its reward along.",
    )
    dataset_config: dict | str | None = _option(
        None, "Configuration (subset) of the data set; of reasoning_gym a mapping: size, test_size, seed, settings."
    )
    dataset_train_split: str = _option("train", "Split to train on.")
    dataset_test_split: str = _option("test", "Split to evaluate on, if eval_strategy asks for evaluation.")
    dataset_test_name: list[str] | str | None = _option(
        None,
        "Data set or file to evaluate on, like dataset_name, or several as NAME=SET; unset: the test split of "
        "dataset_name.",
    )
    dataset_streaming: bool = _option(
        False, "Read rows while training instead of downloading all first; needs max_steps."
    )
    max_train_rows: int | None = _option(None, "Train on the first rows only, at most this many.")
    prompt_column: str | None = _option(None, "Column that holds the prompt; unset: 'prompt'.")
    solution_column: str | None = _option(None, "Column that holds the answer; reward functions get it as 'solution'.")
    solution_pattern: str | None = _option(
        None, "Regular expression whose first match in the answer has the solution as its first group."
    )
    system_prompt: str | None = _option(None, "System message put before each prompt; makes prompts conversational.")
    conversational: bool | None = _option(
        None, "Turn a text prompt into a user message; unset: yes if prompt_column or system_prompt is set."
    )

    # --- Rewards ---
    reward_funcs: list[str] | None = _option(
        None, "Reward functions: built-in names, or dotted paths of your own such as rewards.my_reward."
    )
    reward_model_name_or_path: str | None = _option(None, "Reward model: hub id or folder of a sequence classifier.")
    eval_reward_funcs: list[str] | None = _option(
        None, "Reward functions of evaluation, named like reward_funcs; unset: the rewards of training."
    )


@dataclass
class ModelArguments:
    """The model to train, its adapter and its quantization."""

    # --- Model ---
    model_name_or_path: str | None = _option(None, "Model to train: a hub id or a local folder.")
    model_revision: str | None = _option(None, "Branch, tag or commit of the model on the hub.")
    dtype: str | None = _option(None, "Dtype of the weights: auto, bfloat16, float16 or float32; unset: float32.")
    attn_implementation: str | None = _option(
        None, "Attention: eager, sdpa, flash_attention_2, ...; unset: the model's."
    )

    # --- Adapter and quantization ---
    use_peft: bool = _option(False, "Train an adapter instead of all weights.")
    lora_r: int = _option(16, "LoRA: rank.")
    lora_alpha: int = _option(32, "LoRA: scale, divided by the rank.")
    lora_dropout: float = _option(0.05, "LoRA: dropout probability.")
    lora_target_modules: list[str] | None = _option(
        None, "LoRA: modules to adapt, or all-linear; unset: the architecture's usual ones."
    )
    lora_target_parameters: list[str] | None = _option(
        None,
        "LoRA: parameters outside linear layers, such as mlp.experts.down_proj; needs lora_dropout 0.",
    )
    lora_modules_to_save: list[str] | None = _option(None, "LoRA: modules trained in full and saved with the adapter.")
    lora_task_type: str = _option("CAUSAL_LM", "LoRA: task type written into the adapter's configuration.")
    use_rslora: bool = _option(False, "LoRA: scale by the square root of the rank.")
    use_dora: bool = _option(False, "LoRA: train magnitude and direction separately (DoRA).")
    load_in_8bit: bool = _option(False, "Load the weights in 8 bits (bitsandbytes) and train an adapter.")
    load_in_4bit: bool = _option(False, "Load the weights in 4 bits (bitsandbytes) and train an adapter.")
    bnb_4bit_quant_type: str = _option("nf4", "4 bits: data type, nf4 or fp4.")
    use_bnb_nested_quant: bool = _option(False, "4 bits: quantize the scales too, which saves 0.4 bits a weight.")
    bnb_4bit_quant_storage: str | None = _option(
        None, "4 bits: storage dtype of the packed weights, such as bfloat16; unset: uint8."
    )
