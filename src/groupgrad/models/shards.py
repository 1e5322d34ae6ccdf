"""Tells whether the parameters of a model are sharded over ranks (FSDP 2, DeepSpeed ZeRO-3), and gathers them.

Everything here serves a model on one device too, which it leaves as it is. `integrations/sharding` has what only a
sharded model needs, and is imported when there is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.integrations import deepspeed as hf_deepspeed

CPU_OFFLOAD = "_groupgrad_cpu_offload"
"""Attribute of a model under FSDP that says whether its shards are in host memory."""
_LAUNCHER_FLAG = "ACCELERATE_USE_FSDP"


def is_shard(parameter: Any) -> bool:
    """True for a parameter, or another tensor, of which FSDP gives this rank a part."""
    return hasattr(parameter, "full_tensor")


def is_zero_shard(parameter: Any) -> bool:
    """True for a parameter that ZeRO-3 shards, gathered or not."""
    return hasattr(parameter, "ds_id")


def is_sharded(model: nn.Module) -> bool:
    """True if parameters are sharded over ranks (ZeRO-3, FSDP 2)."""
    return any(is_zero_shard(parameter) or is_shard(parameter) for parameter in model.parameters())


def is_fully_sharded(model: nn.Module) -> bool:
    """True for a model, or a unit of it, under FSDP 2."""
    return isinstance(model, FSDPModule)


def is_zero_sharded(model: nn.Module) -> bool:
    """True if ZeRO-3 shards the model, so that hooks gather the parameters of each module by themselves."""
    return any(is_zero_shard(parameter) for parameter in model.parameters())


def is_offloaded(model: nn.Module) -> bool:
    """True for a model under FSDP whose shards are in host memory."""
    return bool(getattr(model, CPU_OFFLOAD, False))


def local_part(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter or a gradient under FSDP, sharing its memory; otherwise the tensor itself."""
    return parameter.detach().to_local() if is_shard(parameter) else parameter


def shard_values(parameter: Any) -> torch.Tensor:
    """This rank's shard of a parameter, gathered or not; the numbers of one that is not sharded."""
    return parameter.ds_tensor.detach() if is_zero_shard(parameter) else local_part(parameter).detach()


def num_parameters(model: nn.Module) -> int:
    """Number of parameters of `model`, shards of other ranks included."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())


def gathered(module: nn.Module) -> AbstractContextManager[None]:
    """Gathers the parameters of `module`, which must not be changed inside. Collective if it is sharded."""
    if not is_sharded(module):
        return nullcontext()
    from groupgrad.integrations.sharding import sharding

    return sharding.gathered(module)


def gather_all(model: nn.Module) -> AbstractContextManager[None]:
    """Gathers all parameters of `model` on every rank; inside, its passes are not collectives. Collective on entry.

    Needs memory for all parameters. Nothing may be trained inside.
    """
    if not (is_fully_sharded(model) or is_zero_sharded(model)):
        return nullcontext()
    from groupgrad.integrations.sharding import sharding

    return sharding.gather_all(model)


def gather_per_module(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, passes of a sharded `model` without gradient gather its parameters, before training too.

    Each pass is a collective. A rank needs memory for its shards and the largest module, under FSDP for embeddings,
    head and the largest layer.
    """
    if not (is_fully_sharded(model) or is_zero_sharded(model)):
        return nullcontext()
    from groupgrad.integrations.sharding import sharding

    return sharding.gather_per_module(model)


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, which for one under FSDP is the class that it had before."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


@contextmanager
def unsharded_classes(model: nn.Module) -> Iterator[None]:
    """Inside, every module of `model` has its own class, by which transformers finds a model's names in checkpoints."""
    classes = [(module, type(module)) for module in model.modules() if is_fully_sharded(module)]
    try:
        for module, _ in classes:
            module.__class__ = unsharded_class(module)
        yield
    finally:
        for module, kind in classes:
            module.__class__ = kind


@contextmanager
def without_accelerate() -> Iterator[None]:
    """Inside, neither accelerate nor transformers sees that the launcher has turned FSDP on."""
    flag = os.environ.pop(_LAUNCHER_FLAG, None)
    try:
        yield
    finally:
        if flag is not None:
            os.environ[_LAUNCHER_FLAG] = flag


@contextmanager
def loading_unsharded() -> Iterator[None]:
    """Inside, models are loaded whole on every rank, whatever shards the policy.

    Under ZeRO-3 transformers would shard each of them.
    """
    with without_accelerate():
        if not hf_deepspeed.is_deepspeed_zero3_enabled():
            yield
            return
        config = hf_deepspeed._hf_deepspeed_config_weak_ref()  # pyright: ignore[reportOptionalCall]
        hf_deepspeed.unset_hf_deepspeed_config()
        try:
            yield
        finally:
            hf_deepspeed.set_hf_deepspeed_config(config)
