"""Models whose code was exchanged on the instance, as accelerators do it, train by what they compute.

The stand-in here follows the pattern of Unsloth's: attention that goes past the library's interface and takes no mask
but its own, a causal forward that multiplies with the head's weight itself, a `PeftModel` with a `forward` and a
`generate` of its own, and `for_training()` and `for_inference()`, of which `generate` calls the second and leaves it at
that.
"""

from __future__ import annotations

import functools
import logging
import math
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationMixin, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


def own_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    **_: Any,
) -> Any:
    past_key_values = cache if past_key_values is None else past_key_values  # the name depends on the release
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    mask = attention_mask if isinstance(attention_mask, torch.Tensor) else None
    is_causal = mask is None and query.shape[2] > 1
    output = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
    return self.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)), None


def own_causal_forward(self: Any, input_ids: Any = None, labels: Any = None, **given: Any) -> CausalLMOutputWithPast:
    names = ("attention_mask", "past_key_values", "cache", "use_cache", "position_ids")
    output = self.model(input_ids=input_ids, **{k: v for k, v in given.items() if k in names})
    return CausalLMOutputWithPast(
        logits=output.last_hidden_state @ self.lm_head.weight.T,  # pyright: ignore[reportArgumentType]
        past_key_values=output.past_key_values,
    )


def own_adapter_forward(self: Any, input_ids: Any = None, **given: Any) -> Any:
    return self.base_model(input_ids=input_ids, **given)


def own_generate(self: Any, *args: Any, **given: Any) -> Any:
    self.for_inference()
    self.calls["generate"] += 1
    with torch.inference_mode():
        return self.plain_generate(*args, **given)


def switch(self: Any, training: bool) -> None:
    for module in self.modules():
        module.training = training
    self.calls["training" if training else "inference"] += 1


def patch(model: Any) -> Any:
    """Returns the adapted model with patched code."""
    base = model.get_base_model()
    for layer in base.model.layers:
        layer.self_attn.forward = MethodType(own_attention, layer.self_attn)
    base.forward = MethodType(own_causal_forward, base)
    model.calls = {"generate": 0, "training": 0, "inference": 0}
    model.plain_generate, model.generate = model.generate, MethodType(own_generate, model)
    model.forward = MethodType(own_adapter_forward, model)
    model.for_training = MethodType(lambda self: switch(self, True), model)
    model.for_inference = MethodType(lambda self: switch(self, False), model)
    return model


def adapted(make_policy: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(make_policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def test_a_patched_model_trains_as_the_plain_one(train: Any, make_policy: Any, tools: Any) -> None:
    """Every step has the same numbers as the model without patches, with a reference and two steps a batch."""
    patched, plain = (
        train(model=model, rollout_engine="transformers", beta=0.1, num_iterations=2)
        for model in (patch(adapted(make_policy)), adapted(make_policy))
    )
    assert tools.relative(tools.weights(patched.model), tools.weights(plain.model)) < 1e-5
    losses = [[entry["loss"] for entry in trainer.state.log_history[:3]] for trainer in (patched, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert patched.execution.layout_report.layout == "dense" and not patched.execution.layout_report.tiled_head
    assert plain.execution.layout_report.layout == "shared"


def test_what_a_patched_model_brings_is_found_out(make_trainer: Any, make_policy: Any, caplog: Any) -> None:
    """Its own `generate` samples, the dense layout is used because the numbers of others differ, and one line each says
    so. Between generation batches it trains in training mode."""
    model = patch(adapted(make_policy))
    modes: list[bool] = []
    trainer = make_trainer(model=model, max_steps=2)
    assert trainer.execution.engine_choice.name == "transformers"
    assert trainer.execution.engine_choice.reason == "the model brings its own generate"
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("groupgrad")]
    assert len(texts) == 2
    assert texts[0].startswith("PeftModel is scored in the dense layout: ")
    assert "it multiplies with its output head's weight itself; log-probs of the shared layout" in texts[0]
    assert texts[1] == "Qwen3ForCausalLM is sampled by generate: the model brings its own generate"
    before = dict(model.calls)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.register_forward_hook(
        lambda module, inputs, output: modes.append(module.training) if output.requires_grad else None
    )
    trainer.train()
    assert model.calls["generate"] - before["generate"] == 2
    assert model.calls["training"] - before["training"] == 2
    assert modes and all(modes)


@pytest.mark.parametrize("place", ["instance", "class", "library"])
def test_a_generate_that_is_replaced_later_is_refused(make_trainer: Any, monkeypatch: Any, place: str) -> None:
    """Wherever it is replaced, also by a function that goes by the name of the one before."""
    trainer = make_trainer(max_steps=1)
    owner: Any = {"instance": trainer.model, "class": type(trainer.model), "library": GenerationMixin}[place]
    replacement = functools.wraps(owner.generate)(lambda *args, **kwargs: None)
    monkeypatch.setattr(owner, "generate", replacement, raising=False)
    for method in (trainer.train, trainer.evaluate):
        with pytest.raises(
            ValueError, match="generate of the Qwen3ForCausalLM was replaced after the trainer was made"
        ):
            method()


def test_a_generate_that_a_callback_replaces_is_refused(make_trainer: Any) -> None:
    class Replaces(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.generate = lambda *args, **kwargs: None

    trainer = make_trainer(max_steps=1, trainer={"callbacks": [Replaces()]})
    with pytest.raises(ValueError, match="generate of the Qwen3ForCausalLM was replaced after the trainer was made"):
        trainer.train()


@pytest.mark.parametrize("where", ["head", "forward", "subclass"])
def test_logits_that_code_changes_are_trained_and_sampled_as_they_are(where, make_trainer, make_policy, caplog):
    """One token is forbidden and the others are sharper, of which no configuration tells."""
    policy = make_policy()

    def change(logits):
        return torch.cat([torch.full_like(logits[..., :10], float("-inf")), 1.5 * logits[..., 10:]], dim=-1)

    def forward(*args, plain=policy.forward, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    if where == "head":
        policy.lm_head.register_forward_hook(lambda module, inputs, output: change(output))
    elif where == "forward":
        policy.forward = forward
    else:
        policy.__class__ = type("Changed", (type(policy),), {"forward": lambda self, *a, **k: forward(*a, **k)})
    seen = []

    def reward(completion_ids, **_):
        seen.extend(token for ids in completion_ids for token in ids)
        return [float(sum(ids) % 3) for ids in completion_ids]

    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(model=policy, reward_funcs=reward, max_steps=2, generation_batch_size=16)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        f"{type(policy).__name__} is scored in the shared layout: code changes its logits behind the output head, in "
        "a way that its configuration does not say"
    ]
    assert trainer.execution.engine_choice.name == "native"
    trainer.train()
    assert seen and min(seen) >= 10
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(math.isfinite(entry["entropy"]) and math.isfinite(entry["grad_norm"]) for entry in steps)
    assert steps[0]["sampling/logp_mismatch"] < 1e-5
