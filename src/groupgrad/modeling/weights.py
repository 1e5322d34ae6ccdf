"""The policy's weights as another program loads them: by the names of a checkpoint, without wrappers and adapters.

Everything here is a collective where parameters are sharded over ranks (ZeRO-3, FSDP 2): all ranks iterate to the end.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from groupgrad.modeling.adapters import is_adapted
from groupgrad.modeling.quantized import is_packed
from groupgrad.modeling.scoring.forward import unwrap
from groupgrad.modeling.systems.zero3 import gathered, is_sharded

# Wrappers that put their own name between two modules.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(slots=True, frozen=True)
class _Source:
    """Where a tensor of the checkpoint comes from."""

    name: str
    tensor: torch.Tensor
    layer: Any = None
    """The adapted layer whose base it belongs to; None if there is none."""
    inner_name: str = ""
    """Its name within that layer's base."""


@torch.no_grad()  # for each turn of its loop alone: who iterates may stop half way
def checkpoint_weights(
    model: nn.Module, *, merge: bool = True, shapes_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all weights, tied ones once, layer by layer, adapters merged; collective if they are sharded.

    Names and layouts are those that `save_pretrained` writes. Weights are merged in float32, in a copy of one layer at
    a time: the training weights are not touched. Without `merge` they are those below the adapter. With `shapes_only`
    the tensors are empty, on the meta device; their order, names and shapes are the same, and nothing is gathered or
    merged.

    ValueError for adapters that cannot be merged (prompt tuning, quantized layers, ties).
    """
    inner: Any = unwrap(model)
    base = inner.get_base_model() if is_adapted(inner) else inner
    for _, sources in groupby(_sources(inner, base), key=lambda source: _group(source.name)):
        made: dict[str, torch.Tensor] = {}
        merged: dict[int, dict[str, torch.Tensor]] = {}
        for source in sources:
            if shapes_only:
                made[source.name] = _shape(source.tensor)
            else:
                made[source.name] = _value(source, merged) if merge else _whole(source.tensor)
        for name, tensor in _as_saved(base, made).items():
            yield name, tensor.detach()


@contextmanager
def drained_checkpoint_weights(model: nn.Module, *, merge: bool = True) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """`checkpoint_weights`; where they are sharded, those not asked for are gathered at the end, also on errors.

    So a rank that fails does its share, and none of the others waits for it.
    """
    weights = checkpoint_weights(model, merge=merge)
    try:
        yield weights
    finally:
        if is_sharded(model):
            for _ in weights:
                pass


@dataclass(slots=True, frozen=True)
class AdapterFiles:
    """An adapter as PEFT saves it."""

    config: dict[str, Any]
    """Of `adapter_config.json`."""
    tensors: dict[str, torch.Tensor]
    """Of `adapter_model.safetensors`."""


def adapter_files(model: nn.Module) -> AdapterFiles:
    """The active LoRA adapter; collective if it is sharded. ValueError if it is of a kind that can only be merged."""
    from peft import get_peft_model_state_dict

    problem = adapter_obstacle(model)
    if problem is not None:
        raise ValueError(f"{problem}; send the weights instead, adapters merged")
    inner: Any = unwrap(model)
    (name,) = _active(inner)
    config = inner.peft_config[name]
    tensors = {key: _whole(tensor) for key, tensor in get_peft_model_state_dict(inner, adapter_name=name).items()}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return AdapterFiles({**plain, "inference_mode": True}, tensors)


def adapter_obstacle(model: nn.Module) -> str | None:
    """Why no adapter can be sent alone, in words; None for a model with one LoRA adapter of the plain kind."""
    inner: Any = unwrap(model)
    if not is_adapted(inner):
        return f"{type(inner).__name__} has no adapter"
    from peft import PeftType

    (name,) = _active(inner)
    config = inner.peft_config[name]
    if config.peft_type != PeftType.LORA:
        return f"the adapter is of the kind {config.peft_type.value}, which vLLM does not load"
    if config.modules_to_save:
        return f"the adapter trains whole modules (modules_to_save={list(config.modules_to_save)})"
    if getattr(config, "target_parameters", None):
        return f"the adapter changes parameters (target_parameters={list(config.target_parameters)})"
    if getattr(config, "use_dora", False) or getattr(config, "bias", "none") != "none":
        return "the adapter has DoRA or biases, which vLLM does not load"
    if is_sharded(model):
        return "the model is sharded (ZeRO-3, FSDP)"
    return None


def adapter_rank(model: nn.Module) -> int:
    """The largest rank in the active LoRA adapter."""
    inner: Any = unwrap(model)
    (name,) = _active(inner)
    config = inner.peft_config[name]
    return max([int(config.r), *(int(rank) for rank in (getattr(config, "rank_pattern", None) or {}).values())])


def _sources(inner: Any, base: Any) -> Iterator[_Source]:
    layers, saved = _adapted_modules(inner, base)
    seen: set[int] = set()
    tied_to_adapted: set[int] = set()
    for key, tensor in base.state_dict(keep_vars=True).items():
        source = _source(_plain(key), tensor, layers, saved)
        if source is None:
            continue
        if id(tensor) in seen:
            if source.layer is not None or id(tensor) in tied_to_adapted:
                raise ValueError(
                    f"{source.name} is tied to another weight, and an adapter changes one of the two; leave it out of "
                    "target_modules, or use a model with untied embeddings"
                )
            continue
        seen.add(id(tensor))
        if source.layer is not None:
            tied_to_adapted.add(id(tensor))
        yield source


def _source(name: str, tensor: torch.Tensor, layers: dict[str, Any], saved: dict[str, str]) -> _Source | None:
    """None for what is not part of the checkpoint: adapters' own tensors, originals of modules that are trained."""
    for prefix, layer in layers.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            if not rest.startswith("base_layer."):
                return None
            rest = rest.removeprefix("base_layer.")
            if rest.startswith(("base_layer.", "lora_")):
                raise ValueError(
                    f"{prefix.rstrip('.')} carries several adapters, one in another; they cannot be merged"
                )
            return _Source(prefix + rest, tensor, layer, rest)
    for prefix, chosen in saved.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return _Source(prefix + rest.removeprefix(chosen), tensor) if rest.startswith(chosen) else None
    if "_fsdp_wrapped_module." in name:
        raise ValueError(
            "the model is sharded by FSDP 1, whose weights have no names of their own; set fsdp_version: 2"
        )
    return _Source(name, tensor)


def _adapted_modules(inner: Any, base: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Layers with an adapter by the prefix of their names, and which part of a module trained as a whole is in use."""
    if not is_adapted(inner):
        return {}, {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if any(getattr(config, "is_prompt_learning", False) for config in inner.peft_config.values()):
        raise ValueError("the adapter learns a prompt, which no weight can stand for; use LoRA with vLLM")
    layers: dict[str, Any] = {}
    saved: dict[str, str] = {}
    for key, module in base.named_modules():
        prefix = _plain(key + ".")
        if isinstance(module, BaseTunerLayer):
            layers[prefix] = module
        elif isinstance(module, ModulesToSaveWrapper):
            name = next((name for name in _active(inner) if name in module.modules_to_save), None)
            saved[prefix] = "original_module." if name is None else f"modules_to_save.{name}."
    return layers, saved


def _active(inner: Any) -> list[str]:
    active = inner.active_adapters if hasattr(inner, "active_adapters") else [inner.active_adapter]
    names = [active] if isinstance(active, str) else list(active)
    if len(names) != 1:
        raise ValueError(f"{len(names)} adapters are active ({', '.join(names)}); activate the one that is trained")
    return names


def _value(source: _Source, merged: dict[int, dict[str, torch.Tensor]]) -> torch.Tensor:
    if source.layer is None:
        return _whole(source.tensor)
    if id(source.layer) not in merged:
        merged[id(source.layer)] = _merged(source)
    return merged[id(source.layer)][source.inner_name].to(source.tensor.dtype)


def _merged(source: _Source) -> dict[str, torch.Tensor]:
    """The tensors of an adapted layer's base, in float32, with the active adapter added."""
    layer = source.layer
    if is_packed(source.tensor):
        raise ValueError(f"{source.name} is quantized: an adapter cannot be merged into it; send the adapter alone")
    with gathered(layer.parameters()):
        own = copy.deepcopy(layer).float()
        if not own.merged:
            own.merge()
        return dict(own.get_base_layer().state_dict())


def _as_saved(base: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names and in the layout of checkpoints, where transformers computes with others (fused experts)."""
    from transformers.core_model_loading import revert_weight_conversion

    if not hasattr(base, "config"):
        return tensors
    return revert_weight_conversion(base, tensors)


def _group(name: str) -> str:
    """What is converted together: all that lies in one layer."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else name


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _shape(tensor: Any) -> torch.Tensor:
    # DeepSpeed keeps the shape of a sharded parameter beside its empty data.
    return torch.empty(tuple(getattr(tensor, "ds_shape", tensor.shape)), dtype=tensor.dtype, device="meta")


def _whole(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor().detach()
    if hasattr(tensor, "ds_id"):
        with gathered([tensor]):
            return tensor.detach().clone()
    return tensor.detach()
