"""Allowed values of single settings: numbers in `RANGES`, names in `CHOICES`, fixed values and dicts.

A new option that takes a number or a name gets one row here.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from groupgrad.objectives import (
    ESTIMATORS,
    LOSSES,
    MASKS,
    Aggregation,
    MismatchMode,
    RatioLevel,
    ScaleRewards,
    find_estimator,
    find_mask,
    find_method,
)
from groupgrad.rewards.function_calls import FailureAction
from groupgrad.spelling import did_you_mean


@dataclass(slots=True, frozen=True)
class Range:
    """A range of numbers."""

    contains: Callable[[Any], bool]
    remedy: str
    """The range in words, completing "Set it to ..."."""
    whole: bool = False
    """Only integers are allowed."""
    optional: bool = False
    """None is allowed too."""


def or_none(allowed: Range) -> Range:
    """Returns a range that allows None too."""
    return dataclasses.replace(allowed, remedy=f"{allowed.remedy}, or leave it unset", optional=True)


POSITIVE = Range(lambda x: x > 0, "a number above 0")
NOT_NEGATIVE = Range(lambda x: x >= 0, "0 or more")
SHARE = Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")
NONZERO_SHARE = Range(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
FINITE = Range(math.isfinite, "a finite number")
COUNT = Range(lambda x: x >= 1, "a whole number of at least 1", whole=True)
COUNT_OR_ZERO = Range(lambda x: x >= 0, "a whole number, 0 or more", whole=True)
PORT = Range(lambda x: 1 <= x <= 65535, "a port from 1 to 65535", whole=True)

RANGES: dict[str, tuple[Range, str]] = {
    # sampling
    "temperature": (POSITIVE, "logits are divided by it; 0.01 is nearly greedy"),
    "top_p": (NONZERO_SHARE, "it is a share of the probability; 1.0 keeps all tokens"),
    "top_k": (or_none(Range(lambda x: x >= 0, "0 or more, 0 for no limit", whole=True)), "it counts tokens"),
    "min_p": (or_none(SHARE), "it is a share of the largest probability"),
    "repetition_penalty": (POSITIVE, "logits are divided by it; 1.0 has no effect"),
    "max_completion_length": (COUNT, "sampling needs a limit in tokens"),
    "tool_timeout_s": (POSITIVE, "it bounds a call's time"),
    "agent_timeout_s": (POSITIVE, "it bounds a rollout's time"),
    "hang_timeout_s": (or_none(POSITIVE), "it bounds the silence of a phase"),
    "tool_max_result_chars": (COUNT, "it counts characters"),
    "tool_threads": (COUNT, "calls need a thread to run on"),
    "max_tool_calling_iterations": (or_none(COUNT_OR_ZERO), "it counts turns with tool calls"),
    # groups and batches
    "num_generations": (
        Range(lambda x: x >= 2, "at least 2", whole=True),
        "an advantage compares a completion with others of its prompt",
    ),
    "num_generations_eval": (or_none(COUNT), "it counts the completions of a prompt"),
    "per_device_train_batch_size": (COUNT, "it counts completions"),
    "per_device_eval_batch_size": (COUNT, "it counts completions"),
    "gradient_accumulation_steps": (COUNT, "it counts micro-batches"),
    "generation_batch_size": (or_none(COUNT), "it counts completions"),
    "max_tokens_per_pass": (or_none(COUNT), "it counts tokens"),
    "context_parallel_size": (COUNT, "it counts processes"),
    "steps_per_generation": (or_none(COUNT), "it counts micro-batches"),
    "num_iterations": (COUNT, "it counts passes over a generation batch"),
    # objective
    "learning_rate": (NOT_NEGATIVE, "a negative rate makes good completions less likely"),
    "beta": (NOT_NEGATIVE, "a negative weight drives the policy away from the reference"),
    "epsilon": (
        Range(lambda x: 0 <= x < 1, "0 or more and below 1"),
        "it is the width of the trust region below 1, and ratios are positive",
    ),
    "epsilon_high": (or_none(POSITIVE), "it is the width of the trust region above 1, or cispo's ceiling (5.0)"),
    "delta": (
        or_none(Range(lambda x: x > 1, "above 1, best above 1 + epsilon")),
        "it would cut the ratio 1 of an unmoved policy",
    ),
    "sapo_temperature_neg": (POSITIVE, "the gate is divided by it"),
    "sapo_temperature_pos": (POSITIVE, "the gate is divided by it"),
    "vespo_k_pos": (NOT_NEGATIVE, "the weight would have no maximum"),
    "vespo_k_neg": (NOT_NEGATIVE, "the weight would have no maximum"),
    "vespo_lambda_pos": (POSITIVE, "the weight would grow without bound"),
    "vespo_lambda_neg": (POSITIVE, "the weight would grow without bound"),
    "top_entropy_quantile": (SHARE, "it is a share of the tokens; 1.0 trains all"),
    "off_policy_mask_threshold": (or_none(NOT_NEGATIVE), "an unmoved policy has a drift of 0"),
    "entropy_coef": (NOT_NEGATIVE, "a negative bonus drives the entropy to 0"),
    "entropy_coef_min": (FINITE, "it bounds entropy_coef"),
    "entropy_coef_max": (FINITE, "it bounds entropy_coef"),
    "entropy_coef_delta": (NOT_NEGATIVE, "it is the size of a step"),
    "entropy_target": (NOT_NEGATIVE, "the entropy of a token is never negative"),
    "router_aux_loss_coef": (or_none(NOT_NEGATIVE), "a negative weight unbalances the experts"),
    # optimizer and run
    "max_steps": (
        Range(lambda x: x >= -1, "a whole number, or -1 for num_train_epochs", whole=True),
        "it counts steps",
    ),
    "max_grad_norm": (NOT_NEGATIVE, "it is a length; 0 clips nothing"),
    "dataloader_prefetch_factor": (or_none(COUNT), "it counts generation batches"),
    # rewards
    "reward_timeout_s": (or_none(POSITIVE), "it bounds a call's time"),
    "reward_workers": (COUNT_OR_ZERO, "it counts processes"),
    "reward_worker_memory_gb": (or_none(POSITIVE), "it is an amount of memory"),
    "reward_retries": (COUNT_OR_ZERO, "it counts attempts"),
    "reward_model_batch_tokens": (COUNT, "it counts the tokens of a forward pass"),
    # reference model
    "ref_model_mixup_alpha": (SHARE, "it is the policy's share in the reference"),
    "ref_model_sync_steps": (COUNT, "it counts optimizer steps"),
    # vLLM
    "vllm_server_port": (PORT, "there is no such port"),
    "vllm_group_port": (PORT, "there is no such port"),
    "vllm_server_timeout": (POSITIVE, "the server needs seconds to start"),
    "vllm_gpu_memory_utilization": (NONZERO_SHARE, "it is a share of the memory"),
    "vllm_max_model_length": (or_none(COUNT), "it counts tokens"),
    "vllm_tensor_parallel_size": (COUNT, "it counts accelerators"),
    "vllm_sleep_level": (Range(lambda x: x in (1, 2), "1 or 2", whole=True), "vLLM frees nothing at other levels"),
    "dynamic_sampling_rounds": (COUNT_OR_ZERO, "it counts rounds of sampling"),
    "stop_without_signal": (COUNT_OR_ZERO, "it counts generation batches"),
    "rollout_ahead": (COUNT_OR_ZERO, "it counts generation batches"),
    "vllm_importance_sampling_clip_max": (or_none(POSITIVE), "ratios are positive"),
    "vllm_importance_sampling_clip_min": (or_none(NOT_NEGATIVE), "ratios are positive"),
    # logging
    "num_completions_to_print": (or_none(COUNT_OR_ZERO), "it counts rows"),
}
"""Allowed numbers of each setting, and why."""

CHOICES: dict[str, tuple[str, ...]] = {
    "log_level": ("passive", "debug", "info", "warning", "error", "critical"),
    "log_level_replica": ("passive", "debug", "info", "warning", "error", "critical"),
    "loss_type": tuple(LOSSES),
    "importance_sampling_level": get_args(RatioLevel),
    "advantage_estimator": tuple(ESTIMATORS),
    "off_policy_mask": tuple(MASKS),
    "scale_rewards": get_args(ScaleRewards),
    "multi_objective_aggregation": get_args(Aggregation),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "shuffle_rows": ("groups", "rows"),
    "gradient_dtype": ("auto", "float32", "weights"),
    "rollout_engine": ("auto", "native", "transformers"),
    "agent_sampling": ("refuse", "policy", "request"),
    "special_tokens_in_prompts": ("auto", "split", "keep"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_lora_updates": ("auto", "adapter", "merge"),
    "vllm_importance_sampling_mode": get_args(MismatchMode),
}

_FULL_EVAL = (
    "would convert the weights themselves, those that train, to evaluate. Set {name} to False: evaluation computes in "
    "the precision of training (bf16, fp16)"
)

FIXED: dict[str, tuple[object, str]] = {
    "auto_find_batch_size": (False, "would change the batch, and with it the groups. Set it to False"),
    "train_sampling_strategy": (
        "random",
        "would break up the groups. Leave it at 'random'; shuffle_dataset=False keeps the order of the data set",
    ),
    "label_smoothing_factor": (0, "smooths labels, and GRPO has none. Set it to 0"),
    "bf16_full_eval": (False, _FULL_EVAL),
    "fp16_full_eval": (False, _FULL_EVAL),
}
"""The only value of a setting that works, and what is wrong with others."""

EVAL_SAMPLING: dict[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "max_completion_length")},
    "num_generations": "num_generations_eval",
}
"""Key of `eval_sampling` -> the setting whose values it may have."""

DICTS = (
    "eval_sampling",
    "loss_settings",
    "advantage_settings",
    "off_policy_mask_settings",
    "model_init_kwargs",
    "reward_model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "gradient_checkpointing_kwargs",
    "transformers_continuous_batching_config",
)
"""Fields that hold a dict and also accept it as JSON text."""


DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Types in which models are loaded."""


