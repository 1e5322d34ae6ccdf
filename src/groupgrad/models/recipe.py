"""What a model's own forward pass makes of its output head, read from its config.

The table below is what the causal language models of transformers 5 do after their head (`modeling_*.py`). A family
that it does not know but whose config speaks of logits has no recipe, and neither has a head that is no plain linear
layer; such models compute their logits themselves.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from groupgrad.models.adapters import is_adapted
from groupgrad.models.head import HeadRecipe
from groupgrad.models.load import _Float32Linear

Effect = Literal["multiply", "divide", "cap"]

# Config field -> what it does to the head's output, and the model types that read it so (by how their name begins).
_EFFECTS: dict[str, list[tuple[Effect, tuple[str, ...]]]] = {
    "logit_scale": [("multiply", ("cohere",))],
    "logits_scaling": [("divide", ("granite",)), ("multiply", ("hyperclovax",))],
    "lm_head_multiplier": [("multiply", ("falcon_h1",))],
    "final_logit_softcapping": [("cap", ("gemma2", "gemma3", "gemma4", "vaultgemma", "nanochat", "beam"))],
    "logits_soft_cap": [("cap", ("recurrent_gemma",))],
    "output_logit_soft_cap": [("cap", ("xlstm",))],
}
_SPEAKS_OF_LOGITS = re.compile("logit|lm_head|unpadded_vocab|output_multiplier")
# Fields of such a name that do not concern the head's output.
_UNRELATED = re.compile("router|attn_|attention_|num_logits_to_keep")


def head_recipe(model: nn.Module) -> HeadRecipe | None:
    """How `model`, adapters included but no wrapper for data parallelism, gets its logits from its output head.

    None if something unknown may happen to them: the caller then takes the model's own logits. What is returned is
    what the config says; code from elsewhere may still do otherwise, so compare with the model's own logits once.
    """
    inner: Any = model.get_base_model() if is_adapted(model) else model  # pyright: ignore[reportCallIssue]
    head: Any = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    config = getattr(inner, "config", None)
    if config is None or type(head) not in (nn.Linear, _Float32Linear):
        return None
    if head.weight.device.type == "meta":  # kept elsewhere and brought in by a hook
        return None
    try:
        text = config.get_text_config()
    except ValueError:  # several language models in one
        return None
    recipe = _from_fields(text)
    if recipe is None or (text is not config and recipe != HeadRecipe()):
        # Composite models (images and text) do not all heed what their text model's config says of logits.
        return None
    return replace(recipe, own_dtype=isinstance(head, _Float32Linear))


def _from_fields(config: Any) -> HeadRecipe | None:
    recipe = HeadRecipe()
    fields: dict[str, Any] = config.to_dict()
    for field, value in fields.items():
        if not _SPEAKS_OF_LOGITS.search(field) or _UNRELATED.search(field):
            continue
        effect = _effect(field, config.model_type)
        if value is None:
            continue
        if effect is None and value != 1.0:
            return None
        if effect is not None:
            recipe = _apply(recipe, effect, float(value))
    return recipe


def _effect(field: str, model_type: str) -> Effect | None:
    for effect, families in _EFFECTS.get(field, []):
        if model_type.startswith(families):
            return effect
    return None


def _apply(recipe: HeadRecipe, effect: Effect, value: float) -> HeadRecipe:
    if effect == "cap":
        return replace(recipe, softcap=value)
    return replace(recipe, scale=recipe.scale * (value if effect == "multiply" else 1.0 / value))
