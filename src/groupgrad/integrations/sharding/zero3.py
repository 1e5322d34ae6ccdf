"""Gathers parameters that DeepSpeed ZeRO-3 shards over ranks; `sharding.py` has the functions for any sharding.

Before training there are no hooks yet that gather a module's parameters, so `gather_per_module` adds its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupgrad.errors import UnavailableError
from groupgrad.models.shards import is_zero_shard
from groupgrad.models.unwrapping import is_multimodal
from groupgrad.types import Prompt


def is_absent(parameter: Any) -> bool:
    """True if this rank currently has only its shard of the parameter."""
    return is_zero_shard(parameter) and parameter.ds_status.name != "AVAILABLE"


@contextmanager
def gathered(parameters: Iterable[Any]) -> Iterator[None]:
    """Gathers the parameters, which must not be changed inside; they are sharded again afterwards. Collective."""
    absent = [parameter for parameter in parameters if is_absent(parameter)]
    if not absent:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(absent):
        yield


@contextmanager
def gather_per_module(model: nn.Module) -> Iterator[None]:
    """Inside, passes of `model` without gradient gather its parameters, before training too. Each pass is a collective.

    Without ZeRO's own hooks each module's parameters are gathered while it computes.
    """
    has_hooks = any(is_hook(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())
    if has_hooks or not any(is_absent(parameter) for parameter in model.parameters()):
        yield
        return
    gathered_now: dict[int, Any] = {}

    def gather(module: nn.Module, _inputs: Any) -> None:
        absent = [parameter for parameter in module.parameters(recurse=False) if is_absent(parameter)]
        if absent:
            absent[0].all_gather(param_list=absent)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            gathered_now.update({id(parameter): parameter for parameter in absent})

    def free(module: nn.Module, _inputs: Any, _output: Any) -> None:
        gathered_here = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in gathered_now]
        release([gathered_now.pop(id(parameter)) for parameter in gathered_here])

    modules = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(gather) for module in modules]
    handles += [module.register_forward_hook(free) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        release(gathered_now.values())


def image_of_every_pass(model: nn.Module, example: Prompt | None, aux_loss_coef: float) -> Prompt | None:
    """The prompt with an image that ranks compute in passes without one; None for a model that takes text alone.

    Without it a rank would not run the vision tower, and the others would wait for it to gather the tower's weights.
    UnavailableError for a model that takes images and cannot make such passes. `example` is the prompt, None if the
    model's processor made none.
    """
    if not is_multimodal(model):
        return None
    name = f"{type(model).__name__} under DeepSpeed ZeRO-3"
    if example is None or example.media is None:
        raise UnavailableError(
            f"{name}: its processor makes no prompt of an image, which passes without images need so that all ranks "
            "run the vision tower; use FSDP 2"
        )
    if aux_loss_coef != 0.0:
        raise UnavailableError(
            f"{name}: the load-balancing loss would count the image of passes without one; set "
            "router_aux_loss_coef=0.0, or use FSDP 2"
        )
    return example


def engine(accelerator: Any) -> Any:
    """DeepSpeed's engine, of any stage, for the model that `accelerator` has prepared."""
    return accelerator.deepspeed_engine_wrapped.engine


def backward(accelerator: Any, loss: torch.Tensor) -> None:
    """Adds the gradient of `loss`, of a whole micro-batch or of a part of it; `engine(accelerator).step()` ends a step.

    accelerate would take the optimizer step with the first part of the step's last micro-batch.
    """
    engine(accelerator).set_gradient_accumulation_boundary(accelerator.sync_gradients)
    engine(accelerator).backward(loss, scale_wrt_gas=False)


def release(parameters: Iterable[Any]) -> None:
    """Frees the shards of other ranks of the parameters that are gathered. Not a collective.

    ZeRO may keep small parameters gathered between passes, and would use them in place of changed shards.
    """
    present = [parameter for parameter in parameters if is_zero_shard(parameter) and not is_absent(parameter)]
    if present:
        present[0].partition(param_list=present, has_been_updated=False)


def is_hook(hook: Any) -> bool:
    """True for a forward hook of DeepSpeed."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")
