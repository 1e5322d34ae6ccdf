"""The reference keeps the policy's weights from before training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_adapters import logprobs, lora
from torch import nn

from groupgrad.models.adapters import add_adapter, is_adapted
from groupgrad.models.reference import Reference
from groupgrad.scoring.forward import ForwardOptions, OldAndRefScorer, score_without_gradient

peft = pytest.importorskip("peft")


def shift(model: nn.Module, by: float = 0.5, only: str = "") -> None:
    """Changes the trained weights in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and only in name:
                parameter.add_(by)


def reference_logprobs(reference: Reference, batch: Any) -> torch.Tensor:
    with reference.active() as module:
        return logprobs(module, batch)


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_a_full_model_is_copied_from_memory_and_frozen(build, batch):
    policy = build("qwen3").train()
    shift(policy, 0.01)  # changed in memory, which a load by name would miss
    given = logprobs(policy, batch)
    reference = Reference(policy, adapter_is_fresh=False, is_synced=False)
    torch.testing.assert_close(reference_logprobs(reference, batch), given, rtol=0, atol=0)
    shift(policy)
    torch.testing.assert_close(reference_logprobs(reference, batch), given, rtol=0, atol=0)
    assert float((logprobs(policy, batch) - given).abs().max()) > 1e-2
    assert reference.module is not None
    assert not trainable(reference.module)
    assert not reference.module.training
    assert policy.training
    assert {id(p) for p in policy.parameters()}.isdisjoint(id(p) for p in reference.module.parameters())


def test_a_new_adapter_is_disabled(build, batch):
    base = build("qwen3")
    given = logprobs(base, batch)
    policy = add_adapter(base, lora())
    names, before = trainable(policy), set(dict(policy.named_parameters()))
    reference = Reference(policy, adapter_is_fresh=True, is_synced=False)
    shift(policy)
    torch.testing.assert_close(reference_logprobs(reference, batch), given)
    assert reference.module is None
    assert set(dict(policy.named_parameters())) == before, "no second set of weights is needed"
    assert trainable(policy) == names
    assert reference.state_dict() == {}
    assert float((logprobs(policy, batch) - given).abs().max()) > 1e-3, "the adapter is on again"


def adapted(build: Any, kind: str) -> nn.Module:
    """A small model with a trained adapter."""
    qv = ["q_proj", "v_proj"]
    configs = {
        "rsLoRA": lambda: lora(use_rslora=True),
        "DoRA": lambda: lora(use_dora=True),
        "biases": lambda: lora(bias="all"),
        "whole head": lambda: lora(modules_to_save=["lm_head"]),
        "whole tied head": lambda: lora(modules_to_save=["lm_head", "embed_tokens"]),
        "adapted embedding": lambda: lora(target_modules=[*qv, "embed_tokens"]),
        "some tokens": lambda: lora(trainable_token_indices=[5, 20, 21, 22]),
        "experts": lambda: lora(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
        "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
        "LoHa": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=qv),
        "VeRA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]),
    }
    architecture = {"experts": "qwen3-moe", "whole tied head": "qwen3-tied"}.get(kind, "qwen3")
    policy = peft.get_peft_model(build(architecture), configs.get(kind, lora)())
    randomize(policy, seed=1)
    return policy


