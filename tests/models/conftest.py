"""Batches, the plain computation that fast paths must equal, and small models of many architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from groupgrad.data.collate import collate
from groupgrad.types import Batch, Prompt, Rollout

VOCAB = 48
PROMPTS = ([5, 6, 7, 8, 9], [11], [12, 13, 14])
ROWS = ((0, [20, 21, 1]), (1, [22, 23, 24, 25, 26, 27, 28]), (0, []), (2, [29]), (1, [30, 31, 1]))

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**SIZES, "tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {**SIZES, "tie_word_embeddings": True}),
    "llama": ("Llama", SIZES),
    "gpt2": ("GPT2", GPT_SIZES),
    "gpt-j (head bias)": ("GPTJ", {**GPT_SIZES, "rotary_dim": 4}),
    "phi (head bias)": ("Phi", {**SIZES, "num_key_value_heads": 2}),
    "gemma2 (soft caps)": (
        "Gemma2",
        {**SIZES, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 2.0, "sliding_window": 3},
    ),
    "mistral (sliding window)": ("Mistral", {**SIZES, "sliding_window": 3}),
    "cohere (logit scale)": ("Cohere", {**SIZES, "logit_scale": 0.25}),
    "granite (logit scale)": ("Granite", {**SIZES, "logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    ),
    "mamba (recurrent)": ("Mamba", {**SIZES, "state_size": 4, "time_step_rank": 4}),
    "lfm2 (convolution)": (
        "Lfm2",
        {**SIZES, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "opt (learned positions)": ("OPT", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom (alibi)": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model of the architecture in evaluation mode, with weights large enough to tell tokens apart."""
    family, sizes = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def make_batch(rows: tuple[tuple[int, list[int]], ...] = ROWS) -> Batch:
    """Two long and short rows, shared prompts, an empty row in the middle."""
    rollouts = [
        Rollout(Prompt(PROMPTS[group], {"prompt": "x"}, group), i, ids, "eos", "", "")
        for i, (group, ids) in enumerate(rows)
    ]
    return collate(rollouts, [0.0] * len(rollouts), mask_truncated=False)


def row_logits(model: nn.Module, batch: Batch, **arguments: Any) -> torch.Tensor:
    """(L, V) logits of the completion tokens from one unpadded forward pass a row."""
    parts = []
    for i in range(batch.num_rows):
        q = batch.prompt_of_row[i]
        prompt = batch.prompt_ids[batch.prompt_offsets[q] : batch.prompt_offsets[q + 1]]
        completion = batch.completion_ids[batch.offsets[i] : batch.offsets[i + 1]]
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False, **arguments).logits[0]
        parts.append(logits[len(logits) - len(completion) - 1 : -1])
    return torch.cat(parts)


@pytest.fixture(name="build")
def _build() -> Callable[..., Any]:
    return build


@pytest.fixture(name="make_batch")
def _make_batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def batch() -> Batch:
    return make_batch()


@pytest.fixture(name="row_logits")
def _row_logits() -> Callable[..., torch.Tensor]:
    return row_logits


@pytest.fixture(params=sorted(ARCHITECTURES))
def any_model(request: pytest.FixtureRequest) -> Any:
    """Each architecture in turn."""
    return build(request.param)
