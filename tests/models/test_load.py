"""Loading of models and tokenizers, and changes of the loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from groupgrad.errors import UnavailableError
from groupgrad.models import load
from groupgrad.scoring.forward import ForwardOptions, score_tokens


def load_policy(folder: Path, init_kwargs: dict[str, Any] | None = None, quantization_config: Any = None) -> Any:
    return load.load_policy(
        str(folder),
        init_kwargs or {},
        trust_remote_code=False,
        quantization_config=quantization_config,
        on_device=False,
    )


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("init_kwargs", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, None),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_weights_are_float32_unless_a_dtype_is_given(saved, init_kwargs, expected, tmp_path, make_model):
    make_model().to(saved).save_pretrained(tmp_path)
    given = dict(init_kwargs)
    assert load_policy(tmp_path, init_kwargs).dtype == (expected or saved)
    assert init_kwargs == given, "the user's dict is not changed"


@pytest.mark.parametrize("dtype", ["float31", "fp16", 16, None])
def test_an_unknown_dtype(dtype: Any, model_dir):
    with pytest.raises(ValueError, match=r"model_init_kwargs\['dtype'\].*choose one of"):
        load_policy(model_dir, {"dtype": dtype})


def test_the_loaded_model_is_the_saved_one(model_dir, make_model):
    loaded, original = load_policy(model_dir), make_model()
    assert type(loaded) is type(original)
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_further_arguments_reach_from_pretrained(model_dir):
    assert load_policy(model_dir, {"attn_implementation": "eager"}).config._attn_implementation == "eager"


def test_a_quantization_config_given_twice(model_dir):
    with pytest.raises(ValueError, match="give it once"):
        load_policy(model_dir, {"quantization_config": object()}, quantization_config=object())


def tiny_t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def test_encoder_decoders_are_rejected(tmp_path):
    tiny_t5().save_pretrained(tmp_path)
    with pytest.raises(UnavailableError, match=r"encoder-decoder \(t5\)"):
        load_policy(tmp_path)


def test_the_tokenizer_of_a_model(model_dir, tmp_path, model, tokenizer):
    loaded = load.load_tokenizer(model, str(model_dir), revision=None, trust_remote_code=False)
    assert loaded("1+1=")["input_ids"] == tokenizer("1+1=")["input_ids"]
    bare = tmp_path / "bare"
    model.save_pretrained(bare)
    with pytest.raises(ValueError, match="pass one as processing_class"):
        load.load_tokenizer(model, str(bare), revision=None, trust_remote_code=False)


def test_the_tokenizer_in_a_processor(tokenizer):
    class Processor:
        pass

    processor = Processor()
    processor.tokenizer = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    assert load.inner_tokenizer(processor) is tokenizer
    assert load.inner_tokenizer(tokenizer) is tokenizer
    with pytest.raises(TypeError, match="processing_class is a dict"):
        load.inner_tokenizer({})


@pytest.mark.parametrize(
    ("tokenizer_eos", "model_eos", "expected"),
    [
        ("<eos>", None, [1]),
        ("<eos>", 1, [1]),
        ("<eos>", [5, 1, 6], [1, 5, 6]),
        ("<eos>", 7, [1, 7]),
        (None, [5, 5], [5]),
        (None, None, []),
    ],
)
def test_every_end_of_sequence_id_counts(tokenizer_eos, model_eos, expected, model, tokenizer):
    tokenizer.eos_token = tokenizer_eos
    model.generation_config = GenerationConfig(eos_token_id=model_eos)
    assert load.end_of_sequence_ids(model, tokenizer) == expected


def test_positions_of_a_model(build):
    assert load.max_context(build("qwen3")) == 64
    assert load.max_context(build("gpt2")) == 64
    assert load.max_context(build("mamba (recurrent)", max_position_embeddings=None)) is None
    assert load.max_context(nn.Linear(1, 1)) is None


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("llama", {"attention_dropout": 0.5}),
        ("opt (learned positions)", {"dropout": 0.5, "attention_dropout": 0.5}),
    ],
)
def test_dropout_is_off_in_training_too(name, dropout, build, batch):
    model = build(name, **dropout).train()
    first, second = (score_tokens(model, batch, ForwardOptions()).logprobs for _ in range(2))
    assert float((first - second).detach().abs().max()) > 1e-3
    load.turn_off_dropout(model)
    first = score_tokens(model, batch, ForwardOptions()).logprobs
    torch.testing.assert_close(first, score_tokens(model, batch, ForwardOptions()).logprobs, rtol=0, atol=0)
    torch.testing.assert_close(first, score_tokens(model.eval(), batch, ForwardOptions()).logprobs)


def test_an_adapters_dropout_is_off(build):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("qwen3"), peft.LoraConfig(lora_dropout=0.5, target_modules=["q_proj"]))
    load.turn_off_dropout(model)
    assert all(module.p == 0.0 for module in model.modules() if isinstance(module, nn.Dropout))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_multiplies_in_float32(autocast: bool, build):
    """A body in bfloat16; the logits are those of a float32 product of its hidden states, not of a bfloat16 one."""
    model = build("qwen3").to(torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8]])
    load.cast_head_to_float32(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.model(ids).last_hidden_state
        logits = model(ids).logits
    assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    expected = hidden.double() @ model.lm_head.weight.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    rounded = (hidden @ model.lm_head.weight.to(torch.bfloat16).T).double()
    assert float((rounded - expected).abs().max()) > 1e-3


def test_a_cast_head_still_saves_and_trains(build, tmp_path):
    model = build("qwen3").to(torch.bfloat16)
    load.cast_head_to_float32(model)
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    model.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_tied_head_multiplies_in_float32_and_keeps_its_weight(build, tmp_path, monkeypatch):
    """In slices of seven rows; the embedding's own output, its type and the tie stay, on disk too."""
    monkeypatch.setattr(load.Float32Linear, "slice_rows", 7)
    model = build("qwen3-tied").to(torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8]])
    embedded = model.model.embed_tokens(ids)
    load.cast_head_to_float32(model)
    weight = model.lm_head.weight
    assert weight is model.model.embed_tokens.weight and weight.dtype == torch.bfloat16
    assert torch.equal(model.model.embed_tokens(ids), embedded)
    hidden, logits = model.model(ids).last_hidden_state, model(ids).logits
    assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path, {"dtype": "auto"})
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, weight)


def test_a_tied_head_in_float32_reads_no_random_state(build, monkeypatch):
    """A GPU refuses that while a decode step is recorded."""
    model = build("qwen3-tied").to(torch.bfloat16)
    load.cast_head_to_float32(model)

    def refuse() -> None:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    monkeypatch.setattr(torch, "get_rng_state", refuse)
    hidden = torch.randn(1, 3, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        expected = model.lm_head(hidden)
    logits = model.lm_head(hidden)
    logits.sum().backward()
    assert torch.equal(logits, expected)
    assert hidden.grad is not None


def test_heads_that_cannot_be_cast(build):
    with pytest.raises(ValueError, match="names no output head"):
        load.cast_head_to_float32(nn.Linear(2, 2))
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(build("qwen3"), peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="leave lm_head out"):
        load.cast_head_to_float32(adapted)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
def test_the_head_is_cast_under_an_adapter_on_other_layers(name, build):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build(name).to(torch.bfloat16), config)
    load.cast_head_to_float32(model)
    assert model(input_ids=torch.tensor([[5, 6]])).logits.dtype == torch.float32
