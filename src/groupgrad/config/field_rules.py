"""What each single setting may hold, whatever the others say: numbers in `RANGES`, names in `CHOICES`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Range:
    """The numbers that a field may hold."""

    ok: Callable[[Any], bool]
    want: str
    why: str
    whole: bool = False
    optional: bool = False


def _positive(x: float) -> bool:
    return x > 0


def _not_negative(x: float) -> bool:
    return x >= 0


def _share(x: float) -> bool:
    return 0 <= x <= 1


def _some_share(x: float) -> bool:
    return 0 < x <= 1


def _one_or_more(x: float) -> bool:
    return x >= 1


def _port(x: float) -> bool:
    return 1 <= x <= 65535


_COUNT = "a whole number of at least 1"
_SHARE, _SOME_SHARE = "a number from 0 to 1", "a number above 0 and at most 1"
_PORT = "a port from 1 to 65535"
_NONE = ", or leave it unset"

RANGES: dict[str, Range] = {
    # sampling
    "temperature": Range(_positive, "a number above 0", "logits are divided by it; 0.01 is nearly greedy"),
    "top_p": Range(_some_share, _SOME_SHARE, "it is a share of the probability; 1.0 keeps all tokens"),
    "top_k": Range(_not_negative, "0 or more, 0 for no limit", "it counts tokens", whole=True, optional=True),
    "min_p": Range(_share, _SHARE, "it is a share of the largest probability", optional=True),
    "repetition_penalty": Range(_positive, "a number above 0", "logits are divided by it; 1.0 has no effect"),
    "max_completion_length": Range(_one_or_more, _COUNT, "sampling needs a limit in tokens", whole=True),
    "tool_timeout_s": Range(_positive, "above 0", "it bounds a call's time"),
    "tool_max_result_chars": Range(_positive, "at least 1", "it counts characters", whole=True),
    "tool_threads": Range(_positive, "at least 1", "calls need a thread to run on", whole=True),
    "max_tool_calling_iterations": Range(_not_negative, "0 or more", "it counts rounds", whole=True, optional=True),
    # groups and batches
    "num_generations": Range(
        lambda x: x >= 2, "at least 2", "an advantage compares a completion with others of its prompt", whole=True
    ),
    "num_generations_eval": Range(_one_or_more, _COUNT, "evaluation samples something", whole=True, optional=True),
    "per_device_train_batch_size": Range(_one_or_more, _COUNT, "it counts completions", whole=True),
    "per_device_eval_batch_size": Range(_one_or_more, _COUNT, "it counts completions", whole=True),
    "gradient_accumulation_steps": Range(_one_or_more, _COUNT, "it counts micro-batches", whole=True),
    "generation_batch_size": Range(_one_or_more, _COUNT, "it counts completions", whole=True, optional=True),
    "steps_per_generation": Range(_one_or_more, _COUNT, "it counts micro-batches", whole=True, optional=True),
    "num_iterations": Range(_one_or_more, _COUNT, "it counts passes over a sampled round", whole=True),
    # objective
    "learning_rate": Range(_not_negative, "0 or more", "a negative rate makes good completions less likely"),
    "beta": Range(_not_negative, "0 or more", "a negative weight drives the policy away from the reference"),
    "epsilon": Range(_not_negative, "0 or more", "it is the width of the trust region below 1"),
    "epsilon_high": Range(
        _not_negative, "0 or more", "it is the width of the trust region above 1, or cispo's ceiling", optional=True
    ),
    "delta": Range(
        lambda x: x > 1,
        "above 1, best above 1 + epsilon",
        "it would cut the ratio 1 of an unmoved policy",
        optional=True,
    ),
    "sapo_temperature_neg": Range(_positive, "a number above 0", "the gate is divided by it"),
    "sapo_temperature_pos": Range(_positive, "a number above 0", "the gate is divided by it"),
    "vespo_k_pos": Range(_not_negative, "0 or more", "the weight would have no maximum"),
    "vespo_k_neg": Range(_not_negative, "0 or more", "the weight would have no maximum"),
    "vespo_lambda_pos": Range(_positive, "a number above 0", "the weight would grow without bound"),
    "vespo_lambda_neg": Range(_positive, "a number above 0", "the weight would grow without bound"),
    "top_entropy_quantile": Range(_share, _SHARE, "it is a share of the tokens; 1.0 trains all"),
    "off_policy_mask_threshold": Range(
        _not_negative, "0 or more", "a drift of 0 is that of an unmoved policy", optional=True
    ),
    "entropy_coef": Range(math.isfinite, "a finite number", "the bonus is multiplied by it"),
    "entropy_coef_min": Range(math.isfinite, "a finite number", "it bounds entropy_coef"),
    "entropy_coef_max": Range(math.isfinite, "a finite number", "it bounds entropy_coef"),
    "entropy_coef_delta": Range(_not_negative, "0 or more", "it is the size of a step"),
    "entropy_target": Range(_not_negative, "0 or more", "the entropy of a token is never negative"),
    "router_aux_loss_coef": Range(
        _not_negative, "0 or more", "a negative weight unbalances the experts", optional=True
    ),
    # rewards
    "reward_model_batch_tokens": Range(_one_or_more, _COUNT, "a forward pass reads something", whole=True),
    # reference model
    "ref_model_mixup_alpha": Range(_share, _SHARE, "it is the policy's share in the reference"),
    "ref_model_sync_steps": Range(_one_or_more, _COUNT, "it counts optimizer steps", whole=True),
    # vLLM
    "vllm_server_port": Range(_port, _PORT, "there is no such port", whole=True),
    "vllm_group_port": Range(_port, _PORT, "there is no such port", whole=True),
    "vllm_server_timeout": Range(_positive, "seconds above 0", "the server needs time to start"),
    "vllm_gpu_memory_utilization": Range(_some_share, _SOME_SHARE, "it is a share of the memory"),
    "vllm_max_model_length": Range(_one_or_more, _COUNT, "it counts tokens", whole=True, optional=True),
    "vllm_tensor_parallel_size": Range(_one_or_more, _COUNT, "it counts accelerators", whole=True),
    "rollout_ahead": Range(_not_negative, "0 or more", "it counts rounds", whole=True),
    "vllm_importance_sampling_clip_max": Range(_positive, "a number above 0", "ratios are positive", optional=True),
    "vllm_importance_sampling_clip_min": Range(_not_negative, "0 or more", "ratios are positive", optional=True),
    # logging
    "num_completions_to_print": Range(_not_negative, "0 or more", "it counts rows", whole=True, optional=True),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "rollout_engine": ("auto", "native", "transformers"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_lora_updates": ("auto", "adapter", "merge"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

DTYPES = ("auto", "bfloat16", "float16", "float32")


def nearest(value: object, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option that is spelled most like `value`, or None if none is like it."""
    found = difflib.get_close_matches(str(value).lower(), list(options), n=1, cutoff=cutoff)
    return found[0] if found else None


