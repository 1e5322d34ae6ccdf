"""Chooses the engine that samples from a model: the native one, or transformers' `generate`."""

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
from groupgrad.engines.continuous_batching import ContinuousBatchingEngine
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.sampling_params import unsupported
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError
from groupgrad.modeling.model_names import model_source
from groupgrad.modeling.scoring.attention import plannable
from groupgrad.modeling.scoring.forward import ForwardOptions, evaluation_mode, score_tokens
from groupgrad.modeling.self_check import build_batch, logprob_difference, random_ids, tolerance
from groupgrad.modeling.unwrapping import base_model, is_multimodal, pretrained, unwrap
from groupgrad.types import Media, Prompt

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class EngineOptions:
    """The requested engine and the settings of each."""

    engine: str = "auto"
    """`auto`, `native` or `transformers`."""
    kv_memory: int | None = None
    """Bytes of keys and values that the native engine may keep; None: derived from free memory."""
    pack_weights: bool = False
    """On a CPU, let the native engine copy weights into oneDNN's layout for each session."""
    max_rows: int = 64
    """Rows per call of `generate`."""
    continuous_batching: dict[str, Any] | None = None
    """Sample by transformers' continuous batching with these fields of its configuration; None: do not."""


@dataclass(slots=True, frozen=True)
class EngineChoice:
    """The chosen engine."""

    engine: Engine
    name: str
    """`native`, `transformers`, `continuous batching` or `vllm`."""
    reason: str
    """Why it was chosen, in words."""


def choose_engine(
    model: nn.Module,
    options: EngineOptions,
    sampling: SamplingOptions,
    *,
    tokenizer: Any = None,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    example: Prompt | None = None,
) -> EngineChoice:
    """Chooses the native engine if `model` and the sampling options allow it, otherwise `generate`.

    The native engine is first tried on random tokens and on `example`, a prompt with images. If its log-probs differ
    from a plain forward pass it is not used, and one warning names the model and the difference. With `engine="native"`
    an obstacle is an error.

    `generate` is tried in the same way: if left padding changes a model's completions, as with some recurrent models,
    only prompts of equal lengths share a call.

    Raises ConfigError for sampling options that the requested engine lacks or a model that it cannot run.
    """
    trial = _Trial(model, precision, example)
    if options.continuous_batching is not None:
        return _continuous_batching(trial, options.continuous_batching, sampling)
    reason = "rollout_engine='transformers' asks for it"
    if options.engine != "transformers":
        reason = _obstacle(model, sampling)
        if reason is None:
            native = NativeEngine(
                model,
                tokenizer=tokenizer,
                kv_memory=options.kv_memory,
                pack_weights=options.pack_weights,
                precision=precision,
            )
            reason = trial.difference(native, SamplingOptions(max_new_tokens=5))
            if reason is None:
                trial.check_options(native, sampling)
                return EngineChoice(native, "native", "it samples from the modules that train, and its log-probs agree")
        if options.engine == "native":
            raise ConfigError(
                [
                    f"rollout_engine='native' cannot be used for {_name(model)}: {reason}. "
                    "Set rollout_engine='transformers'"
                ]
            )
        logger.warning("%s is sampled by generate: %s", _name(model), reason)
        unused = [name for name in ("kv_memory", "pack_weights") if getattr(options, name)]
        if unused:
            logger.warning("engine_%s: no effect, it is the native engine's", " and engine_".join(unused))
    settings: dict[str, Any] = {"tokenizer": tokenizer, "max_rows": options.max_rows, "precision": precision}
    equal_lengths = _needs_equal_lengths(trial, settings, sampling.cache_implementation)
    engine = TransformersEngine(model, **settings, equal_lengths=equal_lengths)
    trial.check_options(engine, sampling)
    return EngineChoice(engine, "transformers", reason)


def _continuous_batching(trial: _Trial, settings: dict[str, Any], sampling: SamplingOptions) -> EngineChoice:
    """Transformers' continuous batching. ConfigError if it does not sample the model as it is trained."""
    engine = ContinuousBatchingEngine(trial.model, settings, precision=trial.precision)
    if is_multimodal(trial.model):
        reason = "it takes no images; set it to False, or sample with use_vllm=True"
    elif not isinstance(pretrained(unwrap(trial.model)), GenerationMixin):
        reason = "the model has no such method; set it to False"
    elif brings_own_generate(trial.model):
        reason = "the model brings its own generate, which continuous batching never calls; set it to False"
    else:
        reason = trial.difference(engine, SamplingOptions(max_new_tokens=5))
    if reason is not None:
        raise ConfigError(
            [f"use_transformers_continuous_batching=True does not work for {_name(trial.model)}: {reason}"]
        )
    trial.check_options(engine, sampling)
    return EngineChoice(engine, "continuous batching", "use_transformers_continuous_batching=True asks for it")


