"""Small models of the families that compute attention themselves, without transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_hybrids import VOCABULARY
from transformers import AutoModelForCausalLM

_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
_FALCON: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo": (
        "GPTNeo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 7,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 512,
        },
    ),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "bloom, three heads": ("Bloom", {"hidden_size": 30, "n_layer": 2, "n_head": 3}),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "mpt, clipped": (
        "Mpt",
        {
            "d_model": 30,
            "n_layers": 2,
            "n_heads": 3,
            "max_seq_len": 512,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
        },
    ),
    "falcon": ("Falcon", _FALCON),
    "falcon, grouped": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": ("Falcon", {**_FALCON, "alibi": True, "multi_query": False}),
    "falcon, alibi, one key head": ("Falcon", {**_FALCON, "alibi": True, "parallel_attn": False}),
}
"""Family -> its name in transformers, and the sizes of a small one."""


def make_own_attention(family: str, seed: int = 0, **options: Any) -> Any:
    """Makes a small model whose log-probs spread over several nats, in evaluation mode."""
    name, sizes = CONFIGS[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**_TOKENS, **sizes})
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model
