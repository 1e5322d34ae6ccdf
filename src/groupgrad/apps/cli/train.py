"""`groupgrad train`: reads the arguments, builds the trainer, trains and saves."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from groupgrad import compat, dist
from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.apps.cli.command_parser import in_columns, refuse
from groupgrad.apps.cli.dataset import load_splits
from groupgrad.apps.cli.parsing import Parsed, parse, train_parser
from groupgrad.checkpoints.saving import is_storage_error
from groupgrad.config import GRPOConfig
from groupgrad.config.field_rules import DTYPES, changed
from groupgrad.config.grpo_config import without_secrets
from groupgrad.config.settings import mapping
from groupgrad.errors import EXIT_CHECKPOINT_NOT_SAVED, CheckpointError, CheckpointNotSaved
from groupgrad.integrations.reasoning_gym import PREFIX, reasoning_gym_reward
from groupgrad.models.model_names import check_model_name
from groupgrad.rewards import REWARD_FUNCTIONS
from groupgrad.spelling import did_you_mean

_LORA_FLAGS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Flag -> the argument of peft's configuration that it sets."""

parser = train_parser
"""Makes the parser of this command."""

_BUILT_IN = {**REWARD_FUNCTIONS, "reasoning_gym_reward": reasoning_gym_reward}

_FOUR_BIT_FLAGS = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")


def main(argv: Sequence[str]) -> int:
    """Trains as the command line says, or describes the run with `--dry-run`.

    Returns 0, or 2 after a sentence that says what to change if the run cannot begin, or `EXIT_CHECKPOINT_NOT_SAVED` if
    its last checkpoint could not be written. Other errors are raised.
    """
    parsed = parse(argv)
    output_dir = Path(parsed.config.output_dir or "")
    is_new = not output_dir.exists()
    try:
        trainer = build(parsed)
    except (ValueError, TypeError, ImportError, OSError) as error:
        return refuse("train", error)
    if parsed.flags["dry_run"]:
        if dist.is_main():
            print(describe(trainer, parsed), end="")
        if is_new and output_dir.is_dir() and not any(output_dir.iterdir()):
            output_dir.rmdir()
        return 0
    try:
        run(trainer, parsed)
    except CheckpointError as error:
        return refuse("train", error)
    except CheckpointNotSaved as error:
        return refuse("train", error, EXIT_CHECKPOINT_NOT_SAVED)
    return 0


def build(
    parsed: Parsed,
    *,
    splits_of: Callable[[TaskArguments, bool], tuple[Any, Any]] | None = None,
) -> Any:
    """Builds the trainer for a command line. Quick checks come first, then the data, and the model last.

    `splits_of` loads the data in the place of `load_splits`.
    """
    from groupgrad.trainer import GRPOTrainer

    rewards = load_rewards(parsed.script)
    eval_rewards = load_eval_rewards(parsed.script, parsed.config.evaluates)
    model = take_model_options(parsed.model, parsed.config)
    check_model_name("model_name_or_path", model)
    if parsed.script.reward_model_name_or_path:
        check_model_name("reward_model_name_or_path", parsed.script.reward_model_name_or_path)
    options = {"peft_config": peft_config(parsed.model), "quantization_config": quantization_config(parsed.model)}
    options["eval_reward_funcs"] = eval_rewards
    train_dataset, eval_dataset = (splits_of or load_splits)(parsed.script, parsed.config.evaluates)
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=parsed.config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **{name: value for name, value in options.items() if value is not None},
    )


def run(trainer: Any, parsed: Parsed) -> None:
    """Trains, saves the model to `output_dir`, and pushes it to the hub if `push_to_hub` is set.

    CheckpointNotSaved if the disk refused the last checkpoint or the model. The model is smaller, so it is tried after
    a checkpoint that was refused.
    """
    config = parsed.config
    refused: CheckpointNotSaved | None = None
    trainer.recorder.command = parsed.command
    try:
        trainer.train()
    except CheckpointNotSaved as error:
        refused = error
    try:
        trainer.save_model(config.output_dir)
    except Exception as error:
        if not is_storage_error(error):
            raise
        raise CheckpointNotSaved(
            f"the model could not be written to {config.output_dir} ({error}); checkpoints there are as they were"
        ) from error
    if refused is not None:
        raise CheckpointNotSaved(f"{refused}; `groupgrad train` has written the model to {config.output_dir}")
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=parsed.script.dataset_name)


