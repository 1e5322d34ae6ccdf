"""Adapters of every type are sampled without merging, trained and saved alone, and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_adapters import KINDS
from small_runs import logprobs
from transformers import AutoModelForCausalLM

from groupgrad.models.adapters import dora_scales_kept

peft = pytest.importorskip("peft")


@pytest.fixture
def build(make_trainer, make_policy, tools, tmp_path):
    """`build(kind, folder, **settings)` returns a trainer with that type of adapter; its base model is in `base`."""

    def make(kind: str, folder: str, **settings: Any) -> Any:
        base = tmp_path / "base"
        if not base.exists():
            policy = tools.make_experts() if kind == "experts" else make_policy(attention_bias=kind == "biases")
            policy.save_pretrained(base)
        return make_trainer(
            model=str(base),
            trainer={"peft_config": KINDS[kind]()},
            **{"output_dir": str(tmp_path / folder), "save_strategy": "steps", **settings},
        )

    return make


@pytest.mark.quick("LoRA", "experts", "whole head")
@pytest.mark.parametrize("kind", KINDS)
def test_trained_saved_and_resumed(kind: str, build, tools, tmp_path: Path):
    """Nothing but the adapter moves and is saved; the model without it is the reference; a resumed run is bit-equal."""
    settings = {"beta": 0.1, "max_steps": 2, "save_steps": 1}
    straight = build(kind, "straight", **settings)
    assert straight.execution.engine_choice.name == "native"
    trainable = {name for name, p in straight.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in straight.model.named_parameters()}
    given = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    straight.train()
    after = dict(straight.model.named_parameters())
    assert {name for name in after if not torch.equal(after[name], before[name])} <= trainable
    log = straight.state.log_history
    # With dropout training scores other log-probs than sampling does, and they are not compared.
    mismatch = [entry.get("sampling/logp_mismatch") for entry in log[:-1]]
    assert mismatch == [None] * 2 if "dropout" in kind else max(mismatch) < 1e-5
    assert log[0]["kl"] == pytest.approx(0.0, abs=1e-8)
    assert log[1]["kl"] > 1e-7
    trained = logprobs(straight.model)
    with straight.reference.active() as reference:
        assert torch.allclose(logprobs(reference), given, atol=1e-5)
    assert not torch.allclose(trained, given, atol=1e-4)

    resumed = build(kind, "resumed", **{**settings, "save_strategy": "no"})
    resumed.train(str(tmp_path / "straight" / "checkpoint-1"))
    assert torch.equal(tools.weights(resumed.model), tools.weights(straight.model))
    assert tools.without_times(resumed.state.log_history)[:-1] == tools.without_times(log)[:-1]

    folder = tmp_path / "straight" / "checkpoint-2"
    assert list(folder.rglob("adapter_model.safetensors")) == [folder / "adapter_model.safetensors"]
    assert not any(path.name.startswith(("model", "pytorch_model")) for path in folder.iterdir())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    found = logprobs(peft.PeftModel.from_pretrained(base, str(folder)))
    torch.testing.assert_close(found, trained, rtol=0, atol=1e-5)


def test_a_dora_layer_computes_its_norms_once_a_round_of_sampling(build, monkeypatch):
    """And once in each training pass, whose weights may have changed."""
    from peft.tuners.lora.dora import DoraLinearLayer

    counts: dict[str, int] = {"sampling": 0, "training": 0}
    norm = DoraLinearLayer.get_weight_norm

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[trainer.progress.phase if trainer.is_in_train else "training"] += 1
        return norm(self, *args, **kwargs)

    trainer = build("DoRA", "dora", max_steps=2, save_strategy="no", max_completion_length=12)
    monkeypatch.setattr(DoraLinearLayer, "get_weight_norm", counted)
    counts["training"] = 0
    trainer.train()
    layers = [part for part in trainer.model.modules() if isinstance(part, DoraLinearLayer)]
    assert counts["sampling"] == 2 * len(layers)
    assert counts["training"] >= 2 * len(layers)
    assert not any("get_weight_norm" in vars(layer) for layer in layers)
    assert max(entry["sampling/logp_mismatch"] for entry in trainer.state.log_history[:-1]) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
def test_a_kept_scale_changes_no_bit_of_a_dora_layer(bias: bool):
    config = peft.LoraConfig(r=4, target_modules=["0"], use_dora=True, init_lora_weights=False)
    model: Any = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(48, 32, bias=bias)), config).eval()  # pyright: ignore
    inputs = torch.randn(5, 48)
    with torch.no_grad():
        expected = model(inputs)
        with dora_scales_kept(model):
            assert all(torch.equal(model(inputs), expected) for _ in range(2))


QUICK = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "save_strategy": "no"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["LoRA on the head, with dropout", "IA3", "experts"])
def test_gradient_checkpointing_changes_nothing(kind: str, build, tools):
    finals = []
    for number, options in enumerate((None, {"use_reentrant": False}, {"use_reentrant": True})):
        recomputes = {"gradient_checkpointing": options is not None, "gradient_checkpointing_kwargs": options}
        trainer = build(kind, f"run-{number}", **QUICK, **recomputes)
        start = tools.weights(trainer.model)
        trainer.train()
        finals.append(tools.weights(trainer.model))
        assert not torch.equal(finals[-1], start)
    for final in finals[1:]:
        torch.testing.assert_close(final, finals[0], rtol=0, atol=3e-5)


def test_an_adapters_directory_is_trained_further(build, make_trainer, tmp_path: Path):
    """The initial adapter, not the base model, is the reference, so the divergence starts at 0; what `save_model`
    writes is the adapter alone, whatever reference there is."""
    first = build("LoRA", "first", learning_rate=0.1, max_steps=1, beta=0.1, sync_ref_model=True)
    first.train()
    first.save_model(str(tmp_path / "adapter"))
    assert len(list((tmp_path / "adapter").rglob("*.safetensors"))) == 1 and set(first.model.peft_config) == {"default"}
    second = make_trainer(model=str(tmp_path / "adapter"), beta=0.1, max_steps=2)
    expected = logprobs(first.model)
    torch.testing.assert_close(logprobs(second.model), expected, rtol=0, atol=0)
    second.train()
    assert second.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.state.log_history[1]["kl"] > 1e-7
    with second.reference.active() as reference:
        torch.testing.assert_close(logprobs(reference), expected, rtol=0, atol=1e-6)


def test_an_adapter_that_does_not_fit_is_refused_before_training(make_trainer, make_policy, tmp_path: Path):
    config = peft.LoraConfig(target_modules=["query_key_value"])
    with pytest.raises(ValueError, match=r"peft_config does not fit this Qwen3ForCausalLM: .*query_key_value"):
        make_trainer(trainer={"peft_config": config})
    merged = peft.get_peft_model(make_policy(), KINDS["LoRA"]())
    merged.merge_adapter()
    with pytest.raises(ValueError, match="the adapter is merged"):
        make_trainer(model=merged)
    make_policy(hidden_size=64).save_pretrained(tmp_path / "base")
    peft.get_peft_model(make_policy(), KINDS["LoRA"]()).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": f"{tmp_path}/base"}))
    with pytest.raises(ValueError, match=r"does not fit Qwen3ForCausalLM .*size mismatch"):
        make_trainer(model=str(tmp_path / "adapter"))


def test_virtual_tokens_are_sampled_by_generate(make_trainer, caplog):
    """Adapters that the native engine cannot sample fall back to transformers, with one log line, and train."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = make_trainer(trainer={"peft_config": config}, max_steps=1)
    assert trainer.execution.engine_choice.name == "transformers"
    # Without cached keys and values, where peft and transformers mishandle them together.
    assert trainer.execution.engine_choice.gap < 1e-5
    lines = [record.getMessage() for record in caplog.records if "is sampled by generate" in record.getMessage()]
    assert lines == ["Qwen3ForCausalLM is sampled by generate: its adapter puts virtual tokens in front of the prompt"]
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.state.log_history[0]["sampling/logp_mismatch"] < 1e-5
