"""Agents train with the tools of an MCP server: one for all rollouts, or one a rollout; a server may end on the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from scripted_agents import call

pytest.importorskip("mcp.client.client", reason="the package mcp is not installed: `make check` installs it")

from groupgrad.errors import RolloutError
from groupgrad.integrations.mcp import mcp_environment, mcp_tools

COMMAND = f"{sys.executable} {Path(__file__).parents[1] / 'helpers' / 'mcp_server.py'}"
ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Go to {i}. "}], "first": 10} for i in range(8)])
NAMES = ["add", "who-is", "die", "hang"]


class Seen:
    """A reward function that keeps the first results of tools."""

    def __init__(self) -> None:
        self.results: list[str] = []

    def reward(self, completions: list[Any], **kwargs: Any) -> list[float]:
        self.results += [messages[1]["content"] for messages in completions]
        return [float(len(messages[1]["content"]) + row % 2) for row, messages in enumerate(completions)]


def test_rollouts_share_a_server(make_agents: Any, calling: Any) -> None:
    engine = calling(lambda n: call("add", step=1))
    seen = Seen()
    trainer = make_agents(tools=mcp_tools(COMMAND, names=NAMES), reward_funcs=seen.reward)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert sorted(seen.results) == [f"the count is {number}" for number in range(1, 9)]
    assert any((value != before[name]).any() for name, value in trainer.model.named_parameters())
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.0)
    assert '"name": "who_is"' in engine.tokenizer.decode(engine.asked[0].prompt_ids)


def test_a_server_that_ends_costs_the_calls_under_way(make_agents: Any, calling: Any) -> None:
    calling(lambda n: call("die") if n == 0 else call("add", step=1), num_calls=2)
    trainer = make_agents(
        {"max_steps": 2, "max_completion_length": 600},
        tools=mcp_tools(COMMAND, names=NAMES),
        reward_funcs=Seen().reward,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2 and 0 < sum(log["tools/failure_frequency"] for log in logs) < 2
    assert all(log.get("rollouts/error", 0.0) == 0.0 for log in logs)


def test_a_server_that_hangs_costs_the_late_calls(make_agents: Any, calling: Any) -> None:
    calling(lambda n: call("hang") if n < 3 else call("who_is"))
    trainer = make_agents({"tool_timeout_s": 0.5}, tools=mcp_tools(COMMAND, names=NAMES), reward_funcs=Seen().reward)
    trainer.train()
    assert 0 < trainer.state.log_history[0]["tools/timeouts"] <= 1


class Counting(mcp_environment(COMMAND, names=NAMES)):  # type: ignore[misc]
    """A server a rollout, with a reward that asks it."""

    async def reset(self, first: int, **row: Any) -> str:
        await super().reset()
        await self._call("add", step=first)
        return f"The count is {first}."

    async def get_reward(self) -> float:
        return float((await self._call("add", step=0)).split()[-1])


def test_each_rollout_has_a_server_of_its_own(train_agents: Any, calling: Any) -> None:
    engine = calling(lambda n: call("add", step=n), num_calls=2)
    counts: list[list[int]] = []

    def counted(completions: list[Any], **kwargs: Any) -> list[float]:
        replies = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
        counts.extend([int(text.split()[-1]) for text in texts] for texts in replies)
        return [0.0] * len(completions)

    _, log = train_agents(
        {"max_completion_length": 400}, environment_factory=Counting, train_dataset=ROWS, reward_funcs=counted
    )
    assert len(counts) == 8 and all(10 <= first <= second <= first + 4 <= 18 for first, second in counts)
    assert log["tools/failure_frequency"] == 0.0
    assert log["rewards/Counting/mean"] == pytest.approx(sum(second for _, second in counts) / 8)
    assert "The count is 10." in engine.tokenizer.decode(engine.asked[0].prompt_ids)


def test_a_server_that_ends_is_gone_for_its_rollout_alone(make_agents: Any, calling: Any) -> None:
    calling(lambda n: call("die") if n == 0 else call("add", step=1), num_calls=2)
    trainer = make_agents(environment_factory=mcp_environment(COMMAND, names=NAMES), reward_funcs=Seen().reward)
    trainer.train()
    assert 0 < trainer.state.log_history[0]["tools/failure_frequency"] < 1
    assert trainer.state.log_history[0].get("rollouts/error", 0.0) == 0.0


def test_a_server_that_does_not_start_fails_its_rollouts(make_agents: Any, calling: Any) -> None:
    calling(lambda n: "done")
    made = mcp_environment(COMMAND, names=NAMES)
    made._server = type(made._server)("no-such-program")
    with pytest.raises(RolloutError, match=r"reset failed: ConnectionError: the MCP server 'no-such-program'"):
        make_agents(environment_factory=made, reward_funcs=Seen().reward).train()
