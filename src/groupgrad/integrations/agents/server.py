"""The address: an HTTP server that speaks OpenAI's API and Anthropic's. It needs Starlette and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from groupgrad.concurrency.daemon_threads import LoopThread
from groupgrad.integrations.agents import messages_wire, wire
from groupgrad.integrations.agents.wire import MODEL, Answer, BadRequest, Call, Question

KEPT_ALIVE_S = 600
"""Time after which an idle connection is closed. Clients close theirs after some seconds (httpx 5, aiohttp 15). Were
the server to close one as early, a request might already be under way in it."""

MAX_BODY_BYTES = 64 << 20
"""Largest body of a request; a conversation of a million tokens has a tenth of it."""

_MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "groupgrad"}],
}


class _Json(JSONResponse):
    """JSON in ASCII, since models may write half of a surrogate pair, which has no UTF-8 form."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Asked(Protocol):
    """Answers the questions that come with one key."""

    def ask(self, question: Question) -> Future[Answer]:
        """Asks from any thread. A question that cannot be answered is a BadRequest, raised here or by the future.

        The future is cancelled when the request times out or its client goes away.
        """
        ...


@dataclass(slots=True, frozen=True)
class _Form:
    """An API: how its requests are read, and how its answers and errors are written."""

    read: Callable[[Any], Call]
    response: Callable[[Call, Sequence[Answer]], dict[str, Any]]
    events: Callable[[Call, Sequence[Answer]], Iterator[str]]
    error: Callable[[BadRequest], dict[str, Any]]


_CHAT = _Form(partial(wire.read_call, is_chat=True), wire.response, wire.events, lambda error: error.body)
_TEXT = _Form(partial(wire.read_call, is_chat=False), wire.response, wire.events, lambda error: error.body)
_MESSAGES = _Form(messages_wire.read_call, messages_wire.response, messages_wire.events, messages_wire.error_body)


@dataclass(slots=True)
class Traffic:
    """Requests of an address so far, and the tokens of their answers. The event loop of the address counts them."""

    answered: int = 0
    refused: int = 0
    """Requests that got an error."""
    under_way: int = 0
    tokens_read: int = 0
    tokens_written: int = 0


def make_app(
    find: Callable[[str], Asked | None],
    *,
    timeout_s: float | None = None,
    traffic: Traffic | None = None,
    metrics: Callable[[], str] | None = None,
) -> Starlette:
    """The application. `find` gives what answers a key, None for an unknown one.

    A request that is not answered within `timeout_s` seconds gets an error; None: it may take any time. The answers of
    such a request, and of one whose client goes away, are cancelled. `traffic` is kept up to date. `metrics` gives the
    text of `/metrics`; None: there is no such page.
    """
    counts = Traffic() if traffic is None else traffic

    async def answer(request: Request, form: _Form) -> tuple[Call, list[Answer]]:
        asked = _authorized(request, find)
        call = form.read(await _body(request))
        return call, await _answers(request, asked, call)

    async def complete(request: Request, form: _Form) -> Response:
        counts.under_way += 1
        try:
            call, answers = await asyncio.wait_for(answer(request, form), timeout_s)
        except (BadRequest, asyncio.TimeoutError) as error:
            counts.refused += 1
            return _refusal(error if isinstance(error, BadRequest) else late(timeout_s or 0.0), form)
        except asyncio.CancelledError:
            # The client has gone, or uvicorn closes the address. Raised, it would be logged for each request.
            counts.refused += 1
            return _refusal(BadRequest("the address has closed", status=503, code="closed"), form)
        finally:
            counts.under_way -= 1
        counts.answered += 1
        counts.tokens_read += answers[0].num_prompt_tokens
        counts.tokens_written += sum(len(one.tokens) for one in answers)
        if call.stream:
            return StreamingResponse(form.events(call, answers), media_type="text/event-stream")
        return _Json(form.response(call, answers))

    async def show(request: Request, page: Callable[[], Response]) -> Response:
        try:
            _authorized(request, find)
        except BadRequest as error:
            return _refusal(error, _CHAT)
        return page()

    routes = [
        Route("/v1/chat/completions", partial(complete, form=_CHAT), methods=["POST"]),
        Route("/v1/completions", partial(complete, form=_TEXT), methods=["POST"]),
        Route("/v1/messages", partial(complete, form=_MESSAGES), methods=["POST"]),
        Route("/v1/models", partial(show, page=partial(JSONResponse, _MODELS))),
    ]
    if metrics is not None:
        text = partial(PlainTextResponse, media_type="text/plain; version=0.0.4")
        routes.append(Route("/metrics", partial(show, page=lambda: text(metrics()))))

    async def lost(request: Request, error: Exception) -> Response:
        paths = ", ".join(route.path for route in routes)
        said = f"there is no {request.url.path} here, but {paths}"
        if request.url.path == "/v1/responses":
            said += "; ask by chat completions (OpenAI's Agents SDK: set_default_openai_api('chat_completions'))"
        return _refusal(BadRequest(said, status=404, code="not_found"), _CHAT)

    return Starlette(routes=routes, exception_handlers={404: lost})


