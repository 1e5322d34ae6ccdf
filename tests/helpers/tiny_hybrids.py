"""Small models of the families whose layers carry a recurrent state, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GATED_NORM_EPS = 1e-3
"""The norm behind a delta rule divides by its output, which is almost zero where a row's first key is almost orthogonal
to the query. With the default of 1e-6, plain float32 passes of small random models round by more than 1e-5 there."""

_DELTA: dict[str, Any] = {
    "rms_norm_eps": GATED_NORM_EPS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _config(name: str, *without: str, **settings: Any) -> Callable[[], Any]:
    fields = {key: value for key, value in _COMMON.items() if key not in without}
    return lambda: getattr(transformers, name)(**{**fields, **settings})


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_5": _config("Qwen3_5TextConfig", **_DELTA),
    "qwen3_next": _config(
        "Qwen3NextConfig", **_DELTA, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=16, norm_topk_prob=True
    ),
    "olmo_hybrid": _config(
        "OlmoHybridConfig",
        rms_norm_eps=GATED_NORM_EPS,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        layer_types=_DELTA["layer_types"],
    ),
    "nemotron_h": _config(
        "NemotronHConfig",
        "num_hidden_layers",
        layer_types=["mamba", "attention", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        head_dim=16,
    ),
    "granitemoehybrid": _config(
        "GraniteMoeHybridConfig",
        **_MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=32,
    ),
    "falcon_h1": _config("FalconH1Config", **_MAMBA2, mamba_d_ssm=64),
    "bamba": _config("BambaConfig", **_MAMBA2, attn_layer_indices=[1]),
    "lfm2": _config("Lfm2Config", layer_types=["conv", "full_attention", "conv"], block_ff_dim=48, block_multiple_of=8),
    "mamba2": _config("Mamba2Config", num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=16),
}
"""Family -> makes a small configuration of it."""


def make_hybrid(family: str, seed: int = 0, vocab_size: int = VOCABULARY) -> Any:
    """Makes a small model whose log-probs spread over several nats, in evaluation mode."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "A_log" not in name:
            torch.nn.init.normal_(parameter, std=0.12)
    return model
