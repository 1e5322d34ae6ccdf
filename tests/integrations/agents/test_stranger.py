"""A stranger at the address of agents, over real HTTP: nothing is answered, and the session goes on."""

from __future__ import annotations

import http.client
import json
import logging
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from urllib.parse import urlsplit

import pytest
from raw_http import raw_exchange, request
from stranger_cases import BAD_JSON
from waiting import until

from groupgrad.integrations.agents import server
from groupgrad.integrations.agents.server import Address, make_app
from groupgrad.integrations.agents.wire import Answer, Question

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
BODY = json.dumps({"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}).encode()


class Session:
    """Answers every question with nothing, and counts them."""

    num_asked = 0

    def ask(self, question: Question) -> Future[Answer]:
        self.num_asked += 1
        answered: Future[Answer] = Future()
        answered.set_result(Answer({"role": "assistant", "content": "Yes."}, "Yes.", "stop", 1, ["Yes."], None))
        return answered


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def port(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an address with the key `secret`. When a test ends it answers, and has asked the session nothing."""
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    address = Address(make_app({"secret": session}.get, timeout_s=2.0))
    number = urlsplit(address.url).port
    assert number is not None
    yield number
    assert session.num_asked == 0
    assert raw_exchange(number, request(PATHS[0], BODY, "secret"))[0] == 200
    address.close()


@pytest.mark.parametrize("key", [None, "", "secre", "secrets", "Secret", "x" * 10_000])
def test_without_the_key_nothing_is_read(port: int, key: str | None):
    for path in PATHS:
        for body, length in ((BODY, None), (b"", 2**40), (pickle.dumps(BODY), None)):
            assert raw_exchange(port, request(path, body, key, length=length))[0] == 401
    assert raw_exchange(port, request("/v1/models", key=key))[0] == 401


def test_paths_and_methods_that_there_are_not(port: int):
    for path in ("/", "/v1", "/v1/files", "/metrics", "/v1/../etc/passwd", "/%2e%2e/"):
        status, found = raw_exchange(port, request(path, BODY, "secret"))
        assert status == 404 and "/v1/chat/completions" in found["error"]["message"]
    assert raw_exchange(port, request(PATHS[0], key="secret"))[0] == 405


def test_a_client_of_responses_is_told_to_ask_by_chat_completions(port: int):
    """OpenAI's Agents SDK asks so unless it is told otherwise."""
    status, found = raw_exchange(port, request("/v1/responses", BODY, "secret"))
    assert status == 404 and "ask by chat completions" in found["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_bodies_over_the_bound(port: int, path: str):
    assert raw_exchange(port, request(path, b"", "secret", length=2**40))[0] == 413
    chunks = request(path, b"", "secret").replace(b"GET", b"POST")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
    assert raw_exchange(port, chunks, *[b"200\r\n" + b" " * 512 + b"\r\n"] * 3)[0] == 413


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_requests(port: int, path: str):
    for body in BAD_JSON:
        status, found = raw_exchange(port, request(path, body[:900], "secret"))
        assert status == 400 and found["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_stops_is_given_up(port: int, path: str):
    began = time.perf_counter()
    assert raw_exchange(port, request(path, BODY[:9], "secret", length=len(BODY)), timeout_s=20.0)[0] == 503
    assert time.perf_counter() - began < 15.0


def test_clients_that_break_off_leave_no_trace(port: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for path in PATHS:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(request(path, BODY[:9], "secret", length=len(BODY)))
        time.sleep(0.5)
        assert raw_exchange(port, request("/v1/models", key="secret"))[0] == 200
    assert not caplog.records


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_nobody_waits_for_are_cancelled(path: str, stream: bool, caplog: pytest.LogCaptureFixture):
    answers: list[Future[Answer]] = []

    class Busy(Session):
        def ask(self, question: Question) -> Future[Answer]:
            answers.append(Future())
            return answers[-1]

    address = Address(make_app({"secret": Busy()}.get))
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(address.url).port, timeout=10)
    body = json.dumps(json.loads(BODY) | {"prompt": "a", "stream": stream, "n": 2})
    connection.request("POST", path, body, {"Authorization": "Bearer secret"})
    expected = 1 if path == "/v1/messages" else 2
    until(lambda: len(answers) == expected)
    assert not any(answer.cancelled() for answer in answers)
    connection.close()
    until(lambda: all(answer.cancelled() for answer in answers))
    address.close()
    assert not caplog.records


@pytest.mark.slow
def test_a_connection_outlives_the_pause_in_which_a_batch_is_trained():
    """Clients drop connections that were idle for 5 seconds. A server that does so too may drop one in which a request
    is under way, which is an error of a client without retries."""
    address = Address(make_app({"secret": Session()}.get))
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(address.url).port, timeout=10)
    connection.connect()
    first = connection.sock
    for _ in range(2):
        connection.request("POST", PATHS[0], BODY, {"Authorization": "Bearer secret"})
        assert connection.getresponse().read()
        assert connection.sock is first
        time.sleep(7.0)
    address.close()


def test_an_address_that_closes_tells_those_who_wait(capfd: pytest.CaptureFixture[str]):
    """As where a signal stops a run while its programs wait for answers."""
    asked = threading.Event()

    class Busy(Session):
        def ask(self, question: Question) -> Future[Answer]:
            asked.set()
            return Future()

    address = Address(make_app({"secret": Busy()}.get))
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(address.url).port, timeout=10)
    connection.request("POST", PATHS[0], BODY, {"Authorization": "Bearer secret"})
    assert asked.wait(10)
    address.close()
    response = connection.getresponse()
    assert response.status == 503 and "has closed" in json.load(response)["error"]["message"]
    assert "Traceback" not in capfd.readouterr().err
