"""A script's model is after training what it was before, but for its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from base_fixtures import make_model
from peft import LoraConfig, get_peft_model
from step_events import At
from torch import nn

from groupgrad.scoring import gradient_checkpointing

_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]
_WRITTEN = {"architectures", "dtype"}
"""Entries of a configuration that `save_pretrained` fills in."""


def state(model: Any) -> dict[str, Any]:
    """All that a script can see of a model but the values of its weights."""
    found: dict[str, Any] = {"config": {k: v for k, v in model.config.to_dict().items() if k not in _WRITTEN}}
    found["generation"] = model.generation_config.to_dict()
    found["attention"] = model.config._attn_implementation
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key not in _HOOKS}
        for key in ("_modules", "_parameters", "_buffers"):
            attributes[key] = {inner: id(value) for inner, value in attributes[key].items()}
        hooks = {key: sorted(getattr(module, key) or ()) for key in _HOOKS}
        found[f"module {name}"] = {"class": type(module), **hooks, **{k: _comparable(v) for k, v in attributes.items()}}
    for name, parameter in model.named_parameters():
        hooks = len(parameter._backward_hooks or ()), len(parameter._post_accumulate_grad_hooks or ())
        found[f"weight {name}"] = parameter.requires_grad, parameter.dtype, parameter.device, parameter.grad, hooks
    return found


def _comparable(value: Any) -> Any:
    return value if isinstance(value, (dict, list, set, tuple, str, int, float, type(None))) else id(value)


def words_of(tokenizer: Any) -> Any:
    names = ("special_tokens_map", "padding_side", "truncation_side", "chat_template", "model_max_length")
    return [*(getattr(tokenizer, name) for name in names), tokenizer.backend_tokenizer.to_str()]


def plain(**config: Any) -> Any:
    return make_model(**config).eval()


def with_adapter() -> Any:
    return get_peft_model(plain(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)).eval()


def recomputing() -> Any:
    """A model whose script has switched checkpointing on itself, and watches a layer."""
    model = plain()
    model.activation_checkpointing_enable()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bf16": (plain, {"bf16": True, "beta": 0.1}),
    "adapter": (with_adapter, {"gradient_checkpointing": True, "beta": 0.1}),
    "reentrant": (with_adapter, {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "by_need": True}),
    "noise": (recomputing, {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True}),
    "by need": (recomputing, {"by_need": True}),
    "by generate": (lambda: plain(use_cache=False), {"rollout_engine": "transformers"}),
}


@pytest.mark.quick("adapter", "by need")
@pytest.mark.parametrize("case", CASES)
def test_nothing_but_weights_is_changed(
    make_trainer: Any, tokenizer: Any, tools: Any, monkeypatch: Any, tmp_path: Path, case: str
) -> None:
    """Construction, two trainings with an evaluation and checkpoints, an evaluation after them, and a save. Callbacks
    see the configuration as it was, too."""
    build, settings = CASES[case]
    if settings.get("by_need"):
        monkeypatch.setattr(gradient_checkpointing, "free_bytes", lambda device: 1000)
        settings = {**{k: v for k, v in settings.items() if k != "by_need"}, "gradient_checkpointing": None}
    model = build()
    before, words, cache = state(model), words_of(tokenizer), model.config.use_cache
    held_out = tools.prompts().select(range(2))
    steps = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    attention = []
    look = At("on_step_end", lambda at: attention.append(at.model.config._attn_implementation))
    trainer = make_trainer(model=model, trainer={"eval_dataset": held_out, "callbacks": [look]}, **steps, **settings)
    weights = tools.weights(model)
    trainer.train()
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(tmp_path / "final"))
    assert tools.relative(tools.weights(model), weights) > 0
    assert state(model) == before and attention == [before["attention"]] * 2
    assert words_of(tokenizer) == words
    written = [file.read_text() for file in tmp_path.rglob("config.json")]
    assert all(json.loads(config)["use_cache"] is cache and "groupgrad" not in config for config in written)
    assert len(written) == (0 if "adapter_model.safetensors" in {f.name for f in tmp_path.rglob("*")} else 2)


@pytest.mark.parametrize("where", ["reward", "backward"])
def test_a_failed_run_leaves_nothing_either(train: Any, where: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no judge")

    model = plain()
    if where == "backward":
        model.model.embed_tokens.weight.register_hook(fail)
    before, reward = state(model), {"reward_funcs": fail} if where == "reward" else {}
    with pytest.raises(Exception, match="no judge"):
        train(model=model, bf16=True, gradient_checkpointing=True, **reward)
    model.zero_grad()  # layers above the one that failed have their gradients
    assert state(model) == before


def _wrapped_by_accelerate(precision: str) -> Any:
    """A model that another library's trainer has prepared before."""
    model = plain()
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True, mixed_precision=precision).prepare_model(model, evaluation_mode=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize(("first", "then"), [("a trainer", "no"), ("accelerate", "no"), ("accelerate", "bf16")])
def test_the_precision_of_an_earlier_trainer_is_not_kept(train: Any, tools: Any, first: str, then: str) -> None:
    """The second one trains the model as it trains a fresh one, to the bit."""
    before = {"no": "bf16", "bf16": "no"}[then]
    if first == "accelerate":
        model = _wrapped_by_accelerate(before)
    else:
        model = plain()
        train(model=model, max_steps=1, learning_rate=0.0, bf16=before == "bf16")
    wrapper = vars(model).get("forward")
    results = []
    for policy in (model, plain()):
        train(model=policy, max_steps=2, bf16=then == "bf16")
        results.append(tools.weights(policy))
    assert torch.equal(results[0], results[1])
    assert vars(model).get("forward") is wrapper


def test_a_forward_that_a_script_replaces_between_trainings_is_used_in_training_s_precision(train: Any) -> None:
    model, dtypes = plain(), []
    trainer = train(model=model, max_steps=1, bf16=True)
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        dtypes.append(torch.is_autocast_enabled("cpu"))
        return original(*args, **kwargs)

    model.forward = forward
    trainer.train()
    assert dtypes and all(dtypes) and model.forward is forward
