"""Shards a model over ranks by FSDP 2 (`fully_shard`): one unit for each decoder layer, and one for all else.

The outer unit (embeddings, last norm, head) is gathered throughout a pass and its backward pass, a layer only while it
computes. So the output head's weight is there when the tiled head scores, forward and backward. accelerate is left out
of this: its FSDP refuses CPUs, and one way of sharding serves all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers.utils import ModelOutput

from groupgrad import dist
from groupgrad.errors import UnavailableError
from groupgrad.models.quantized import is_packed
from groupgrad.models.shards import CPU_OFFLOAD, is_fully_sharded, is_shard, local_part, unsharded_classes
from groupgrad.models.unwrapping import base_model, is_multimodal, parameters_replaced

_torch_fsdp: Any = torch_fsdp
_COMPUTE_DTYPE = "_groupgrad_compute_dtype"


@dataclass(slots=True, frozen=True)
class FSDPOptions:
    """Options for sharding a model."""

    layer_classes: tuple[str, ...] = ()
    """Class names of the modules that are units of their own; empty for the model's decoder layers."""
    reshard_after_forward: bool = True
    """Free a layer after its forward pass and gather it again for its backward pass."""
    compute_dtype: torch.dtype | None = None
    """Parameters are gathered in this dtype, and gradients are reduced in float32; None for the parameters' own."""
    cpu_offload: bool = False
    """Shards, their gradients and the optimizer are in host memory; a unit is on the device while it computes."""


def shard(model: Any, options: FSDPOptions, device: torch.device) -> None:
    """Shards `model` in place, with rank 0's weights, and moves it to `device`. Collective.

    With `cpu_offload` the shards stay in host memory. The model gets the class `FSDP<its class>`. UnavailableError for
    a model that cannot be sharded so.
    """
    layers = decoder_layers(model, options.layer_classes)
    _check(model)
    dist.broadcast_module(model, device=device)
    mesh = torch.distributed.init_device_mesh(device.type, (dist.world_size(),))
    policy = _torch_fsdp.MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=torch.float32)
    fully_shard = partial(_torch_fsdp.fully_shard, mesh=mesh, mp_policy=policy)
    if options.cpu_offload:
        fully_shard = partial(fully_shard, offload_policy=_torch_fsdp.CPUOffloadPolicy(pin_memory=device.type != "cpu"))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward)
    if is_multimodal(model):
        model.register_forward_hook(_without_encoder_outputs)  # before the hook of FSDP
    fully_shard(model, reshard_after_forward=False)
    setattr(model, _COMPUTE_DTYPE, options.compute_dtype)
    setattr(model, CPU_OFFLOAD, options.cpu_offload)


