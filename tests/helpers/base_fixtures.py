"""Small models and tokenizers made in code, shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import memory as accelerate_memory
from tiny_hybrids import GATED_NORM_EPS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import logging as hf_logging

from groupgrad.kernels import fallbacks
from groupgrad.types import Prompt, Rollout

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/=.,?!<>:'\"()[]{}_\\#$\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(*extra: str, named: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A character tokenizer: ids 0 pad, 1 eos, 2 bos, 3 unknown, then the `extra` tokens, then one a character."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    for token in (*extra, *CHARACTERS):
        vocabulary.setdefault(token, len(vocabulary))
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    special = named or {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=special or [token for token in extra if token not in special.values()],
    )
    rest = [token for token in extra if token not in special.values()]
    if special and rest:
        tokenizer.add_special_tokens({"additional_special_tokens": rest}, replace_extra_special_tokens=False)
    return tokenizer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer with a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int = 0, **config: object) -> Qwen3ForCausalLM:
    """A random Qwen3-architecture model of about 20 thousand parameters in float32, evaluation mode off."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": len(CHARACTERS) + 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 2,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **config}))


def pytest_collection_finish() -> None:
    """Takes all that is loaded out of garbage collection, of which accelerate runs a whole one before each training."""
    gc.collect()
    gc.freeze()
    gc.enable()
    accelerate_memory.gc = SimpleNamespace(collect=lambda: gc.collect(1))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _no_deepspeed_left() -> None:
    """Drops DeepSpeed's configuration, by which transformers loads models as long as any reference to it lives."""
    unset_hf_deepspeed_config()


@pytest.fixture(autouse=True)
def _no_log_level_left() -> Iterator[None]:
    """Puts transformers' level of logging back: a trainer sets it, and bars are drawn by it."""
    before = hf_logging.get_verbosity()
    yield
    hf_logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def _no_fallbacks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what falls back in a test be said, though an earlier test has met the same."""
    monkeypatch.setattr(fallbacks, "_found", {})


@pytest.fixture
def tf32() -> Iterator[None]:
    """float32 products in TF32 on CUDA devices, by the newer of torch's two settings alone, as transformers sets it."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        pytest.skip("this torch has one setting")
    backends.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")
    backends.fp32_precision = backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_model()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A saved small model with its tokenizer."""
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the project; tests that need it skip without it."""
    folder = Path(os.environ.get("GROUPGRAD_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"the shared data folder is not here ({folder})")
    return folder


@pytest.fixture(name="make_model", scope="session")
def _make_model() -> Callable[..., Qwen3ForCausalLM]:
    """The function that makes small models, for tests that need several or one of their own."""
    return make_model


@pytest.fixture(name="make_tokenizer", scope="session")
def _make_tokenizer() -> Callable[[], PreTrainedTokenizerFast]:
    """The function that makes tokenizers."""
    return make_tokenizer


VOCAB = 48
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
FALCON_SIZES = {
    name: SIZES[name]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "eos_token_id")
}
LAYER_PAIR: list[str] = ["sliding_attention", "full_attention"]
GEMMA4_SIZES: dict[str, Any] = {
    **SIZES,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 3,
    "layer_types": LAYER_PAIR,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 3.0,
    "rms_norm_eps": GATED_NORM_EPS,
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
        {**SIZES, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "sliding_window": 3},
    ),
    "mistral (sliding window)": ("Mistral", {**SIZES, "sliding_window": 3}),
    "gemma4 (two sizes of heads)": (
        "Gemma4Text",
        {**GEMMA4_SIZES, "num_attention_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma4 (shared keys and values)": (
        "Gemma4Text",
        # With `GATED_NORM_EPS` plain float32 passes of four such layers are 1.5e-5 from float64, with this 9e-6.
        {
            **GEMMA4_SIZES,
            "num_hidden_layers": 4,
            "layer_types": LAYER_PAIR * 2,
            "num_kv_shared_layers": 2,
            "rms_norm_eps": 1e-2,
        },
    ),
    "cohere (logit scale)": ("Cohere", {**SIZES, "logit_scale": 0.25}),
    "granite (logit scale)": ("Granite", {**SIZES, "logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    ),
    "gpt-oss (experts, sinks)": (
        "GptOss",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mamba (recurrent)": ("Mamba", {**SIZES, "state_size": 4, "time_step_rank": 4}),
    "mamba2 (recurrent)": (
        "Mamba2",
        {**SIZES, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4, "expand": 2},
    ),
    "qwen3.5 (linear attention)": (
        "Qwen3_5Text",
        {
            **SIZES,
            "layer_types": ["linear_attention", "full_attention"],
            "rms_norm_eps": GATED_NORM_EPS,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
    ),
    "lfm2 (convolution)": (
        "Lfm2",
        {**SIZES, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "opt (learned positions)": ("OPT", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom (alibi)": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "codegen": ("CodeGen", {**GPT_SIZES, "n_head": 4, "rotary_dim": 4}),
    "gpt-neo (local attention)": (
        "GPTNeo",
        {**SIZES, "num_layers": 2, "num_heads": 2, "window_size": 3, "attention_types": [[["global", "local"], 1]]},
    ),
    "mpt (alibi)": (
        "Mpt",
        {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, "eos_token_id": 1},
    ),
    "falcon": ("Falcon", FALCON_SIZES),
    "falcon (alibi)": ("Falcon", {**FALCON_SIZES, "alibi": True, "multi_query": False}),
    "recurrent gemma (own recurrence)": (
        "RecurrentGemma",
        {**SIZES, "lru_width": 16, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
    "xglm (own attention)": (
        "XGLM",
        {
            **SIZES,
            "d_model": 16,
            "ffn_dim": 24,
            "num_layers": 2,
            "attention_heads": 2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of the architecture."""
    family, sizes = ARCHITECTURES[name]
    return build_family(family, seed, **{**sizes, **changes})


def build_family(family: str, seed: int = 0, scale: float = 0.3, **sizes: Any) -> Any:
    """A random float32 model of the family in evaluation mode, with weights large enough to tell tokens apart."""
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(name="build")
def _build() -> Callable[..., Any]:
    return build


@pytest.fixture(params=sorted(ARCHITECTURES))
def any_model(request: pytest.FixtureRequest) -> Any:
    """Each architecture in turn."""
    return build(request.param)


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    """A rollout of `num_tokens` tokens."""

    def make(num_tokens: int, reason: Any = "eos", index: int = 0, group: int = 0, **fields: Any) -> Rollout:
        prompt = Prompt([5, 6, 7], {"prompt": "abc"}, group)
        return Rollout(prompt, index, [9] * num_tokens, reason, "text", "text", **fields)

    return make
