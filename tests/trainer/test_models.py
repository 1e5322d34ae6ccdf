"""Dropout, reference, adapters, experts, precision, loading and callbacks of the model in training."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from noted_calls import note_results
from peft import LoraConfig, PeftModel, get_peft_model
from step_events import At
from transformers import AutoModelForCausalLM

from groupgrad.scoring.forward import layout_for
from groupgrad.trainer import trainer as trainer_module

OFF_POLICY = {"generation_batch_size": 16, "max_steps": 2}


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)


@pytest.fixture
def passes(monkeypatch):
    """Collects the micro-batches of training with their scores."""
    note = lambda scores, model, batch, *_: (batch, scores.logprobs.detach().clone())  # noqa: E731
    return note_results(monkeypatch, trainer_module, "score_tokens", note)


# ------------------------------------------------------------------------------------------------ dropout


def test_sampling_old_and_reference_passes_run_without_dropout(train, make_policy, passes):
    """Half of the attention is dropped in training passes alone: what was sampled, the old and the reference scores
    agree to rounding before the first update, the training pass does not."""
    train(model=make_policy(attention_dropout=0.5), beta=0.1, **OFF_POLICY)
    batch, logprobs = passes[0]
    assert batch.old_logprobs == pytest.approx(batch.sampling_logprobs, abs=1e-5)
    assert batch.old_logprobs == pytest.approx(batch.ref_logprobs, abs=1e-5)
    assert float((logprobs - batch.old_logprobs).abs().max()) > 0.01


@pytest.mark.parametrize("adapter", [False, True])
def test_disable_dropout_turns_all_of_it_off(final_weights, adapter):
    """The dropout of attention, which is a number and no layer, too; and that of an adapter."""
    finals = []
    for dropout, settings in ((0.5, {"disable_dropout": True}), (0.0, {}), (0.5, {})):
        extra = {"peft_config": lora(lora_dropout=dropout)} if adapter else {}
        model = {"attention_dropout": dropout}
        finals.append(final_weights(model=model, trainer=extra, beta=0.1, **OFF_POLICY, **settings))
    assert torch.equal(finals[0], finals[1])
    assert not torch.equal(finals[1], finals[2])


# ------------------------------------------------------------------------------------------------ reference


def test_the_reference_is_the_model_as_given(train, make_policy, model_dir):
    """A model that was changed in memory after loading starts with divergence 0."""
    policy = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    trainer = train(model=policy, beta=0.1, max_steps=2)
    first, second = trainer.state.log_history[:2]
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl"] > 1e-5


def test_the_reference_follows_on_schedule(train):
    """Mixed in whole after steps 2 and 4, it is the policy of the next step's rollouts: divergence 0 there alone."""
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    trainer = train(beta=0.1, max_steps=5, **sync)
    divergence = [entry["kl"] for entry in trainer.state.log_history[:-1]]
    assert [kl < 1e-9 for kl in divergence] == [True, False, True, False, True]


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_is_mixed(make_trainer, make_policy, adapter):
    """After one step the reference is 0.25 of the policy and 0.75 of the old reference."""
    policy = make_policy()
    torch.manual_seed(0)
    trainer = make_trainer(
        model=policy,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.25,
        max_steps=1,
        trainer={"peft_config": lora()} if adapter else {},
    )
    own = trainer._policy.reference.state_dict()
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    end = dict(trainer.model.named_parameters())
    moved = trainer._policy.reference.state_dict()
    assert len(moved) == (8 if adapter else len(start))
    for name in own:
        assert torch.allclose(moved[name], 0.25 * end[name] + 0.75 * start[name], atol=1e-7)
    assert any(not torch.equal(moved[name], start[name]) for name in own)


# ------------------------------------------------------------------------------------------------ adapters


