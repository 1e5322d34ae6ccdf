"""What a model's own forward pass makes of its output head, read from its config.

`families.FAMILIES` lists what the causal language models of transformers 5 do after their head. A family
that it does not know but whose config speaks of logits has no recipe, and neither has a head that is no plain linear
layer, one under a LoRA adapter, or one that an adapter trains as a whole; such models compute their logits themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupgrad.modeling.adapters import active_adapters, is_adapted
from groupgrad.modeling.families import LogitEffect, logit_effect
from groupgrad.modeling.load import Float32Linear
from groupgrad.modeling.scoring.head import LogitTransform, LowRank
from groupgrad.modeling.systems.zero3 import is_sharded

_SPEAKS_OF_LOGITS = re.compile("logit|lm_head|unpadded_vocab|output_multiplier")
# Fields of such a name that do not concern the head's output.
_UNRELATED = re.compile("router|attn_|attention_|num_logits_to_keep")


@dataclass(slots=True, frozen=True)
class HeadLayer:
    """A linear output head, and the LoRA adapters in use on it."""

    linear: nn.Linear
    adapters: tuple[tuple[Any, Any, Any, float], ...] = ()
    """Dropout, A, B and scale of each: what it adds to the output is scale * B(A(dropout(x)))."""

    def low_rank(self, hidden: torch.Tensor) -> LowRank | None:
        """What the adapters add for hidden states (L, H); None without adapters. Dropout is drawn anew."""
        if not self.adapters:
            return None
        states = [scale * a(dropout(hidden.to(a.weight.dtype))) for dropout, a, _, scale in self.adapters]
        return LowRank(torch.cat(states, dim=1), torch.cat([b.weight for _, _, b, _ in self.adapters], dim=1))


def head_layer(head: Any) -> HeadLayer | None:
    """The linear layer that an output head comes to, through wrappers of peft; None if it is something else."""
    kind = f"{type(head).__module__}.{type(head).__name__}"
    if kind.startswith("peft.") and is_sharded(head):
        return None  # its parts are gathered one by one, each as it is called
    if kind.endswith(".ModulesToSaveWrapper"):
        names = [] if head.disable_adapters else [x for x in active_adapters(head) if x in head.modules_to_save]
        head = head.modules_to_save[names[0]] if names else head.original_module
    elif kind == "peft.tuners.lora.layer.Linear":
        return _under_lora(head)
    return HeadLayer(head) if type(head) in (nn.Linear, Float32Linear) else None


def _under_lora(head: Any) -> HeadLayer | None:
    """None for what is more than a product of two matrices: DoRA and other variants, biases, merged adapters."""
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
    """How `model`, adapters included but no wrapper for data parallelism, gets its logits from its output head.

    None if something unknown may happen to them: the caller then takes the model's own logits. What is returned is
    what the config says; code from elsewhere may still do otherwise, so compare with the model's own logits once.
    """
    inner: Any = model.get_base_model() if is_adapted(model) else model  # pyright: ignore[reportCallIssue]
    head: Any = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    config = getattr(inner, "config", None)
    layer = None if config is None else head_layer(head)
    if config is None or layer is None:
        return None
    if layer.linear.weight.device.type == "meta":  # kept elsewhere and brought in by a hook
        return None
    try:
        text = config.get_text_config()
    except ValueError:  # several language models in one
        return None
    transform = _from_fields(text)
    if transform is None or (text is not config and transform != LogitTransform()):
        # Composite models (images and text) do not all heed what their text model's config says of logits.
        return None
    return replace(transform, own_dtype=isinstance(layer.linear, Float32Linear))


def _from_fields(config: Any) -> LogitTransform | None:
    transform = LogitTransform()
    fields: dict[str, Any] = config.to_dict()
    for field, value in fields.items():
        if not _SPEAKS_OF_LOGITS.search(field) or _UNRELATED.search(field):
            continue
        effect = logit_effect(config.model_type, field)
        if value is None:
            continue
        if effect is None and value != 1.0:
            return None
        if effect is not None:
            transform = _apply(transform, effect, float(value))
    return transform


def _apply(transform: LogitTransform, effect: LogitEffect, value: float) -> LogitTransform:
    if effect == "cap":
        return replace(transform, softcap=value)
    return replace(transform, scale=transform.scale * (value if effect == "multiply" else 1.0 / value))
