"""Chooses the engine that samples from a model: the native one, or transformers' `generate`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from groupgrad import compat
from groupgrad.engines.base import Engine, Request, SamplingOptions
from groupgrad.engines.continuous_batching import ContinuousBatchingEngine
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.runner import MODULES
from groupgrad.engines.native.sampling_params import unsupported
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError
from groupgrad.kernels.fallbacks import fall_back
from groupgrad.models.adapters import is_adapted
from groupgrad.models.model_names import model_source
from groupgrad.models.unwrapping import base_model, is_multimodal, pretrained, unwrap
from groupgrad.scoring.attention import flat_obstacle
from groupgrad.scoring.forward import ForwardOptions, evaluation_mode, score_tokens
from groupgrad.scoring.rounding import Rounding
from groupgrad.scoring.self_check import build_batch, random_ids
from groupgrad.types import Media, Prompt

logger = logging.getLogger(__name__)

WRONG_NATS = 1.0
"""A gap that no rounding makes: the sampled text is another model's."""

_ONE_LENGTH = "%s is given prompts of one length at a time, since padding on their left changes its log-probs"
_NO_CACHE = (
    "generate computes every token of %s from the whole text, which is slower, since %s sample other tokens than it is "
    "trained on where keys and values of earlier tokens are kept (%s)"
)


@dataclass(slots=True, frozen=True)
class EngineOptions:
    """The requested engine and the settings of each."""

    engine: str = "auto"
    """`auto`, `native` or `transformers`."""
    kv_memory: int | None = None
    """Bytes of keys and values that the native engine may keep; None: derived from free memory."""
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
    gap: float | None = None
    """Nats between its log-probs and those of a plain forward pass on random tokens, the largest of some twenty; None
    if they were not compared."""


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
    from a plain forward pass, it runs the model's modules; if they still differ, it is not used. One warning names the
    difference. With `engine="native"` an obstacle is an error.

    `generate` is tried in the same way: if left padding changes a model's completions, as with some recurrent models,
    only prompts of equal lengths share a call; if cached keys and values do, as with some releases of peft, it runs
    without them. A gap of a nat or more that stays is an error: such text teaches nothing.

    Raises ConfigError for sampling options that the requested engine lacks or a model that it cannot run.
    """
    trial = _Trial(model, precision, example)
    if options.continuous_batching is not None:
        return _continuous_batching(trial, options.continuous_batching, sampling)
    reason = "rollout_engine='transformers' asks for it"
    if options.engine != "transformers":
        reason = _obstacle(model, sampling)
        if reason is None:
            native, found = _tried_native(trial, tokenizer, options.kv_memory)
            reason = found.problem
            if reason is None:
                trial.check_options(native, sampling)
                why = "it samples from the modules that train, and its log-probs agree"
                return EngineChoice(native, "native", why, found.largest)
        if options.engine == "native":
            raise ConfigError(
                [
                    f"rollout_engine='native' cannot be used for {_name(model)}: {reason}. "
                    "Set rollout_engine='transformers'"
                ]
            )
        logger.warning("%s is sampled by generate: %s", _name(model), reason)
        if options.kv_memory is not None:
            logger.warning("engine_kv_memory: no effect, it is the native engine's")
    settings: dict[str, Any] = {"tokenizer": tokenizer, "max_rows": options.max_rows, "precision": precision}
    engine, found = _tried_generate(trial, settings, sampling.cache_implementation)
    trial.check_options(engine, sampling)
    return EngineChoice(engine, "transformers", reason, found.largest)


def _continuous_batching(trial: _Trial, settings: dict[str, Any], sampling: SamplingOptions) -> EngineChoice:
    """Transformers' continuous batching. ConfigError if it does not sample the model as it is trained."""
    engine, found = ContinuousBatchingEngine(trial.model, settings, precision=trial.precision), _Comparison(None)
    if is_multimodal(trial.model):
        reason = "it takes no images; set it to False, or sample with use_vllm=True"
    elif not isinstance(pretrained(unwrap(trial.model)), GenerationMixin):
        reason = "the model has no such method; set it to False"
    elif replaces_generate(trial.model):
        reason = "the model brings its own generate, which continuous batching never calls; set it to False"
    else:
        found = trial.compare(engine, SamplingOptions(max_new_tokens=5))
        reason = found.problem
    if reason is not None:
        raise ConfigError(
            [f"use_transformers_continuous_batching=True does not work for {_name(trial.model)}: {reason}"]
        )
    trial.check_options(engine, sampling)
    why = "use_transformers_continuous_batching=True asks for it"
    return EngineChoice(engine, "continuous batching", why, found.largest)


def replaces_generate(model: nn.Module) -> bool:
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
    if replaces_generate(model):
        return "the model brings its own generate"
    reason = flat_obstacle(model)
    if reason is not None:
        return reason
    missing = unsupported(sampling)
    if missing:
        return f"the native engine has no {', '.join(missing)}, which rollout_engine='transformers' has"
    return None


