"""Models whose parameters are spread over ranks (DeepSpeed ZeRO-3): when they are whole, and how a pass finds them so.

In training ZeRO's own hooks gather a module's parameters for its forward and for its backward pass. A pass through
them is a collective, so every rank makes equally many, with the same modules in the same order; what a rank has nothing
to do for, it does with a made-up token (`forward.py`). Outside of training there may be no hooks yet, and sampling
wants whole parameters throughout: `gather_per_module` and `gather_all` are for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.integrations import deepspeed as hf_deepspeed


def is_sharded(model: nn.Module) -> bool:
    """True if no rank has whole parameters (ZeRO-3, FSDP 2)."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor") for parameter in model.parameters())


def num_parameters(model: nn.Module) -> int:
    """Numbers in the parameters of `model`, those on other ranks too."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in model.parameters())


@contextmanager
def gathered(parameters: Iterable[Any]) -> Iterator[None]:
    """Collective at its beginning. The parameters whole inside, which must not be changed; sharded again afterwards."""
    absent = [parameter for parameter in parameters if _is_absent(parameter)]
    if not absent:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(absent):
        yield


@contextmanager
def gather_all(model: nn.Module) -> Iterator[None]:
    """Collective at its beginning. All of `model` whole on every rank inside, to be run by each as often as it likes.

    Takes the memory of all parameters. Nothing may be trained inside. A model that is whole is left as it is.
    """
    if not any(_is_absent(parameter) for parameter in model.parameters()):
        yield
        return
    with gathered(model.parameters()), _unhooked(model):
        yield


@contextmanager
def gather_per_module(model: nn.Module) -> Iterator[None]:
    """Inside, passes of `model` without a gradient find its parameters, also before training has begun. Each such pass
    is a collective if they are sharded.

    Without ZeRO's own hooks each module's parameters are gathered for the time that it computes, so that no rank needs
    memory for more than the largest module beside its share.
    """
    if _has_hooks(model) or not any(_is_absent(parameter) for parameter in model.parameters()):
        yield
        return
    brought: dict[int, Any] = {}

    def bring(module: nn.Module, _inputs: Any) -> None:
        absent = [parameter for parameter in module.parameters(recurse=False) if _is_absent(parameter)]
        if absent:
            absent[0].all_gather(param_list=absent)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            brought.update({id(parameter): parameter for parameter in absent})

    def release(module: nn.Module, _inputs: Any, _output: Any) -> None:
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in brought]
        _partition([brought.pop(id(parameter)) for parameter in own])

    modules = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(bring) for module in modules]
    handles += [module.register_forward_hook(release) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _partition(list(brought.values()))


@contextmanager
def loading_unsharded() -> Iterator[None]:
    """Inside, models that are loaded are whole on every rank; under ZeRO-3 transformers would spread each of them."""
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
    """The weights of a sharded model as they are now, this rank's part of them, to be put in place of later ones.

    Takes a rank's part of the weights in memory.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._kept = {name: p.ds_tensor.detach().clone() for name, p in _sharded_parameters(model)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with these weights; afterwards it has its own again, to the bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        parameters = dict(_sharded_parameters(self._model))
        # Small ones may stay whole between passes, and would be used as they are.
        _partition([parameter for parameter in parameters.values() if not _is_absent(parameter)])
        for name, parameter in parameters.items():
            other, kept = parameter.ds_tensor.detach().clone(), self._kept[name]
            parameter.ds_tensor.data.copy_(kept)
            kept.copy_(other)


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if hasattr(parameter, "ds_id"))


def _is_absent(parameter: Any) -> bool:
    """True if this rank has only its part of the parameter now."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def _partition(parameters: list[Any]) -> None:
    """Local. Drop what other ranks hold."""
    if parameters:
        parameters[0].partition(param_list=parameters, has_been_updated=False)


def _has_hooks(model: nn.Module) -> bool:
    return any(_is_of_zero(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def _is_of_zero(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


@contextmanager
def _unhooked(model: nn.Module) -> Iterator[None]:
    """The model without ZeRO's hooks, which would drop what was gathered; they are put back where they were."""
    kept = [(hooks, dict(hooks)) for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    for hooks, before in kept:
        for key, hook in before.items():
            if _is_of_zero(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            stayed = {key: hook for key, hook in hooks.items() if key in before}
            added = {key: hook for key, hook in hooks.items() if key not in before}
            ours = {key: hook for key, hook in before.items() if key in stayed or _is_of_zero(hook)}
            hooks.clear()
            hooks.update({**ours, **added})
