"""Adapters over 4-bit and 8-bit weights match the dequantized weights; optimizers with 8-bit state train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_adapters import KINDS
from small_runs import logprobs
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from groupgrad.models.quantized import is_packed
from groupgrad.models.weights import checkpoint_weights

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4, stored as bfloat16": {
        **FOUR_BITS,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4, scales too": {**FOUR_BITS, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4": {**FOUR_BITS, "bnb_4bit_quant_type": "nf4"},
    "8 bits": {"load_in_8bit": True},
}


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings})


@pytest.fixture
def base(make_policy, tokenizer, tmp_path: Path) -> Path:
    """Saves a model whose widths can be quantized, and its tokenizer."""
    make_policy(hidden_size=64, intermediate_size=96, head_dim=16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def quantized(base: Path):
    """`quantized(kind)` returns the quantized model."""

    def load(kind: str, **settings: Any) -> Any:
        config = BitsAndBytesConfig(**QUANTIZED[kind])
        return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, **settings)

    return load


def in_full(model: Any, base: Path) -> Any:
    """Returns a float32 model with the dequantized weights of `model`."""
    plain = AutoModelForCausalLM.from_pretrained(base)
    layers = dict(model.named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            if hasattr(layers[name].weight if hasattr(layers[name], "weight") else None, "quant_state"):
                weight = layers[name].weight
                module.weight.copy_(bnb.functional.dequantize_4bit(weight.data, weight.quant_state))
            elif type(layers[name]).__name__ == "Linear8bitLt":
                weight = layers[name].weight
                module.weight.copy_(weight.data.float() * weight.SCB[:, None] / 127)
    return plain


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def packed(model: Any) -> list[torch.Tensor]:
    """Returns the bytes of all quantized weights."""
    return [p.detach().clone().view(torch.uint8) for p in model.parameters() if is_packed(p)]


@pytest.mark.quick("8 bits", "nf4")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_training_equals_that_over_the_same_weights_in_full(kind: str, make_trainer, quantized, base: Path):
    """Log-probs of sampling and training, the reference's, and the adapter after three steps; nothing else changes."""
    finals, logs = [], []
    for plain in (False, True):
        model = quantized(kind)
        before = packed(model)
        given = in_full(model, base) if plain else model
        torch.manual_seed(1)
        trainer = make_trainer(model=given, trainer={"peft_config": lora()}, beta=0.1, optim="sgd", learning_rate=0.3)
        assert trainer.execution.engine_choice.name == "native"
        assert trainer.execution.layout_report.reason is None
        trainer.train()
        finals.append(trained(trainer.model))
        logs.append(trainer.state.log_history[:-1])
        assert all(torch.equal(a, b) for a, b in zip(packed(model), before, strict=True))
    assert {p.dtype for p in finals[0].values()} == {torch.float32}
    for name, value in finals[0].items():
        torch.testing.assert_close(value, finals[1][name], rtol=0, atol=1e-5)
    moved = max(float(p.abs().max()) for name, p in finals[0].items() if "lora_B" in name)
    assert moved > 1e-3
    for ours, other in zip(*logs):
        assert ours["sampling/logp_mismatch"] < 1e-5
        for key in ("reward", "entropy", "kl", "loss"):
            assert ours[key] == pytest.approx(other[key], abs=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["nf4", "8 bits"])
def test_by_name_saved_alone_and_resumed(kind: str, make_trainer, quantized, base: Path, tmp_path: Path):
    runs = []
    for folder, checkpoint in (("straight", None), ("resumed", str(tmp_path / "straight" / "checkpoint-1"))):
        trainer = make_trainer(
            model=str(base),
            trainer={"peft_config": lora(), "quantization_config": BitsAndBytesConfig(**QUANTIZED[kind])},
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=1,
            max_steps=2,
            beta=0.1,
        )
        assert trainer.model.get_base_model().is_quantized
        trainer.train(checkpoint)
        runs.append(trainer)
    straight, resumed = (trained(trainer.model) for trainer in runs)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    runs[0].save_model(str(tmp_path / "saved"))
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "adapter_model.safetensors" in files
    assert not any(name.startswith(("model", "pytorch_model")) for name in files)
    reloaded = peft.PeftModel.from_pretrained(in_full(quantized(kind), base), str(tmp_path / "saved"))
    torch.testing.assert_close(logprobs(runs[0].model), logprobs(reloaded), rtol=0, atol=1e-5)