def _tried_native(trial: _Trial, tokenizer: Any, kv_memory: int | None) -> tuple[NativeEngine, _Comparison]:
    """The native engine in its fastest form that agrees with training, and else in its plain one."""
    settings: dict[str, Any] = {"tokenizer": tokenizer, "kv_memory": kv_memory, "precision": trial.precision}
    engine, sampling = NativeEngine(trial.model, **settings), SamplingOptions(max_new_tokens=5)
    found = trial.compare(engine, sampling)
    if found.problem is None:
        return engine, found
    plain = NativeEngine(trial.model, **settings, is_plain=True)
    of_plain = trial.compare(plain, sampling)
    if of_plain.problem is None:
        fall_back(logger, MODULES, found.problem)
    return plain, of_plain


def _tried_generate(
    trial: _Trial, settings: dict[str, Any], cache_implementation: str | None
) -> tuple[TransformersEngine, _Comparison]:
    """`generate`, called in the fastest way in which it agrees with training; warns where that is not the plain one."""
    sampling = SamplingOptions(max_new_tokens=5, cache_implementation=cache_implementation)
    found: list[tuple[TransformersEngine, _Comparison]] = []
    for use_cache, equal_lengths in ((True, False), (True, True), (False, False), (False, True)):
        engine = TransformersEngine(trial.model, **settings, equal_lengths=equal_lengths, use_cache=use_cache)
        found.append((engine, trial.compare(engine, sampling)))
        if found[-1][1].problem is None:
            if equal_lengths:
                logger.warning(_ONE_LENGTH, _name(trial.model))
            if not use_cache:
                logger.warning(_NO_CACHE, _name(trial.model), _releases(trial.model), found[0][1].problem)
            return found[-1]
    engine, difference = min(found, key=lambda tried: tried[1].gap)
    text = f"generate does not sample {_name(trial.model)} as it is trained: {difference.problem}"
    if WRONG_NATS <= difference.gap < math.inf:
        raise ConfigError(
            [
                f"{text}, with keys and values of earlier tokens kept or not ({_releases(trial.model)}), so it would "
                "learn from another model's text. Use other releases, LoRA as adapter, and the library's own generate"
            ]
        )
    logger.warning("%s; sampling/logp_mismatch in the log is by how much", text)
    return engine, difference


def _releases(model: nn.Module) -> str:
    """The installed releases of the libraries whose code `generate` runs."""
    names = ["transformers", *(["peft"] if is_adapted(unwrap(model)) else [])]
    return ", ".join(f"{name} {compat.installed_version(name)}" for name in names)


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

    def compare(self, engine: Engine, sampling: SamplingOptions) -> _Comparison:
        """Compares the engine's log-probs with those of the model's own logits; no problem if they agree."""
        model, stream = self.model, torch.Generator().manual_seed(1)
        prompts, rows = [random_ids(model, length, stream).tolist() for length in (6, 11)], (0, 0, 1, 0, 1)
        media: tuple[Media | None, ...] = (None, None)
        if self.example is not None and is_multimodal(model):
            prompts, rows = [*prompts, self.example.ids], (*rows, 2, 2)
            media = (*media, self.example.media)
        requests = [Request(prompts[p], seed=i, max_new_tokens=3 + i % 3, media=media[p]) for i, p in enumerate(rows)]
        try:
            # Alone, since a session with images may compute steps in another way.
            parts = [part for part in (requests[:5], requests[5:]) if part]
            samples = [sample for part in parts for sample in engine.sample(part, sampling)]
        except Exception as error:  # a model's own code may raise anything; `generate` remains
            return _Comparison(f"sampling random tokens failed: {type(error).__name__}: {error}")
        if any(len(sample.logprobs or ()) != len(sample.ids) or not sample.ids for sample in samples):
            return _Comparison(None)  # nothing to compare
        batch = build_batch(prompts, rows, [sample.ids for sample in samples], media if any(media) else None)
        batch = batch.to(next(model.parameters()).device)
        # A model may change its logits behind the head, where the tiled head would not see it.
        plain, rounding = ForwardOptions(layout="dense", tiled_head=False), Rounding.of(model, self.precision)
        with torch.no_grad(), evaluation_mode(model), self.precision():
            expected = score_tokens(model, batch, plain).logprobs.cpu()
        sampled = torch.tensor([value for sample in samples for value in sample.logprobs or ()])
        gap, largest = rounding.gap(sampled, expected), float((sampled - expected).abs().max())
        problem = f"its log-probs differ by {gap:.2g} nats from a plain forward pass on random tokens"
        return _Comparison(problem if gap > rounding.tolerance else None, gap, largest)


@dataclass(slots=True, frozen=True)
class _Comparison:
    """What a trial of an engine has found."""

    problem: str | None
    """Why the engine does not sample the model as it is trained; None if it does."""
    gap: float = math.inf
    """Nats by which its log-probs differ (`Rounding.gap`); inf if they could not be compared."""
    largest: float | None = None
    """The same of the token that differs most."""


def _name(model: nn.Module) -> str:
    base = base_model(unwrap(model))
    path = model_source(base)
    return f"{type(base).__name__} ({path})" if path else type(base).__name__
