"""Rounds of training of a pretrained model: a tool through its chat template, LoRA with a KL term, a killed run."""

from __future__ import annotations

from typing import Any

import pytest
import small_runs
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]


def digits(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(str.isdigit, messages[-1]["content"]))) for messages in completions]


@pytest.fixture
def make(smollm2, make_trainer) -> Any:
    def make(**settings: Any) -> Any:
        prompts = [[{"role": "user", "content": text}] for text in ("Count to five.", "What is 2 + 3?")]
        return make_trainer(
            model=str(smollm2),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            **{
                "reward_funcs": digits,
                "trainer": {"processing_class": None},
                "per_device_train_batch_size": 4,
                "num_generations": 2,
                "max_completion_length": 4,
                "max_steps": 1,
                **settings,
            },
        )

    return make


def test_a_tool_answers_through_its_chat_template(make, smollm2) -> None:
    """The template shows no calls, so a parser reads them: here it takes every first turn for one."""
    tokenizer, texts = AutoTokenizer.from_pretrained(smollm2), []

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def parser(text: str, ids: list[int]) -> dict[str, Any]:
        return {"content": text, "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}

    def kept(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts.extend(map(tokenizer.decode, completion_ids))
        return digits(completions)

    trainer = make(
        trainer={"processing_class": None, "tools": [add], "response_parser": parser},
        reward_funcs=kept,
        max_completion_length=48,
        max_tool_calling_iterations=1,
    )
    trainer.train()
    reply = "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert any(reply in text for text in texts), texts
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["sampling/logp_mismatch"] < 1e-4


def test_lora_trains_with_a_kl_term(make) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make(trainer={"processing_class": None, "peft_config": lora}, beta=0.1, learning_rate=1e-3, max_steps=2)
    trainer.train()
    first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["grad_norm"] > 0


class _Ends(TrainerCallback):
    """Ends the run as a kill does: nothing is saved after the step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("ended")


def test_a_run_that_ended_resumes_bit_for_bit(make, tmp_path) -> None:
    settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}
    ended = make(**settings)
    ended.add_callback(_Ends)
    with pytest.raises(RuntimeError, match="ended"):
        ended.train()
    weights = small_runs.weights(ended.model)  # those of the second step, which the disk does not have
    del ended
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.equal(small_runs.weights(resumed.model), weights)