def test_an_adapters_directory_over_quantized_weights(make_trainer, quantized, base: Path, tmp_path: Path):
    """The base is loaded quantized, and the initial adapter is the reference."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(quantized("nf4"), lora(init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    config = BitsAndBytesConfig(**QUANTIZED["nf4"])
    trainer = make_trainer(
        model=str(tmp_path / "adapter"), trainer={"quantization_config": config}, beta=0.1, max_steps=2
    )
    assert trainer.model.get_base_model().is_quantized
    plain = peft.PeftModel.from_pretrained(in_full(quantized("nf4"), base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logprobs(trainer.model), logprobs(plain), rtol=0, atol=1e-5)
    trainer.train()
    with trainer.reference.active() as reference:
        torch.testing.assert_close(logprobs(reference), logprobs(plain), rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs(trainer.model), logprobs(plain), atol=1e-4)


def test_gradient_checkpointing_over_quantized_weights(make_trainer, quantized):
    """The adapters are in bfloat16, and weights are stored for it."""
    finals = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = peft.get_peft_model(quantized("nf4", dtype=torch.bfloat16), lora(), autocast_adapter_dtype=False)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        trainer = make_trainer(model=model, gradient_checkpointing=checkpointing, max_steps=1)
        assert trainer.execution.engine_choice.name == "native"
        before = trained(trainer.model)
        trainer.train()
        finals.append(trained(trainer.model))
        assert {p.dtype for p in finals[-1].values()} == {torch.bfloat16}
        assert any(not torch.equal(value, before[name]) for name, value in finals[-1].items())
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name])


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (None, r"Qwen3ForCausalLM are quantized and cannot be trained .* give a peft_config"),
        # bitsandbytes rearranges weights in the first call on some processors; no gradient passes a layer since.
        (lora(), r"layers\.1\.mlp\.up_proj were rearranged .* load the model anew"),
    ],
    ids=["none", "rearranged"],
)
def test_what_cannot_be_trained_is_refused(make_trainer, quantized, adapter, text, request):
    model = quantized("nf4")
    if "rearranged" in request.node.name:
        model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=text):
        make_trainer(model=model, trainer={"peft_config": adapter})


@pytest.mark.parametrize("kind", QUANTIZED)
def test_nothing_is_merged_into_quantized_weights(kind: str, quantized):
    model = peft.get_peft_model(quantized(kind), lora())
    before = packed(model)
    with pytest.raises(ValueError, match="is quantized: an adapter cannot be merged into it"):
        list(checkpoint_weights(model))
    assert all(torch.equal(a, b) for a, b in zip(packed(model), before, strict=True))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("adapter", "kind"), [("rsLoRA on all layers", "8 bits"), ("whole head", "nf4"), ("IA3", "8 bits")]
)
def test_other_adapters_over_quantized_weights(adapter: str, kind: str, make_trainer, quantized):
    trainer = make_trainer(model=quantized(kind), trainer={"peft_config": KINDS[adapter]()}, beta=0.1, max_steps=2)
    assert (trainer.execution.engine_choice.name, trainer.execution.layout_report.reason) == ("native", None)
    before = trained(trainer.model)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in trained(trainer.model).items())
    log = trainer.state.log_history[:-1]
    assert max(entry["sampling/logp_mismatch"] for entry in log) < 1e-5
    assert log[0]["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_quantization_config_given_twice(make_trainer, base: Path):
    config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="quantization_config is given both"):
        make_trainer(
            model=str(base),
            model_init_kwargs={"quantization_config": {"load_in_4bit": True}},
            trainer={"quantization_config": config, "peft_config": lora()},
        )


# ------------------------------------------------------------------------------------------------ command, optimizers


NARROW_STATE = {
    "adamw_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "adamw_torch_8bit": "torchao",
    "adamw_torch_4bit": "torchao",
}
"""Optimizer -> its package."""

EPSILON = {"adamw_torch_8bit": 1e-5}
"""Its second moments that are small beside others of their block are 0, which a larger epsilon makes up for."""


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of an optimizer's state of one weight, those inside of tensor subclasses counted."""
    total = 0
    for value in state.values():
        parts = [value]
        if hasattr(value, "__tensor_flatten__"):
            parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        total += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor) and part.ndim)
    return total


@pytest.mark.quick(1)
@pytest.mark.parametrize("optim", NARROW_STATE)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_optimizers_with_narrow_state(optim: str, make_trainer, make_policy, tools, tmp_path: Path, monkeypatch):
    """The state of large weights is 8 bits wide, or 4; a resumed run goes on bit for bit."""
    pytest.importorskip(NARROW_STATE[optim])
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)  # torchao compiles one for each shape, for minutes
    finals = {}
    start = tools.weights(make_policy(hidden_size=64, intermediate_size=96))
    for folder, name, checkpoint in (
        ("straight", optim, None),
        ("resumed", optim, str(tmp_path / "straight" / "checkpoint-2")),
        ("plain", "adamw_torch", None),
    ):
        trainer = make_trainer(
            model=make_policy(hidden_size=64, intermediate_size=96),
            optim=name,
            learning_rate=1e-3,
            adam_epsilon=EPSILON.get(optim, 1e-8),
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train(checkpoint)
        finals[folder] = tools.weights(trainer.model)
        if folder == "straight":
            weight = trainer.model.model.layers[0].mlp.up_proj.weight
            bits = 4 if "4bit" in optim else 8
            # Two numbers a weight, and two tables of the float32 numbers that they stand for; scales take the rest.
            size = state_bytes(trainer.optimizer.state[weight]) - 2 * 4 * 2**bits
            assert 2 * bits / 8 * weight.numel() <= size < 2.3 * bits / 8 * weight.numel()
    assert torch.equal(finals["resumed"], finals["straight"])
    change = tools.relative(finals["straight"] - start, finals["plain"] - start)
    assert change > 0
    assert change < (1.0 if optim == "adamw_torch_4bit" else 0.3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_on_a_gpu(kind: str, make_trainer, base: Path):
    config = BitsAndBytesConfig(**QUANTIZED[kind])
    trainer = make_trainer(
        model=str(base),
        trainer={"quantization_config": config, "peft_config": lora()},
        use_cpu=False,
        beta=0.1,
        optim="paged_adamw_8bit",
    )
    assert trainer.execution.engine_choice.name == "native"
    trainer.train()
    log = trainer.state.log_history[:-1]
    assert log[0]["kl"] == pytest.approx(0.0, abs=1e-2)
    assert all(entry["sampling/logp_mismatch"] < 0.5 for entry in log)
