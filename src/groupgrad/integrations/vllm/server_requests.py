"""Reads requests to the server with limits on size and time, checks their fields, and limits the time of answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import urllib.parse
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from groupgrad.integrations.vllm.http import MISSING_KEY_STATUS

T = TypeVar("T", str, int, float, bool, list, dict)

JSON_BYTES = 2**20
"""Largest JSON body of a route that has no limit of its own."""
MAX_TIMEOUT_S = 86400.0
"""Longest wait that a caller may ask for."""
SILENCE_S = 60.0
"""Time to send a body, plus one second for each MiB that it announces, or may have if it announces no length."""
RETRY_S = 1
"""Seconds after which a caller that was refused during a push may retry."""
UNREAD_S = 60.0
"""Time that a caller has for reading each part of its answer."""


class Refusal(Exception):
    """A request that cannot be answered: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Call:
    """A request to the server, by ASGI's scope and `receive`."""

    def __init__(self, scope: Mapping[str, Any], receive: Any):
        self._scope, self._receive = scope, receive
        self.query: dict[str, Any] = dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))

    @property
    def server_host(self) -> str:
        """The address of this machine at which the caller has reached the server."""
        host, port = self._scope.get("server") or (None, None)
        if not host or port is None:
            raise Refusal(409, "this server listens at no network address, so no process group can meet there")
        return str(host)

    async def body(self, max_bytes: int) -> bytes:
        """The body, which is refused before it is read if it announces more bytes, and as soon as it has more."""
        limit_s = SILENCE_S + body_bytes(self._scope, max_bytes) / 2**20
        try:
            return await asyncio.wait_for(self._read(max_bytes), limit_s)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body of this request did not arrive within {limit_s:.0f} s") from None

    async def json(self, max_bytes: int = JSON_BYTES) -> dict[str, Any]:
        """The body as a JSON object."""
        try:
            values = json.loads(await self.body(max_bytes))
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise Refusal(400, f"the body is a JSON {type(values).__name__}, not an object")
        return values

    async def _read(self, max_bytes: int) -> bytes:
        data = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Refusal(400, "the caller went away in the middle of the body")
            data += message.get("body", b"")
            if len(data) > max_bytes:
                raise _too_large(len(data), max_bytes)
            if not message.get("more_body"):
                return bytes(data)


def body_bytes(scope: Mapping[str, Any], max_bytes: int) -> int:
    """The length of the body that the headers announce, else `max_bytes`. Refuses a longer one."""
    announced = header(scope, b"content-length")
    num_bytes = int(announced) if announced.isdigit() else max_bytes
    if num_bytes > max_bytes:
        raise _too_large(num_bytes, max_bytes)
    return num_bytes


def header(scope: Mapping[str, Any], name: bytes) -> bytes:
    """The value of the header with this name in small letters; empty without one."""
    return next((value for key, value in scope.get("headers", ()) if key == name), b"")


def replayed(body: bytes, receive: Any) -> Any:
    """ASGI's `receive` of a request whose body was read: the body first, then what `receive` reports."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_replayed() -> Any:
        return messages.pop() if messages else await receive()

    return receive_replayed


def read_in_time(send: Any) -> Any:
    """ASGI's `send`, raising ConnectionAbortedError if the caller does not read within `UNREAD_S`."""

    async def send_in_time(message: Any) -> None:
        try:
            await asyncio.wait_for(send(message), UNREAD_S)
        except asyncio.TimeoutError:
            raise ConnectionAbortedError(f"the caller has read nothing of its answer for {UNREAD_S:g} s") from None

    return send_in_time


async def reply(status: int, answer: dict[str, Any], scope: Any, receive: Any, send: Any) -> None:
    """Answers with JSON; after a refusal that may have left a part of the body on its way, the connection ends."""
    from starlette.responses import JSONResponse

    headers = {"retry-after": str(RETRY_S)} if status == 503 else {}
    if status in (MISSING_KEY_STATUS, 408, 413):
        headers["connection"] = "close"
    await JSONResponse(answer, status, headers)(scope, receive, send)


def take(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """The field of this name, of this type. A query's text is converted to a number."""
    value = values.get(name)
    if isinstance(value, str) or (kind is float and type(value) is int):
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(value) if kind in (int, float) else value
    if type(value) is not kind:
        raise Refusal(400, f"the field {name} is {str(value)[:80]!r}, which is no {kind.__name__}")
    return cast("T", value)


def take_timeout(values: Mapping[str, Any]) -> float:
    """The field `timeout_s`, at most `MAX_TIMEOUT_S`."""
    seconds = take(values, "timeout_s", float)
    if not math.isfinite(seconds) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise Refusal(
            400, f"timeout_s is {seconds:g}; the server waits at most {MAX_TIMEOUT_S:g} s: lower vllm_server_timeout"
        )
    return seconds


def _too_large(num_bytes: int, max_bytes: int) -> Refusal:
    return Refusal(413, f"the body has {num_bytes} bytes or more, and this route takes at most {max_bytes}")
