"""A judge behind an OpenAI-compatible address, here a server of this process."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from groupgrad.errors import RewardError
from groupgrad.rewards import judge
from groupgrad.rewards.judge import last_number
from groupgrad.rewards.reward_runner import RewardRunner


class Server:
    """Answers each request by `answer(text)`, a reply or a code of failure; `seen` has the texts of all requests."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self.answer: Callable[[str], str | int] = lambda text: "8"
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner._respond(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        text = body["messages"][0]["content"]
        with self._lock:
            self.seen.append(text)
            self.bodies.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            answer = self.answer(text)
        time.sleep(0.05)
        with self._lock:
            self._at_once -= 1
        failed = isinstance(answer, int)
        message = {"role": "assistant", "content": answer}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102},
        }
        data = json.dumps({"error": {"message": "no"}} if failed else reply).encode()
        handler.send_response(answer if failed else 200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        if failed:
            handler.send_header("retry-after-ms", "1")
        handler.end_headers()
        handler.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def ask(reward: Any, completions: list[str], **columns: Any) -> tuple[list[float | None], dict[str, float]]:
    metrics: dict[str, float] = {}
    columns = {"prompts": ["2+2?"] * len(completions), **columns}
    return asyncio.run(reward(completions=completions, log_metric=metrics.__setitem__, **columns)), metrics


def test_rewards_are_what_the_judge_replies_as_part_of_a_run(server, make_rollouts):
    server.answer = lambda text: "I say 3, no, 7.5" if "good" in text else "none"
    reward = judge(model="m", base_url=server.url)
    rollouts = make_rollouts(["good", "bad"], [{"prompt": "2+2?", "hint": "x"}] * 2)
    table = RewardRunner([reward]).score(rollouts)
    assert table.names == ["judge"]
    assert table.rewards[0].item() == 0.75
    assert table.rewards[1].isnan().item()
    assert sorted(text[-4:] for text in server.seen) == ["\nbad", "good"]
    assert all("Question:\n2+2?" in text for text in server.seen)
    assert server.bodies[0]["temperature"] == 0.0
    assert table.metrics["judge/unread"].value == 1


def test_ratings_are_read_as_shares_of_ten():
    replies = {"8": 0.8, "I give 8/10.": 0.8, "7.5 out of 10": 0.75, "10": 1.0, "0 / 10": 0.0, "2024": None, "-3": None}
    assert {reply: last_number(reply) for reply in replies} == replies


def test_columns_and_conversations_are_filled_in(server):
    reward = judge(model="m", base_url=server.url, prompt="{prompt}|{completion}|{answer}")
    conversation = [[{"role": "user", "content": "{x}?"}]]
    ask(reward, [[{"role": "assistant", "content": "{y}"}]], prompts=conversation, answer=[4])  # type: ignore[list-item]
    assert server.seen == ["user: {x}?|{y}|4"]


def test_failures_are_repeated_and_then_an_error_or_a_value(server):
    codes = iter([429, 503, 500])
    server.answer = lambda text: next(codes, "10")
    assert ask(judge(model="m", base_url=server.url), ["a"])[0] == [1.0]
    assert len(server.seen) == 4
    server.answer = lambda text: 500
    with pytest.raises(RewardError, match=r"m at http://127.*failed after 1 repetitions: InternalServerError"):
        ask(judge(model="m", base_url=server.url, max_retries=1), ["a"])
    unscored = judge(model="m", base_url=server.url, max_retries=0, on_failure=None)
    rewards, metrics = ask(unscored, ["a", "b"])
    assert rewards == [None, None]
    assert metrics["judge/failed"] == 2
    assert ask(judge(model="m", base_url=server.url, max_retries=0, on_failure=-1.0), ["a"])[0] == [-1.0]


def test_a_request_is_sent_once_and_kept_on_disk(server, tmp_path):
    settings: dict[str, Any] = {"model": "m", "base_url": server.url, "cache": tmp_path / "replies.db"}
    assert ask(judge(**settings), ["a", "b"])[0] == [0.8, 0.8]
    rewards, metrics = ask(judge(**settings), ["a", "b", "c"])
    assert rewards == [0.8, 0.8, 0.8]
    assert len(server.seen) == 3
    assert (metrics["judge/requests"], metrics["judge/cached"], metrics["judge/tokens"]) == (1, 2, 102)


def test_equal_requests_of_a_batch_are_sent_once(server):
    replies = iter("456")
    server.answer = lambda text: next(replies)
    rewards, metrics = ask(judge(model="m", base_url=server.url), ["a", "b", "a", "a"])
    assert len(server.seen) == 2
    assert rewards[0] == rewards[2] == rewards[3] != rewards[1]
    assert metrics["judge/requests"] == 2


@pytest.mark.parametrize("damage", ["no database", "no folder"])
def test_a_cache_that_cannot_be_used_is_a_warning(server, tmp_path, caplog, damage):
    path = tmp_path / "replies.db" if damage == "no database" else tmp_path / "missing" / "replies.db"
    if damage == "no database":
        path.write_text("these are notes, and no database" * 40)
    reward = judge(model="m", base_url=server.url, cache=path)
    assert ask(reward, ["a", "b"])[0] == [0.8, 0.8]
    assert ask(reward, ["a"])[0] == [0.8]
    (text,) = [record.getMessage() for record in caplog.records if record.name.startswith("groupgrad")]
    assert text.startswith(f"judge: the cache {path} cannot be used")
    assert len(server.seen) == 3


def test_requests_keep_to_the_limits(server):
    ask(judge(model="m", base_url=server.url, max_concurrency=2), [str(i) for i in range(8)])
    assert server.most_at_once == 2


def test_it_can_be_pickled_and_bad_settings_are_refused(server):
    reward = pickle.loads(pickle.dumps(judge(model="m", base_url=server.url)))
    assert ask(reward, ["a"])[0] == [0.8]
    for settings, message in (
        ({"max_concurrency": 0}, "max_concurrency=0 lets no request through"),
        ({"on_failure": "none"}, "on_failure='none' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            judge(model="m", **settings)  # type: ignore[arg-type]
