"""Direct form of common decoders: computes a decode step in fewer calls than the model's modules need.

On a CPU a small model's step spends a fifth of its time between the matrix products: in module calls, and in norms and
rotary embeddings of many small operations each. The direct form applies the same formulas to the same weights in fewer
calls, or in one compiled call where all modules are plain and there is a compiler (see `kernels`). On a GPU it does so
in Triton's kernels (`triton_layers`). Decoders with recurrent layers have only the compiled form of the CPU. A probe
run of the model records which attention each layer computes. `engines/selection.py` compares what an engine samples by
it with a plain forward pass, and leaves it if that differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from groupgrad.engines.native.cpp_step import CompiledModel, compiled_model
from groupgrad.engines.native.decode_kernels import has_layer_kernels, obstacle_to_kernels
from groupgrad.engines.native.decoder_layers import NORMS, Decoder, read_decoder
from groupgrad.kernels import layers as kernel_layers
from groupgrad.kernels import library
from groupgrad.models.families import (
    CAUSAL_LMS,
    DECODERS,
    HYBRID_DECODERS,
    HYBRID_LMS,
    is_rms_norm,
    is_transformers_class,
)
from groupgrad.models.unwrapping import is_multimodal, is_prepared
from groupgrad.scoring.attention_layout import AttentionCall, AttentionLayout
from groupgrad.scoring.fused_modules import computes_in_float32, is_replaced, is_silu

_HARMLESS_HOOKS = (
    *("make_inputs_require_grads", "make_inputs_require_grad"),
    *("_module_forward_pre_hook", "_module_forward_post_hook"),
)
"""Names of hooks that change no number: those by which transformers and peft let embeddings require gradients, for
gradient checkpointing, and those of DeepSpeed's engine, which start and stop the timers of training passes."""

_Angles = tuple[torch.Tensor, torch.Tensor]
"""(n, R) cosines of the angles by which the first R numbers of a head are turned, and sines, the first half of them
with the sign that they have in the turn."""


class DirectModel:
    """Computes the logits of one token for each of n rows: float32 on a CPU, any type on a GPU."""

    def __init__(self, decoder: Decoder, *, on_gpu: bool = False):
        self._operations = _GPUOperations() if on_gpu else _Operations()
        prepared = self._operations.prepared
        self._embed, self._rotary = decoder.embedding, decoder.rotary
        self._head, self._norm = prepared(decoder.head), prepared(decoder.norm)
        self._layers = [
            replace(layer, modules={name: prepared(module) for name, module in layer.modules.items()})
            for layer in decoder.layers
        ]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionLayout) -> torch.Tensor:
        """(n, V) logits after `tokens` (n,) at `positions` (n,)."""
        with torch.cuda.device_of(tokens):  # where Triton launches, unlike torch, if another device is the current one
            return self._logits(tokens, positions, attention)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionLayout) -> torch.Tensor:
        operations, hidden, added = self._operations, self._embed(tokens), None
        cosines, sines = (table[0] for table in self._rotary(hidden[None], positions[None]))
        half = sines.shape[-1] // 2
        angles = cosines, torch.cat([-sines[:, :half], sines[:, half:]], dim=-1)
        for layer in self._layers:
            modules = layer.modules
            hidden, normed = operations.add_and_norm(hidden, added, modules["attention_norm"])
            heads = [modules[name](normed).unflatten(-1, (-1, layer.head_dim)) for name in ("query", "key", "value")]
            query, key = operations.rotate(heads[0], heads[1], modules, angles)
            assert layer.call is not None  # layers without attention have the compiled form alone
            attended = attention.attend(*(x.transpose(0, 1) for x in (query, key, heads[2])), layer.call)
            hidden, normed = operations.add_and_norm(
                hidden, modules["output"](attended.flatten(1)), modules["mlp_norm"]
            )
            added = modules["down"](operations.gate(layer.activation, modules["gate"](normed), modules["up"](normed)))
        return self._head(operations.add_and_norm(hidden, added, self._norm)[1])


