"""Allowed values inside the settings that are dicts, such as `generation_kwargs` and `model_init_kwargs`.

`models/policy_checks.py` checks token ids against the model.
"""

from __future__ import annotations

from typing import Any

from groupgrad.config.field_rules import DICTS, is_number
from groupgrad.config.settings import GRPOSettings, mapping

_TOKENS = ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")


def generation_problem(c: GRPOSettings) -> str:
    """Describes tokens in `generation_kwargs` that are no ids, and a length at which none could end."""
    kwargs = {} if c.use_vllm else mapping(c.generation_kwargs)
    texts = [
        f"{key}={kwargs[key]!r} is neither a token id nor a list of some. Set it to whole numbers, such as those of "
        "tokenizer.convert_tokens_to_ids"
        for key in _TOKENS
        if not _are_ids(kwargs.get(key))
    ]
    smallest, longest = kwargs.get("min_new_tokens"), kwargs.get("max_new_tokens", c.max_completion_length)
    if is_number(smallest) and is_number(longest) and smallest > longest:
        texts.append(
            f"min_new_tokens={smallest} is above the {longest} tokens that a completion may have, so none could end. "
            f"Set it to at most {longest}"
        )
    return "; ".join(texts)


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return all(isinstance(number, int) and number >= 0 for number in ids)


def switch_text(c: GRPOSettings) -> str | None:
    """Finds a text in a dict that was meant to be True or False, since every text counts as true."""
    for name in DICTS:
        for key, value in mapping(getattr(c, name)).items():
            if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
                return f"{name} has {key}={value!r}"
    return None