def field_problems(config: Any) -> dict[str, str]:
    """Maps each setting whose value is invalid on its own to the reason."""
    names = [name for name in (*CHOICES, *RANGES, *FIXED, *DICTS, "eval_k") if hasattr(config, name)]
    return {name: text for name in names if (text := field_problem(name, getattr(config, name)))}


def field_problem(name: str, value: Any) -> str | None:
    """Explains why the setting `name` cannot have this value; None if it can."""
    if name in RANGES:
        return _range_problem(name, value, *RANGES[name])
    if name in _FINDERS:
        return None if name == "off_policy_mask" and value is None else _unknown_definition(name, value)
    if name in CHOICES and value not in CHOICES[name]:
        return _not_among(name, value, CHOICES[name])
    if name in FIXED and value and value != FIXED[name][0]:
        return f"{name}={value!r} {FIXED[name][1].format(name=name)}"
    if name in DICTS and not isinstance(value, (dict, type(None))):
        return f"{name}={value!r} is not a dict. Give a dict, or one as JSON text such as '{{\"key\": 1}}'"
    if name == "eval_sampling":
        return _eval_sampling_problem(value or {})
    if name == "eval_k" and not all(isinstance(k, int) and k >= 1 for k in value or ()):
        return f"eval_k={value!r} cannot work: it counts completions. Set it to whole numbers of at least 1"
    return None


