"""Translates sampling options, requests and LoRA adapters into vLLM's terms, and its log-probs back.

vLLM returns log-probs in one of two modes, for a whole engine. `processed_logprobs` are of the distribution that the
token was drawn from: after temperature, penalties, a regex or other structure, and cuts, renormalised over the tokens
that were left. Without cuts, penalties and structure that is the temperature softmax over the whole vocabulary, as
training scores it. `raw_logprobs` are of the softmax before all of these except structure, so also before temperature:
at temperature 1 they are training's, whatever cuts and penalties shape the draw. Structure comes before both: vLLM
masks tokens before it computes either. `logprobs_mode` picks the mode that is comparable with training.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupgrad.engines.base import Request, SamplingOptions

if TYPE_CHECKING:  # a server does not load the modeling code
    import torch

    from groupgrad.models.weights import AdapterFiles

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
LOGPROBS_MODE = PROCESSED
"""Default mode of `groupgrad vllm-serve`."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""

FINISH_REASONS: dict[str | None, Literal["eos", "length"]] = {"stop": "eos", "length": "length"}
"""Finish reasons by vLLM's names; with any other reason vLLM aborted the row."""

# Fields that groupgrad sets for each row.
_RESERVED = frozenset(
    {"n", "seed", "max_tokens", "logprobs", "prompt_logprobs", "output_kind", "detokenize", "flat_logprobs"}
)

STRUCTURE = "structured_outputs"
"""Field for a regex, a grammar or a choice."""
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

    ValueError for an entry of `options.extra` that groupgrad sets for each row.
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
        # Ids of the checkpoint's own generation config do not end a completion.
        "ignore_eos": True,
        **options.extra,
    }
    if regex is not None:
        fields[STRUCTURE] = {"regex": regex}
    return fields


def row_fields(request: Request) -> dict[str, int]:
    """The fields of vLLM's `SamplingParams` that differ between rows."""
    return {"seed": request.seed % 2**63, "max_tokens": request.max_new_tokens}


def shaping(fields: Mapping[str, Any]) -> list[str]:
    """Names of the fields that change the tokens' distribution from the temperature softmax."""
    is_on = {
        "top_p": fields["top_p"] < 1.0,
        "top_k": fields["top_k"] > 0,
        "min_p": fields["min_p"] != 0.0,
        "repetition_penalty": fields["repetition_penalty"] != 1.0,
        **{name: bool(fields.get(name)) for name in _SHAPING},
        "thinking_token_budget": fields.get("thinking_token_budget") is not None,  # a budget of 0 counts
    }
    return [name for name, on in is_on.items() if on]


def logprobs_mode(fields: Mapping[str, Any]) -> str | None:
    """The mode whose log-probs are of the temperature softmax, as training scores tokens.

    PROCESSED where both modes are, None if neither is.
    """
    return next((mode for mode in (PROCESSED, RAW) if is_plain(fields, mode)), None)


def is_plain(fields: Mapping[str, Any], mode: str = PROCESSED) -> bool:
    """True if log-probs in this mode are of the temperature softmax over the whole vocabulary."""
    if mode == RAW:
        return fields["temperature"] == 1.0 and not fields.get(STRUCTURE)
    return mode == PROCESSED and not shaping(fields)


def sampling_params(fields: Mapping[str, Any], row: Mapping[str, int], **output_fields: Any) -> Any:
    """vLLM's `SamplingParams` of a row; `output_fields` are those about the form of the answer.

    ValueError, with vLLM's message, for unknown or invalid fields.
    """
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    shared = dict(fields)
    with plain_errors():
        if isinstance(shared.get(STRUCTURE), Mapping):
            shared[STRUCTURE] = StructuredOutputsParams(**shared[STRUCTURE])
        # Text is only needed where strings end a completion.
        return SamplingParams(**shared, **row, logprobs=0, detokenize=bool(shared.get("stop")), **output_fields)


def check_options(fields: Mapping[str, Any], engine: Any) -> None:
    """Runs vLLM's check of each submitted row. ValueError, with vLLM's message, for instance for an invalid regex."""
    params, processor = sampling_params(fields, {"seed": 0, "max_tokens": 1}), engine.input_processor
    with plain_errors():
        params.verify(
            processor.model_config,
            processor.speculative_config,
            processor.structured_outputs_config,
            processor.tokenizer,
        )


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors into ValueError, since vLLM's exception types do not derive from it."""
    try:
        yield
    except Exception as error:
        raise ValueError(str(error)) from error


def refusal(reason: object, fields: Mapping[str, Any], regex: str | None) -> ValueError:
    """The error for sampling options that vLLM refuses, naming the settings that they come from."""
    settings = "generation_kwargs" + ("" if regex is None else f" and vllm_structured_outputs_regex={regex!r}")
    return ValueError(f"{reason}; the fields are {dict(fields)}: see {settings}")


def sampled_logprobs(ids: Iterable[int], entries: Any) -> list[float]:
    """The log-prob of each sampled token, from vLLM's list of one dict a position. RuntimeError if one is missing."""
    ids = list(ids)
    if entries is None or len(entries) != len(ids):
        raise RuntimeError(f"vLLM gave {len(ids)} tokens and {0 if entries is None else len(entries)} log-probs")
    return [float(entry[token].logprob) for token, entry in zip(ids, entries)]


def version_counts(spans: Any, num_tokens: int) -> list[tuple[str, int]]:
    """Weight versions in the order of a row's tokens, each with the number of tokens that it sampled, by vLLM's record.

    RuntimeError if the record is not of all tokens.
    """
    counts = [(str(span.version), int(span.end) - int(span.start)) for span in spans]
    if sum(count for _, count in counts) != num_tokens:
        raise RuntimeError(f"vLLM gave {num_tokens} tokens, and the weight versions of {counts}")
    return counts


def lora_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM for an adapter of this rank. ValueError if there is none."""
    for size in LORA_RANKS:
        if rank <= size:
            return size
    raise ValueError(
        f"the adapter has rank {rank}, but vLLM takes adapters up to rank {LORA_RANKS[-1]}; merge it into the weights"
    )


def adapter_bytes(files: AdapterFiles, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Contents of `adapter_config.json` and `adapter_model.safetensors`, with tensors in vLLM's dtype."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in files.tensors.items()}
    return json.dumps(files.config, default=str).encode(), save(tensors)


@contextmanager
def lora_request(weight_version: str, number: int, config: bytes, tensors: bytes) -> Iterator[Any]:
    """vLLM's request for an adapter, which needs a `number` of its own; its files are removed afterwards.

    vLLM reads them when it loads the adapter, and then keeps that in memory.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="groupgrad-adapter-") as folder:
        (Path(folder) / "adapter_config.json").write_bytes(config)
        (Path(folder) / "adapter_model.safetensors").write_bytes(tensors)
        yield LoRARequest(weight_version, number, folder)
