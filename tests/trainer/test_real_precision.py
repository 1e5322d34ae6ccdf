"""A real pretrained model trains under autocast: no false warning, no fast path lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupgrad.engines.native import NativeEngine


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_a_real_model_trains_under_autocast(adapted, smollm2, train, caplog, recwarn):
    extra: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(smollm2)}
    if adapted:
        peft = pytest.importorskip("peft")
        extra["peft_config"] = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    with caplog.at_level(logging.WARNING, "groupgrad"):
        trainer = train(
            # Two of its layers: processors without bfloat16 take minutes for all thirty.
            model=AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=2),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 17) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": ["1, 2, 3,", "Ten:", "A:", "5 +"]}),
            trainer=extra,
            bf16=True,
            max_steps=2,
            learning_rate=1e-4,
            per_device_train_batch_size=4,
            max_completion_length=4,
        )
    assert isinstance(trainer.engine, NativeEngine)
    # Four tokens end no answer, which is said rightly.
    said = [record.getMessage() for record in caplog.records if record.name.startswith("groupgrad")]
    assert all("all completions were truncated" in text for text in said), said
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2
    for entry in steps:
        # Logits around 30 have half a nat of rounding in bfloat16; a sampler of another policy would be nats away.
        assert entry["sampling/logp_mismatch"] < 0.5
        assert entry["grad_norm"] > 0
        assert entry["clip_ratio/region_mean"] == 0  # each batch trains once, by the policy that sampled it
