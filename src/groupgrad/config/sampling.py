"""How completions are drawn, read from the flat configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.vllm.vllm_params import logprobs_mode, sampling_fields

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig


def mapping(value: Any) -> dict[str, Any]:
    """A dict-valued field as a dict of its own; None is the empty one. (JSON texts were parsed with the config.)"""
    return dict(value or {})


def temperature(config: GRPOConfig) -> float:
    """The sampling temperature in force, which also divides the logits when scoring."""
    return float(mapping(config.generation_kwargs).get("temperature", config.temperature))


def sampling_options(config: GRPOConfig, *, eos_ids: list[int], pad_id: int) -> SamplingOptions:
    """How completions are drawn. `generation_kwargs` wins over the named fields."""
    extra: dict[str, Any] = mapping(config.generation_kwargs)
    budget = extra.pop("max_new_tokens", config.max_completion_length)
    return SamplingOptions(
        max_new_tokens=int(budget),
        temperature=float(extra.pop("temperature", config.temperature)),
        top_p=float(extra.pop("top_p", config.top_p)),
        top_k=int(extra.pop("top_k", config.top_k) or 0),
        min_p=extra.pop("min_p", config.min_p),
        repetition_penalty=float(extra.pop("repetition_penalty", config.repetition_penalty)),
        eos_ids=tuple(eos_ids),
        pad_id=pad_id,
        cache_implementation=config.cache_implementation,
        extra=extra,
    )


def vllm_fields(config: GRPOConfig) -> dict[str, Any]:
    """What vLLM is told of how completions are drawn, but for what ends them. ValueError for what is not to be told."""
    sampling = sampling_options(config, eos_ids=[], pad_id=0)
    return sampling_fields(sampling, regex=config.vllm_structured_outputs_regex)


def has_comparable_logprobs(config: GRPOConfig) -> bool:
    """Whether vLLM can tell log-probs of the distribution that is trained, given how completions are drawn."""
    return logprobs_mode(vllm_fields(config)) is not None
