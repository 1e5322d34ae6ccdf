"""Estimates the cost of attention relative to the rest of a model, which balances the work of ranks."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from groupgrad.models.families import layer_configs
from groupgrad.models.shards import num_parameters

_FULL = frozenset({"attention", "full_attention", "hybrid"})
"""Kinds of layers in which a token attends to all tokens before it."""


def attention_cost(model: nn.Module) -> float:
    """Cost of one token's attention to one other token, in all layers, over the cost of a token in everything else.

    Both are counted in operations: attention takes 4 for each number of a query (its product with a key, and the
    weighted value), linear layers 2 for each weight (arXiv:2001.08361, sec. 2.1). Layers with a window count nothing,
    since their cost per token is bounded. Of experts only the chosen ones count. 0.0 for a model without a
    configuration of its sizes.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 0.0
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:
        kinds = [None if getattr(text, "sliding_window", None) else "attention"] * len(layer_configs(text))
    query_numbers = sum(_query_numbers(layer) for layer, kind in zip(layer_configs(text), kinds) if kind in _FULL)
    return 2.0 * query_numbers / _weights_of_a_token(model, text)


def _query_numbers(layer: Any) -> int:
    """Numbers of the queries of one token in a layer; if values have another width, the mean of both."""
    heads = getattr(layer, "num_attention_heads", None) or 0
    if (values := getattr(layer, "v_head_dim", None)) and hasattr(layer, "qk_nope_head_dim"):  # latent attention
        return heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + values) // 2
    return heads * int(getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // max(heads, 1))


def _weights_of_a_token(model: nn.Module, text: Any) -> float:
    """Weights that a token passes: no embeddings that it only looks up, and no experts that it does not choose."""
    weights = float(num_parameters(model))
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is not None and (head is None or head.weight is not embedding.weight):
        weights -= num_parameters(embedding)
    chosen: int = getattr(text, "num_experts_per_tok", None) or 0
    for name, stacked in model.named_parameters() if chosen else ():
        shape = getattr(stacked, "ds_shape", stacked.shape)  # under ZeRO-3 the parameter itself is empty
        if ".experts." in name and len(shape) == 3:  # (experts, outputs, inputs)
            weights -= math.prod(shape) * (1.0 - min(1.0, chosen / shape[0]))
    return max(weights, 1.0)
