"""What a request means in vLLM's words.

vLLM tells log-probs in one of two ways, for a whole engine. `processed_logprobs` are those of the distribution that the
token was drawn from: after temperature, penalties, a regex or other structure, and cuts, renormalised over the tokens
that were left. Without cuts, penalties and structure that is the temperature softmax over the whole vocabulary, as
training scores it. `raw_logprobs` are those of the softmax before all of that but structure, temperature included, so
that at temperature 1 they are training's whatever cuts and penalties shape the draw. Structure comes before both: vLLM
takes tokens out before it looks at logits at all. `logprobs_mode` says which of the two are comparable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from groupgrad.engines.base import Request, SamplingOptions

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
LOGPROBS_MODE = PROCESSED
"""What a server tells unless it is started otherwise."""

REASONS: dict[str | None, Literal["eos", "length"]] = {"stop": "eos", "length": "length"}
"""Why a row ended, in our words; any other reason is not an end but that vLLM gave it up."""

# A row's prompt, seed, budget and what is told of it are groupgrad's to say.
_RESERVED = frozenset(
    {"n", "seed", "max_tokens", "logprobs", "prompt_logprobs", "output_kind", "detokenize", "flat_logprobs"}
)

STRUCTURE = "structured_outputs"
"""The field for a regex, a grammar or a choice."""
THINKING = "thinking_token_budget"
"""The field for a number of tokens, 0 among them, after which others are put in that end thinking."""
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_SHAPING = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    STRUCTURE,
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
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
        fields[STRUCTURE] = {"regex": regex}
    return fields


def row_fields(request: Request) -> dict[str, int]:
    """The fields of vLLM's `SamplingParams` that are this row's own."""
    return {"seed": request.seed % 2**63, "max_tokens": request.max_new_tokens}


def shaping(fields: Mapping[str, Any]) -> list[str]:
    """The fields that make the tokens' distribution another one than the temperature softmax."""
    found = [name for name, neutral in _NEUTRAL.items() if fields[name] != neutral and not _is_off(name, fields[name])]
    found += [name for name in _SHAPING if fields.get(name)]
    if fields.get(THINKING) is not None:
        found.append(THINKING)
    return found


def _is_off(name: str, value: Any) -> bool:
    return (name == "top_k" and value <= 0) or (name == "top_p" and value >= 1.0)


def logprobs_mode(fields: Mapping[str, Any]) -> str | None:
    """The way of telling log-probs in which they are those of the temperature softmax, as training scores tokens;
    PROCESSED where both are, None if neither is."""
    return next((mode for mode in (PROCESSED, RAW) if is_plain(fields, mode)), None)


def is_plain(fields: Mapping[str, Any], mode: str = PROCESSED) -> bool:
    """True if log-probs told in this mode are those of the temperature softmax over the whole vocabulary."""
    if mode == RAW:
        return fields["temperature"] == 1.0 and not fields.get(STRUCTURE)
    return mode == PROCESSED and not shaping(fields)


def sampling_params(fields: Mapping[str, Any], row: Mapping[str, int], **told: Any) -> Any:
    """vLLM's `SamplingParams` of a row; `told` are fields about how the answer is told.

    ValueError, in vLLM's words, for fields that it does not know or that cannot work.
    """
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    chosen = dict(fields)
    with in_plain_errors():
        if isinstance(chosen.get(STRUCTURE), Mapping):
            chosen[STRUCTURE] = StructuredOutputsParams(**chosen[STRUCTURE])
        # Text is only needed where strings end a completion.
        return SamplingParams(**chosen, **row, logprobs=0, detokenize=bool(chosen.get("stop")), **told)


def verify(params: Any, engine: Any) -> None:
    """What vLLM does with each row that is submitted: ValueError, in its words, for params that this engine cannot
    sample by, such as those with an invalid regex."""
    known = engine.input_processor
    with in_plain_errors():
        params.verify(known.model_config, known.speculative_config, known.structured_outputs_config, known.tokenizer)


@contextmanager
def in_plain_errors() -> Iterator[None]:
    """What vLLM refuses inside is a ValueError: its own kinds of errors are none."""
    try:
        yield
    except Exception as error:
        raise ValueError(str(error)) from error


def refusal(reason: object, fields: Mapping[str, Any], regex: str | None) -> ValueError:
    """The error for options that vLLM refuses, with the settings that they come from."""
    settings = "generation_kwargs" + ("" if regex is None else f" and vllm_structured_outputs_regex={regex!r}")
    return ValueError(f"{reason}; the fields are {dict(fields)}: see {settings}")


def sampled_logprobs(ids: Iterable[int], entries: Any) -> list[float]:
    """The log-prob of each sampled token out of vLLM's table of one token a place.

    RuntimeError if vLLM left one out.
    """
    ids = list(ids)
    if entries is None or len(entries) != len(ids):
        raise RuntimeError(f"vLLM gave {len(ids)} tokens and {0 if entries is None else len(entries)} log-probs")
    return [float(entry[token].logprob) for token, entry in zip(ids, entries)]