def _eval_sampling_problem(given: dict[str, Any]) -> str | None:
    for key, value in given.items():
        if key not in EVAL_SAMPLING:
            hint = did_you_mean(key, EVAL_SAMPLING, after=" ")
            return f"eval_sampling has {key!r}: {hint}Take it out, or give one of {', '.join(EVAL_SAMPLING)}"
        if text := field_problem(EVAL_SAMPLING[key], value):
            return f"in eval_sampling, {key}{text.removeprefix(EVAL_SAMPLING[key])}"
    return None


_FINDERS: dict[str, Callable[[str], Any]] = {
    "loss_type": find_method,
    "advantage_estimator": find_estimator,
    "off_policy_mask": find_mask,
}
"""Settings that name a definition, here or in a user's module."""


def _unknown_definition(name: str, value: Any) -> str | None:
    try:
        _FINDERS[name](str(value))
    except ValueError as error:
        return str(error)
    return None


def _not_among(name: str, value: Any, choices: Sequence[str]) -> str:
    hint = did_you_mean(value, choices, after=" ")
    return f"{name}={value!r} is not known: {hint}Set it to one of {', '.join(choices)}"


def _range_problem(name: str, value: Any, allowed: Range, why: str) -> str | None:
    """Explains why the setting `name` cannot have this number; None if it can."""
    in_range = (
        is_number(value) and (isinstance(value, numbers.Integral) or not allowed.whole) and allowed.contains(value)
    )
    if in_range or (value is None and allowed.optional):
        return None
    if not is_number(value):
        why = "it is no finite number"
    return f"{name}={value!r} cannot work: {why}. Set it to {allowed.remedy}"


def changed(record: Any, names: Iterable[str]) -> list[str]:
    """Selects the fields of a dataclass instance, among `names`, whose value is not their default."""
    fields = record.__dataclass_fields__
    return [name for name in names if name in fields and getattr(record, name) != _default(fields[name])]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def is_number(value: object) -> bool:
    """True for a finite number that is not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def failure_action(value: object) -> FailureAction:
    """Reads what a reward function's failure means: 'error', None for 'none', or a reward. ValueError for another."""
    if value == "error":
        return "error"
    if value is None or value == "none":
        return None
    if isinstance(value, (bool, dict)):
        raise ValueError(value)
    number = float(value)  # pyright: ignore[reportArgumentType]
    if not math.isfinite(number):
        raise ValueError(value)
    return number