def test_a_frozen_model_is_refused(make_trainer, make_policy, tmp_path):
    """The usual one: an adapter that was loaded for use, not for training."""
    with pytest.raises(ValueError, match="frozen"):
        make_trainer(model=make_policy().requires_grad_(False))
    get_peft_model(make_policy(), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is_trainable=True"):
        make_trainer(model=PeftModel.from_pretrained(make_policy(), str(tmp_path)))
    make_trainer(model=PeftModel.from_pretrained(make_policy(), str(tmp_path), is_trainable=True))


# ------------------------------------------------------------------------------------------------ experts, precision


def test_router_aux_loss_coef(train, tools):
    """Unset: the model's own weight (0.001 here). The logged loss is the policy's plus weight x `aux_loss`."""
    losses, finals = {}, {}
    for coef in (None, 0.001, 0.5, 0.0):
        model = tools.make_experts(router_aux_loss_coef=0.001)
        trainer = train(model=model, router_aux_loss_coef=coef, max_steps=1, gradient_accumulation_steps=2)
        finals[coef] = tools.weights(model)
        losses[coef] = trainer.state.log_history[0]
    assert torch.equal(finals[None], finals[0.001])
    assert tools.relative(finals[0.5], finals[0.0]) > 1e-4
    assert "aux_loss" not in losses[0.0]
    assert losses[0.5]["aux_loss"] == pytest.approx(losses[0.001]["aux_loss"], abs=1e-6)
    assert losses[0.5]["aux_loss"] >= 2.0  # two of four experts a token, in balance: 2
    assert losses[0.5]["loss"] == pytest.approx(losses[0.0]["loss"] + 0.5 * losses[0.5]["aux_loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss (experts, sinks)"])
def test_experts_train_with_shared_prompts_and_their_balance(train, build, tokenizer, tools, name):
    """The native engine samples, prompts are shared, log-probs of sampling are training's, and the balance is in the
    loss by the model's own weight."""
    entries = []
    for weight in (0.25, 0.0):
        model = build(name, vocab_size=len(tokenizer), router_aux_loss_coef=weight)
        model.generation_config.eos_token_id = tools.EOS
        trainer = train(model=model, max_steps=1)
        assert trainer.execution.engine_choice.name == "native"
        assert layout_for(trainer.model, trainer.components.forward_options) == "shared"
        entries.append(trainer.state.log_history[0])
        assert entries[-1]["sampling/logp_mismatch"] < 1e-5
    assert entries[0]["aux_loss"] >= 1.0
    assert entries[0]["loss"] == pytest.approx(entries[1]["loss"] + 0.25 * entries[0]["aux_loss"], abs=1e-5)


def test_cast_lm_head_to_fp32(train, make_policy, passes):
    """A bfloat16 model whose head alone computes in float32: its scores are not those of a bfloat16 head."""
    scores = []
    for cast in (False, True):
        policy = make_policy().to(torch.bfloat16)
        trainer = train(model=policy, cast_lm_head_to_fp32=cast, beta=0.1, max_steps=1)
        scores.append(passes[-1][1])
        assert policy.lm_head.weight.dtype == (torch.float32 if cast else torch.bfloat16)
        assert trainer._policy.reference.module.lm_head.weight.dtype == policy.lm_head.weight.dtype
        assert policy.model.embed_tokens.weight.dtype == torch.bfloat16
    assert not torch.equal(scores[0][:3], scores[1][:3])


# ------------------------------------------------------------------------------------------------ loading


def test_trust_remote_code(make_trainer, model_dir):
    """Code that comes with a checkpoint runs only if it is trusted."""
    config = json.loads((model_dir / "config.json").read_text())
    config |= {
        "architectures": ["OddForCausalLM"],
        "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"},
        "model_type": "odd",
    }
    (model_dir / "config.json").write_text(json.dumps(config))
    (model_dir / "odd.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class OddConfig(Qwen3Config):\n    model_type = 'odd'\n"
        "class OddForCausalLM(Qwen3ForCausalLM):\n    config_class = OddConfig\n"
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        make_trainer(model=str(model_dir))
    trainer = make_trainer(model=str(model_dir), trust_remote_code=True, max_steps=1)
    assert type(trainer.model).__name__ == "OddForCausalLM"
    trainer.train()
    assert trainer.state.global_step == 1


# ------------------------------------------------------------------------------------------------ callbacks, optimizers


def test_callbacks_are_called_in_their_places(train, tools):
    events: list[str] = []

    names = ("train_begin", "step_begin", "step_end", "log", "evaluate", "save", "train_end", "epoch_begin")
    notes = [At(f"on_{name}", lambda _, name=name: events.append(name)) for name in names]
    train(
        max_steps=2,
        trainer={"callbacks": notes, "eval_dataset": tools.prompts(2)},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    assert events == [
        *["train_begin", "epoch_begin", "step_begin", "step_end", "log"],
        *["step_begin", "step_end", "log", "log", "evaluate", "save", "log", "train_end"],
    ]
