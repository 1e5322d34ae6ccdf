"""Replaces known modules of a model by faster or more exact computations during a pass.

On a CPU, linear layers, RMS norms, gated layers and rotary embeddings run in the compiled kernels (see `kernels`).
They give a token the same numbers when it is sampled and when it is trained. Norms are computed in float64: their
factor scales all numbers of a vector together, so its rounding does not average out in the products that follow. The
backward passes read memory fewer times than those that autograd composes.

On a CPU a decoder in bfloat16 keeps its weights in that type, and everything else is float32 (see
`computes_in_float32`): decode steps and training would round activations differently.

On a GPU, norms run in PyTorch's fused kernel: one launch, rounded once. transformers' modules take a launch for each
operation and keep the results of several for the backward pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad import kernels
from groupgrad.kernels import layers
from groupgrad.memory.oom_retry import STRETCH_TOKENS, is_long
from groupgrad.models.families import (
    CAUSAL_LMS,
    CENTRED_NORMS,
    GATED_NORMS,
    GROUPED_NORMS,
    MLPS,
    NORMS,
    is_transformers_class,
)
from groupgrad.models.shards import is_sharded
from groupgrad.models.unwrapping import is_prepared, unwrap
from groupgrad.scoring.attention import is_checkpointing

_LINEAR_FORWARD = nn.Linear.forward

_PLAIN_TENSORS: tuple[type, ...] = (torch.Tensor, nn.Parameter)
"""Tensor classes without behaviour of their own."""

_staying: WeakSet[nn.Module] = WeakSet()
"""Modules whose forward methods stay replaced until `restore_modules`."""

_compiled_decoders: WeakSet[nn.Module] = WeakSet()
"""Decoders that will be compiled, and compute in the type of their weights."""

_SILU = nn.SiLU()

_TOP_HOOKS = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
"""The hooks on saved tensors that are in force; None in torch releases that do not tell."""

ROTARY = "apply_rotary_pos_emb"
"""Name of the function of rotary embeddings in transformers' model files."""

_Compute = Callable[..., torch.Tensor | None]
"""A module and its inputs -> its output, or None for unsupported inputs."""


@contextmanager
def compiled_parts(model: nn.Module, *, stays: bool | None = None, is_dense: bool = False) -> Iterator[None]:
    """Replaces the forward methods of known modules inside `model`, as the head of this file describes.

    On CPUs float32 modules are replaced, and bfloat16 ones where `computes_in_float32`; on GPUs norms of any type.
    Without compiled kernels only norms are replaced on CPUs. With gradient checkpointing (or if `stays` is true) the
    modules stay replaced until `restore_modules`, because it computes layers again after the pass. Sharded and compiled
    models are left alone, and so are modules whose forward method was replaced by other code. CPU computations have no
    second derivatives. With `is_dense`, models of the gated delta rule keep their norms, so that a dense pass has the
    bits of transformers' own.
    """
    replaced: list[Any] = []
    files: list[Any] = []
    if stays is None:
        stays = torch.is_grad_enabled() and is_checkpointing(model)
    try:
        modules = list(model.modules())
        is_compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules)
        if not is_compiled and not is_sharded(model):
            has_kernels = any(p.device.type == "cpu" for p in model.parameters()) and kernels.library() is not None
            is_half = has_kernels and computes_in_float32(model) and not torch.is_autocast_enabled("cpu")
            for module in modules:
                compute = _replacement(module, has_kernels=has_kernels, is_dense=is_dense, is_half=is_half)
                if compute is not None:
                    replaced.append(module)
                    module.__dict__["forward"] = _Replaced(module, compute, stays)  # `setattr` searches for parameters
            if stays:
                _staying.update(replaced)
            if has_kernels:
                files = _rotary_files(modules)
        for file in files:
            setattr(file, ROTARY, _Rotary(getattr(file, ROTARY), stays))
        yield
    finally:
        for file in files:
            setattr(file, ROTARY, getattr(file, ROTARY).original)
        for module in [] if stays else replaced:
            module.__dict__.pop("forward", None)


def restore_modules(model: nn.Module) -> None:
    """Restores the forward methods of the modules inside `model`."""
    if not _staying:  # asked several times a step, mostly for nothing
        return
    for module in model.modules():
        if is_replaced(module):
            del module.forward
        _staying.discard(module)


def is_replaced(module: nn.Module) -> bool:
    """True if `compiled_parts` has replaced the module's forward method."""
    return isinstance(module.__dict__.get("forward"), _Replaced)