class _Operations:
    """The operations of a layer between its matrix products, in torch, with compiled kernels where there are some."""

    def prepared(self, module: Any) -> Any:
        """The module, or a function that computes the same."""
        return _function(module)

    def add_and_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, H) `hidden + added`, and its norm."""
        hidden = hidden if added is None else hidden + added
        return hidden, norm(hidden)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, modules: dict[str, Any], angles: _Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, heads, D) queries and keys after the norms of heads, if any, with rotary embeddings."""
        if modules["query_norm"] is not None:
            query, key = modules["query_norm"](query), modules["key_norm"](key)
        num_heads, (cosines, sines) = query.shape[1], (angle[:, None] for angle in angles)
        both = torch.cat([query, key], dim=1)
        both = both * cosines + both.roll(sines.shape[-1] // 2, -1) * sines
        return both[:, :num_heads], both[:, num_heads:]

    def gate(self, activation: Any, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """activation(gates) * values."""
        kernels = library() if is_silu(activation) else None
        if kernels is not None:
            return kernel_layers.gated(kernels, gates, values)
        return activation(gates).mul_(values)


class _GPUOperations(_Operations):
    """The same in Triton's kernels, in the types that the modules' results have."""

    def prepared(self, module: Any) -> Any:
        return module

    def add_and_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from groupgrad.engines.native import triton_layers  # Triton is there on machines with a GPU

        kind = hidden.device.type
        dtype = torch.promote_types(hidden.dtype, norm.weight.dtype)
        if torch.is_autocast_enabled(kind):  # the product that follows would bring its input to this type
            dtype = torch.get_autocast_dtype(kind)
        return triton_layers.add_and_norm(hidden, added, norm.weight, norm.variance_epsilon, dtype)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, modules: dict[str, Any], angles: _Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from groupgrad.engines.native import triton_layers

        query_norm, key_norm = modules["query_norm"], modules["key_norm"]
        norms = None
        if query_norm is not None:
            norms = query_norm.weight, key_norm.weight, query_norm.variance_epsilon
        return triton_layers.rotate(query, key, *angles, norms)

    def gate(self, activation: Any, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        from groupgrad.engines.native import triton_layers

        return triton_layers.gate(gates, values) if is_silu(activation) else activation(gates) * values


def direct_model(model: nn.Module, calls: dict[int, AttentionCall]) -> CompiledModel | DirectModel | str:
    """The direct form of `model`, adapters included; `calls` are its attention calls by layer.

    Without one, the reason why a family that has a direct form gets none here; empty for other families.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    family = _family_parts(inner)
    if family is None:
        return ""
    parts, backbone, head = family
    parameters = [parameter for part in parts for parameter in part.parameters()]
    on_gpu = has_layer_kernels(parameters)
    is_plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)
    is_plain = is_plain or computes_in_float32(model)
    if not on_gpu and (not is_plain or torch.is_autocast_enabled("cpu")):
        reason = obstacle_to_kernels() if all(p.device.type == "cuda" for p in parameters) else ""
        return reason or "its weights are not all on one GPU, nor all on the CPU in a type that has kernels"
    for module in (module for part in parts for module in part.modules()):
        if text := _must_be_called(module):
            return text
    decoder = read_decoder(backbone, head, calls)
    if decoder is None:
        return "a layer of the decoder is of another kind than its family's"
    has_recurrence = any(layer.call is None for layer in decoder.layers)
    if not on_gpu:
        compiled = compiled_model(decoder)
        return "" if compiled is None and has_recurrence else compiled or DirectModel(decoder)
    return "" if has_recurrence or not _has_plain_norms(decoder) else DirectModel(decoder, on_gpu=True)


def _has_plain_norms(decoder: Decoder) -> bool:
    """True if all norms are there that Triton's kernels compute, and all MLPs have gates."""
    layers = decoder.layers
    names = [{name for name in NORMS if layer.modules[name] is not None} for layer in layers]
    needed = {"attention_norm", "mlp_norm"}
    norms = [decoder.norm, *(layer.modules[name] for layer, found in zip(layers, names) for name in found)]
    is_whole = all(found in (needed, set(NORMS)) and layer.is_gated for layer, found in zip(layers, names))
    return is_whole and all(map(is_rms_norm, norms))


def _family_parts(inner: Any) -> tuple[list[Any], Any, Any] | None:
    """The modules that compute a known family's logits, each with those inside it, and the decoder and the head."""
    if not is_transformers_class(type(inner)):
        return None
    if type(inner).__name__ in CAUSAL_LMS | HYBRID_LMS:
        return [inner], inner.model, inner.lm_head
    # Some text-only models put other layers around a decoder of the same name.
    decoder, head = (inner.get_decoder(), inner.get_output_embeddings()) if is_multimodal(inner) else (None, None)
    is_family = type(decoder).__name__ in DECODERS | HYBRID_DECODERS and is_transformers_class(type(decoder))
    return ([decoder, head], decoder, head) if is_family and type(head) is nn.Linear else None


def _must_be_called(module: nn.Module) -> str:
    """Names what works only if the module is called: a hook or a replaced forward method; empty if nothing does."""
    name = type(module).__name__
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(getattr(hook, "__name__", "") not in _HARMLESS_HOOKS for hook in hooks):
        return f"{name} has a forward hook"
    is_ours = is_replaced(module) or is_prepared(module)
    is_unchanged = "forward" not in module.__dict__ or type(module) is nn.Linear or is_ours
    return "" if is_unchanged else f"the forward method of {name} was replaced"


def _function(module: Any) -> Any:
    """The formula of a plain module as a function; any other module, such as an adapter, itself, and None for none."""
    if type(module) is nn.Linear:
        return module.forward
    if module is not None and is_rms_norm(module):
        weight, epsilon, kernels = module.weight.float(), module.variance_epsilon, library()
        if kernels is not None:
            return lambda hidden: kernel_layers.norm(kernels, hidden.float(), weight, epsilon)
        return lambda hidden: F.rms_norm(hidden, weight.shape, weight, epsilon)
    return module
