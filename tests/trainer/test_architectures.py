"""Training of mixtures of experts, recurrent models and models with patched layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from groupgrad.scoring.forward import layout_for


@pytest.fixture
def make_any(build: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """Builds a small random model of an architecture, with the tests' vocabulary and many end-of-sequence tokens."""

    def make(name: str, **changes: Any) -> Any:
        model = build(name, vocab_size=len(tokenizer), **changes)
        model.generation_config.eos_token_id = [1, *range(4, 24)]
        return model

    return make


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss (experts, sinks)"])
def test_experts_train_with_shared_prompts_and_their_balance(make_trainer: Any, make_any: Any, name: str) -> None:
    """The native engine samples, prompts are shared, log-probs of sampling are training's, and the balance is in the
    loss by the model's own weight."""
    trainers = []
    for weight in (0.25, 0.0):
        trainers.append(make_trainer(model=make_any(name, router_aux_loss_coef=weight), max_steps=2))
        assert trainers[-1].execution.engine_choice.name == "native"
        assert layout_for(trainers[-1].model, trainers[-1].components.forward_options) == "shared"
        trainers[-1].train()
        assert max(logged(trainers[-1], "sampling/logp_mismatch")) < 1e-5
    balance, loss = logged(trainers[0], "aux_loss"), logged(trainers[0], "loss")
    assert len(balance) == 2 and min(balance) >= 1.0
    assert loss[0] == pytest.approx(logged(trainers[1], "loss")[0] + 0.25 * balance[0], abs=1e-5)


@pytest.mark.parametrize("name", ["mamba2 (recurrent)", "qwen3.5 (linear attention)"])
def test_neighbours_of_a_row_do_not_change_its_states(make_trainer: Any, make_any: Any, tools: Any, name: str) -> None:
    """A micro-batch of all rows and four of two give one step."""
    finals = []
    for rows, accumulation in ((8, 1), (2, 4)):
        model = make_any(name)
        trainer = make_trainer(
            model=model,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            optim="sgd",
            learning_rate=0.01,
        )
        assert trainer.execution.layout_report.layout == "shared" and trainer.execution.layout_report.tiled_head
        assert trainer.execution.engine_choice.name == "native"
        trainer.train()
        log = trainer.state.log_history[:2]
        lengths = [entry["completions/max_length"] - entry["completions/min_length"] for entry in log]
        assert min(lengths) > 0
        finals.append(tools.weights(model))
    assert tools.relative(finals[1], finals[0]) < 1e-6
    assert tools.relative(finals[0], tools.weights(make_any(name))) > 1e-4


@pytest.mark.parametrize("name", ["gpt-oss (experts, sinks)", "mamba2 (recurrent)", "qwen3.5 (linear attention)"])
def test_checkpointing_changes_nothing(make_trainer: Any, make_any: Any, tools: Any, name: str) -> None:
    """Recomputed layers do not count experts or update states twice."""
    finals = []
    for checkpointing in (False, True):
        model = make_any(name)
        settings = {"gradient_checkpointing": checkpointing, "optim": "sgd", "learning_rate": 0.01, "max_steps": 2}
        make_trainer(model=model, **settings).train()
        finals.append(tools.weights(model))
    assert tools.relative(finals[1], finals[0]) < 1e-6
    assert tools.relative(finals[0], tools.weights(make_any(name))) > 1e-4