def computes_in_float32(model: nn.Module) -> bool:
    """True if `model` is a decoder in bfloat16 on a CPU that computes in float32 inside `compiled_parts`.

    All its layers in bfloat16 have to be ones that are replaced, and no other code may read their weights: plain
    layers of a known family, under LoRA with adapters in float32 at most. Other models compute as PyTorch does.
    """
    decoder = unwrap(model)
    decoder = decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder  # pyright: ignore
    if type(decoder).__name__ not in CAUSAL_LMS or not is_transformers_class(type(decoder)):
        return False
    if next(decoder.parameters()).dtype != torch.bfloat16:  # the embedding; asked several times a step
        return False
    if decoder in _compiled_decoders or kernels.library() is None or is_sharded(model):
        return False
    return all(_is_plain_or_half(p) for p in model.parameters()) and all(map(_computes_in_float32, model.modules()))


def compute_in_weights_type(model: nn.Module, is_compiled: bool) -> None:
    """Has the decoder inside `model` compute in the type of its weights from now on if it will be compiled."""
    decoder: Any = unwrap(model)
    decoder = decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder
    (_compiled_decoders.add if is_compiled else _compiled_decoders.discard)(decoder)


def _computes_in_float32(module: Any) -> bool:
    """True for a module of a decoder in bfloat16 that takes and gives float32 numbers inside `compiled_parts`."""
    kind = type(module)
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return False
    if "forward" in module.__dict__ and not (is_replaced(module) or is_prepared(module)):
        return False
    if kind.__module__ == "peft.tuners.lora.layer":  # without variants such as DoRA, which read the weight beneath
        adapters = (p for name in module.adapter_layer_names for p in getattr(module, name).parameters())
        return not getattr(module, "lora_variant", None) and all(p.dtype == torch.float32 for p in adapters)
    if kind.__module__.startswith("peft."):  # wrappers, whose modules are looked at too
        return (
            kind.__module__ in ("peft.peft_model", "peft.tuners.lora.model") or kind.__name__ == "ModulesToSaveWrapper"
        )
    if not kind.__module__.startswith(("torch.nn.", "transformers.")):
        return False
    is_half = any(p.dtype == torch.bfloat16 for p in module.parameters(recurse=False))
    return not is_half or _is_half_layer(module)


def as_trained(model: nn.Module) -> AbstractContextManager[None]:
    """Has calls of a decoder in bfloat16 compute in float32 where its training does; nothing changes for others."""
    return compiled_parts(model, stays=False) if computes_in_float32(model) else nullcontext()


def _is_half_layer(module: nn.Module) -> bool:
    """True for an embedding, a linear layer or a norm that `compiled_parts` replaces, or has replaced."""
    computations = (_embedding_in_float32, _linear, _norm)
    return is_replaced(module) or _replacement(module, has_kernels=True, is_dense=False, is_half=True) in computations


def is_silu(activation: Any) -> bool:
    """True for a module without hooks that computes x * sigmoid(x)."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation") and _is_untouched(activation)


def gate_activation(activation: Any) -> layers.Activation | None:
    """The name that the kernels of gates have for a module without hooks; None if they do not compute it."""
    if is_silu(activation):
        return "silu"
    # `act` may be another form of the same function, written in PyTorch's operations.
    is_gelu = type(activation).__name__ == "GELUTanh" and isinstance(activation.act, functools.partial)
    return "gelu_tanh" if is_gelu and _is_untouched(activation) else None


def is_squared_relu(activation: Any) -> bool:
    """True for a module without hooks that computes max(x, 0)^2."""
    return type(activation).__name__ == "ReLUSquaredActivation" and _is_untouched(activation)


def activation_of(mlp: Any) -> Any:
    """The activation of an MLP of a known family; LFM2's has no module for it."""
    return getattr(mlp, "act_fn", _SILU)


def _is_untouched(activation: Any) -> bool:
    return not _has_hooks(activation) and "forward" not in activation.__dict__


def _has_hooks(module: Any) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class _Replaced:
    """A replacement of a module's forward method; inputs that it does not support go to the original."""

    def __init__(self, module: Any, compute: _Compute, stays: bool):
        self._module, self._compute, self._stays = module, compute, stays

    def computes(self, compute: _Compute) -> bool:
        """True if `compute` is what replaces the method."""
        return self._compute is compute

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        module, output = self._module, None
        if len(named) < 2 and _is_ordinary_pass(self._stays):
            output = self._compute(module, *inputs, *named.values())
        if output is not None:
            return output
        return type(module).forward(module, *inputs, **named)


