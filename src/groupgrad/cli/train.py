"""`groupgrad train`: read the arguments, build the trainer, train, save."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from groupgrad import compat

if TYPE_CHECKING:
    from groupgrad.cli.arguments import ModelArguments, ScriptArguments
    from groupgrad.cli.parsing import Parsed
    from groupgrad.config import GRPOConfig

_ADAPTER_FLAGS = {
    "lora": (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
        *("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
    ),
    "ia3": ("ia3_target_modules", "ia3_feedforward_modules", "ia3_modules_to_save"),
}
"""Kind of adapter -> the flags that are for it alone."""
_FOUR_BIT_FLAGS = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
_FOUR_BITS, _STORAGE = ("nf4", "fp4"), ("uint8", "float16", "float32", "bfloat16")


def main(argv: Sequence[str]) -> int:
    """Train as the command line says. Returns 0, or 2 after a sentence that says what to change if the run cannot
    begin; what fails later is raised."""
    from groupgrad.cli.parsing import parse

    parsed = parse(argv)
    try:
        trainer = build(parsed)
    except (ValueError, TypeError, ImportError, OSError) as error:
        if os.environ.get("GROUPGRAD_TRACEBACK"):
            raise
        print(f"groupgrad train: error: {error}\n(GROUPGRAD_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2
    run(trainer, parsed)
    return 0


def build(parsed: Parsed) -> Any:
    """The trainer for a command line."""
    from groupgrad.cli.dataset import load_splits

    # First what is quick to check, then the data, and last the model, which takes longest.
    rewards = load_rewards(parsed.script)
    model = model_name(parsed.model, parsed.config)
    further = {"peft_config": peft_config(parsed.model), "quantization_config": quantization_config(parsed.model)}
    train_dataset, eval_dataset = load_splits(parsed.script, parsed.config.evaluates)
    trainer_class = import_module("groupgrad.trainer").GRPOTrainer
    return trainer_class(
        model=model,
        reward_funcs=rewards,
        args=parsed.config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **{name: value for name, value in further.items() if value is not None},
    )


def run(trainer: Any, parsed: Parsed) -> None:
    """Train, save the model to `output_dir`, and push it if asked to."""
    config = parsed.config
    trainer.train(resume_from_checkpoint=resume_from(config.resume_from_checkpoint))
    trainer.save_model(config.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=parsed.script.dataset_name)


def resume_from(value: str | bool | None) -> str | bool | None:
    """`true` means the last checkpoint in `output_dir`; other text is a path; `false` or unset: no resuming."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    return value or None


