"""A run of a real pretrained model is resumed: its head is tied to its embedding, and no checkpoint has both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import CheckpointError


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """Rewards digits."""
    return [float(sum(character.isdigit() for character in text)) for text in completions]


def trainer_of(model: Path, folder: Path, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=str(model),
        reward_funcs=digits,
        args=GRPOConfig(
            **{
                "output_dir": str(folder),
                "use_cpu": True,
                "bf16": False,
                "report_to": "none",
                "save_strategy": "steps",
                "save_steps": 1,
                "max_steps": 1,
                "logging_steps": 1,
                "per_device_train_batch_size": 4,
                "num_generations": 4,
                "max_completion_length": 4,
                "optim": "sgd",
                "learning_rate": 1e-3,
                "beta": 0.1,
                "gradient_checkpointing": False,
                **settings,
            }
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1, 2, 3,", "Ten:", "A:", "5 +"]}),
    )


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_tied_model_resumes_without_a_remark(smollm2, tmp_path, caplog):
    trainer_of(smollm2, tmp_path, max_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    resumed = trainer_of(smollm2, tmp_path, max_steps=2, save_strategy="no")
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert "lm_head" not in caplog.text and "missing keys" not in caplog.text
    inner = resumed.model
    assert torch.equal(inner.lm_head.weight, inner.model.embed_tokens.weight)
    other = trainer_of(checkpoint, tmp_path, max_steps=2, save_strategy="no")
    with pytest.raises(CheckpointError, match=r"KL divergence.*was measured from '.*smollm2'"):
        other.train(resume_from_checkpoint=True)