class _Rotary:
    """A replacement of a model file's rotary function; inputs that the kernels do not support go to the original."""

    def __init__(self, original: Callable[..., Any], has_checkpoints: bool):
        self.original, self._has_checkpoints = original, has_checkpoints

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        library = kernels.library()
        if library is None or named or not _supports_rotary(inputs) or not self._is_ordinary():
            return self.original(*inputs, **named)
        query, key, cosines, sines = inputs
        return tuple(layers.rotated(library, x, cosines, sines) for x in (query, key))

    def _is_ordinary(self) -> bool:
        # Torch before 2.7 does not tell whether there are hooks; checkpointing has some.
        return _is_ordinary_pass() and not (self._has_checkpoints and _TOP_HOOKS is None)


def _supports_rotary(inputs: tuple[Any, ...]) -> bool:
    """True for queries and keys (1, H, T, D) of flat tokens with cosines and sines (1, T, D)."""
    if len(inputs) != 4 or not all(map(_is_plain_input, inputs)):
        return False
    query, key, cosines, sines = inputs
    shape = (1, *query.shape[-2:])
    return query.dim() == key.dim() == 4 and len(query) == 1 and cosines.shape == sines.shape == shape


def _rotary_files(modules: list[nn.Module]) -> list[Any]:
    """The model files of the decoders in `modules` that define a rotary function themselves."""
    names = {type(m).__module__ for m in modules if type(m).__name__ in CAUSAL_LMS and is_transformers_class(type(m))}
    files = [sys.modules[name] for name in names]
    return [file for file in files if getattr(getattr(file, ROTARY, None), "__module__", None) == file.__name__]


def _replacement(module: nn.Module, *, has_kernels: bool, is_dense: bool, is_half: bool) -> _Compute | None:
    """The computation that replaces a module's forward method, if any. It returns None for unsupported inputs."""
    if "forward" in module.__dict__:
        return None
    kind = type(module)
    if kind is nn.Embedding:
        return _embedding_in_float32 if is_half else None
    if kind is nn.Linear:
        is_plain = nn.Linear.forward is _LINEAR_FORWARD and _is_plain_parameter(module.weight, is_half=is_half)
        return _linear if has_kernels and is_plain else None
    if not is_transformers_class(kind) or kind.forward.__module__ != kind.__module__:
        return None
    if kind.__name__ in NORMS:
        weight: Any = module._parameters.get("weight")
        if type(weight) in _PLAIN_TENSORS and weight.is_cuda:
            return _norm_on_gpu if weight.numel() else None
        return _norm if _is_plain_parameter(weight, is_half=is_half) else None
    if kind.__name__ in GROUPED_NORMS:
        return _grouped_norm if has_kernels and _is_plain_parameter(module.weight) else None
    if kind.__name__ in CENTRED_NORMS | GATED_NORMS:
        if is_dense or not has_kernels or not _is_plain_parameter(module.weight):
            return None
        return _centred_norm if kind.__name__ in CENTRED_NORMS else _gated_norm
    return _gated if has_kernels and kind.__name__ in MLPS and gate_activation(activation_of(module)) else None


def _is_plain_parameter(weight: Any, *, is_half: bool = False) -> bool:
    """True for a contiguous parameter on a CPU in float32, or with `is_half` in bfloat16."""
    is_plain = _is_plain_or_half(weight) if is_half else _is_plain(weight)
    return type(weight) is nn.Parameter and is_plain and weight.numel() > 0 and weight.is_contiguous()


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in _PLAIN_TENSORS and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_plain_or_half(tensor: Any) -> bool:
    is_known = type(tensor) in _PLAIN_TENSORS and tensor.dtype in (torch.float32, torch.bfloat16)
    return is_known and tensor.device.type == "cpu"


def _is_plain_input(input: torch.Tensor) -> bool:
    return _is_plain(input) and not torch.is_autocast_enabled("cpu")