def randomize(model: nn.Module, seed: int) -> None:
    """Adds noise to the trained weights; a constant would cancel out in the softmax."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=stream))


KINDS = ["LoRA", "rsLoRA", "DoRA", "biases", "whole head", "whole tied head", "adapted embedding", "some tokens"]
KINDS += ["experts", "IA3", "LoHa", "VeRA"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_adapter_of_any_kind_is_copied_and_synced(kind: str, build, batch):
    policy = adapted(build, kind)
    names, given = trainable(policy), logprobs(policy, batch)
    reference = Reference(policy, adapter_is_fresh=False, is_synced=False)
    assert trainable(policy) == names
    randomize(policy, seed=2)
    moved = logprobs(policy, batch)
    assert float((moved - given).abs().max()) > 1e-3
    torch.testing.assert_close(reference_logprobs(reference, batch), given, rtol=0, atol=0)
    torch.testing.assert_close(logprobs(policy, batch), moved, rtol=0, atol=0)
    assert trainable(policy) == names
    assert set(reference.state_dict()) == names
    reference.sync(policy, 1.0)
    torch.testing.assert_close(reference_logprobs(reference, batch), moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}])
def test_a_new_adapter_that_changes_the_base_is_copied(settings: dict[str, Any], build, batch):
    """The adapter trains biases of the base model, or its initialisation is subtracted from the base weights."""
    base = build("qwen3", attention_bias=True)
    with torch.no_grad():
        base.model.layers[0].self_attn.q_proj.bias.normal_()
    given = logprobs(base, batch)
    policy = add_adapter(base, lora(**{"init_lora_weights": True, **settings}))
    reference = Reference(policy, adapter_is_fresh=True, is_synced=False)
    randomize(policy, seed=2)
    torch.testing.assert_close(reference_logprobs(reference, batch), given, rtol=0, atol=1e-5)
    with policy.disable_adapter():
        assert float((logprobs(policy, batch) - given).abs().max()) > 1e-3


def test_a_copied_adapter_takes_the_dtype_of_its_policy(build, batch):
    policy = adapted(build, "LoRA")
    reference = Reference(policy, adapter_is_fresh=False, is_synced=False)
    policy.to(torch.bfloat16)
    given = logprobs(policy, batch)
    randomize(policy, seed=2)
    torch.testing.assert_close(reference_logprobs(reference, batch), given, rtol=0, atol=0)


def test_trained_parameters_are_restored_after_an_error(build):
    policy = peft.get_peft_model(build("qwen3"), lora())
    reference = Reference(policy, adapter_is_fresh=False, is_synced=False)
    own = {name: id(parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad}
    with pytest.raises(RuntimeError, match="stop"), reference.active():
        assert not trainable(policy)
        raise RuntimeError("stop")
    assert {n: id(p) for n, p in policy.named_parameters() if p.requires_grad} == own


def test_a_full_reference_is_synced_with_its_mixup(build):
    policy = build("qwen3")
    reference = Reference(policy, adapter_is_fresh=False, is_synced=True)
    start = copy.deepcopy(policy.state_dict())
    shift(policy, 1.0)
    reference.sync(policy, 0.25)
    assert reference.module is not None
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(value, start[name] + 0.25, rtol=1e-5, atol=1e-6)
    reference.sync(policy, 1.0)
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(value, start[name] + 1.0, rtol=1e-5, atol=1e-6)


def test_a_reference_is_synced_with_a_policy_of_lower_precision(build):
    policy = build("qwen3")
    reference = Reference(policy, adapter_is_fresh=False, is_synced=True)
    reference.sync(policy.to(torch.bfloat16), 0.5)
    assert reference.module is not None
    assert next(reference.module.parameters()).dtype == torch.float32


@pytest.mark.parametrize("fresh", [True, False])
def test_an_adapter_reference_is_synced_with_its_mixup(fresh: bool, build):
    policy = peft.get_peft_model(build("qwen3"), lora())
    reference = Reference(policy, adapter_is_fresh=fresh, is_synced=True)
    start = {n: p.detach().clone() for n, p in policy.named_parameters()}
    shift(policy, 1.0)
    reference.sync(policy, 0.25)
    actual = reference.state_dict()
    assert len(actual) == len(trainable(policy)) == 8
    for name, value in actual.items():
        torch.testing.assert_close(value, start[name] + 0.25, rtol=1e-5, atol=1e-6)
    for name, parameter in policy.named_parameters():
        if "lora" not in name:
            torch.testing.assert_close(parameter.detach(), start[name], rtol=0, atol=0)


@pytest.mark.parametrize("adapted", [True, False])
def test_the_state_of_a_synced_reference_is_restored(adapted: bool, build, batch):
    def make() -> tuple[nn.Module, Reference]:
        policy = peft.get_peft_model(build("qwen3"), lora()) if adapted else build("qwen3")
        return policy, Reference(policy, adapter_is_fresh=True, is_synced=True)

    policy, reference = make()
    shift(policy, 0.3)
    reference.sync(policy, 0.5)
    state = reference.state_dict()
    shift(policy, 1.0)
    reference.sync(policy, 0.5)  # must not change the saved state
    _, restored = make()
    before = reference_logprobs(restored, batch)
    restored.load_state_dict(state)
    policy, expected = make()
    shift(policy, 0.3)
    expected.sync(policy, 0.5)
    actual = reference_logprobs(restored, batch)
    torch.testing.assert_close(actual, reference_logprobs(expected, batch), rtol=0, atol=0)
    assert float((actual - before).abs().max()) > 1e-3


def test_frozen_scores_of_policy_and_reference(build, batch):
    policy = build("qwen3")
    reference = Reference(policy, adapter_is_fresh=False, is_synced=False)
    given = logprobs(policy, batch)
    shift(policy, 0.1)
    scorer = OldAndRefScorer(policy, reference, ForwardOptions(), "cpu")
    expected = score_without_gradient(policy, batch, ForwardOptions())
    torch.testing.assert_close(expected.logprobs, logprobs(policy, batch))
    for rows_per_pass in (None, 1, 2):
        scored = scorer.policy(batch, rows_per_pass=rows_per_pass)
        torch.testing.assert_close(scored.logprobs, expected.logprobs)
        torch.testing.assert_close(scored.entropy, expected.entropy)
        torch.testing.assert_close(scorer.reference_logprobs(batch, rows_per_pass=rows_per_pass), given)
    assert OldAndRefScorer(policy, None, ForwardOptions(), "cpu").reference_logprobs(batch) is None


def test_frozen_scores_have_no_dropout(build, batch):
    policy = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    scorer = OldAndRefScorer(
        policy, Reference(policy, adapter_is_fresh=False, is_synced=False), ForwardOptions(), "cpu"
    )
    old = scorer.policy(batch).logprobs
    torch.testing.assert_close(old, scorer.reference_logprobs(batch))
    torch.testing.assert_close(old, logprobs(policy, batch))
    assert policy.training


def test_adding_an_adapter(build):
    model = build("qwen3")
    assert not is_adapted(model)
    policy = add_adapter(model, lora())
    assert is_adapted(policy)
    assert all("lora" in name for name in trainable(policy))
    with pytest.raises(ValueError, match="already has an adapter"):
        add_adapter(policy, lora())
    with pytest.raises(TypeError, match=r"a dict; it must be a peft\.PeftConfig"):
        add_adapter(build("qwen3"), {"r": 2})


def test_a_missing_peft_is_named(build, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install .peft>="):
        add_adapter(build("qwen3"), object())


@pytest.mark.parametrize("follows", [False, True])
def test_frozen_parts_of_an_adapter_stay_frozen(build, batch, follows):
    policy = add_adapter(build("qwen3"), lora())
    for name, parameter in policy.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(False)
    reference = Reference(policy, adapter_is_fresh=True, is_synced=follows)
    before = trainable(policy)
    reference_logprobs(reference, batch)
    assert trainable(policy) == before
    assert before and not any("layers.0" in name for name in before)
