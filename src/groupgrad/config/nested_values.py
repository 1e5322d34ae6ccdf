"""Allowed values inside the settings that are dicts, such as `generation_kwargs` and `model_init_kwargs`.

A value that may be checked without the model gets one row here; `models/policy_checks.py` checks token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupgrad.config.field_rules import (
    COUNT,
    COUNT_OR_ZERO,
    DECAY,
    FINITE,
    NONZERO_SHARE,
    POSITIVE,
    Range,
    is_number,
    range_problem,
)
from groupgrad.config.settings import GRPOSettings, mapping

_NUMBERS: dict[str, tuple[Range, str]] = {
    "min_new_tokens": (COUNT_OR_ZERO, "it counts tokens"),
    "num_beams": (COUNT, "it counts beams"),
    "no_repeat_ngram_size": (COUNT_OR_ZERO, "it counts tokens"),
    "encoder_no_repeat_ngram_size": (COUNT_OR_ZERO, "it counts tokens"),
    "typical_p": (NONZERO_SHARE, "it is a share of the probability"),
    "top_h": (NONZERO_SHARE, "it is a share of the entropy"),
    "epsilon_cutoff": (DECAY, "it is a probability"),
    "eta_cutoff": (DECAY, "it is a probability"),
    "encoder_repetition_penalty": (POSITIVE, "logits are divided by it; 1.0 has no effect"),
    "length_penalty": (FINITE, "it is an exponent"),
    "max_time": (POSITIVE, "it is a time in seconds"),
    "max_cache_len": (COUNT, "it counts tokens"),
    "prefill_chunk_size": (COUNT, "it counts tokens"),
}
"""Allowed numbers in `generation_kwargs`, beside those that are fields of the configuration."""

_SWITCHES = {
    "generation_kwargs": ("do_sample", "use_cache", "disable_compile", "renormalize_logits", "remove_invalid_values"),
    "model_init_kwargs": (
        *("trust_remote_code", "local_files_only", "force_download", "use_safetensors", "low_cpu_mem_usage"),
        *("ignore_mismatched_sizes", "use_kernels", "load_in_4bit", "load_in_8bit"),
    ),
    "gradient_checkpointing_kwargs": ("use_reentrant", "preserve_rng_state", "debug", "early_stop"),
}
_SWITCHES["reward_model_init_kwargs"] = _SWITCHES["model_init_kwargs"]


def generation_problem(c: GRPOSettings) -> str:
    """Describes the values in `generation_kwargs` that no engine can sample with; vLLM checks its own."""
    kwargs = {} if c.use_vllm else mapping(c.generation_kwargs)
    texts: list[str | None] = []
    for key, value in kwargs.items():
        if value is None:
            continue
        if key in _NUMBERS:
            texts.append(range_problem(key, value, *_NUMBERS[key]))
        elif key == "stop_strings":
            stops = [value] if isinstance(value, str) else value
            if not (isinstance(stops, (list, tuple)) and all(isinstance(text, str) and text for text in stops)):
                texts.append(f"{key}={value!r} is not a text that could end a completion. Set it to a text or a list")
        elif key in _TOKENS:
            texts.append(_TOKENS[key](key, value))
    smallest, longest = kwargs.get("min_new_tokens"), kwargs.get("max_new_tokens", c.max_completion_length)
    if is_number(smallest) and is_number(longest) and smallest > longest:
        texts.append(
            f"min_new_tokens={smallest} is above the {longest} tokens that a completion may have, so none could end. "
            f"Set it to at most {longest}"
        )
    return "; ".join(filter(None, texts))


def _ids(key: str, value: Any) -> str | None:
    """Describes a value that is not a list of token ids."""
    if isinstance(value, (list, tuple)) and all(_is_id(number) for number in value):
        return None
    return f"{key}={value!r} is not a list of token ids. Set it to whole numbers, 0 or more, such as [11, 12]"


def _id_or_ids(key: str, value: Any) -> str | None:
    """Describes a value that is neither a token id nor a list of some."""
    if _is_id(value) or (isinstance(value, (list, tuple)) and value and all(map(_is_id, value))):
        return None
    hint = f"Set it to tokenizer.convert_tokens_to_ids({value!r})" if isinstance(value, str) else "Set it to an id"
    return f"{key}={value!r} is neither a token id nor a list of some. {hint}"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_TOKENS: dict[str, Callable[[str, Any], str | None]] = {
    "eos_token_id": _id_or_ids,
    "forced_eos_token_id": _id_or_ids,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
}


def switch_problem(c: GRPOSettings) -> str | None:
    """Finds a switch in a dict whose value is neither True nor False; a text such as "no" would count as True."""
    for name, keys in _SWITCHES.items():
        options: Any = getattr(c, name, None)
        for key in keys if isinstance(options, dict) else ():
            if not isinstance(options.get(key), (bool, type(None))):
                return f"{name} has {key}={options[key]!r}"
    return None


def template_text(c: GRPOSettings) -> str | None:
    """Finds a text in `chat_template_kwargs` that was meant to be True or False, since a template counts it as True."""
    for key, value in mapping(c.chat_template_kwargs).items():
        if isinstance(value, str) and (value.lower() in ("true", "false") or key == "continue_final_message"):
            return f"{key}={value!r}"
    return None
