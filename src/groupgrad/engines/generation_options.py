"""Tables of the options of transformers' `GenerationConfig`, by the engines that support them.

Each field is in one of these tables or among the keys that a run sets itself (`config/conditions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupgrad.engines.base import SamplingOptions

EVERYWHERE = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "suppress_tokens", "eos_token_id", "max_new_tokens", "do_sample"}
)
"""Options of every engine that samples from the model itself."""

NATIVE = EVERYWHERE | {"repetition_penalty", "min_new_tokens", "stop_strings", "begin_suppress_tokens"}
"""Options of the native engine. `generate` has them too."""

PAGED = EVERYWHERE | {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "remove_invalid_values"}
"""Options of transformers' continuous batching, which knows no token of a row but the last."""

COST_ONLY = frozenset({"use_cache", "disable_compile", "renormalize_logits"})
"""Options that change no sampled token."""

MOVED = frozenset(
    {
        *("penalty_alpha", "low_memory", "dola_layers", "constraints", "force_words_ids"),
        *("num_beam_groups", "diversity_penalty"),
    }
)
"""Options that transformers 5 moved from `generate` to code on the Hub."""

INTERNAL = frozenset({"_from_model_config", "transformers_version"})
"""Fields that are not options."""

_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "early_stopping": ("num_beams above 1", lambda options: (options.get("num_beams") or 1) > 1),
    "length_penalty": ("num_beams above 1", lambda options: (options.get("num_beams") or 1) > 1),
    "max_cache_len": (
        "a static cache_implementation",
        lambda options: "static" in str(options["cache_implementation"]),
    ),
    "cache_config": (
        "cache_implementation='quantized'",
        lambda options: options["cache_implementation"] == "quantized",
    ),
    "compile_config": ("disable_compile=False", lambda options: options.get("disable_compile") is False),
}


def missing_from_paged(options: SamplingOptions) -> list[str]:
    """Options, with their values, that continuous batching lacks."""
    given = {"cache_implementation": options.cache_implementation, **options.extra}
    if options.repetition_penalty != 1.0:
        given["repetition_penalty"] = options.repetition_penalty
    supported = PAGED | COST_ONLY
    return [f"{name}={value!r}" for name, value in given.items() if name not in supported and value is not None]


def without_effect(options: dict[str, Any], cache_implementation: str | None) -> dict[str, str]:
    """Options without effect given the others, with what each requires."""
    given = {"cache_implementation": cache_implementation, **options}
    return {name: need for name, (need, is_met) in _NEEDS.items() if name in options and not is_met(given)}