def load_rewards(script: ScriptArguments) -> list[Any]:
    """The reward functions and the reward model that are named. ValueError if there are none, or one is unknown."""
    rewards: list[Any] = [load_reward(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path:
        rewards.append(script.reward_model_name_or_path)
    if not rewards:
        raise ValueError(
            f"no reward is given; set reward_funcs to built-in names ({', '.join(_registry())}) or dotted paths of "
            f"your own functions, or set reward_model_name_or_path"
        )
    return rewards


def load_reward(name: str) -> Callable[..., Any]:
    """A built-in reward function by its name, or any function by its dotted path, seen from the current folder."""
    registry = _registry()
    if name in registry:
        return registry[name]
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        from groupgrad.config.field_rules import nearest

        like = nearest(name, registry)
        hint = f"; did you mean {like!r}?" if like else ""
        raise ValueError(
            f"there is no built-in reward function {name!r}{hint}. Built in are {', '.join(registry)}; "
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


def _registry() -> dict[str, Any]:
    return import_module("groupgrad.rewards").REWARD_FUNCTIONS


def model_name(model: ModelArguments, config: GRPOConfig) -> str:
    """The model's name; how to load it is written into `config.model_init_kwargs`. ValueError if a setting is given
    there too, with another value."""
    if not model.model_name_or_path:
        raise ValueError("no model is given; set model_name_or_path to a hub id or a local folder")
    given: Any = dict(config.model_init_kwargs or {})  # pyright: ignore[reportArgumentType, reportCallIssue]
    flags = {
        "revision": ("model_revision", model.model_revision),
        "dtype": ("dtype", model.dtype),
        "attn_implementation": ("attn_implementation", model.attn_implementation),
    }
    for key, (flag, value) in flags.items():
        if value is None:
            continue
        if given.get(key, value) != value:
            raise ValueError(f"{flag}={value!r}, but model_init_kwargs has {key}={given[key]!r}; set it in one place")
        given[key] = value
    from groupgrad.config.field_rules import DTYPES

    if model.dtype is not None and model.dtype not in DTYPES:
        raise ValueError(f"dtype={model.dtype!r} is not known; set it to one of {', '.join(DTYPES)}")
    config.model_init_kwargs = given or None
    return model.model_name_or_path


def peft_config(model: ModelArguments) -> Any:
    """The adapter's configuration that the flags describe, or None without `use_peft`. ValueError for an unknown kind
    of adapter, and for flags of another kind than the one asked for."""
    if not model.use_peft:
        flags = ("peft_method", *(name for names in _ADAPTER_FLAGS.values() for name in names))
        _warn_of_idle(model, flags, "without use_peft; set use_peft to train an adapter")
        return None
    method = model.peft_method
    if method not in _ADAPTER_FLAGS:
        raise ValueError(f"peft_method={method!r} is not known; set it to one of {', '.join(_ADAPTER_FLAGS)}")
    for other, flags in _ADAPTER_FLAGS.items():
        if other != method and (given := _changed(model, flags)):
            raise ValueError(
                f"peft_method={method!r} has no use for {', '.join(given)}; leave that out, or set peft_method to "
                f"{other!r}"
            )
    compat.require("peft", "use_peft")
    return _lora_config(model) if method == "lora" else _ia3_config(model)


def _lora_config(model: ModelArguments) -> Any:
    from peft import LoraConfig

    parameters = _names(model.lora_target_parameters)
    if parameters and not hasattr(LoraConfig, "target_parameters"):
        raise ImportError("lora_target_parameters needs peft 0.17 or later: pip install -U peft")
    newer: Any = {"target_parameters": parameters} if parameters else {}
    return LoraConfig(
        task_type=model.lora_task_type,  # pyright: ignore[reportArgumentType]
        r=model.lora_r,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        target_modules=_targets(model.lora_target_modules),
        modules_to_save=_names(model.lora_modules_to_save) or None,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
        **newer,
    )


def _ia3_config(model: ModelArguments) -> Any:
    from peft import IA3Config

    targets, feedforward = _targets(model.ia3_target_modules), _names(model.ia3_feedforward_modules)
    # peft takes no notice of those that it does not adapt.
    alone = [] if targets == "all-linear" else [name for name in feedforward if name not in (targets or [])]
    if alone:
        raise ValueError(
            f"ia3_feedforward_modules names {', '.join(alone)}, which ia3_target_modules does not; name them in both"
        )
    return IA3Config(
        task_type="CAUSAL_LM",  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        feedforward_modules=feedforward or None,
        modules_to_save=_names(model.ia3_modules_to_save) or None,
    )


def _targets(given: list[str] | None) -> list[str] | str | None:
    names = _names(given)
    return "all-linear" if names == ["all-linear"] else names or None


def _names(given: list[str] | None) -> list[str]:
    """A shell passes the list "a", "b" of the documents with its commas."""
    return [name.strip(",") for name in given or []]


def _changed(model: ModelArguments, flags: tuple[str, ...]) -> list[str]:
    """Those of the flags that have another value than their default, with it."""
    default = type(model)()
    return [f"{name}={getattr(model, name)!r}" for name in flags if getattr(model, name) != getattr(default, name)]


def _warn_of_idle(model: ModelArguments, flags: tuple[str, ...], why: str) -> None:
    """One warning that names those of the flags that are set and change nothing."""
    if idle := _changed(model, flags):
        warnings.warn(f"no effect: {', '.join(idle)} {why}")


def quantization_config(model: ModelArguments) -> Any:
    """How to load the weights in fewer bits, or None. ValueError if 4 and 8 bits are both asked for, or for an
    unknown value."""
    if not model.load_in_4bit:
        _warn_of_idle(model, _FOUR_BIT_FLAGS, "without load_in_4bit")
    if not (model.load_in_4bit or model.load_in_8bit):
        return None
    if model.load_in_4bit and model.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both True; set one of them to False")
    flag = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
    for name, known in (("bnb_4bit_quant_type", _FOUR_BITS), ("bnb_4bit_quant_storage", (None, *_STORAGE))):
        if getattr(model, name) not in known:
            choices = ", ".join(str(value) for value in known if value is not None)
            raise ValueError(f"{name}={getattr(model, name)!r} is not known; set it to one of {choices}")
    compat.require("bitsandbytes", flag)
    import torch
    from transformers import BitsAndBytesConfig

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