def _without_encoder_outputs(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """The output without those of encoders, which transformers returns from 5.24 on.

    FSDP gathers weights where a gradient reaches an output of the model. An encoder's output is there on ranks with
    images alone, so that these would gather once more than the others, and all would wait for ever.
    """
    if not isinstance(output, ModelOutput):
        return output
    kept = {name: value for name, value in output.items() if name not in ("image_outputs", "video_outputs")}
    return output if len(kept) == len(output) else type(output)(**kept)


def decoder_layers(model: Any, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """The modules of these classes, by default the model's decoder layers, without those inside another.

    A vision tower is no part of them: a rank whose rows have no images does not run it, and could not take part when
    the others gather its layers. UnavailableError if there are none.
    """
    inner: Any = base_model(model)
    names = set(class_names or getattr(inner, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    inside: set[int] = set()
    for module in (_text_decoder(model) if is_multimodal(model) else model).modules():
        if type(module).__name__ in names and id(module) not in inside:
            layers.append(module)
            inside.update(id(part) for part in module.modules())
    if not layers:
        raise UnavailableError(
            f"{type(inner).__name__} has no module of the classes {', '.join(sorted(names)) or '(none are named)'}, so "
            "FSDP cannot tell its decoder layers; name their class in fsdp_config, "
            "{'transformer_layer_cls_to_wrap': [...]}"
        )
    return layers


def zero_of_vision_tower(model: nn.Module) -> torch.Tensor | None:
    """0, differentiable in all trained weights outside of the text decoder and the head of a sharded model.

    Added to a loss it gives them a gradient in every pass, also without images, since the ranks reduce the gradients of
    all of them together. To be made right after a forward pass, while these weights are gathered. None for other
    models, and where nothing is trained.
    """
    if not torch.is_grad_enabled() or not is_fully_sharded(model) or not is_multimodal(model):
        return None
    parts: list[Any] = [_text_decoder(model), base_model(model).get_output_embeddings()]
    text = {id(parameter) for part in parts for parameter in part.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in text]
    return 0.0 * sum((parameter.sum() for parameter in others), start=torch.zeros(()))


def _text_decoder(model: nn.Module) -> nn.Module:
    inner: Any = base_model(model)
    return inner.get_decoder()


@torch.no_grad()
def clip_offloaded(model: nn.Module, max_norm: float, device: torch.device) -> torch.Tensor:
    """The norm of the gradient of an offloaded model, which is scaled down to `max_norm` if it is larger. Collective.

    The ranks' backend need not serve host memory, so their squares are summed on `device`.
    """
    gradients = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    square = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().to(device)
    dist.sum_tensor(square)
    norm = square.sqrt()
    scale = float(max_norm / (norm + 1e-6))
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


def reshard(model: nn.Module) -> None:
    """Frees what is gathered of a model; a pass without backward leaves the outer unit gathered. Not a collective."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # pyright: ignore[reportCallIssue]


@contextmanager
def whole_parameters(
    module: nn.Module, *, dtype: torch.dtype | None = None, keep_changes: bool = False
) -> Iterator[None]:
    """Replaces the shards of `module` by whole parameters inside the context. Collective on entry.

    `dtype` converts floating-point parameters. With `keep_changes` each rank's shard is cut at the end from rank 0's
    parameters, which is a collective too; otherwise the parameters must not be changed.
    """
    reshard(module)
    shards = [parameter for parameter in module.parameters() if is_shard(parameter)]
    whole = {id(parameter): _gathered(parameter, dtype) for parameter in shards}
    hooks = [part._load_state_dict_post_hooks for part in module.modules()]
    load_hooks = [dict(of_module) for of_module in hooks]
    try:
        for of_module in hooks:  # FSDP's would look for shards in what is loaded
            for key in [key for key, hook in of_module.items() if is_hook(hook)]:
                del of_module[key]
        with parameters_replaced(module.modules(), whole):
            yield
        for parameter in shards if keep_changes else ():
            _take_part(parameter, whole[id(parameter)])
    finally:
        for of_module, before in zip(hooks, load_hooks):
            of_module.clear()
            of_module.update(before)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside, every module of `model` has its own class and whole parameters, in the dtype that passes compute in.

    Collective on entry.
    """
    with whole_parameters(model, dtype=getattr(model, _COMPUTE_DTYPE, None)), unsharded_classes(model):
        yield


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights of a sharded model on the CPU of the main process, tied ones as one tensor; empty elsewhere.

    Collective.
    """
    reshard(model)
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            whole = _whole(tensor)
            seen[id(tensor)] = whole.cpu() if dist.is_main() else whole.new_empty(0)
        found[name] = seen[id(tensor)]
    return found if dist.is_main() else {}


def is_hook(hook: Any) -> bool:
    """True for a hook of FSDP."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _check(model: Any) -> None:
    """UnavailableError for a model whose gradients FSDP could not reduce, or whose weights it could not cut."""
    base, parameters = base_model(model), list(model.parameters())
    name = f"{type(base).__name__} under FSDP"
    if any(map(is_packed, parameters)):
        raise UnavailableError(f"{name}: quantized weights are not sharded; load it without quantization")
    in_embedding = {id(parameter) for parameter in base.get_input_embeddings().parameters()}
    in_head = {id(parameter) for parameter in base.get_output_embeddings().parameters()} - in_embedding
    if not any(parameter.requires_grad and id(parameter) not in in_head for parameter in parameters):
        raise UnavailableError(
            f"{name}: nothing below the output head is trained, so no backward pass reaches the layers whose hooks "
            "reduce gradients; train a layer too, or leave fsdp unset"
        )


def _gathered(parameter: Any, dtype: torch.dtype | None) -> nn.Parameter:
    values = parameter.detach()
    if dtype is not None and values.is_floating_point():
        values = values.to(dtype)
    return nn.Parameter(_whole(values), requires_grad=parameter.requires_grad)


def _whole(parameter: Any) -> torch.Tensor:
    """The values of a whole parameter, gathered on the device that computes if it is in shards. Collective."""
    values = parameter.detach()
    # Shards that are offloaded are in host memory, which the ranks' backend need not serve.
    return values.to(values.device_mesh.device_type).full_tensor() if is_shard(values) else values


@torch.no_grad()
def _take_part(parameter: Any, whole: torch.Tensor) -> None:
    """Copies this rank's part of rank 0's `whole` into a shard. Collective."""
    part = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements)
    local_part(parameter).copy_(part.to_local())
