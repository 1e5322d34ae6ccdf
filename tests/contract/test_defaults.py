"""Defaults that differ from `TrainingArguments`, as a run shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from groupgrad import GRPOConfig, compat

PLAIN = {"report_to": "none", "save_strategy": "no", "max_completion_length": 1, "disable_tqdm": True}


def recomputes(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_learning_rate_and_logs(make_trainer: Any, tmp_path: Any) -> None:
    """1e-6, falling to 0 over the run, and a log every ten steps; the weights stay in float32 on a CPU."""
    args = GRPOConfig(str(tmp_path), use_cpu=True, max_steps=11, **PLAIN)
    trainer = make_trainer(args=args)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry["step"] for entry in logged] == [10]
    assert logged[0]["learning_rate"] == pytest.approx(1e-6 * 2 / 11)
    assert trainer.accelerator.mixed_precision == "no"
    assert not recomputes(trainer.model)


def test_mixed_precision_and_checkpointing_on_an_accelerator(
    make_trainer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is made where an accelerator is simulated; the run is in bfloat16 and recomputes by need."""
    with monkeypatch.context() as simulated:
        simulated.setattr(compat, "has_bf16_accelerator", lambda: True)
        simulated.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
        simulated.setattr(GRPOConfig, "device", property(lambda self: torch.device("cuda")))
        args = GRPOConfig(str(tmp_path), max_steps=1, **PLAIN)
    seen: list[tuple[torch.dtype, bool]] = []

    class Look(TrainerCallback):
        def on_step_end(self, *given: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append((types[-1], recomputes(model)))

    types: list[torch.dtype] = []
    trainer = make_trainer(args=args, callbacks=[Look()])
    projection = trainer.model.model.layers[0].mlp.up_proj
    projection.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    trainer.train()
    assert seen == [(torch.bfloat16, False)]
    assert next(trainer.model.parameters()).dtype == torch.float32
