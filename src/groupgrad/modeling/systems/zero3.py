"""Gathers the parameters of models that DeepSpeed ZeRO-3 shards over ranks.

In training ZeRO's own hooks gather each module's parameters for its forward and its backward pass. Such a pass is a
collective, so all ranks must make the same number of passes; a rank without rows runs one dummy token (`forward.py`).
Before training there are no hooks yet, and sampling needs all parameters throughout: `gather_per_module` and
`gather_all` serve these cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.integrations import deepspeed as hf_deepspeed


def is_sharded(model: nn.Module) -> bool:
    """True if parameters are sharded over ranks (ZeRO-3, FSDP 2)."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor") for parameter in model.parameters())


def num_parameters(model: nn.Module) -> int:
    """Number of parameters of `model`, shards of other ranks included."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())


@contextmanager
def gathered(parameters: Iterable[Any]) -> Iterator[None]:
    """Gathers the parameters, which must not be changed inside; they are sharded again afterwards. Collective."""
    absent = [parameter for parameter in parameters if _is_absent(parameter)]
    if not absent:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(absent):
        yield


@contextmanager
def gather_all(model: nn.Module) -> Iterator[None]:
    """Gathers all parameters of `model` on every rank; inside, its passes are not collectives. Collective on entry.

    Needs memory for all parameters. Nothing may be trained inside. An unsharded model is left as it is.
    """
    if not any(_is_absent(parameter) for parameter in model.parameters()):
        yield
        return
    with gathered(model.parameters()), _unhooked(model):
        yield


@contextmanager
def gather_per_module(model: nn.Module) -> Iterator[None]:
    """Inside, passes of `model` without gradient gather its parameters, before training too. Each pass is a collective.

    Without ZeRO's own hooks each module's parameters are gathered while it computes, so a rank needs memory for its
    shards and the largest module.
    """
    has_hooks = any(_is_zero_hook(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())
    if has_hooks or not any(_is_absent(parameter) for parameter in model.parameters()):
        yield
        return
    gathered_now: dict[int, Any] = {}

    def gather(module: nn.Module, _inputs: Any) -> None:
        absent = [parameter for parameter in module.parameters(recurse=False) if _is_absent(parameter)]
        if absent:
            absent[0].all_gather(param_list=absent)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            gathered_now.update({id(parameter): parameter for parameter in absent})

    def release(module: nn.Module, _inputs: Any, _output: Any) -> None:
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in gathered_now]
        _partition([gathered_now.pop(id(parameter)) for parameter in own])

    modules = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(gather) for module in modules]
    handles += [module.register_forward_hook(release) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _partition(list(gathered_now.values()))


@contextmanager
def loading_unsharded() -> Iterator[None]:
    """Inside, models are loaded unsharded on every rank; under ZeRO-3 transformers would shard each of them."""
    if not hf_deepspeed.is_deepspeed_zero3_enabled():
        yield
        return
    config = hf_deepspeed._hf_deepspeed_config_weak_ref()  # pyright: ignore[reportOptionalCall]
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed.set_hf_deepspeed_config(config)


class ShardSnapshot:
    """A copy of this rank's shards of a model's current weights."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._shards = {name: p.ds_tensor.detach().clone() for name, p in _sharded_parameters(model)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the copied weights; afterwards its own are restored bitwise."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        parameters = dict(_sharded_parameters(self._model))
        # ZeRO may keep small parameters gathered between passes and would use them instead of the shards.
        _partition([parameter for parameter in parameters.values() if not _is_absent(parameter)])
        for name, parameter in parameters.items():
            current = parameter.ds_tensor.detach().clone()
            parameter.ds_tensor.data.copy_(self._shards[name])
            self._shards[name].copy_(current)


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if hasattr(parameter, "ds_id"))


def _is_absent(parameter: Any) -> bool:
    """True if this rank currently has only its shard of the parameter."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def _partition(parameters: list[Any]) -> None:
    """Frees the shards of other ranks. Not a collective."""
    if parameters:
        parameters[0].partition(param_list=parameters, has_been_updated=False)


def _is_zero_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


@contextmanager
def _unhooked(model: nn.Module) -> Iterator[None]:
    """Removes ZeRO's hooks, which would free gathered parameters, and restores them in their old order afterwards."""
    saved = [(hooks, dict(hooks)) for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    for hooks, before in saved:
        for key, hook in before.items():
            if _is_zero_hook(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in saved:
            added = {key: hook for key, hook in hooks.items() if key not in before}
            restored = {key: hook for key, hook in before.items() if key in hooks or _is_zero_hook(hook)}
            hooks.clear()
            hooks.update({**restored, **added})
