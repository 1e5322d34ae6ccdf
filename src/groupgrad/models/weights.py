"""The policy's weights and adapters under the names that `save_pretrained` writes, for another process to load.

With sharded parameters (ZeRO-3, FSDP 2) every iteration is a collective, so all ranks must iterate to the end.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from groupgrad.models.adapters import active_adapters, is_adapted
from groupgrad.models.quantized import is_packed
from groupgrad.models.shards import gathered, is_shard, is_sharded, is_zero_shard, unsharded_classes
from groupgrad.models.unwrapping import base_model, unwrap

# Wrappers that insert their own name into the names of parameters.
_WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(slots=True, frozen=True)
class _Source:
    """A tensor of the model with its name in the checkpoint."""

    name: str
    tensor: torch.Tensor
    layer: Any = None
    """The adapted layer around the tensor's layer; None without an adapter."""
    inner_name: str = ""
    """The tensor's name in the layer under the adapter."""


@torch.no_grad()  # holds while the generator runs, not in the caller's loop body
def checkpoint_weights(
    model: nn.Module, *, merge: bool = True, shapes_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor of all weights, layer by layer, tied ones once, adapters merged. Collective if sharded.

    Names and layouts are those of `save_pretrained`. Adapters are merged in float32 into a copy of one layer at a time,
    and the training weights stay as they are. Without `merge` adapters are left out. With `shapes_only` the tensors are
    on the meta device, in the same order and shapes; nothing is gathered or merged.

    ValueError for adapters that cannot be merged (prompt tuning, quantized layers, tied weights).
    """
    from transformers.core_model_loading import revert_weight_conversion

    inner: Any = unwrap(model)
    base = base_model(inner)
    for _, sources in groupby(_sources(inner, base), key=lambda source: _layer_name(source.name)):
        tensors: dict[str, torch.Tensor] = {}
        merged: dict[int, dict[str, torch.Tensor]] = {}
        for source in sources:
            if shapes_only:
                tensors[source.name] = _empty(source.tensor)
            else:
                tensors[source.name] = _merged_value(source, merged) if merge else _unsharded(source.tensor)
        if hasattr(base, "config"):  # in memory transformers fuses experts, say
            with unsharded_classes(base):
                tensors = revert_weight_conversion(base, tensors)
        for name, tensor in tensors.items():
            yield name, tensor.detach()


@dataclass(slots=True, frozen=True)
class AdapterFiles:
    """An adapter as PEFT saves it."""

    config: dict[str, Any]
    """Content of `adapter_config.json`."""
    tensors: dict[str, torch.Tensor]
    """Content of `adapter_model.safetensors`."""


def adapter_files(model: nn.Module) -> AdapterFiles:
    """The active LoRA adapter. ValueError for an adapter with an `adapter_obstacle`."""
    from peft import get_peft_model_state_dict

    problem = adapter_obstacle(model)
    if problem is not None:
        raise ValueError(f"{problem}; send the weights instead, adapters merged")
    inner: Any = unwrap(model)
    name = _active_adapter(inner)
    config = inner.peft_config[name]
    tensors = {key: _unsharded(tensor) for key, tensor in get_peft_model_state_dict(inner, adapter_name=name).items()}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return AdapterFiles({**plain, "inference_mode": True}, tensors)


def adapter_obstacle(model: nn.Module) -> str | None:
    """The reason why vLLM cannot load the adapter without the model; None for one plain LoRA adapter."""
    inner: Any = unwrap(model)
    if not is_adapted(inner):
        return f"{type(inner).__name__} has no adapter"
    from peft import PeftType

    config = inner.peft_config[_active_adapter(inner)]
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
    config = inner.peft_config[_active_adapter(inner)]
    return max([int(config.r), *(int(rank) for rank in (getattr(config, "rank_pattern", None) or {}).values())])


def _sources(inner: Any, base: Any) -> Iterator[_Source]:
    adapted = _adapted_modules(inner, base)
    seen: set[int] = set()
    adapted_tensors: set[int] = set()
    for key, tensor in base.state_dict(keep_vars=True).items():
        source = _source(plain_name(key), tensor, adapted)
        if source is None:
            continue
        if id(tensor) in seen:
            if source.layer is not None or id(tensor) in adapted_tensors:
                raise ValueError(
                    f"{source.name} is tied to another weight, and an adapter changes one of the two; leave it out of "
                    "target_modules, or use a model with untied embeddings"
                )
            continue
        seen.add(id(tensor))
        if source.layer is not None:
            adapted_tensors.add(id(tensor))
        yield source


def _source(name: str, tensor: torch.Tensor, adapted: dict[str, tuple[str, Any]]) -> _Source | None:
    """None for tensors that a checkpoint lacks: adapters' own, and originals of modules that train as a whole."""
    for prefix, (saved, layer) in adapted.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            if not rest.startswith(saved):
                return None
            rest = rest.removeprefix(saved)
            return _Source(prefix + rest, tensor, layer, rest)
    return _Source(name, tensor)


def _adapted_modules(inner: Any, base: Any) -> dict[str, tuple[str, Any]]:
    """Name prefix of each module that PEFT wraps -> prefix, in it, of the saved weights, and the layer to merge."""
    if not is_adapted(inner):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if any(getattr(config, "is_prompt_learning", False) for config in inner.peft_config.values()):
        raise ValueError("the adapter learns a prompt, which no weight can stand for; use LoRA with vLLM")
    adapted: dict[str, tuple[str, Any]] = {}
    for key, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            adapted[plain_name(key + ".")] = ("base_layer.", module)
        elif isinstance(module, ModulesToSaveWrapper):
            name = _active_adapter(inner)
            is_saved = name in module.modules_to_save
            adapted[plain_name(key + ".")] = (f"modules_to_save.{name}." if is_saved else "original_module.", None)
    return adapted


def _active_adapter(inner: Any) -> str:
    names = active_adapters(inner)
    if len(names) != 1:
        raise ValueError(f"{len(names)} adapters are active ({', '.join(names)}); activate the one that is trained")
    return names[0]


def _merged_value(source: _Source, merged: dict[int, dict[str, torch.Tensor]]) -> torch.Tensor:
    """The tensor with the adapter merged into it; `merged` caches the tensors of merged layers."""
    if source.layer is None:
        return _unsharded(source.tensor)
    if id(source.layer) not in merged:
        merged[id(source.layer)] = _merge_layer(source)
    return merged[id(source.layer)][source.inner_name].to(source.tensor.dtype)


def _merge_layer(source: _Source) -> dict[str, torch.Tensor]:
    """Tensors of the layer under the adapter, in float32, with the active adapter merged."""
    layer = source.layer
    if is_packed(source.tensor):
        raise ValueError(f"{source.name} is quantized: an adapter cannot be merged into it; send the adapter alone")
    with gathered(layer):
        clone = copy.deepcopy(layer).float()
        if not clone.merged:
            clone.merge()
        return dict(clone.get_base_layer().state_dict())


def _layer_name(name: str) -> str:
    """The layer of a tensor. The tensors of one layer are converted to the checkpoint's layout together."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name


def plain_name(name: str) -> str:
    """The name of a parameter without those that wrappers insert into it."""
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def _empty(tensor: Any) -> torch.Tensor:
    # A parameter sharded by DeepSpeed has empty data and its shape in `ds_shape`.
    return torch.empty(tuple(getattr(tensor, "ds_shape", tensor.shape)), dtype=tensor.dtype, device="meta")


def _unsharded(tensor: Any) -> torch.Tensor:
    if is_shard(tensor):
        return tensor.full_tensor().detach()
    if is_zero_shard(tensor):
        from groupgrad.integrations.sharding import zero3

        with zero3.gathered([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


def weights_digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """16 hexadecimal digits of the bits of named parameters.

    Each tensor enters by the sum of its bits, read as 64-bit integers. Every change of one number changes the digest;
    two changes that cancel each other do not.
    """
    named = [(name, parameter.detach()) for name, parameter in parameters]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for _, data in named:
        sums.setdefault(data.device, []).append(_sum_of_bits(data))
    values = {device: iter(torch.stack(found).tolist()) for device, found in sums.items()}  # one wait each
    lines = [f"{name} {data.dtype} {tuple(data.shape)} {next(values[data.device])}\n" for name, data in named]
    return hashlib.sha1("".join(lines).encode()).hexdigest()[:16]


def _sum_of_bits(data: torch.Tensor) -> torch.Tensor:
    flat = data.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # only an aligned storage can be read as longer integers
        flat = flat.clone()
    if missing := -flat.numel() % 8:
        whole = flat.numel() - 8 + missing
        last = torch.cat([flat[whole:], flat.new_zeros(missing)])  # a number of several bytes counts as a whole
        return flat[:whole].view(torch.int64).sum() + last.view(torch.int64).sum()
    return flat.view(torch.int64).sum()
