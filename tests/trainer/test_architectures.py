"""Training of mixtures of experts."""

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
        trainers.append(make_trainer(model=make_any(name, router_aux_loss_coef=weight), max_steps=1))
        assert trainers[-1].execution.engine_choice.name == "native"
        assert layout_for(trainers[-1].model, trainers[-1].components.forward_options) == "shared"
        trainers[-1].train()
        assert max(logged(trainers[-1], "sampling/logp_mismatch")) < 1e-5
    balance, loss = logged(trainers[0], "aux_loss"), logged(trainers[0], "loss")
    assert len(balance) == 1 and balance[0] >= 1.0
    assert loss[0] == pytest.approx(logged(trainers[1], "loss")[0] + 0.25 * balance[0], abs=1e-5)
