"""Agents train in environments of OpenEnv servers, which are real ones of the package (`make test-environments`)."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from scripted_agents import call

from groupgrad import compat
from groupgrad.integrations.openenv import openenv_environment

pytestmark = pytest.mark.skipif(
    not compat.is_available("openenv"), reason="openenv is not installed: `make test-environments` installs it"
)
SERVER = Path(__file__).parents[1] / "helpers" / "openenv_server.py"
ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Go, {i}. "}], "start": 4} for i in range(8)])


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """`serve(*arguments)`: the address of a server that has started."""
    processes = []

    def start(*arguments: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes.append(subprocess.Popen([sys.executable, str(SERVER), str(port), *arguments]))
        until = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return f"http://127.0.0.1:{port}"
            except OSError:
                assert time.monotonic() < until and processes[-1].poll() is None, "the server did not start"
                time.sleep(0.2)

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def walk(serve: Any) -> str:
    return serve()


def test_rollouts_have_sessions_and_the_rewards_of_their_steps(train_agents: Any, calling: Any, walk: str) -> None:
    engine = calling(lambda n: call("step", by=n + 1), num_calls=2)
    replies: list[list[str]] = []

    def seen(completions: list[Any], **kwargs: Any) -> list[None]:
        replies.extend([m["content"] for m in messages if m["role"] == "tool"] for messages in completions)
        return [None] * len(completions)

    made = openenv_environment(walk, description="Go some way.", reset_columns=["start"])
    _, log = train_agents(
        {"max_completion_length": 400}, environment_factory=made, train_dataset=ROWS, reward_funcs=seen
    )
    first = engine.tokenizer.decode(engine.asked[0].prompt_ids)
    assert '{"place": 4, "note": "Go to 10."}' in first and '"description": "Go some way."' in first
    assert '"by": {"description": "How far to go."' in first and "metadata" not in first
    ends = [int(texts[-1].removeprefix('{"place": ').removesuffix("}")) for texts in replies]
    assert len(ends) == 8 and all(6 <= end <= 14 for end in ends)
    assert log["rewards/OpenEnvEnvironment/mean"] == pytest.approx(sum(end - 4 for end in ends) / 80)


def test_an_episode_that_is_over_takes_no_steps(train_agents: Any, calling: Any, walk: str) -> None:
    calling(lambda n: call("step", by=10), num_calls=2)
    _, log = train_agents({"max_completion_length": 400}, environment_factory=openenv_environment(walk))
    assert log["tools/failure_frequency"] == 0.5 and log["rewards/OpenEnvEnvironment/mean"] == 1.0


def test_late_steps_have_no_reward(train_agents: Any, calling: Any, walk: str) -> None:
    calling(lambda n: call("step", by=1, wait_s=20 if n < 3 else 0.0))
    _, log = train_agents({"tool_timeout_s": 1.0}, environment_factory=openenv_environment(walk))
    assert 0 < log["tools/timeouts"] < 1
    assert log["rewards/OpenEnvEnvironment/mean"] == pytest.approx(0.1 * (1 - log["tools/timeouts"]))


def test_tools_of_an_environment(make_agents: Any, calling: Any, serve: Any) -> None:
    engine = calling(lambda n: call("add", step=n) if n else call("fail"))
    texts: list[str] = []

    def counted(completions: list[Any], **kwargs: Any) -> list[float]:
        texts.extend(messages[1]["content"] for messages in completions)
        return [float(len(text)) for text in texts[-len(completions) :]]

    made = openenv_environment(serve("mcp"))
    make_agents(environment_factory=made, reward_funcs=counted).train()
    assert '"description": "Adds to the count."' in engine.tokenizer.decode(engine.asked[0].prompt_ids)
    known = {"Error: RuntimeError: Error calling tool 'fail': it is late", *(f"the count is {n}" for n in range(1, 5))}
    assert set(texts) <= known and len(set(texts)) > 1


def test_an_address_without_a_server() -> None:
    with pytest.raises(
        ConnectionError, match=r"no OpenEnv server describes its actions at http://127\.0\.0\.1:9/schema"
    ):
        openenv_environment("http://127.0.0.1:9/")
