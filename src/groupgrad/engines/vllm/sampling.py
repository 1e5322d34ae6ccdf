"""What a request means in vLLM's words.

Log-probs are vLLM's `processed_logprobs`: those of the distribution that the token was drawn from, after temperature,
penalties, a regex or other structure, and cuts. Without cuts, penalties and structure that is the temperature softmax
over the whole vocabulary, as training scores it. With top-k, top-p or min-p it is the temperature softmax renormalised
over the tokens that were left; `is_plain` says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from groupgrad.engines.base import Request, SamplingOptions

LOGPROBS_MODE = "processed_logprobs"

# A row's prompt, seed, budget and what is told of it are groupgrad's to say.
_RESERVED = frozenset(
    {"n", "seed", "max_tokens", "logprobs", "prompt_logprobs", "output_kind", "detokenize", "flat_logprobs"}
)


def sampling_fields(options: SamplingOptions, *, regex: str | None = None) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` that all rows share, as plain values.

    ValueError for an entry of `options.extra` that would change what a row is.
    """
    reserved = sorted(_RESERVED & options.extra.keys())
    if reserved:
        raise ValueError(
            f"generation_kwargs has {', '.join(map(repr, reserved))}, which groupgrad sets for each row; remove "
            "it (num_generations, seed and max_completion_length say the same)"
        )
    fields: dict[str, Any] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k or 0,
        "min_p": options.min_p or 0.0,
        "repetition_penalty": options.repetition_penalty,
        "stop_token_ids": list(options.eos_ids),
        # Only the ids above end a completion, not those of the checkpoint's own generation config.
        "ignore_eos": True,
        **options.extra,
    }
    if regex is not None:
        fields["structured_outputs"] = {"regex": regex}
    return fields


def row_fields(request: Request) -> dict[str, int]:
    """The fields of vLLM's `SamplingParams` that are this row's own."""
    return {"seed": request.seed % 2**63, "max_tokens": request.max_new_tokens}


def is_plain(fields: Mapping[str, Any]) -> bool:
    """True if the log-probs are those of the temperature softmax over the whole vocabulary."""
    cut = fields["top_p"] < 1.0 or fields["top_k"] > 0 or fields["min_p"] > 0.0
    changed = fields["repetition_penalty"] != 1.0 or any(
        fields.get(name) for name in ("presence_penalty", "frequency_penalty", "logit_bias", "structured_outputs")
    )
    listed = any(fields.get(name) for name in ("allowed_token_ids", "bad_words", "min_tokens"))
    return not (cut or changed or listed)


def sampling_params(fields: Mapping[str, Any], row: Mapping[str, int], **told: Any) -> Any:
    """vLLM's `SamplingParams` of a row; `told` are fields about how the answer is told.

    TypeError or ValueError, in vLLM's words, for fields that it does not know or that cannot work.
    """
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    chosen = dict(fields)
    if isinstance(chosen.get("structured_outputs"), Mapping):
        chosen["structured_outputs"] = StructuredOutputsParams(**chosen["structured_outputs"])
    # Text is only needed where strings end a completion.
    return SamplingParams(**chosen, **row, logprobs=0, detokenize=bool(chosen.get("stop")), **told)


def sampled_logprobs(ids: Iterable[int], entries: Any) -> list[float]:
    """The log-prob of each sampled token out of vLLM's table of one token a place.

    RuntimeError if vLLM left one out.
    """
    ids = list(ids)
    if entries is None or len(entries) != len(ids):
        raise RuntimeError(f"vLLM gave {len(ids)} tokens and {0 if entries is None else len(entries)} log-probs")
    return [float(entry[token].logprob) for token, entry in zip(ids, entries)]
