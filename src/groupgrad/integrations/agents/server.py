"""The address: an HTTP server on this machine that speaks OpenAI's API. It needs Starlette and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from groupgrad.concurrency.event_loop import LoopThread
from groupgrad.integrations.agents.wire import MODEL, Answer, BadRequest, Question, events, read_call, response

MAX_BODY_BYTES = 64 << 20
"""Largest body of a request; a conversation of a million tokens has a tenth of it."""


class Asked(Protocol):
    """Answers the questions that come with one key."""

    def ask(self, question: Question) -> Future[Answer]:
        """Thread-safe. The answer comes later; BadRequest, raised or as the future's exception, if it cannot."""
        ...


def make_app(find: Callable[[str], Asked | None]) -> Starlette:
    """The application. `find` gives what answers a key, None for an unknown one."""

    async def complete(request: Request, *, is_chat: bool) -> Response:
        try:
            asked = _authorized(request)
            body = await _body(request)
            call = read_call(body, is_chat=is_chat)
            futures = [asyncio.wrap_future(asked.ask(call.question)) for _ in range(call.n)]
            answers = await asyncio.gather(*futures)
        except BadRequest as error:
            return JSONResponse(error.body, status_code=error.status)
        if call.stream:
            return StreamingResponse(events(call, answers), media_type="text/event-stream")
        return JSONResponse(response(call, answers))

    async def chat(request: Request) -> Response:
        return await complete(request, is_chat=True)

    async def text(request: Request) -> Response:
        return await complete(request, is_chat=False)

    async def models(request: Request) -> Response:
        try:
            _authorized(request)
        except BadRequest as error:
            return JSONResponse(error.body, status_code=error.status)
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "groupgrad"}
        return JSONResponse({"object": "list", "data": [entry]})

    def _authorized(request: Request) -> Asked:
        found = find(request.headers.get("authorization", "").removeprefix("Bearer "))
        if found is None:
            raise BadRequest("this key opens no session here", status=401, code="invalid_api_key")
        return found

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/models", models),
        ]
    )


async def _body(request: Request) -> Any:
    """The JSON of a body of at most `MAX_BODY_BYTES`."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


class Address:
    """Serves an application on a free port of this machine, on a thread of its own, until `close`."""

    def __init__(self, app: Starlette, host: str = "127.0.0.1", port: int = 0):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small parts at once only on sockets that name TCP; elsewhere an answer waits 40 ms for an ACK.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        self._socket.listen(2048)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._loop = LoopThread("agent-address")
        self._served, _ = self._loop.submit(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Ends the server. May be called any number of times."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):  # a server that does not end in time ends with its loop
            self._served.result(timeout=5)
        self._loop.close()
        self._socket.close()
