"""Reads from a model's config how its forward pass transforms the output of its head into logits.

`families.FAMILIES` lists the operations after the head in the causal language models of transformers 5. A head has a
transform if it is a linear layer, plain, with LoRA, or trained as a whole by an adapter, and if the config has no
unknown fields about logits. Other models compute their logits themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupgrad.models.adapters import active_adapters, is_adapted
from groupgrad.models.families import logit_effect
from groupgrad.models.load import Float32Linear
from groupgrad.models.shards import is_zero_sharded
from groupgrad.scoring.tiled_head import LogitTransform, OutputHead

_ABOUT_LOGITS = re.compile("logit|lm_head|unpadded_vocab|output_multiplier")
# Fields with such names that do not affect the head's output.
_UNRELATED = re.compile("router|attn_|attention_|num_logits_to_keep")


@dataclass(slots=True, frozen=True)
class HeadLayer:
    """A linear output head and its active LoRA adapters."""

    linear: nn.Linear
    adapters: tuple[tuple[Any, Any, Any, float], ...] = ()
    """Dropout, A, B and scale of each adapter, which adds scale * B(A(dropout(x))) to the output."""

    def output_head(self, hidden: torch.Tensor) -> OutputHead:
        """The head with what its adapters add for hidden states (L, H). Each call samples new dropout."""
        weight, bias = self.linear.weight, self.linear.bias
        if not self.adapters:
            return OutputHead(weight, bias)
        states = [scale * a(dropout(hidden.to(a.weight.dtype))) for dropout, a, _, scale in self.adapters]
        second = torch.cat([b.weight for _, _, b, _ in self.adapters], dim=1)
        return OutputHead(weight, bias, second, torch.cat(states, dim=1))


def head_layer(head: Any) -> HeadLayer | None:
    """The linear layer of an output head under peft's wrappers; None if the head computes anything else."""
    class_name = f"{type(head).__module__}.{type(head).__name__}"
    if class_name.startswith("peft.") and is_zero_sharded(head):
        return None  # ZeRO-3 gathers the wrapper's modules one by one, when each is called
    if class_name.endswith(".ModulesToSaveWrapper"):
        names = [] if head.disable_adapters else [x for x in active_adapters(head) if x in head.modules_to_save]
        head = head.modules_to_save[names[0]] if names else head.original_module
    elif class_name == "peft.tuners.lora.layer.Linear":
        return _lora_layer(head)
    return HeadLayer(head) if type(head) in (nn.Linear, Float32Linear) else None


def _lora_layer(head: Any) -> HeadLayer | None:
    """The layer with LoRA; None for DoRA and other variants, biases and merged adapters."""
    linear = head.base_layer
    if type(linear) is not nn.Linear or head.merged:
        return None
    if head.disable_adapters:
        return HeadLayer(linear)
    names = [name for name in active_adapters(head) if name in head.lora_A]
    for name in names:
        is_variant = name in getattr(head, "lora_variant", {}) or head.use_dora.get(name)
        if is_variant or head.lora_B[name].bias is not None:
            return None
    return HeadLayer(
        linear,
        tuple((head.lora_dropout[x], head.lora_A[x], head.lora_B[x], float(head.scaling[x])) for x in names),
    )


def logit_transform(model: nn.Module) -> LogitTransform | None:
    """The transform from the head's output to logits in `model` (adapters included, unwrapped); None if unknown.

    It follows from the config alone. Code outside transformers may compute something else, so the start-up check
    compares with the model's own logits once.
    """
    inner: Any = model.get_base_model() if is_adapted(model) else model  # pyright: ignore[reportCallIssue]
    head: Any = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    config = getattr(inner, "config", None)
    layer = None if config is None else head_layer(head)
    if config is None or layer is None:
        return None
    if layer.linear.weight.device.type == "meta":  # offloaded; a hook loads it when the module is called
        return None
    try:
        text = config.get_text_config()
    except ValueError:  # several language models in one
        return None
    transform = _from_fields(text)
    if transform is None or (text is not config and transform != LogitTransform()):
        # Not all composite models (images and text) apply the logit settings of their text model's config.
        return None
    return replace(transform, in_float32=isinstance(layer.linear, Float32Linear))


def _from_fields(config: Any) -> LogitTransform | None:
    transform = LogitTransform()
    for field, value in config.to_dict().items():
        if value is None or not _ABOUT_LOGITS.search(field) or _UNRELATED.search(field):
            continue
        effect = logit_effect(config.model_type, field)
        if effect is None and value != 1.0:
            return None
        if effect == "cap":
            transform = replace(transform, softcap=float(value))
        elif effect is not None:
            factor = float(value) if effect == "multiply" else 1.0 / float(value)
            transform = replace(transform, scale=transform.scale * factor)
    return transform
