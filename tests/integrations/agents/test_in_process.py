"""Requests that reach an address without a socket are answered as those that come by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest
from waiting import until

from groupgrad.integrations.agents import server
from groupgrad.integrations.agents.in_process import make_client
from groupgrad.integrations.agents.server import Address, make_app
from groupgrad.integrations.agents.wire import Answer, Question

CHAT = {"messages": [{"role": "user", "content": "a"}]}
ANSWER = Answer({"role": "assistant", "content": "Yes."}, "Yes.", "stop", 1, ["Yes."], None)


class Slow:
    """Answers the first question never and others at once. `last` is the last answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def ask(self, question: Question) -> Future[Answer]:
        self.last = answer = Future[Answer]()
        if self.asked.is_set():
            answer.set_result(ANSWER)
        self.asked.set()
        return answer


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def address(slow: Slow) -> Iterator[Address]:
    found = Address(make_app({"secret": slow}.get))
    yield found
    found.close()


def client_of(address: Address, *, is_async: bool = True) -> Any:
    return make_client(address, is_async=is_async, api_key="secret", max_retries=0)


@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/chat/completions", CHAT, "secret", 200),
        ("/chat/completions", {**CHAT, "stream": True}, "secret", 200),
        ("/chat/completions", {**CHAT, "n": 0.5}, "secret", 400),
        ("/chat/completions", {**CHAT, "user": "x" * 1000}, "secret", 413),
        ("/chat/completions", CHAT, "another", 401),
        ("/files", CHAT, "secret", 404),
    ],
)
def test_both_ways_give_the_same(
    path: str, body: Any, key: str, status: int, slow: Slow, address: Address, monkeypatch: Any
) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr("groupgrad.integrations.agents.wire.uuid.uuid4", lambda: type("Id", (), {"hex": "1"}))
    monkeypatch.setattr("groupgrad.integrations.agents.wire.time.time", lambda: 1.0)
    slow.asked.set()
    asked = {"url": address.url + path, "json": body, "headers": {"authorization": f"Bearer {key}"}}
    with openai.DefaultHttpxClient() as client:
        by_socket = client.post(**asked)

    async def post() -> Any:
        return await client_of(address)._client.post(**asked)

    for found in (client_of(address, is_async=False)._client.post(**asked), asyncio.run(post())):
        assert by_socket.status_code == found.status_code == status
        assert by_socket.content == found.content
        assert by_socket.headers["content-type"] == found.headers["content-type"]


def test_a_client_that_gives_up_or_is_cancelled_ends_its_request_alone(slow: Slow, address: Address) -> None:
    async def play() -> str | None:
        client = client_of(address)
        asking = asyncio.create_task(client.chat.completions.create(model="m", **CHAT))
        while not slow.asked.is_set():
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        until(slow.last.cancelled)
        slow.asked.clear()
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", **CHAT, timeout=0.3)
        until(slow.last.cancelled)
        answer = await client.chat.completions.create(model="m", **CHAT)
        return answer.choices[0].message.content

    assert asyncio.run(play()) == "Yes."
    slow.asked.clear()
    with pytest.raises(openai.APITimeoutError):
        client_of(address, is_async=False).chat.completions.create(model="m", **CHAT, timeout=0.3)
    until(slow.last.cancelled)


def test_an_address_that_closes_tells_those_who_wait(slow: Slow, address: Address) -> None:
    async def play() -> None:
        client = client_of(address)
        asking = asyncio.create_task(client.chat.completions.create(model="m", **CHAT))
        while not slow.asked.is_set():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(address.close)
        with pytest.raises(openai.InternalServerError, match="has closed"):
            await asking

    asyncio.run(play())