def _input_of(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The input of a layer in bfloat16 as float32, also where a hook or an adapter has rounded it."""
    return input.float() if weight.dtype == torch.bfloat16 and _is_plain_or_half(input) else input


def _embedding_in_float32(module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor | None:
    return None if torch.is_autocast_enabled("cpu") else nn.Embedding.forward(module, ids).float()


def _is_ordinary_pass(stays: bool = False) -> bool:
    """True if a replaced module may compute this call itself: no hooks on saved tensors.

    Checkpointing sets such hooks, and a layer that it computes again has to save the same tensors as before. Modules
    that stay replaced after the pass (`stays`) do, so hooks do not matter to them.
    """
    has_hooks = _TOP_HOOKS is not None and _TOP_HOOKS(True) is not None
    return stays or not has_hooks


def _linear(module: nn.Linear, input: torch.Tensor) -> torch.Tensor | None:
    library, weight, bias = kernels.library(), module.weight, module.bias
    input = _input_of(input, weight)
    fits = _is_plain_input(input) and _is_plain_or_half(weight) and (bias is None or _is_plain_or_half(bias))
    if library is None or not fits or input.shape[-1:] != weight.shape[1:]:
        return None
    return layers.linear(library, input, weight, bias)


def _centred_norm(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    library, weight = kernels.library(), module.weight
    if library is None or not _is_plain_input(input) or not _is_plain(weight) or input.shape[-1:] != weight.shape:
        return None
    return layers.norm(library, input, 1.0 + weight, module.eps)


def _gated_norm(module: Any, input: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
    library = kernels.library()
    if library is None or not _is_plain(gate) or gate.shape != input.shape:
        return None
    normal = _norm(module, input)
    return None if normal is None else layers.gated(library, gate, normal)


def _grouped_norm(module: Any, input: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
    library, weight = kernels.library(), module.weight
    if library is None or not _is_plain_input(input) or not _is_plain(weight) or not _is_plain(gate):
        return None
    if gate.shape != input.shape or input.shape[-1:] != weight.shape:
        return None
    gated, width = layers.gated(library, gate, input), module.group_size
    if width == len(weight):
        return layers.norm(library, gated, weight, module.variance_epsilon)
    groups = layers.norm(library, gated.unflatten(-1, (-1, width)), weight.new_ones(width), module.variance_epsilon)
    return groups.flatten(-2) * weight


def _norm(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    weight = module.weight
    input = _input_of(input, weight)
    if not _is_plain_input(input) or not _is_plain_or_half(weight) or input.shape[-1:] != weight.shape:
        return None
    return layers.norm(kernels.library(), input, weight.float(), module.variance_epsilon)


def _projections(module: Any) -> tuple[Any, Any, Any]:
    """The projections gate, up and down of a gated MLP."""
    if hasattr(module, "w1"):  # of LFM2
        return module.w1, module.w3, module.w2
    return module.gate_proj, module.up_proj, module.down_proj


def _is_linear(module: Any) -> bool:
    """True for a linear layer that `_linear` computes, without hooks."""
    replaced = module.__dict__.get("forward")
    is_ours = isinstance(replaced, _Replaced) and replaced.computes(_linear) and not _has_hooks(module)
    return is_ours and _is_plain_or_half(module.weight) and (module.bias is None or _is_plain_or_half(module.bias))


def _gated(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    library = kernels.library()
    (gate_of, up_of, down_of), activation = _projections(module), activation_of(module)
    name = gate_activation(activation)
    if library is None or not _is_plain_input(input) or name is None:
        return None
    # Tensors of the inner width stay small at any length of a row. A gradient needs all of them.
    is_cut = not torch.is_grad_enabled() and input.dim() > 1 and is_long(input)
    parts = input.split(STRETCH_TOKENS, dim=-2) if is_cut else (input,)
    outputs = []
    for part in parts:
        gate, up = gate_of(part), up_of(part)
        if not (_is_plain(gate) and _is_plain(up) and gate.shape == up.shape):
            outputs.append(down_of(activation(gate) * up))
        elif _is_linear(down_of) and down_of.weight.shape[1:] == gate.shape[-1:]:
            outputs.append(layers.gated_linear(library, gate, up, down_of.weight, down_of.bias, name))
        else:
            outputs.append(down_of(layers.gated(library, gate, up, name)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)


def _norm_on_gpu(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    weight = module.weight
    is_tensor = type(input) in _PLAIN_TENSORS and input.is_cuda
    if not is_tensor or input.shape[-1:] != weight.shape:
        return None
    # The module's result has the wider of both types; under autocast the fused norm's would be float32.
    if input.dtype in (torch.bfloat16, torch.float16) and weight.dtype == torch.float32:
        input = input.float()
    if input.dtype != weight.dtype:
        return None
    with torch.autocast("cuda", enabled=False):
        return F.rms_norm(input, weight.shape, weight, module.variance_epsilon)
