"""Environments of the real verifiers train: a rubric with weights, and one of several turns (`make test-agents`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_agents import with_tools

from groupgrad import GRPOConfig, GRPOTrainer

pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-agents` installs it")

SINGLE = """
import verifiers as vf
from datasets import Dataset

def load_environment(rows=8):
    def long(completion, **kwargs):
        return float(len(completion[-1]["content"]))

    def said(completion, answer, **kwargs):
        return float(answer in completion[-1]["content"])

    data = Dataset.from_list([{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(rows)])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[long, said], weights=[0.5, 2.0]))
"""
SEVERAL = """
import verifiers as vf
from datasets import Dataset

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

def load_environment():
    def turns(completion, **kwargs):
        return float(sum(message["role"] == "assistant" for message in completion))

    data = Dataset.from_list([{"question": f"{n}?", "answer": ""} for n in range(8)])
    return Again(dataset=data, rubric=vf.Rubric(funcs=[turns]), max_turns=3)
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Any, make_tokenizer: Any) -> Any:
    """`trained(name, source, **arguments)`: the log of a step on an environment of this source."""

    def train(name: str, source: str, **arguments: Any) -> dict[str, float]:
        from groupgrad.integrations import verifiers

        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        loaded = verifiers.load(name, sampling_args={"max_tokens": 6}, **arguments)
        trainer = GRPOTrainer(
            make_model(max_position_embeddings=2048),
            processing_class=with_tools(make_tokenizer()),
            agent=loaded.agent,
            args=GRPOConfig(
                output_dir=str(tmp_path / "run"),
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=300,
                max_steps=1,
                logging_steps=1,
            ),
            train_dataset=loaded.dataset,
        )
        trainer.train()
        return trainer.state.log_history[0]

    return train


def test_the_weights_of_a_rubric_and_its_functions_arrive(trained: Any) -> None:
    log = trained("one_turn_env", SINGLE, rows=6)
    mean, long, said = (log[f"rewards/one_turn_env/{name}"] for name in ("mean", "long", "said"))
    assert mean == pytest.approx(0.5 * long + 2.0 * said) and long > 0
    assert log["rollouts/error"] == 0.0 and log["rollouts/turns"] == 1.0


def test_an_environment_of_several_turns(trained: Any) -> None:
    log = trained("several_turns_env", SEVERAL)
    assert (log["rollouts/turns"], log["rewards/several_turns_env/mean"], log["rollouts/branches"]) == (3.0, 3.0, 0.0)


def test_an_environment_that_is_not_installed() -> None:
    from groupgrad.integrations import verifiers

    with pytest.raises(ValueError, match="not-there"):
        verifiers.load("not-there")
