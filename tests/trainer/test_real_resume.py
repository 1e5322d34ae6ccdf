"""A run of a real pretrained model is resumed: its head is tied to its embedding, and no checkpoint has both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from groupgrad.errors import CheckpointError


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_tied_model_resumes_without_a_remark(smollm2, make_trainer, tmp_path, caplog):
    def make(model: Any, **settings: Any) -> Any:
        digits = lambda completions, **_: [float(sum(map(str.isdigit, text))) for text in completions]  # noqa: E731
        sgd = {"optim": "sgd", "learning_rate": 1e-3, "beta": 0.1}
        return make_trainer(
            model=str(model),
            reward_funcs=digits,
            train_dataset=Dataset.from_dict({"prompt": ["1, 2, 3,", "Ten:", "A:", "5 +"]}),
            trainer={"processing_class": None},
            per_device_train_batch_size=4,
            max_completion_length=4,
            **sgd,
            **settings,
        )

    make(smollm2, max_steps=1, save_strategy="steps", save_steps=1).train()
    resumed = make(smollm2, max_steps=2)
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert "lm_head" not in caplog.text and "missing keys" not in caplog.text
    inner = resumed.model
    assert torch.equal(inner.lm_head.weight, inner.model.embed_tokens.weight)
    with pytest.raises(CheckpointError, match=r"KL divergence.*was measured from '.*smollm2'"):
        make(tmp_path / "run" / "checkpoint-1", max_steps=2).train(resume_from_checkpoint=True)
