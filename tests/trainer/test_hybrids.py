"""Hybrid models train as attention models do: sampled natively, each prompt computed once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_hybrids import CONFIGS, make_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
FAMILIES = ["qwen3_5", "nemotron_h", "lfm2"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_micro_batches_do_not_change_the_weights(
    make_trainer: Any, tools: Any, family: str, tmp_path: Any
) -> None:
    """Also where activations are computed again."""
    start, weights = make_hybrid(family, vocab_size=92), []
    for number, settings in enumerate(
        [
            {"per_device_train_batch_size": 8},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True},
        ]
    ):
        trainer = make_trainer(
            model=copy.deepcopy(start), beta=0.1, max_steps=2, output_dir=str(tmp_path / str(number)), **settings
        )
        assert (trainer.execution.engine_choice.name, trainer.execution.layout_report.layout) == ("native", "shared")
        trainer.train()
        log = trainer.state.log_history[-2]
        assert log["sampling/logp_mismatch"] < 1e-4
        weights.append(tools.weights(trainer.model))
    assert tools.relative(weights[0], tools.weights(start)) > 1e-3
    assert tools.relative(weights[0], weights[1]) < 1e-5


@pytest.mark.quick("lfm2", "nemotron_h", "qwen3_5")
@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_and_their_reference_train_with_activations_computed_again(
    make_trainer: Any, tools: Any, family: str
) -> None:
    """LoRA on all layers and a KL term; the base weights stay, and sampled log-probs are those of training."""
    peft = pytest.importorskip("peft")
    model = make_hybrid(family, vocab_size=92)
    # PEFT refuses adapters on `out_proj` of models with Mamba layers.
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["out_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(
        model=model, trainer={"peft_config": adapter}, beta=0.1, max_steps=2, gradient_checkpointing=True
    )
    assert (trainer.execution.engine_choice.name, trainer.execution.layout_report.layout) == ("native", "shared")
    trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in frozen.items())
    moved = [name for name, value in trained.items() if not torch.equal(value, now[name])]
    assert trained and all("lora_" in name for name in trained)
    assert len(moved) > len(trained) / 2
    first, second = (entry for entry in trainer.state.log_history if "kl" in entry)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and second["kl"] > 1e-6
    assert max(first["sampling/logp_mismatch"], second["sampling/logp_mismatch"]) < 1e-4
