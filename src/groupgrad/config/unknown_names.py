"""Finds what a name that is no setting was meant to be: another setting, or a value that belongs elsewhere.

For the command line, its files and sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from transformers import GenerationConfig

from groupgrad.config.conditions import OWNED_KEYS
from groupgrad.engines.generation_options import MOVED
from groupgrad.spelling import nearest

TRAINER_ARGUMENTS = (
    *("model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes"),
    *("callbacks", "optimizers", "quantization_config", "peft_config", "tools", "rollout_func", "environment_factory"),
    *("agent", "response_parser", "eval_reward_funcs", "tokenizer", "reward_fn", "reward_model"),
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

_ELSEWHERE: dict[str, str] = {
    **OWNED_KEYS,
    **{name: f"pass GRPOTrainer({name}=...)" for name in TRAINER_ARGUMENTS},
    **{
        name: f"set model_init_kwargs={{{name.removeprefix('torch_')!r}: ...}}"
        for name in ("dtype", "torch_dtype", "attn_implementation", "device_map", "revision")
    },
    **{
        name: f"pass GRPOTrainer(quantization_config=BitsAndBytesConfig({name}=...))"
        for name in ("load_in_4bit", "load_in_8bit")
    },
    **dict.fromkeys(
        ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_config"),
        "pass GRPOTrainer(peft_config=LoraConfig(...))",
    ),
    "stop": "it is an option of sampling, set generation_kwargs={'stop_strings': ...}, or with vLLM {'stop': ...}",
    "vllm_sampling_params": "set temperature, top_p, top_k, min_p and repetition_penalty, and generation_kwargs={...} "
    "for other options of sampling",
    "max_seq_length": "prompt and completion together may be as long as the model's context; set max_completion_length "
    "for completions, and leave long prompts out of the data set (with vLLM, vllm_max_model_length bounds both)",
}
"""Names of things that are set elsewhere, and where."""


def advice(name: str, known_names: Collection[str], *, spelled: Callable[[str], str] = repr) -> str:
    """Says what to set in place of the unknown `name`; empty if nothing is similar.

    `known_names` exist where it was given, and `spelled` writes one of them in the form of that place.
    """
    if place := place_of(name, known_names, spelled=spelled):
        return place
    similar = nearest(name, known_names)
    return f"did you mean {spelled(similar)}?" if similar else ""


def place_of(name: str, known_names: Collection[str], *, spelled: Callable[[str], str] = repr) -> str:
    """`advice` for a name that other libraries use, or that belongs elsewhere; empty for any other."""
    if (other := _OTHER_NAMES.get(name, "")) in known_names:
        return f"it is {spelled(other)} here"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if name in {*vars(GenerationConfig()), "stop_strings"} - MOVED:
        return f"it is an option of sampling, set generation_kwargs={{{name!r}: ...}}"
    return ""
