"""Allowed values of single settings: ranges of numbers, lists of names, and dicts.

A new option that takes a number or a name gets one row in `RANGES` or `CHOICES`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from groupgrad.objectives import Aggregation, LossType, MismatchMode, RatioLevel, ScaleRewards


@dataclass(slots=True, frozen=True)
class Range:
    """A range of numbers."""

    contains: Callable[[Any], bool]
    remedy: str
    """The range in words, completing "Set it to ..."."""
    whole: bool = False
    """Only integers are allowed."""


@dataclass(slots=True, frozen=True)
class RangeRule:
    """The range of one setting."""

    range: Range
    why: str
    """The reason for the range."""
    optional: bool = False
    """None is allowed too."""


POSITIVE = Range(lambda x: x > 0, "a number above 0")
NOT_NEGATIVE = Range(lambda x: x >= 0, "0 or more")
SHARE = Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")
NONZERO_SHARE = Range(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
FINITE = Range(math.isfinite, "a finite number")
COUNT = Range(lambda x: x >= 1, "a whole number of at least 1", whole=True)
COUNT_OR_ZERO = Range(lambda x: x >= 0, "a whole number, 0 or more", whole=True)
PORT = Range(lambda x: 1 <= x <= 65535, "a port from 1 to 65535", whole=True)

RANGES: dict[str, RangeRule] = {
    # sampling
    "temperature": RangeRule(POSITIVE, "logits are divided by it; 0.01 is nearly greedy"),
    "top_p": RangeRule(NONZERO_SHARE, "it is a share of the probability; 1.0 keeps all tokens"),
    "top_k": RangeRule(
        Range(lambda x: x >= 0, "0 or more, 0 for no limit", whole=True), "it counts tokens", optional=True
    ),
    "min_p": RangeRule(SHARE, "it is a share of the largest probability", optional=True),
    "repetition_penalty": RangeRule(POSITIVE, "logits are divided by it; 1.0 has no effect"),
    "max_completion_length": RangeRule(COUNT, "sampling needs a limit in tokens"),
    "tool_timeout_s": RangeRule(POSITIVE, "it bounds a call's time"),
    "tool_max_result_chars": RangeRule(COUNT, "it counts characters"),
    "tool_threads": RangeRule(COUNT, "calls need a thread to run on"),
    "max_tool_calling_iterations": RangeRule(COUNT_OR_ZERO, "it counts turns with tool calls", optional=True),
    # groups and batches
    "num_generations": RangeRule(
        Range(lambda x: x >= 2, "at least 2", whole=True),
        "an advantage compares a completion with others of its prompt",
    ),
    "num_generations_eval": RangeRule(COUNT, "it counts the completions of a prompt", optional=True),
    "per_device_train_batch_size": RangeRule(COUNT, "it counts completions"),
    "per_device_eval_batch_size": RangeRule(COUNT, "it counts completions"),
    "gradient_accumulation_steps": RangeRule(COUNT, "it counts micro-batches"),
    "generation_batch_size": RangeRule(COUNT, "it counts completions", optional=True),
    "steps_per_generation": RangeRule(COUNT, "it counts micro-batches", optional=True),
    "num_iterations": RangeRule(COUNT, "it counts passes over a generation batch"),
    # objective
    "learning_rate": RangeRule(NOT_NEGATIVE, "a negative rate makes good completions less likely"),
    "beta": RangeRule(NOT_NEGATIVE, "a negative weight drives the policy away from the reference"),
    "epsilon": RangeRule(NOT_NEGATIVE, "it is the width of the trust region below 1"),
    "epsilon_high": RangeRule(
        NOT_NEGATIVE, "it is the width of the trust region above 1, or cispo's ceiling", optional=True
    ),
    "delta": RangeRule(
        Range(lambda x: x > 1, "above 1, best above 1 + epsilon"),
        "it would cut the ratio 1 of an unmoved policy",
        optional=True,
    ),
    "sapo_temperature_neg": RangeRule(POSITIVE, "the gate is divided by it"),
    "sapo_temperature_pos": RangeRule(POSITIVE, "the gate is divided by it"),
    "vespo_k_pos": RangeRule(NOT_NEGATIVE, "the weight would have no maximum"),
    "vespo_k_neg": RangeRule(NOT_NEGATIVE, "the weight would have no maximum"),
    "vespo_lambda_pos": RangeRule(POSITIVE, "the weight would grow without bound"),
    "vespo_lambda_neg": RangeRule(POSITIVE, "the weight would grow without bound"),
    "top_entropy_quantile": RangeRule(SHARE, "it is a share of the tokens; 1.0 trains all"),
    "off_policy_mask_threshold": RangeRule(NOT_NEGATIVE, "an unmoved policy has a drift of 0", optional=True),
    "entropy_coef": RangeRule(FINITE, "the bonus is multiplied by it"),
    "entropy_coef_min": RangeRule(FINITE, "it bounds entropy_coef"),
    "entropy_coef_max": RangeRule(FINITE, "it bounds entropy_coef"),
    "entropy_coef_delta": RangeRule(NOT_NEGATIVE, "it is the size of a step"),
    "entropy_target": RangeRule(NOT_NEGATIVE, "the entropy of a token is never negative"),
    "router_aux_loss_coef": RangeRule(NOT_NEGATIVE, "a negative weight unbalances the experts", optional=True),
    # rewards
    "reward_model_batch_tokens": RangeRule(COUNT, "it counts the tokens of a forward pass"),
    # reference model
    "ref_model_mixup_alpha": RangeRule(SHARE, "it is the policy's share in the reference"),
    "ref_model_sync_steps": RangeRule(COUNT, "it counts optimizer steps"),
    # vLLM
    "vllm_server_port": RangeRule(PORT, "there is no such port"),
    "vllm_group_port": RangeRule(PORT, "there is no such port"),
    "vllm_server_timeout": RangeRule(POSITIVE, "the server needs seconds to start"),
    "vllm_gpu_memory_utilization": RangeRule(NONZERO_SHARE, "it is a share of the memory"),
    "vllm_max_model_length": RangeRule(COUNT, "it counts tokens", optional=True),
    "vllm_tensor_parallel_size": RangeRule(COUNT, "it counts accelerators"),
    "rollout_ahead": RangeRule(COUNT_OR_ZERO, "it counts generation batches"),
    "vllm_importance_sampling_clip_max": RangeRule(POSITIVE, "ratios are positive", optional=True),
    "vllm_importance_sampling_clip_min": RangeRule(NOT_NEGATIVE, "ratios are positive", optional=True),
    # logging
    "num_completions_to_print": RangeRule(COUNT_OR_ZERO, "it counts rows", optional=True),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": get_args(LossType),
    "importance_sampling_level": get_args(RatioLevel),
    "scale_rewards": get_args(ScaleRewards),
    "multi_objective_aggregation": get_args(Aggregation),
    "rollout_engine": ("auto", "native", "transformers"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_lora_updates": ("auto", "adapter", "merge"),
    "vllm_importance_sampling_mode": get_args(MismatchMode),
}

DICTS = (
    "model_init_kwargs",
    "reward_model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "transformers_continuous_batching_config",
)
"""Fields that hold a dict and also accept it as JSON text."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Types in which models are loaded."""