async def _answers(request: Request, asked: Asked, call: Call) -> list[Answer]:
    """The answers to a call. If its client goes away, or this is cancelled, those that are not there are cancelled."""
    answers = [asyncio.wrap_future(asked.ask(question)) for question in call.questions]
    gone = asyncio.ensure_future(_disconnection(request))
    gone.add_done_callback(lambda _: [answer.cancel() for answer in answers])
    try:
        return await asyncio.gather(*answers)
    finally:
        gone.cancel()


async def _disconnection(request: Request) -> None:
    """Ends when the client of a request goes away whose body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _authorized(request: Request, find: Callable[[str], Asked | None]) -> Asked:
    """Finds the session of a request by its key, in either API's header. BadRequest for an unknown key."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    for key in (request.headers.get("x-api-key"), bearer):
        if key is not None and (found := find(key)) is not None:
            return found
    raise BadRequest("this key opens no session here", status=401, code="invalid_api_key")


def late(timeout_s: float) -> BadRequest:
    """The error for a request that was not answered within its time, in seconds."""
    return BadRequest(
        f"this request was not answered within its {timeout_s:g} seconds; ask for fewer tokens, send fewer requests at "
        f"once, or serve with a longer --timeout",
        status=503,
        code="timeout",
    )


def _refusal(error: BadRequest, form: _Form) -> Response:
    # Clients of both APIs send a request again after some statuses, although it would be refused again.
    return _Json(form.error(error), status_code=error.status, headers={"x-should-retry": "false"})


async def _body(request: Request) -> Any:
    """The JSON of a body of at most `MAX_BODY_BYTES`."""
    too_large = BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    parts, size = [], 0
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:  # uvicorn lets no other texts through
        raise too_large
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise BadRequest("the client went away before its body had come") from None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket to which clients connect from now on; port 0 is any that is free. OSError if there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small parts at once only on sockets that name TCP; elsewhere an answer waits 40 ms for an ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                f"port {port} of {host} is in use by another program; end it, or set --port to another port, or to 0 "
                f"for any that is free"
            ) from None
        raise OSError(f"nothing can be served at {host}, port {port}: {error}; set --host and --port") from error
    return listening


class Address:
    """Serves an application on a socket that listens, on a thread of its own, until `close`.

    Without a socket it is a free port of this machine.
    """

    def __init__(self, app: Starlette, listening: socket.socket | None = None):
        self.app = app
        self._socket = listen() if listening is None else listening
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEPT_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._loop = LoopThread("agent-address")
        self.submit = self._loop.submit
        """Runs a coroutine on the thread of the address."""
        self._served = self.submit(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Ends the server. May be called any number of times."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):  # a server that does not end in time ends with its loop
            self._served.result(timeout=5)
        self._loop.close()
        self._socket.close()
