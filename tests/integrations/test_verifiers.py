"""Environments of the real verifiers train: tasks with weighted rewards, several turns, several attempts, and what is
refused (`make test-verifiers`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_agents import with_tools

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import RolloutError

pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-verifiers` installs it")

# The harness talks in the process: those of verifiers install what they need by uv.
TASKS = """
import itertools

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=0.5)
    async def long(self, trace):
        return float(len(trace.last_reply))

    @vf.reward(weight=2.0)
    async def said(self, trace):
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def known(self, trace):
        return float(self.data.answer)


class SumsConfig(vf.TasksetConfig):
    first: int = 0


class Sums(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count(self.config.first):
            yield SumTask(Sum(prompt=f"{n}+1=", answer=str(n + 1)), self.config.task)


class Chat(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [message_to_wire(message) for message in said]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


__all__ = ["Chat", "Sums"]
"""
SEVERAL = (
    TASKS
    + """
import asyncio

calls = []


class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    async def start(self):
        calls.append("start")
        await asyncio.sleep(0.2)
        self.turns = 3

    async def stop(self):
        calls.append("stop")

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            for _ in range(self.turns - 1):
                await talk.turn("again")
        talk.trace.record_reward("turns", talk.trace.num_turns)


__all__ = ["Chat", "Sums", "Talk"]
"""
)
DOWN = SEVERAL.replace("self.turns = 3", "raise KeyError('away')")
BY_MESSAGES = TASKS.replace("openai import AsyncOpenAI", "anthropic import AsyncAnthropic").replace(
    "AsyncOpenAI(base_url=endpoint,", "AsyncAnthropic(base_url=endpoint.removesuffix('/v1'),"
)
BY_MESSAGES = BY_MESSAGES.replace("chat.completions.create(", "messages.create(max_tokens=9, ")
BROKEN = TASKS.replace("float(len(trace.last_reply))", "trace.no_such_thing")
HERE = {"runtime": {"type": "subprocess"}}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load(name, source, **arguments)`: the environment of a module with this source."""

    def load(name: str, source: str, **arguments: Any) -> Any:
        from groupgrad.integrations import verifiers

        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return verifiers.load(name, sampling_args={"max_tokens": 6}, select={"limit": 8}, **arguments)

    return load


@pytest.fixture
def train(load: Any, tmp_path: Path, make_model: Any, make_tokenizer: Any) -> Any:
    """`train(name, source, **arguments)`: the log of the first step on this environment."""

    def train(name: str, source: str, max_steps: int = 1, **arguments: Any) -> dict[str, float]:
        loaded = load(name, source, **arguments)
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
                max_steps=max_steps,
                logging_steps=1,
            ),
            train_dataset=loaded.dataset,
        )
        trainer.train()
        return trainer.state.log_history[0]

    return train


def test_weighted_rewards_and_metrics_arrive(train: Any) -> None:
    log = train("one_turn_tasks", TASKS, agent=HERE, taskset={"first": 30})
    mean, long, said, known = (log[f"rewards/one_turn_tasks/{name}"] for name in ("mean", "long", "said", "known"))
    assert mean == pytest.approx(0.5 * long + 2.0 * said) and long > 0 and 31 <= known <= 38
    assert (log["rollouts/error"], log["rollouts/turns"], log["rollouts/branches"]) == (0.0, 1.0, 0.0)


def test_a_harness_that_speaks_anthropics_messages(train: Any) -> None:
    log = train("messages_tasks", BY_MESSAGES, agent=HERE)
    assert (log["rollouts/error"], log["rollouts/turns"]) == (0.0, 1.0) and log["rewards/messages_tasks/long"] > 0


def test_an_environment_of_several_turns(train: Any) -> None:
    log = train("several_turns_tasks", SEVERAL, agent=HERE)
    mean, long, said, turns = (log[f"rewards/several_turns_tasks/{name}"] for name in ("mean", "long", "said", "turns"))
    assert turns == 3.0 and mean == pytest.approx(0.5 * long + 2.0 * said + turns)
    assert (log["rollouts/error"], log["rollouts/turns"], log["rollouts/branches"]) == (0.0, 3.0, 0.0)


def test_rollouts_share_what_an_environment_starts(train: Any) -> None:
    train("shared_tasks", SEVERAL, max_steps=2, agent=HERE)
    assert sys.modules["shared_tasks"].calls == ["start", "stop"] * 2  # once a batch


def test_rollouts_share_a_start_that_fails(train: Any) -> None:
    with pytest.raises(RolloutError, match=r"4 of 4 rollouts of step 0 failed.*KeyError: 'away'"):
        train("down_tasks", DOWN, agent=HERE)
    assert sys.modules["down_tasks"].calls == ["start", "stop"]


def test_attempts_of_an_episode_have_their_mean(train: Any) -> None:
    log = train("attempted_tasks", TASKS, id="best-of-n", n=2, agent=HERE)
    mean, long, said, best = (log[f"rewards/attempted_tasks/{name}"] for name in ("mean", "long", "said", "best"))
    assert mean == pytest.approx(0.5 * long + 2.0 * said) and 0.5 <= best <= 1.0
    assert (log["rollouts/error"], log["rollouts/turns"], log["rollouts/branches"]) == (0.0, 2.0, 1.0)


def test_a_reward_that_raises_is_named(train: Any) -> None:
    with pytest.raises(RolloutError, match=r"'broken_tasks' failed: TaskError: .*no_such_thing"):
        train("broken_tasks", BROKEN, agent=HERE)


def test_the_policy_plays_no_agent_that_is_not_trained(train: Any) -> None:
    with pytest.raises(RolloutError, match="its agent 'user' is not trained"):
        train("simulated_tasks", TASKS, id="user-sim", assistant=HERE, user=HERE)


def test_rows_are_the_tasks_that_are_chosen(load: Any) -> None:
    rows = load("chosen_tasks", TASKS, taskset={"first": 5}).dataset
    assert len(rows) == 8 and '"prompt":"5+1="' in rows[0]["task"] and '"answer":"13"' in rows[7]["task"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"agent": {"retries": {"max_retries": 1}}}, "retries would train"),
        ({"retries": {"rules": [{"max_retries": 1}]}}, "retries would train"),
        ({"taskset": {"frist": 1}}, "frist"),
        ({"select": {}}, "endless tasks"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str, load: Any) -> None:
    from groupgrad.integrations import verifiers

    load("refused_tasks", TASKS)
    with pytest.raises(ValueError, match=said):
        verifiers.load("refused_tasks", **arguments)


def test_a_task_set_that_is_not_installed() -> None:
    from groupgrad.integrations import verifiers

    with pytest.raises(ImportError, match="not-there"):
        verifiers.load("not-there")