def field_problem(name: str, value: object) -> str | None:
    """Explains why the setting `name` cannot have this value; None if it can."""
    if name in RANGES:
        return _range_problem(name, value)
    if name in CHOICES:
        return _choice_problem(name, value)
    if name in DICTS and not isinstance(value, (dict, type(None))):
        return f"{name}={value!r} is not a dict. Give a dict, or one as JSON text such as '{{\"key\": 1}}'"
    return None


def _range_problem(name: str, value: Any) -> str | None:
    rule = RANGES[name]
    if value is None and rule.optional:
        return None
    if is_number(value) and (isinstance(value, int) or not rule.range.whole) and rule.range.contains(value):
        return None
    unset = ", or leave it unset" if rule.optional else ""
    return f"{name}={value!r} cannot work: {rule.why}. Set it to {rule.range.remedy}{unset}"


def _choice_problem(name: str, value: object) -> str | None:
    choices = CHOICES[name]
    if value in choices:
        return None
    similar = nearest(value, choices)
    hint = f"did you mean {similar!r}? " if similar else ""
    return f"{name}={value!r} is not known: {hint}Set it to one of {', '.join(choices)}"


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """Returns the choice spelled most like `value`, or None if none is similar."""
    matches = difflib.get_close_matches(str(value).lower(), list(choices), n=1)
    return matches[0] if matches else None


def changed(record: Any, names: Iterable[str]) -> list[str]:
    """Selects the fields of a dataclass instance, among `names`, whose value is not their default."""
    known = record.__dataclass_fields__
    return [name for name in names if name in known and getattr(record, name) != _default(known[name])]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def is_number(value: object) -> bool:
    """True for a finite int or float that is not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def parse_bytes(value: object) -> int | None:
    """Reads an amount of memory such as 4096, '512MiB', '4 GB' or '1.5e9' as bytes; None if it is not one of at least
    a byte."""
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    if match is None or isinstance(value, bool):
        return None
    number, prefix, binary = match.groups()
    try:
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    except ValueError:
        return None
    return int(size) if 1 <= size < math.inf else None
