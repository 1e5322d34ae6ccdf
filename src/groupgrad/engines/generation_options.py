"""Tables of the options of transformers' `GenerationConfig`, by the engines that support them.

Each field is in one of these tables or among the keys that a run sets itself (`config/rules.py`).
"""

from __future__ import annotations

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


def missing_from_paged(options: SamplingOptions) -> list[str]:
    """Options, with their values, that continuous batching lacks."""
    given = {"cache_implementation": options.cache_implementation, **options.extra}
    if options.repetition_penalty != 1.0:
        given["repetition_penalty"] = options.repetition_penalty
    supported = PAGED | COST_ONLY
    return [f"{name}={value!r}" for name, value in given.items() if name not in supported and value is not None]
