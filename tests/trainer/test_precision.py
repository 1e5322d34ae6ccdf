"""Weight and compute dtypes: float32, mixed precision, pure bfloat16."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import peft
import pytest
import small_adapters
import torch
from noted_calls import note_calls
from torch import nn
from transformers import TrainerCallback

from groupgrad.engines.native.attention_layouts import DecodeLayout, PrefillLayout
from groupgrad.kernels import library, status
from groupgrad.scoring.block_attention import BlockLayout
from groupgrad.scoring.fused_modules import computes_in_float32
from groupgrad.scoring.rounding import Rounding
from groupgrad.trainer.stochastic_adamw import StochasticAdamW

PLANS = {"prompts": PrefillLayout, "sampled tokens": DecodeLayout, "training": BlockLayout}


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """Records the dtypes of attention by phase."""
    seen: dict[str, set[torch.dtype]] = defaultdict(set)
    for purpose, plan in PLANS.items():

        def attend(self: Any, query: Any, key: Any, value: Any, call: Any, *, _for=purpose, _plain=plan.attend) -> Any:
            output = _plain(self, query, key, value, call)
            seen[_for] |= {query.dtype, key.dtype, value.dtype, output.dtype}
            return output

        monkeypatch.setattr(plan, "attend", attend)
    return seen


CASES = {
    "float32": ({}, torch.float32, torch.float32, 1e-5),
    "mixed": ({"bf16": True}, torch.float32, torch.bfloat16, 0.1),
    "bfloat16 alone": ({}, torch.bfloat16, torch.float32, 1e-5),
}


@pytest.mark.parametrize("case", [*CASES, "both"])
def test_the_engine_samples_in_the_type_that_training_computes_in(case, make_trainer, make_policy, attended):
    settings, held, computed, gap = CASES.get(case, ({"bf16": True}, torch.bfloat16, torch.bfloat16, 0.1))
    policy = make_policy().to(held)
    trainer = make_trainer(model=policy, max_steps=2, **settings)
    assert trainer.execution.engine_choice.name == "native"
    trainer.train()
    # A compiled decode step calls no `attend`.
    assert {"prompts", "training"} <= {*attended} and all(found == {computed} for found in attended.values())
    assert {parameter.dtype for parameter in policy.parameters()} == {held}
    states = [value.dtype for state in trainer.optimizer.state.values() for value in state.values()]
    assert held in states
    assert max(entry["sampling/logp_mismatch"] for entry in trainer.state.log_history[:-1]) < gap


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_clipped_where_the_policy_has_not_moved(case, make_trainer, make_policy, monkeypatch):
    """Each batch serves four steps at a learning rate of 0; the bounds are tighter than rounding is.

    Old log-probs are the engine's where it computes in float32, and a training pass's in half precision.
    """
    settings, held, _, _ = CASES[case]
    trainer = make_trainer(
        model=make_policy().to(held),
        reward_funcs=lambda prompts, completion_ids, **_: [
            sum(ids) % 3 * (len(prompt) % 2) for prompt, ids in zip(prompts, completion_ids)
        ],
        learning_rate=0.0,
        temperature=0.3,
        generation_batch_size=16,
        num_iterations=2,
        epsilon=1e-3,
        max_steps=8,
        **settings,
    )
    passes = note_calls(monkeypatch, type(trainer.components.scorer), "policy")
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["clip_ratio/region_mean"] for entry in steps] == [0.0] * 8
    assert len(passes) == (2 if case == "mixed" else 0)
    said = {
        True: "those of sampling",
        False: "those of a forward pass of training, from which those of sampling differ by",
    }
    assert trainer.sampler_logprobs.old_in_words(0.1).startswith(said[case != "mixed"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixed", ["fp16", "bf16"])
def test_mixed_precision_on_a_gpu(mixed: str, train, make_policy, attended):
    policy = make_policy()
    settings = {"use_cpu": False, "fp16": mixed == "fp16", "bf16": mixed == "bf16"}
    train(model=policy, max_steps=2, **settings)
    computed = {"fp16": torch.float16, "bf16": torch.bfloat16}[mixed]
    assert dict(attended) == {purpose: {computed} for purpose in PLANS}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------------ sums of gradients


class Gradients(TrainerCallback):
    """Keeps the gradient of each backward pass, and the one that the optimizer gets."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.passes: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.final: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.passes[name].append(gradient.clone()))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.final = {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}


def test_gradients_of_micro_batches_are_summed_in_float32(train, make_policy):
    """The optimizer gets the float32 sum of the passes' gradients, rounded once; added up in bfloat16 it is further
    from the exact sum."""
    errors = {}
    for dtype in ("auto", "float32", "weights"):
        policy = make_policy(num_hidden_layers=1).to(torch.bfloat16)
        gradients = Gradients(policy)
        train(
            model=policy,
            gradient_dtype=dtype,
            max_steps=1,
            max_grad_norm=0.0,
            max_completion_length=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=16,
            trainer={"callbacks": [gradients]},
        )
        assert len(gradients.passes["model.norm.weight"]) == 16
        gaps = []
        for name, parts in gradients.passes.items():
            if dtype != "weights":
                in_float32 = torch.stack(parts).float().cumsum(0)[-1]
                assert torch.equal(gradients.final[name], in_float32.bfloat16()), name
            gaps.append((gradients.final[name].double() - torch.stack(parts).double().sum(0)).flatten())
        errors[dtype] = float(torch.cat(gaps).norm())
    assert errors["auto"] == errors["float32"] < errors["weights"] / 1.5


# ------------------------------------------------------------------------------------------------ stochastic rounding


