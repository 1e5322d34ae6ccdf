"""Runs models under an attention layout, which transformers passes to each layer in place of the mask.

A model runs on flat, unpadded tokens, (1, T). Each layer hands its queries, keys and values to the layout, which
computes the attention. The attention implementation of a model's configuration is wrapped by transformers' attention
interface: the wrapper recognises layouts and passes every other call on. No model file is patched, and a model without
one (its own `generate`, a dense forward pass) runs as before.

The layout is passed as the mask, not looked up when a layer runs. A layer that gradient checkpointing computes again in
the backward pass therefore gets the layout of its own forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from groupgrad.models.recurrent_classes import recurrent_classes
from groupgrad.models.unwrapping import arguments, is_multimodal, pretrained, unwrapped_parts
from groupgrad.scoring.attention_layout import AttentionCall, AttentionLayout, LayoutMask

_PREFIX = "groupgrad_"

_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Entries of a configuration's `layer_types` in which tokens interact by attention alone."""

_ROUTABLE_LAYERS = _ATTENTION_LAYERS | {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
"""`_ATTENTION_LAYERS`, and layers that a `Recurrence` can compute."""

_WHOLE_CALL_ROPE = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings whose frequencies depend on the largest position of a call."""


_configs: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""The configurations inside a model that name an attention implementation, cached because sampling needs them often."""

_active_layouts: list[LayoutMask] = []
"""The layouts of the running model calls, innermost last."""

_find_packed = masking_utils.find_packed_sequence_indices


def _find_packed_without_layout(position_ids: torch.Tensor) -> torch.Tensor | None:
    """None under an attention layout: the search for packed rows would make the host wait for a GPU."""
    return None if _active_layouts else _find_packed(position_ids)


masking_utils.find_packed_sequence_indices = _find_packed_without_layout


def run_flat(
    model: nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionLayout,
    **extra: Any,
) -> Any:
    """The model's output for the flat tokens `ids` (T,) at `positions` (T,) under `attention`, without a KV cache.

    Positions with several axes are (3, T). In a vision-language model the layout applies to the text decoder alone.

    `model` may be wrapped (adapters, data parallelism). ValueError if it cannot run so (see `flat_obstacle`).
    """
    reason = flat_obstacle(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot run under an attention layout: {reason}")
    inner = pretrained(model)
    assert inner is not None
    is_kept = _is_kept_for_backward(inner)
    _active_layouts.append(LayoutMask(attention))
    try:
        with _wrapped_attention(inner, is_kept=is_kept), ExitStack() as routes:
            if recurrent_classes(inner):
                from groupgrad.integrations.recurrent.recurrent_layers import routed

                routes.enter_context(routed(inner, attention.recurrence, keep=is_kept))
            if "position_ids" in arguments(model):
                extra["position_ids"] = positions.unsqueeze(-2)
            return model(input_ids=ids[None], use_cache=False, **extra)
    finally:
        _active_layouts.pop()


def unplug(model: nn.Module) -> None:
    """Restores the attention implementations of the configurations inside `model`.

    Call it after a backward pass: with gradient checkpointing they stay wrapped until then.
    """
    inner = pretrained(model)
    if inner is None:
        return
    for config in _configs.get(inner, ()):
        config._attn_implementation_internal = config._attn_implementation_internal.removeprefix(_PREFIX)
    if recurrent_classes(inner):
        from groupgrad.integrations.recurrent.recurrent_layers import drop_kept_recurrence

        drop_kept_recurrence(inner)


def flat_obstacle(model: nn.Module) -> str | None:
    """None if the structure of `model` supports attention layouts, otherwise the reason why not.

    Only the structure is examined. The start-up check compares the numbers.
    """
    inner = pretrained(model)
    if inner is None:
        return "it is not a transformers model"
    config = inner.config.get_text_config(decoder=True)
    if getattr(inner.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    recurrent = bool(recurrent_classes(inner))
    if getattr(inner, "_is_stateful", False) and not recurrent:
        return "it carries a recurrent state"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    rope = _rope_types(config) & _WHOLE_CALL_ROPE
    if rope:
        return f"its {rope.pop()} rotary positions depend on the longest row of a call"
    layer_types = set(getattr(config, "layer_types", None) or ())
    other_layers = sorted(layer_types - (_ROUTABLE_LAYERS if recurrent else _ATTENTION_LAYERS))
    if other_layers:
        return f"it has layers of type {', '.join(other_layers)}"
    if not _has_interface(inner) and not (recurrent and layer_types == {"linear_attention"}):
        return "its attention does not go through transformers' attention interface"
    for part in unwrapped_parts(model):
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None:
            return "it is compiled, for rectangular batches"
        adapters = getattr(part, "peft_config", None)
        if isinstance(adapters, dict) and any(getattr(c, "is_prompt_learning", False) for c in adapters.values()):
            return "its adapter puts virtual tokens in front of the prompt"
    return None


def continues_prefixes(model: nn.Module) -> bool:
    """True if a row can go on from inside a shared prompt. Recurrent layers have a state at its end only."""
    inner = pretrained(model)
    return inner is None or not recurrent_classes(inner)


def _has_interface(inner: PreTrainedModel) -> bool:
    """True if attention layers call transformers' attention interface, and the model takes positions."""
    return inner._can_set_attn_implementation() and "position_ids" in arguments(inner)


def attention_dropout(model: nn.Module) -> float:
    """The largest dropout probability of attention weights in `model` when it trains."""
    probabilities = [0.0]
    for module in model.modules():
        attributes = vars(module)  # a search for a missing attribute takes long in a module
        if "layer_idx" in attributes or "layer_id" in attributes:
            floats = {name: value for name, value in attributes.items() if isinstance(value, float)}
            probabilities += [value for name, value in floats.items() if "dropout" in name]
            layers = [(n, c.p) for n, c in module.named_children() if isinstance(c, nn.modules.dropout._DropoutNd)]
            probabilities += [probability for name, probability in layers if "att" in name or name == "dropout"]
    return max(probabilities)


def whole_rows_reason(model: nn.Module, padded_because: str | None, *, aux_loss: bool) -> str | None:
    """Says why the tokens of a row of `model` cannot be on several ranks, and what to set; None if they can.

    `padded_because` says why the model runs on padded rows only; None if it does not.
    """
    inner = pretrained(model)
    if is_multimodal(model):
        return "this model takes images, whose tokens must stay together. Set context_parallel_size=1"
    if inner is not None and recurrent_classes(inner):
        return "this model has recurrent layers, which pass a state on from token to token. Set context_parallel_size=1"
    if padded_because is not None:
        return f"this model runs on padded rows only: {padded_because}. Set context_parallel_size=1"
    if dropout := attention_dropout(model):
        return f"this model has an attention dropout of {dropout:g}. Set disable_dropout=True"
    if aux_loss:
        return "this model's load-balancing loss counts all tokens of a pass. Set router_aux_loss_coef=0"
    return None


def _rope_types(config: Any) -> set[str]:
    """Types of rotary embeddings in a configuration, for all layers or for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return {str(s.get("rope_type", s.get("type", "default"))) for s in nested}


@contextmanager
def _wrapped_attention(inner: PreTrainedModel, *, is_kept: bool) -> Iterator[None]:
    """Wraps the attention implementations that the configurations inside a model name.

    With `is_kept` they stay wrapped until `unplug`, because checkpointing computes layers again after the call.
    """
    if inner not in _configs:
        _configs[inner] = _decoder_configs(inner)
    for config in _configs[inner]:
        config._attn_implementation_internal = _wrapped(config._attn_implementation_internal.removeprefix(_PREFIX))
    try:
        yield
    finally:
        if not is_kept:
            unplug(inner)


def _is_kept_for_backward(model: nn.Module) -> bool:
    """True if layers of `model` are computed again in the backward pass of a pass that begins now."""
    return torch.is_grad_enabled() and is_checkpointing(model)


def _decoder_configs(inner: PreTrainedModel) -> list[Any]:
    """The configurations that the text decoder's attention reads; a vision tower's are not among them."""
    text = inner.config.get_text_config(decoder=True)
    decoder = inner if text is inner.config else inner.get_decoder()
    configs = [text, *(c for module in decoder.modules() if (c := getattr(module, "config", None)) is not None)]
    distinct = {id(c): c for c in configs}.values()
    return [c for c in distinct if getattr(c, "_attn_implementation_internal", None) is not None]


def is_checkpointing(model: nn.Module) -> bool:
    """True if some layers of `model` are computed again in the backward pass."""
    return any(vars(module).get("gradient_checkpointing") for module in model.modules())


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turns cuDNN's attention off inside the context, which PyTorch prefers on Hopper and Blackwell.

    cuDNN builds an execution for each new shape, in about half a second on a B200 (modelscope/FunASR, issue 3704; not
    measured here), and prompts and rows have many lengths. A backward pass has to run inside the same context: a
    checkpointed layer that is computed again has to take the same kernel.
    Nothing changes where other fused kernels are off.
    """
    backends = torch.backends.cuda
    if not (backends.cudnn_sdp_enabled() and backends.flash_sdp_enabled()):
        yield
        return
    backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(True)


def _wrapped(name: str) -> str:
    """Registers an implementation that runs layouts, and `name` for all other calls. Returns its name."""
    wrapped = f"{_PREFIX}{name}"
    if wrapped in ALL_ATTENTION_FUNCTIONS:
        return wrapped

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        if isinstance(attention_mask, LayoutMask):
            call = _call(module, query, key, attention_mask, options)
            if torch.is_autocast_enabled(query.device.type):
                # Rotary embeddings give float32; like the library's kernels, bring all three to one type.
                dtype = torch.get_autocast_dtype(query.device.type)
                query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            return attention_mask.attention.attend(query[0], key[0], value[0], call).unsqueeze(0), None
        return _original(name, module)(module, query, key, value, attention_mask, **options)

    def mask(**arguments: Any) -> Any:
        if _active_layouts:
            return _active_layouts[-1]
        original = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(name)
        return original(**arguments) if original is not None else None

    AttentionInterface.register(wrapped, attention)
    AttentionMaskInterface.register(wrapped, mask)
    return wrapped


def _original(name: str, module: nn.Module) -> Any:
    """The attention function called `name`; the eager one is defined in each model's own file."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _call(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: LayoutMask, options: dict[str, Any]
) -> AttentionCall:
    scale = options.get("scaling")
    return AttentionCall(
        layer=(layer := int(module.layer_idx)),
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=options.get("softcap"),
        window=options.get("sliding_window"),
        sinks=options.get("s_aux"),
        dropout=float(options.get("dropout") or 0.0),
        source=mask.source(key, layer),
    )
