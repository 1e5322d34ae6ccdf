"""Agents of other libraries train a pretrained model through the address, and a bare `openai` client does
(`make test-agents`)."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
PROGRAMS = Path(__file__).parents[2] / "examples" / "programs"
SMALL = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "learning_rate": 1e-5}
QUIET = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`program(name, package)`: the module of an example."""
    monkeypatch.syspath_prepend(PROGRAMS)

    def load(name: str, package: str) -> Any:
        pytest.importorskip(package, reason=f"{package} is not installed: `make test-agents` installs it")
        return importlib.import_module(name)

    yield load
    for name in ("run", *(path.stem for path in PROGRAMS.glob("*.py"))):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "package", "settings"),
    [
        ("openai_client", "openai", {}),
        ("smolagents_agent", "smolagents", {"max_completion_length": 48}),
        ("smolagents_code_agent", "smolagents", {"max_completion_length": 96}),
        ("openai_agents_sdk", "agents", {}),
        ("pydantic_ai_agent", "pydantic_ai", {}),
        ("langgraph_agent", "langgraph", {}),
        ("mini_swe_agent", "minisweagent", {"max_completion_length": 128}),
    ],
)
def test_a_program_trains(
    name: str, package: str, settings: Any, program: Any, smollm2: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The model reads what was asked and nothing is tokenised again: the sampler's log-probs are those of training."""
    module = program(name, package)
    given = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **QUIET, **settings}.items()]
    monkeypatch.setattr(sys, "argv", [name, str(smollm2), str(tmp_path), *given])
    arguments = (module.parse,) if hasattr(module, "parse") else ()
    trainer = importlib.import_module("run").train(module.solve, *arguments)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2]
    assert all(entry["rollouts/error"] == 0.0 and entry["sampling/logp_mismatch"] < 1e-4 for entry in logs)
    assert all(entry["rollouts/turns"] >= 1.0 for entry in logs)


@pytest.mark.timeout(900)
def test_thirty_steps_over_the_address_raise_the_reward(smollm2: Path, tmp_path: Path) -> None:
    """The reward is the share of digits in the second of two answers. Of three seeds the last ten steps have more than
    the first ten, p < 0.01. An adapter trains."""
    peft = pytest.importorskip("peft")

    async def count(row: dict[str, Any], session: Any) -> float:
        client = session.async_openai()
        asked = {"model": session.model, "max_tokens": 4}
        messages = [{"role": "user", "content": row["question"]}]
        first = await client.chat.completions.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": "As digits:"})
        second = await client.chat.completions.create(messages=messages, **asked)
        text = second.choices[0].message.content
        return sum(map(str.isdigit, text)) / max(len(text), 1)

    gains = []
    for seed in range(3):
        trainer = GRPOTrainer(
            str(smollm2),
            agent=count,
            peft_config=peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            args=GRPOConfig(
                output_dir=str(tmp_path / str(seed)),
                **QUIET,
                seed=seed,
                bf16=False,
                max_steps=30,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=64,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
            ),
            train_dataset=Dataset.from_dict({"question": ["A number?", "What year is it?", "How many?", "Your age?"]}),
        )
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        gains.append(sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10)
    # Student's t with two degrees of freedom exceeds 6.965 with a probability of 0.01.
    t = statistics.fmean(gains) / (statistics.stdev(gains) / 3**0.5)
    assert t > 6.965, gains
