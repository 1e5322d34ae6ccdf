"""Which engine samples from a model, and why."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from groupgrad.engines.base import Engine, Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.sampling_params import unsupported
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError
from groupgrad.modeling.scoring.attention import plannable
from groupgrad.modeling.scoring.forward import ForwardOptions, evaluation_mode, score_tokens, unwrap
from groupgrad.modeling.self_check import build_batch, logprob_difference, random_ids, tolerance
from groupgrad.modeling.vlm import is_multimodal
from groupgrad.types import Media, Prompt

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class EngineOptions:
    """What decides between the engines, and their own settings."""

    engine: str = "auto"
    """`auto`, `native` or `transformers`."""
    kv_memory: int | None = None
    """Bytes of keys and values that the native engine may keep; None: by what is free."""
    pack_weights: bool = False
    """Let the native engine copy weights into the kernel's order for each call, on a CPU."""
    max_rows: int = 64
    """Rows of one call of `generate`."""


@dataclass(slots=True, frozen=True)
class EngineChoice:
    """The engine chosen."""

    engine: Engine
    name: str
    """`native` or `transformers`."""
    reason: str
    """Why, in words."""


def choose_engine(
    model: nn.Module,
    options: EngineOptions,
    sampling: SamplingOptions,
    *,
    tokenizer: Any = None,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    example: Prompt | None = None,
) -> EngineChoice:
    """The native engine if `model` and the sampling options allow it, otherwise `generate`.

    The native engine is tried on random tokens first, and on the `example`, a prompt with images; if its log-probs are
    not those of a plain forward pass, it is not used, and one warning names the model and the difference. With
    `engine="native"` what it cannot do is an error.

    `generate` is tried in the same way: a model of which padding on the left of a prompt changes the completion, as it
    does with some recurrent ones, is given prompts of equal lengths at a time.

    Raises ConfigError for sampling options that the engine asked for lacks, ValueError for a model that it cannot run.
    """

    def generating(equal_lengths: bool) -> TransformersEngine:
        return TransformersEngine(
            model, tokenizer=tokenizer, max_rows=options.max_rows, precision=precision, equal_lengths=equal_lengths
        )

    trial = SamplingOptions(max_new_tokens=5, cache_implementation=sampling.cache_implementation)
    if options.engine == "transformers":
        engine = _agreeing(model, generating, precision, example, trial)
        return EngineChoice(engine, "transformers", "rollout_engine='transformers' asks for it")
    reason = _obstacle(model, sampling)
    native = None
    if reason is None:
        native = NativeEngine(
            model,
            tokenizer=tokenizer,
            kv_memory=options.kv_memory,
            pack_weights=options.pack_weights,
            precision=precision,
        )
        reason = _disagreement(model, native, precision, example, SamplingOptions(max_new_tokens=5))
        if reason is not None and options.engine == "auto":
            logger.warning("%s is sampled by generate: %s", _name(model), reason)
    if reason is None and native is not None:
        return EngineChoice(native, "native", "it samples from the modules that train, and its log-probs agree")
    if options.engine == "native":
        raise ConfigError(
            [f"rollout_engine='native' cannot be used for {_name(model)}: {reason}. Set rollout_engine='transformers'"]
        )
    if native is None:
        logger.warning("%s is sampled by generate: %s", _name(model), reason)
    idle = [name for name in ("kv_memory", "pack_weights") if getattr(options, name)]
    if idle:
        logger.warning("engine_%s: no effect, it is the native engine's", " and engine_".join(idle))
    return EngineChoice(_agreeing(model, generating, precision, example, trial), "transformers", reason or "")


def brings_own_generate(model: nn.Module) -> bool:
    """True if the model under its wrappers has a `generate` that is not transformers' own, as accelerated models do."""
    inner: Any = unwrap(model)
    if "generate" in vars(inner):
        return True
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if "generate" in vars(inner):
        return True
    generate = inspect.getattr_static(type(inner), "generate", None)
    return generate is not None and generate is not inspect.getattr_static(GenerationMixin, "generate")


def _obstacle(model: nn.Module, sampling: SamplingOptions) -> str | None:
    """Why the native engine is not even tried, or None."""
    if brings_own_generate(model):
        return "the model brings its own generate"
    reason = plannable(model)
    if reason is not None:
        return reason
    missing = unsupported(sampling)
    if missing:
        return f"the native engine has no {', '.join(missing)}, which rollout_engine='transformers' has"
    return None


def _agreeing(
    model: nn.Module,
    make: Callable[[bool], TransformersEngine],
    precision: Callable[[], AbstractContextManager[Any]],
    example: Prompt | None,
    trial: SamplingOptions,
) -> TransformersEngine:
    """`generate` with prompts of any lengths in a call, or where only that agrees with training, of equal lengths."""
    problem = _disagreement(model, make(False), precision, example, trial)
    if problem is None:
        return make(False)
    if _disagreement(model, make(True), precision, example, trial) is None:
        logger.warning(
            "%s is given prompts of one length at a time, since padding on their left changes what it says",
            _name(model),
        )
        return make(True)
    logger.warning(
        "generate does not sample %s as it is trained: %s; 'sampling/logp_mismatch' in the log is by how much",
        _name(model),
        problem,
    )
    return make(False)


def _disagreement(
    model: nn.Module,
    engine: Engine,
    precision: Callable[[], AbstractContextManager[Any]],
    example: Prompt | None,
    trial: SamplingOptions,
) -> str | None:
    """How sampling differs from a plain forward pass on random prompts and the example; None if it does not."""
    stream = torch.Generator().manual_seed(1)
    prompts, rows = [random_ids(model, length, stream).tolist() for length in (6, 11)], (0, 0, 1, 0, 1)
    media: tuple[Media | None, ...] = (None, None)
    if example is not None and is_multimodal(model):
        prompts, rows, media = [*prompts, example.ids], (*rows, 2, 2), (*media, example.media)
    requests = [Request(prompts[p], seed=i, max_new_tokens=3 + i % 3, media=media[p]) for i, p in enumerate(rows)]
    try:
        samples = engine.sample(requests, trial)
    except Exception as error:  # whatever a model's own code raises, generate is there
        return f"sampling random tokens failed: {type(error).__name__}: {error}"
    if any(len(sample.logprobs or ()) != len(sample.ids) or not sample.ids for sample in samples):
        return None  # nothing to compare
    batch = build_batch(prompts, rows, [sample.ids for sample in samples], media if any(media) else None)
    batch = batch.to(next(model.parameters()).device)
    with torch.no_grad(), evaluation_mode(model), precision():
        expected = score_tokens(model, batch, ForwardOptions(layout="dense")).logprobs.cpu()
        found = torch.tensor([value for sample in samples for value in sample.logprobs or ()])
        difference = logprob_difference(found, expected, model)
        if difference > tolerance(model):
            return f"its log-probs differ by {difference:.2g} nats from a plain forward pass on random tokens"
    return None


def _name(model: nn.Module) -> str:
    inner: Any = unwrap(model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    path = getattr(getattr(inner, "config", None), "_name_or_path", "")
    return f"{type(inner).__name__} ({path})" if path else type(inner).__name__