def brings_own_generate(model: nn.Module) -> bool:
    """True if `generate` of the model under its wrappers is not the library's: that of accelerated models, say.

    A script may replace it on the instance, on its class, or on the library's class for all models.
    """
    inner = unwrap(model)
    return any("generate" in vars(part) or _is_replaced(type(part)) for part in (inner, base_model(inner)))


def _is_replaced(model_class: type) -> bool:
    """True if the class has a `generate` that neither transformers nor peft defines for all models."""
    generate = inspect.getattr_static(model_class, "generate", None)
    while _module(generate).startswith(("torch.utils.", "transformers.utils.")):  # their decorators
        generate = generate.__wrapped__
    return generate is not None and _module(generate) not in ("transformers.generation.utils", "peft.peft_model")


def _module(function: Any) -> str:
    """The module whose code a function is; decorators copy the name of another one into its `__module__`."""
    return getattr(function, "__globals__", {}).get("__name__", "")


def _obstacle(model: nn.Module, sampling: SamplingOptions) -> str | None:
    """The reason not to try the native engine, or None."""
    if brings_own_generate(model):
        return "the model brings its own generate"
    reason = plannable(model)
    if reason is not None:
        return reason
    missing = unsupported(sampling)
    if missing:
        return f"the native engine has no {', '.join(missing)}, which rollout_engine='transformers' has"
    return None


def _needs_equal_lengths(trial: _Trial, settings: dict[str, Any], cache_implementation: str | None) -> bool:
    """True if `generate` agrees with training only for prompts of equal lengths; warns unless it agrees for any."""
    sampling = SamplingOptions(max_new_tokens=5, cache_implementation=cache_implementation)
    difference = trial.difference(TransformersEngine(trial.model, **settings), sampling)
    if difference is None:
        return False
    equal_lengths = TransformersEngine(trial.model, **settings, equal_lengths=True)
    if trial.difference(equal_lengths, sampling) is None:
        logger.warning(
            "%s is given prompts of one length at a time, since padding on their left changes what it says",
            _name(trial.model),
        )
        return True
    logger.warning(
        "generate does not sample %s as it is trained: %s; 'sampling/logp_mismatch' in the log is by how much",
        _name(trial.model),
        difference,
    )
    return False


@dataclass(slots=True, frozen=True)
class _Trial:
    """Compares an engine's log-probs with a plain forward pass, on random prompts and on an example with images."""

    model: nn.Module
    precision: Callable[[], AbstractContextManager[Any]]
    example: Prompt | None

    def check_options(self, engine: Engine, sampling: SamplingOptions) -> None:
        """ConfigError if the engine fails on random tokens with the run's own sampling options."""
        if not sampling.extra:
            return
        request = Request(
            random_ids(self.model, 6, torch.Generator().manual_seed(1)).tolist(), seed=0, max_new_tokens=3
        )
        try:
            engine.sample([request, request], sampling)
        except Exception as error:  # a library may raise anything for values that were not checked
            raise ConfigError(
                [
                    f"generation_kwargs has {sampling.extra!r}, with which nothing can be sampled "
                    f"({type(error).__name__}: {error}). Correct the option, or take it out"
                ]
            ) from error

    def difference(self, engine: Engine, sampling: SamplingOptions) -> str | None:
        """Describes how the engine's log-probs differ; None if they agree."""
        model, stream = self.model, torch.Generator().manual_seed(1)
        prompts, rows = [random_ids(model, length, stream).tolist() for length in (6, 11)], (0, 0, 1, 0, 1)
        media: tuple[Media | None, ...] = (None, None)
        if self.example is not None and is_multimodal(model):
            prompts, rows = [*prompts, self.example.ids], (*rows, 2, 2)
            media = (*media, self.example.media)
        requests = [Request(prompts[p], seed=i, max_new_tokens=3 + i % 3, media=media[p]) for i, p in enumerate(rows)]
        try:
            samples = engine.sample(requests, sampling)
        except Exception as error:  # a model's own code may raise anything; `generate` remains
            return f"sampling random tokens failed: {type(error).__name__}: {error}"
        if any(len(sample.logprobs or ()) != len(sample.ids) or not sample.ids for sample in samples):
            return None  # nothing to compare
        batch = build_batch(prompts, rows, [sample.ids for sample in samples], media if any(media) else None)
        batch = batch.to(next(model.parameters()).device)
        with torch.no_grad(), evaluation_mode(model), self.precision():
            expected = score_tokens(model, batch, ForwardOptions(layout="dense")).logprobs.cpu()
            sampled = torch.tensor([value for sample in samples for value in sample.logprobs or ()])
            difference = logprob_difference(sampled, expected, model)
            if difference > tolerance(model):
                return f"its log-probs differ by {difference:.2g} nats from a plain forward pass on random tokens"
        return None


def _name(model: nn.Module) -> str:
    base = base_model(unwrap(model))
    path = model_source(base)
    return f"{type(base).__name__} ({path})" if path else type(base).__name__
