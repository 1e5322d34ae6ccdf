"""The model under its wrappers (data parallelism, compilation, adapters), its output head, the inputs that it takes.

`parameters_replaced` puts other parameters into its modules for a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from groupgrad.models.families import IMAGE_TOKEN_FIELDS, VIDEO_TOKEN_FIELDS


def unwrap(model: nn.Module) -> nn.Module:
    """The model under wrappers for data parallelism and compilation."""
    is_parallel = isinstance(model, nn.parallel.DistributedDataParallel) or type(model).__name__ == "DeepSpeedEngine"
    inner = getattr(model, "_orig_mod", None) or (model.module if is_parallel else None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def base_model(model: Any) -> Any:
    """The model under its adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model under wrappers and adapters; None if there is none."""
    return next((part for part in unwrapped_parts(model) if isinstance(part, PreTrainedModel)), None)


def is_prepared(module: nn.Module) -> bool:
    """True if the module's forward method is that of its class inside accelerate's mixed precision, and nothing more.

    accelerate sets a method that enters autocast, calls the one of the class, and returns its numbers in float32.
    """
    outermost = getattr(module.__dict__.get("forward"), "__wrapped__", None)
    innermost = getattr(module.__dict__.get("_original_forward"), "__func__", None)
    return type(outermost).__name__ == "ConvertOutputsToFp32" and innermost is type(module).forward


def unwrapped_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The model and the modules under its wrappers (data parallelism, compilation, adapters), outermost first."""
    part: Any = model
    while isinstance(part, nn.Module):
        yield part
        if hasattr(part, "get_base_model") and part.get_base_model() is not part:  # pyright: ignore
            part = part.get_base_model()  # pyright: ignore[reportCallIssue]
        else:
            part = getattr(part, "_orig_mod", None) or part._modules.get("module")


@contextmanager
def parameters_replaced(modules: Iterable[nn.Module], replacements: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Inside, the modules have other parameters: those of `replacements`, by the ids of the present ones.

    The present ones are not touched. A parameter that is tied belongs to several modules, and stays tied.
    """
    owners = [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if id(parameter) in replacements
    ]
    try:
        for parameters, name, parameter in owners:
            parameters[name] = replacements[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in owners:
            parameters[name] = parameter


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, adapters included; None if the model declares none."""
    inner = unwrap(model)
    getter = getattr(inner, "get_output_embeddings", None)
    return getter() if getter is not None else None


def arguments(model: nn.Module) -> frozenset[str]:
    """Names of the forward arguments of the transformers model in `model`."""
    inner = pretrained(model)
    return frozenset() if inner is None else _parameters(type(inner))


@cache
def _parameters(model_class: type[PreTrainedModel]) -> frozenset[str]:
    names: set[str] = set()
    for cls in model_class.__mro__:
        if "forward" in vars(cls):
            parameters = inspect.signature(cls.forward).parameters
            names |= parameters.keys()
            # A subclass that takes `**kwargs` hands them to the class that it changes.
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return frozenset(names)


def is_multimodal(model: nn.Module) -> bool:
    """True if the model takes images beside its token ids."""
    return "pixel_values" in arguments(model) and bool(placeholder_ids(model))


def placeholder_ids(model: nn.Module) -> tuple[int, ...]:
    """Token ids that the model replaces by image or video features; empty for a text-only model."""
    config = getattr(pretrained(model), "config", None)
    ids = (getattr(config, name, None) for name in IMAGE_TOKEN_FIELDS + VIDEO_TOKEN_FIELDS)
    return tuple(sorted({int(token) for token in ids if token is not None}))
