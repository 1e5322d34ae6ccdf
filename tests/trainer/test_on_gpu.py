"""Whole runs on a simulated CUDA device match the CPU: recorded sampling steps, training, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from simulated_cuda import Graph, to_cuda, trainers_on_simulated_cuda

from groupgrad.scoring.forward import score_tokens
from groupgrad.scoring.self_check import random_batch

NUMBERS = ("loss", "grad_norm", "reward", "entropy", "kl", "sampling/logp_mismatch")


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 5) for completion in completions]


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.1, "gradient_checkpointing": True},
        pytest.param(
            {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "grpo", "entropy_coef": 0.01},
            marks=pytest.mark.slow,
        ),
        pytest.param({"bf16": True, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, marks=pytest.mark.slow),
    ],
    ids=["reference, checkpointing", "old policy", "bfloat16, adapter"],
)
def test_a_run_gives_the_numbers_of_the_cpu(fields: dict[str, Any], make_trainer, make_model, tmp_path):
    def run(*, gpu: bool, resumed: bool = False) -> list[dict[str, float]]:
        settings = {
            "max_steps": 2,
            "learning_rate": 1e-3,
            "save_strategy": "steps",
            "save_steps": 1,
            "max_completion_length": 12,
            **fields,
        }
        given = {"peft_config": settings.pop("peft_config", None)}
        model = to_cuda(make_model()) if gpu else make_model()
        trainer = make_trainer(model=model, reward_funcs=lengths, trainer=given, use_cpu=not gpu, **settings)
        assert trainer.accelerator.device.type == ("cuda" if gpu else "cpu")
        trainer.train(resume_from_checkpoint=resumed and str(tmp_path / "run" / "checkpoint-1"))
        return [{name: entry[name] for name in NUMBERS if name in entry} for entry in trainer.state.log_history]

    with trainers_on_simulated_cuda():
        before = Graph.num_replayed
        found = run(gpu=True)
        assert Graph.num_replayed > before
        # Another one of its own second step.
        assert run(gpu=True, resumed=True)[1] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    expected = run(gpu=False)
    assert len(found) == len(expected) >= 3
    for ours, theirs in zip(found, expected):
        assert ours.pop("sampling/logp_mismatch", 0.0) < (0.02 if "bf16" in fields else 1e-5)
        theirs.pop("sampling/logp_mismatch", None)
        assert ours == pytest.approx(theirs, rel=0.05 if "bf16" in fields else 1e-4, abs=1e-6)


def test_tf32_set_as_transformers_sets_it(tf32, make_trainer, make_model):
    with trainers_on_simulated_cuda():
        trainer = make_trainer(model=to_cuda(make_model()), use_cpu=False)
        assert trainer.execution.engine_choice.name == "native"
    assert torch.get_float32_matmul_precision() == "high"  # torch's compiler reads it


def test_training_passes_are_not_computed_by_cudnn(make_trainer, make_model, monkeypatch):
    """It would build a plan for each shape of a padded micro-batch, forward and backward."""
    allowed: dict[str, set[bool]] = {"forward": set(), "backward": set()}
    attend = torch.nn.functional.scaled_dot_product_attention

    def note(when: str) -> None:
        allowed[when].add(torch.backends.cuda.cudnn_sdp_enabled())

    def attend_and_note(*tensors: Any, **options: Any) -> Any:
        output = attend(*tensors, **options)
        if output.requires_grad:
            note("forward")
            output.register_hook(lambda _: note("backward"))
        return output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_and_note)
    with trainers_on_simulated_cuda():
        trainer = make_trainer(model=to_cuda(make_model()), use_cpu=False, max_steps=1)
        for noted in allowed.values():
            noted.clear()
        options = replace(trainer.components.forward_options, layout="dense")
        with trainer._training_passes(is_last=False):
            score_tokens(trainer.model, random_batch(trainer.model), options).logprobs.sum().backward()
    assert allowed == {"forward": {False}, "backward": {False}}
    assert torch.backends.cuda.cudnn_sdp_enabled()