def moved(policy: nn.Module, start: dict[str, torch.Tensor]) -> float:
    """Share of the numbers above 0.01 that are not what they were; half a step of bfloat16 is 3e-5 or more there."""
    changed = [(p.detach() != start[name])[start[name].abs() > 0.01] for name, p in policy.named_parameters()]
    return float(torch.cat(changed).float().mean())


def test_small_updates_arrive(train, make_policy):
    """At a rate of 1e-6, rounding to nearest leaves all but the smallest weights unchanged."""
    shares = {}
    for rounded in (False, True):
        policy = make_policy().to(torch.bfloat16)
        start = {name: p.detach().clone() for name, p in policy.named_parameters()}
        trainer = train(model=policy, learning_rate=1e-6, stochastic_rounding=rounded)
        assert isinstance(trainer.optimizer.optimizer, StochasticAdamW) == rounded
        shares[rounded] = moved(policy, start)
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert shares[False] == 0.0
    assert shares[True] > 1e-3


def test_settings_of_the_optimizer_reach_it(make_trainer, make_policy):
    settings = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    trainer = make_trainer(model=make_policy().to(torch.bfloat16), stochastic_rounding=True, **settings)
    groups = trainer.create_optimizer().param_groups
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    for group in groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-6)


def test_other_types_and_optimizers_are_refused(make_trainer, make_policy):
    with pytest.raises(ValueError, match=r"rounds to bfloat16, but model\.embed_tokens\.weight is float32"):
        make_trainer(stochastic_rounding=True)
    policy = make_policy().to(torch.bfloat16)
    given = (torch.optim.SGD(policy.parameters(), lr=0.1), None)
    with pytest.raises(ValueError, match="optimizers has an optimizer, and stochastic_rounding=True"):
        make_trainer(model=policy, stochastic_rounding=True, trainer={"optimizers": given})


@pytest.mark.slow
def test_adapters_over_bfloat16_weights(make_trainer, make_policy):
    """They are float32, as peft makes them, and sampled as they are trained; rounded stochastically they are bfloat16,
    which one that was made before must be."""
    plain = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])

    def adapted(**options: Any) -> Any:
        return peft.get_peft_model(make_policy().to(torch.bfloat16), plain, **options)

    with pytest.raises(ValueError, match=r"lora_A.* is float32, .* autocast_adapter_dtype=False"):
        make_trainer(model=adapted(), stochastic_rounding=True)
    fresh = {"model": make_policy().to(torch.bfloat16), "trainer": {"peft_config": plain}, "stochastic_rounding": True}
    given = {"model": adapted(autocast_adapter_dtype=False), "stochastic_rounding": True}
    mixed = {"model": adapted(), "bf16": True}
    for settings in (fresh, given, mixed, {"model": adapted()}):
        trainer = make_trainer(**settings, beta=0.1, max_steps=2)
        assert trainer.execution.layout_report.tiled_head
        trainer.train()
        learned = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert {p.dtype for p in learned} == {torch.bfloat16 if "stochastic_rounding" in settings else torch.float32}
        assert any(float(p.abs().max()) > 0 for p in learned)
        log = trainer.state.log_history[:-1]
        assert max(entry["sampling/logp_mismatch"] for entry in log) < 0.2
        assert all(entry["grad_norm"] > 0 for entry in log)


ADAPTERS = {
    **{kind: small_adapters.KINDS[kind] for kind in ("LoRA", "DoRA", "whole head", "some tokens", "IA3")},
    "LoRA on the head": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
    "LoRA in bfloat16": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"]),
    "tokens alone": lambda: peft.TrainableTokensConfig(token_indices=[*range(3, 20)], target_modules=["embed_tokens"]),
    "SHiRA": lambda: peft.ShiraConfig(r=4, target_modules=["q_proj"]),
}
IN_FLOAT32 = ("LoRA", "LoRA on the head", "whole head")


@pytest.mark.skipif(library() is None, reason=status())
@pytest.mark.quick("LoRA on the head", "LoRA in bfloat16", "DoRA", "tokens alone")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_over_bfloat16_is_sampled_as_it_is_trained(kind, make_trainer, make_policy, caplog):
    """In float32 under LoRA. Others read the weights beneath themselves, and compute in the type of those."""
    in_half = {"autocast_adapter_dtype": False} if kind == "LoRA in bfloat16" else {}
    model = peft.get_peft_model(make_policy().bfloat16(), ADAPTERS[kind](), **in_half)
    trainer = make_trainer(model=model, max_steps=2, learning_rate=1e-3)
    assert computes_in_float32(trainer.model) == (kind in IN_FLOAT32)
    assert trainer.execution.engine_choice.name == "native" and trainer.execution.layout_report.reason is None
    trainer.train()
    log = trainer.state.log_history[:-1]
    assert max(entry["sampling/logp_mismatch"] for entry in log) < (1e-5 if kind in IN_FLOAT32 else 0.1)
    assert all(entry["grad_norm"] > 0 for entry in log)
    assert not [record for record in caplog.records if "differ" in record.getMessage()]


@pytest.mark.skipif(library() is None, reason=status())
def test_a_hook_that_rounds_costs_no_fast_path(make_trainer, make_policy):
    model = make_policy().bfloat16()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output.to(module.weight.dtype))
    trainer = make_trainer(model=model, max_steps=1)
    assert trainer.execution.engine_choice.name == "native" and trainer.execution.layout_report.layout == "shared"
    trainer.train()
    assert trainer.state.log_history[0]["sampling/logp_mismatch"] < 1e-5


def test_a_model_that_will_be_compiled_computes_in_the_type_of_its_weights(make_trainer, make_policy):
    model = make_policy().bfloat16()
    trainer = make_trainer(model=model, torch_compile=True)
    assert not computes_in_float32(trainer.model) and Rounding.of(trainer.model).is_half
    again = make_trainer(model=model)
    assert computes_in_float32(again.model) == (library() is not None)
