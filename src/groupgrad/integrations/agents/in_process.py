"""The way to an address from its own process: requests go to its application without a socket."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from groupgrad.integrations.agents.server import Address


def async_http_client(address: Address) -> Any:
    """An HTTP client, as `openai.AsyncOpenAI` takes one, whose requests the address answers as those of its socket.

    They are handled on the address's thread, so keys, bounds, deadlines and its end are the same. What it saves is HTTP
    itself, which takes the processor for longer than everything else that the address does.
    """
    from openai import DefaultAsyncHttpxClient

    httpx: Any = sys.modules[DefaultAsyncHttpxClient.__base__.__module__]  # openai 3 has one of another name

    class Transport(httpx.AsyncBaseTransport):
        def __init__(self) -> None:
            self._app = httpx.ASGITransport(address.app, raise_app_exceptions=False)

        async def handle_async_request(self, request: Any) -> Any:
            answer = asyncio.wrap_future(address.submit(self._app.handle_async_request(request)))
            try:
                return await asyncio.wait_for(answer, request.extensions["timeout"]["read"])
            except asyncio.TimeoutError as error:
                raise httpx.ReadTimeout("no answer in time", request=request) from error

    return DefaultAsyncHttpxClient(transport=Transport())
