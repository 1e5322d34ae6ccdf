"""Clients of an address in its own process: their requests go to its application without a socket."""

from __future__ import annotations

import asyncio
import functools
import sys
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout
from typing import Any

from groupgrad.integrations.agents.server import Address


def make_client(address: Address, *, is_async: bool, **options: Any) -> Any:
    """An `openai` client with these options, whose requests the address answers as those of its socket.

    They are handled on the address's thread, so keys, bounds, deadlines and its end are the same. What it saves is HTTP
    itself, which takes the processor for longer than everything else that the address does.
    """
    import openai

    kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
    http_kind: Any = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
    return kind(base_url=address.url, http_client=http_kind(transport=_transport_type()(address)), **options)


@functools.cache
def _transport_type() -> Any:
    from openai import DefaultHttpxClient

    httpx: Any = sys.modules[DefaultHttpxClient.__mro__[1].__module__]  # openai 3 has one of another name

    class Transport(httpx.BaseTransport, httpx.AsyncBaseTransport):
        def __init__(self, address: Address) -> None:
            self._address = address
            self._app = httpx.ASGITransport(address.app, raise_app_exceptions=False)

        async def handle_async_request(self, request: Any) -> Any:
            try:
                return await asyncio.wait_for(asyncio.wrap_future(self._sent(request)), _limit_s(request))
            except asyncio.TimeoutError as error:
                raise httpx.ReadTimeout("no answer in time", request=request) from error

        def handle_request(self, request: Any) -> Any:
            sent = self._sent(request)
            try:
                return sent.result(_limit_s(request))
            except FuturesTimeout as error:
                sent.cancel()
                raise httpx.ReadTimeout("no answer in time", request=request) from error

        def _sent(self, request: Any) -> Future[Any]:
            async def answer() -> Any:
                found = await self._app.handle_async_request(request)
                return httpx.Response(found.status_code, headers=found.headers, content=await found.aread())

            return self._address.submit(answer())

    return Transport


def _limit_s(request: Any) -> float | None:
    return request.extensions["timeout"]["read"]
