"""Rounds of training of a pretrained model: a tool, LoRA with a KL term, a kill, autocast, learning."""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
from typing import Any

import pytest
import small_runs
import torch
from datasets import Dataset
from forked_ranks import ForkedRanks
from step_events import At
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupgrad.engines.native import NativeEngine
from groupgrad.errors import CheckpointError

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]


def digits(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(str.isdigit, messages[-1]["content"]))) for messages in completions]


@pytest.fixture
def make(smollm2, make_trainer) -> Any:
    def make(**settings: Any) -> Any:
        prompts = [[{"role": "user", "content": text}] for text in ("Count to five.", "What is 2 + 3?")]
        return make_trainer(
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            **{
                "model": str(smollm2),
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


def test_a_killed_run_resumes_bit_for_bit_without_a_remark(make, tmp_path, caplog) -> None:
    """Its head is tied to its embedding, and no checkpoint has both. Its KL is measured from the model of its start."""
    settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}
    settings["beta"] = 0.1

    def kill(at: Any) -> None:
        torch.save(small_runs.weights(at.model), tmp_path / "weights.pt")
        os.kill(os.getpid(), signal.SIGKILL)

    def train(rank: int) -> None:
        trainer = make(**settings)
        trainer.add_callback(At("on_step_end", kill, 2))
        trainer.train()

    run = ForkedRanks(train, tmp_path, num_ranks=1)
    assert run.wait(150) == [-signal.SIGKILL], run.log(0)
    resumed = make(**settings)
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=True)
    (first,) = (entry["step"] for entry in resumed.state.log_history if entry.get("step") == 1 and "loss" in entry)
    assert first == 1 and resumed.state.global_step == 2
    assert torch.equal(small_runs.weights(resumed.model), torch.load(tmp_path / "weights.pt"))
    assert "lm_head" not in caplog.text and "missing keys" not in caplog.text
    assert torch.equal(resumed.model.lm_head.weight, resumed.model.model.embed_tokens.weight)
    other = make(**settings, model=str(tmp_path / "run" / "checkpoint-1"))
    with pytest.raises(CheckpointError, match=r"KL divergence.*was measured from '.*smollm2'"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_it_trains_under_autocast(adapted, smollm2, make, caplog, recwarn) -> None:
    """No false warning is given, and no fast path lost."""
    extra: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(smollm2)}
    if adapted:
        peft = pytest.importorskip("peft")
        extra["peft_config"] = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    with caplog.at_level(logging.WARNING, "groupgrad"):
        trainer = make(
            # Two of its layers: processors without bfloat16 take minutes for all thirty.
            model=AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=2),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 17) for ids in completion_ids],
            trainer=extra,
            bf16=True,
            max_steps=2,
            learning_rate=1e-4,
        )
        trainer.train()
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


@pytest.mark.timeout(900)
def test_thirty_steps_raise_the_reward(smollm2, make_trainer) -> None:
    """The reward is the share of digits. Of three seeds the last ten steps have more than the first ten, p < 0.01.

    An adapter trains: with all weights the optimizer takes most of the time, and the reward rises as well.
    """
    peft = pytest.importorskip("peft")

    def share(completions: list[str], **_: Any) -> list[float]:
        return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]

    gains = []
    for seed in range(3):
        trainer = make_trainer(
            model=str(smollm2),
            train_dataset=Dataset.from_dict({"prompt": ["Numbers:", "The year was", "My answer is", "A list of"]}),
            reward_funcs=share,
            trainer={
                "processing_class": None,
                "peft_config": peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            },
            seed=seed,
            max_steps=30,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=4,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
        )
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        gains.append(sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10)
    # Student's t with two degrees of freedom exceeds 6.965 with a probability of 0.01.
    assert statistics.mean(gains) > 6.965 * statistics.stdev(gains) / math.sqrt(3), gains