def is_number(value: object) -> bool:
    """True for a finite int or float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> bool:
    """True for an int of at least 1; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_bytes(value: object) -> int | None:
    """Bytes in a number of them or a text such as '512MiB', '4 GB' or '1.5e9'; None if it is neither or not above 0."""
    found = re.fullmatch(r"\s*([0-9.eE+]+)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    if found is None or isinstance(value, bool):
        return None
    number, prefix, binary = found.groups()
    try:
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    except ValueError:
        return None
    return int(size) if 1 <= size < math.inf else None


def range_problem(name: str, value: object) -> str | None:
    """What is wrong with the number given for the setting `name`, or None."""
    row = RANGES[name]
    if value is None and row.optional:
        return None
    kind_ok = is_number(value) and (not row.whole or isinstance(value, int))
    if kind_ok and row.ok(value):
        return None
    return f"{name}={value!r} cannot work: {row.why}. Set it to {row.want}{_NONE if row.optional else ''}"


def choice_problem(name: str, value: object) -> str | None:
    """What is wrong with the name given for the setting `name`, or None."""
    options = CHOICES[name]
    if value in options:
        return None
    like = nearest(value, options)
    hint = f"did you mean {like!r}? " if like else ""
    return f"{name}={value!r} is not known: {hint}Set it to one of {', '.join(options)}"
