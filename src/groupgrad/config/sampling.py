"""Sampling parameters of a configuration."""

from __future__ import annotations

from typing import Any

from groupgrad.config.settings import GRPOSettings, mapping
from groupgrad.engines.base import SamplingOptions


def sampling_options(config: GRPOSettings, *, eos_ids: list[int], pad_id: int) -> SamplingOptions:
    """Returns the sampling parameters that every engine takes. `generation_kwargs` wins over the named fields."""
    sampling, extra = config.sampling_resolved, config.generation_kwargs_resolved
    extra.pop("do_sample", None)  # the rules allow True alone, which every engine does
    extra.pop("max_new_tokens", None)
    return SamplingOptions(
        max_new_tokens=config.max_new_tokens_resolved,
        temperature=config.temperature_resolved,
        top_p=float(sampling["top_p"]),
        top_k=int(sampling["top_k"] or 0),
        min_p=sampling["min_p"],
        repetition_penalty=float(sampling["repetition_penalty"]),
        eos_ids=tuple(eos_ids),
        pad_id=pad_id,
        cache_implementation=config.cache_implementation,
        extra=extra,
    )


def eval_sampling_changes(config: GRPOSettings) -> dict[str, Any]:
    """Returns the fields of `SamplingOptions` that `eval_sampling` sets in evaluation."""
    names = {"max_completion_length": "max_new_tokens"}
    changes = {names.get(key, key): value for key, value in mapping(config.eval_sampling).items()}
    changes.pop("num_generations", None)
    if "top_k" in changes:
        changes["top_k"] = changes["top_k"] or 0
    return changes


def vllm_fields(config: GRPOSettings) -> dict[str, Any]:
    """Returns the fields of vLLM's `SamplingParams` that all rows share, without end-of-sequence ids. ValueError for
    fields that groupgrad sets for each row."""
    from groupgrad.integrations.vllm.vllm_params import sampling_fields

    sampling = sampling_options(config, eos_ids=[], pad_id=0)
    return sampling_fields(sampling, regex=config.vllm_structured_outputs_regex)


def has_comparable_logprobs(config: GRPOSettings) -> bool:
    """True if vLLM can return log-probs of the distribution that training scores."""
    from groupgrad.integrations.vllm.vllm_params import logprobs_mode

    return logprobs_mode(vllm_fields(config)) is not None


def shaping_fields(config: GRPOSettings) -> dict[str, Any]:
    """Returns those of `vllm_fields` that change the tokens' distribution from the temperature softmax."""
    from groupgrad.integrations.vllm.vllm_params import shaping

    fields = vllm_fields(config)
    return {name: fields[name] for name in shaping(fields)}
