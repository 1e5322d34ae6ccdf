"""Parses sampling options for the native engine, and names the options that it does not support."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.generation_options import COST_ONLY, NATIVE
from groupgrad.errors import ConfigError

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_KNOWN = NATIVE | COST_ONLY

# Values with which an option of `generate` has no effect.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
}


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Parsed sampling options: temperature and filters, and the rules that end a completion."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    greedy: bool
    min_new_tokens: int
    eos_ids: tuple[int, ...]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    """Ids excluded as the first token of a completion."""
    stop_strings: tuple[str, ...]

    @property
    def is_filtered(self) -> bool:
        """True if tokens are sampled from another distribution than the temperature softmax."""
        return bool(
            self.top_k
            or self.top_p < 1.0
            or self.min_p
            or self.repetition_penalty != 1.0
            or self.suppressed
            or self.suppressed_first
            or (self.min_new_tokens and self.eos_ids)
        )


def unsupported(options: SamplingOptions) -> list[str]:
    """Names of the options in effect that the native engine does not support, in order."""
    names = [
        name
        for name, value in options.extra.items()
        if name not in _KNOWN and value is not None and value != _NEUTRAL.get(name)
    ]
    return [*names, "cache_implementation"] if options.cache_implementation is not None else names


def read_options(options: SamplingOptions, tokenizer: Any) -> SamplingParams:
    """Parses sampling options; `options.extra` wins over the fields.

    ConfigError for an option the engine lacks, ValueError for stop strings without a tokenizer.
    """
    if missing := unsupported(options):
        raise ConfigError(
            [f"the native engine has no {', '.join(missing)}; set rollout_engine='transformers', or leave them out"]
        )
    extra = options.extra
    values = {name: extra.get(name, getattr(options, name)) for name in _FIELDS}
    stop_strings = extra.get("stop_strings") or ()
    if stop_strings and tokenizer is None:
        raise ValueError(
            f"stop_strings={stop_strings!r} need a tokenizer to compare texts; the engine was made without"
        )
    do_sample = extra.get("do_sample")
    temperature = 1.0 if values["temperature"] is None else float(values["temperature"])
    if temperature <= 0.0:
        raise ValueError(f"temperature={temperature} divides the logits; set it above 0 (or do_sample=False)")
    return SamplingParams(
        temperature=temperature,
        top_k=int(values["top_k"] or 0),
        top_p=1.0 if values["top_p"] is None else float(values["top_p"]),
        min_p=float(values["min_p"] or 0.0),
        repetition_penalty=float(values["repetition_penalty"] or 1.0),
        greedy=do_sample is not None and not do_sample,
        min_new_tokens=int(extra.get("min_new_tokens") or 0),
        eos_ids=_ids(extra.get("eos_token_id", options.eos_ids)),
        suppressed=_ids(extra.get("suppress_tokens")),
        suppressed_first=_ids(extra.get("begin_suppress_tokens")),
        stop_strings=(stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings),
    )


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
