"""What to do about a name that is no setting: the setting that was meant, or the place where the value belongs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from transformers import GenerationConfig

from groupgrad.config.conditions import OWNED_KEYS, VLLM_KEYS
from groupgrad.config.legacy import LEGACY
from groupgrad.config.unused_settings import always_unused
from groupgrad.data.values import cut_repr
from groupgrad.engines.generation_options import INTERNAL, MOVED, without_effect
from groupgrad.spelling import nearest

TRAINER_ARGUMENTS = (
    *("model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes"),
    *("callbacks", "optimizers", "quantization_config", "peft_config", "tools", "rollout_func", "environment_factory"),
    *("response_parser", "tokenizer", "reward_fn", "reward_model"),
)
"""Arguments of `GRPOTrainer` that are no settings."""

_OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_tokens", "max_response_length", "response_length"), "max_completion_length"
    ),
    **dict.fromkeys(("kl_coef", "kl_coeff", "init_kl_coef", "kl_loss_coef", "kl_beta", "kl_weight"), "beta"),
    **dict.fromkeys(("n", "group_size", "num_samples_per_prompt", "num_rollouts"), "num_generations"),
    **dict.fromkeys(("cliprange", "clip_range", "clip_ratio", "clip_eps"), "epsilon"),
    "lr": "learning_rate",
    # where the command line has what the trainer gets as an object
    "model": "model_name_or_path",
    "train_dataset": "dataset_name",
    "eval_dataset": "dataset_test_name",
    "peft_config": "use_peft",
    "quantization_config": "load_in_4bit",
}
"""Other names of a setting."""

_LOADING = ("dtype", "torch_dtype", "attn_implementation", "device_map", "revision")
_ADAPTER = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_config")
_QUANTIZATION = ("load_in_4bit", "load_in_8bit")

_INSTEAD: dict[str, str] = {
    "vllm_sampling_params": "set temperature, top_p, top_k, min_p and repetition_penalty, and generation_kwargs={...} "
    "for other options of sampling",
    "max_seq_length": "prompt and completion together may be as long as the model's context; set max_completion_length "
    "for completions, and leave long prompts out of the data set (with vLLM, vllm_max_model_length bounds both)",
    **dict.fromkeys(_ADAPTER, "pass GRPOTrainer(peft_config=LoraConfig(...))"),
}
"""Names of things that are set elsewhere, and where."""


def advice(
    name: str,
    known_names: Collection[str],
    value: Any = ...,
    *,
    use_vllm: bool = False,
    spelled: Callable[[str], str] = repr,
) -> str:
    """Says what to set in place of the unknown `name` with its `value`; empty if nothing is similar.

    `known_names` exist where it was given; one that has no effect is never advised. `spelled` writes one of them in the
    form of that place.
    """
    if place := place_of(name, known_names, value, use_vllm=use_vllm, spelled=spelled):
        return place
    similar = nearest(name, known_names)
    if similar is None:
        return ""
    if reason := no_effect(similar):
        return f"it resembles {spelled(similar)}, which has no effect ({reason}); take it out"
    into = LEGACY[similar].into if similar in LEGACY else None
    return f"did you mean {spelled(into or similar)}?"


def place_of(
    name: str,
    known_names: Collection[str],
    value: Any = ...,
    *,
    use_vllm: bool = False,
    spelled: Callable[[str], str] = repr,
) -> str:
    """`advice` for a name that other libraries use, or that belongs elsewhere; empty for any other."""
    if (other := _OTHER_NAMES.get(name, "")) in known_names:
        return f"it is {spelled(other)} here"
    return _elsewhere(name, value, use_vllm=use_vllm)


def no_effect(setting: str) -> str | None:
    """Why a setting has no effect whatever the others are; None if it has one."""
    row = LEGACY.get(setting)
    if row is not None:
        return row.why if row.into is None and row.act is None else None
    return always_unused(setting)


def _elsewhere(name: str, value: Any, *, use_vllm: bool) -> str:
    """The place outside of the configuration's fields where a value belongs; empty if none is known."""
    shown = "..." if value is ... else cut_repr(value)
    if name in TRAINER_ARGUMENTS:
        return f"it is an argument of the trainer, pass GRPOTrainer({name}=...)"
    if name in _LOADING:
        return f"the model is loaded with it, set model_init_kwargs={{{name.removeprefix('torch_')!r}: {shown}}}"
    if name in _QUANTIZATION:
        return f"pass GRPOTrainer(quantization_config=BitsAndBytesConfig({name}={shown}))"
    return _INSTEAD.get(name) or _in_generation_kwargs(name, value, shown, use_vllm=use_vllm)


def _in_generation_kwargs(name: str, value: Any, shown: str, *, use_vllm: bool) -> str:
    """How to give an option of sampling; empty if the name is none."""
    if name in VLLM_KEYS:
        key = name if use_vllm else VLLM_KEYS[name]
        return f"it is an option of sampling, set generation_kwargs={{{key!r}: {shown}}}"
    if name not in {*vars(GenerationConfig()), "stop_strings"} - INTERNAL:
        return ""
    if name in OWNED_KEYS:
        return OWNED_KEYS[name]
    if name in MOVED:
        return "transformers 5 moved it from generate to code on the Hub, take it out"
    if need := without_effect({name: value}, None).get(name):
        return f"it is an option of sampling without effect unless there is {need}, take it out"
    return f"it is an option of sampling, set generation_kwargs={{{name!r}: {shown}}}"