def load_rewards(script: TaskArguments) -> list[Any]:
    """Loads the named reward functions; a reward model stays a name. ValueError if there are none or one is unknown.

    A task of reasoning-gym brings its reward along, unless others are named.
    """
    rewards: list[Any] = [load_reward(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path:
        rewards.append(script.reward_model_name_or_path)
    if not rewards and (script.dataset_name or "").startswith(PREFIX):
        return [reasoning_gym_reward]
    if not rewards:
        raise ValueError(
            f"no reward is given; set reward_funcs to built-in names ({', '.join(_BUILT_IN)}) or dotted "
            f"paths of your own functions, or set reward_model_name_or_path"
        )
    return rewards


def load_eval_rewards(script: TaskArguments, evaluates: bool) -> list[Any] | None:
    """Loads the named reward functions of evaluation; None if there are none, with a warning if nothing evaluates.

    ValueError if one is unknown.
    """
    if script.eval_reward_funcs is None:
        return None
    functions = [load_reward(name) for name in script.eval_reward_funcs]
    if evaluates:
        return functions
    warnings.warn(f"no effect: eval_reward_funcs={script.eval_reward_funcs!r} without evaluation; set eval_strategy")
    return None


def load_reward(name: str) -> Callable[..., Any]:
    """Returns a built-in reward function by its name, or imports one by its dotted path from the current folder."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        hint = did_you_mean(name, _BUILT_IN, before="; ")
        raise ValueError(
            f"there is no built-in reward function {name!r}{hint}. Built in are {', '.join(_BUILT_IN)}; "
            f"your own are given as module.function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward function {name!r} cannot be imported from {os.getcwd()}: {error}") from error
    if not callable(function):
        raise ValueError(f"{name!r} is a {type(function).__name__}, not a reward function")
    return function


def take_model_options(model: ModelArguments, config: GRPOConfig) -> str:
    """Writes the loading options into `config.model_init_kwargs` and returns the model's name. ValueError if an option
    is set there too, to another value."""
    if not model.model_name_or_path:
        raise ValueError("no model is given; set model_name_or_path to a hub id or a local folder")
    kwargs = mapping(config.model_init_kwargs)
    flags = {"revision": "model_revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    for key, flag in flags.items():
        value = getattr(model, flag)
        if value is None:
            continue
        if kwargs.get(key, value) != value:
            raise ValueError(f"{flag}={value!r}, but model_init_kwargs has {key}={kwargs[key]!r}; set it in one place")
        kwargs[key] = value
    if model.dtype is not None and model.dtype not in DTYPES:
        raise ValueError(f"dtype={model.dtype!r} is not known; set it to one of {', '.join(DTYPES)}")
    config.model_init_kwargs = kwargs or None
    return model.model_name_or_path


def peft_config(model: ModelArguments) -> Any:
    """Returns peft's configuration of the adapter, or None without `use_peft`."""
    if not model.use_peft:
        _warn_of_unused(model, tuple(_LORA_FLAGS), "without use_peft; set use_peft to train an adapter")
        return None
    compat.require("peft", "use_peft")
    from peft import LoraConfig

    values = {key: _adapter_value(model, flag) for flag, key in _LORA_FLAGS.items()}
    return LoraConfig(**{key: value for key, value in values.items() if value not in (None, [])})


def _adapter_value(model: ModelArguments, flag: str) -> Any:
    value = getattr(model, flag)
    if not isinstance(value, list):
        return value
    # The documents write --lora_target_modules "q_proj", "v_proj", and a shell keeps the comma.
    names = [name.strip(",") for name in value]
    return "all-linear" if names == ["all-linear"] else names


def _warn_of_unused(model: ModelArguments, flags: Sequence[str], why: str) -> None:
    """Names in one warning the flags that are set without effect."""
    if unused := [f"{name}={getattr(model, name)!r}" for name in changed(model, flags)]:
        warnings.warn(f"no effect: {', '.join(unused)} {why}")


def quantization_config(model: ModelArguments) -> Any:
    """Returns the configuration that loads weights in 4 or 8 bits, or None. ValueError if both are set."""
    if not model.load_in_4bit:
        _warn_of_unused(model, _FOUR_BIT_FLAGS, "without load_in_4bit")
    if not (model.load_in_4bit or model.load_in_8bit):
        return None
    if model.load_in_4bit and model.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both True; set one of them to False")
    compat.require("bitsandbytes", "load_in_4bit" if model.load_in_4bit else "load_in_8bit")
    if model.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = getattr(torch, model.dtype) if model.dtype not in (None, "auto") else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model.bnb_4bit_quant_storage,
    )


_COMPUTED = ("logging_dir", "deepspeed_plugin")
"""Fields that are derived from others and say no more than they."""
_CONVERTED = ("accelerator_config", "debug", "disable_tqdm")
"""Fields whose default transformers writes in another form."""


def describe(trainer: Any, parsed: Parsed) -> str:
    """Returns the settings that were given and those that follow from them and, in words, the model, data, batch,
    steps and engine."""
    from groupgrad.trainer import run_summary

    given, derived = _settings(parsed)
    lines = ["settings that were given:", *given]
    if derived:
        lines += ["", "settings that follow from them or from this machine:", *derived]
    model, execution = trainer.model, trainer.execution
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = {
        "model": f"{model.num_parameters():,} parameters, of which {trained:,} are trained",
        "data": run_summary.data_in_words(trainer),
        "batch": run_summary.batch_in_words(trainer.plan),
        "steps": run_summary.steps_in_words(trainer),
        "prompts": str(run_summary.prompt_lengths(trainer, run_summary.PROMPTS_AT_START)),
        "ending": run_summary.ending_in_words(trainer),
        "rewards": ", ".join(trainer.rewards.names),
        **({"evaluated by": ", ".join(trainer.eval_rewards.names)} if parsed.script.eval_reward_funcs else {}),
        "sampled by": f"{execution.engine_choice.name} engine: {execution.engine_choice.reason}",
        "scored in": f"{execution.layout_report.layout} layout",
        **run_summary.old_logprobs_row(trainer),
    }
    return "\n".join([*lines, "", *in_columns(rows), "", "No step was taken.\n"])


def _settings(parsed: Parsed) -> tuple[list[str], list[str]]:
    """Lines of the fields that were given, and of the others that differ from their defaults."""
    given, derived = [], []
    for record in (parsed.script, parsed.model, parsed.config):
        names = [field.name for field in dataclasses.fields(record) if field.name not in _COMPUTED]
        differ = changed(record, names)
        for name in names:
            line = f"  {name}: {without_secrets(getattr(record, name), name)}"
            if name in parsed.given:
                given.append(line)
            elif name in differ and name not in _CONVERTED:
                derived.append(line)
    return given or ["  none"], derived
