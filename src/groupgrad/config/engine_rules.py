"""What the settings of engines must obey, vLLM's above all; rows of `rules.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from groupgrad.config import sampling
from groupgrad.config.field_rules import is_number, parse_bytes
from groupgrad.engines.vllm.vllm_params import STRUCTURE, shaping

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


def _engine_memory(c: GRPOConfig) -> str | None:
    if c.engine_kv_memory is None or parse_bytes(c.engine_kv_memory) is not None:
        return None
    return (
        f"engine_kv_memory={c.engine_kv_memory!r} is no amount of memory. Set it to bytes with a unit, such as '4GiB' "
        "or '512MB', or leave it unset"
    )


def _mismatch_bounds(c: GRPOConfig) -> str | None:
    low, high = c.vllm_importance_sampling_clip_min, c.vllm_importance_sampling_clip_max
    if low is not None and high is not None:
        if is_number(low) and is_number(high) and low >= high:
            return (
                f"vllm_importance_sampling_clip_min={low} is not below vllm_importance_sampling_clip_max={high}. "
                f"Set vllm_importance_sampling_clip_min below {high}"
            )
    elif low is None and high is None and str(c.vllm_importance_sampling_mode).endswith("_truncate"):
        return (
            f"vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r} cuts ratios, but both bounds are None. "
            f"Set vllm_importance_sampling_clip_max, for example to 3.0"
        )
    return None


def _vespo_sequence_correction(c: GRPOConfig) -> str | None:
    mode = str(c.vllm_importance_sampling_mode)
    if c.loss_type != "vespo" or not (c.use_vllm and c.vllm_importance_sampling_correction and mode[:4] == "sequ"):
        return None
    return (
        f"loss_type='vespo' needs the correction of each token, but vllm_importance_sampling_mode={mode!r} gives one "
        f"for the sequence. Set vllm_importance_sampling_mode to 'token_truncate' or 'token_mask'"
    )


def _vllm_rows(c: GRPOConfig) -> str | None:
    if not c.use_vllm or not isinstance(c.generation_kwargs, (dict, type(None))):
        return None
    try:
        sampling.vllm_fields(c)
    except (TypeError, ValueError) as error:
        # What is wrong with a single value is said by its own rule.
        return str(error) if "groupgrad sets for each row" in str(error) else None
    return None


def uncorrected(c: GRPOConfig) -> str | None:
    """A remark: vLLM tells log-probs before cuts, penalties and temperature, or after them; a regex cuts before
    both."""
    if not c.use_vllm or not c.vllm_importance_sampling_correction or sampling.has_comparable_logprobs(c):
        return None
    fields = sampling.vllm_fields(c)
    shaped, remedy = shaping(fields), ""
    regex = c.vllm_structured_outputs_regex
    told = {STRUCTURE: f"vllm_structured_outputs_regex={regex!r}"} if regex is not None else {}
    said = ", ".join(told.get(name, f"{name}={fields[name]!r}") for name in shaped)
    if STRUCTURE not in shaped:
        said += f" beside temperature={fields['temperature']!r}"
        remedy = f"; with temperature=1.0, or without {' and '.join(shaped)}, it is"
    return (
        f"{said} with use_vllm=True: vLLM tells a token's log-prob among the tokens that were left, and training does "
        f"not know which were, so that the difference between the two is not corrected for{remedy}"
    )


def _vllm_context(c: GRPOConfig) -> str | None:
    longest, completion = c.vllm_max_model_length, c.max_completion_length
    if not c.use_vllm or c.vllm_mode != "colocate" or not (is_number(longest) and is_number(completion)):
        return None
    if int(longest or 0) > int(completion or 0):
        return None
    return (
        f"vllm_max_model_length={longest} holds prompt and completion together, and completions alone may have "
        f"max_completion_length={completion} tokens. Set vllm_max_model_length above that, or lower "
        f"max_completion_length"
    )


def _rollout_ahead(c: GRPOConfig) -> str | None:
    if not c.rollout_ahead or (c.use_vllm and c.vllm_mode == "server"):
        return None
    where = f"vllm_mode={c.vllm_mode!r}" if c.use_vllm else "use_vllm=False"
    return (
        f"rollout_ahead={c.rollout_ahead} samples while the model trains, but with {where} both would use the same "
        f"device at once. Set use_vllm=True and vllm_mode='server', or rollout_ahead=0"
    )


ENGINE_RULES: tuple[Callable[[GRPOConfig], str | None], ...] = (
    _engine_memory,
    _mismatch_bounds,
    _vespo_sequence_correction,
    _vllm_rows,
    _vllm_context,
    _rollout_ahead,
)
