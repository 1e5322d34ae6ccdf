"""A session with an MCP server, which is a process or an address, and which may end or hang at any time."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import logging
import os
import shlex
import tempfile
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import TimeoutError as FuturesTimeout
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from groupgrad.concurrency.daemon_threads import LoopThread

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_S = 5.0
"""Time that a server has to list its tools after a call failed or was late; otherwise it counts as hanging."""
EXIT_S = 8.0
"""Time that servers have to end at the interpreter's end. The package kills a process after about four seconds."""
STARTS_AT_ONCE = os.cpu_count() or 1
"""Processes that start at the same time; of many, each would take longer than `start_timeout_s`."""
_MAX_TAIL = 2000
"""Bytes of a process's last messages that errors quote."""
MAX_MESSAGES = 1 << 20
"""Bytes of a process's messages on the disk at a call; more are dropped."""
_LOOP = LoopThread("mcp")
"""Runs all sessions. It runs no code of the user, so nothing can block it."""
_STARTS = asyncio.Semaphore(STARTS_AT_ONCE)


async def on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of a connection from another event loop; cancelled with the caller."""
    return await asyncio.wrap_future(_LOOP.submit(coroutine))


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of a connection and waits for it on this thread."""
    return _LOOP.submit(coroutine).result()


@dataclass(frozen=True)
class Server:
    """The command or address of a server, and options of its start."""

    target: str
    """A command with its arguments, or an address that begins with http:// or https://."""
    env: Mapping[str, str] | None = None
    """Environment variables of the process, besides HOME, PATH and the like."""
    headers: Mapping[str, str] | None = None
    """Headers of each request to the address."""
    start_timeout_s: float = 30.0
    """Time that it may take to start and to answer."""

    @property
    def is_address(self) -> bool:
        return self.target.startswith(("http://", "https://"))


class Connection:
    """A session with a server, started by the first call, and again by the first call after it has ended.

    With `restarts=False` only `open` starts it again, and calls fail until then. Its coroutines run on the loop of this
    module (`on_loop`, `run_on_loop`). The session ends with `close` or with this object.
    """

    def __init__(self, server: Server, *, restarts: bool = True):
        self._server = server
        self._restarts = restarts
        self._opening: asyncio.Task[_Session] | None = None
        """Starts the session; done while there is one."""
        self._held: list[_Session] = []
        """The session, if there is one. A list, because the finalizer must share it without a reference to this."""
        self._checking: asyncio.Task[None] | None = None
        """Finds out whether the server still answers; calls wait for it."""
        self._has_ended = False
        self._has_warned = False
        # Not at the interpreter's end, when `_close_all` waits for all.
        weakref.finalize(self, _close_soon, self._held).atexit = False

    async def open(self) -> None:
        """Starts the server unless it runs. ConnectionError if it cannot be started or does not answer."""
        self._has_ended = False
        await self._started()

    async def list_tools(self) -> list[Any]:
        """All tools of the server, as the package describes them."""
        session = await self._started()
        page = await session.client.list_tools()
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await session.client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a tool, as the package gives it. ConnectionError if there is no server; errors of the package
        if it ends during the call."""
        session = await self._started()
        session.drop_messages()
        calling = asyncio.create_task(session.client.call_tool(name, arguments))
        try:
            # Not `await calling`: cancelled, it would end only when the package has told the server so, and calls that
            # begin meanwhile would go to a server that hangs.
            await asyncio.wait({calling})
            return calling.result()
        except BaseException:  # a cancelled call too: its deadline has passed
            calling.cancel()
            if self._checking is None and session in self._held:
                self._checking = asyncio.create_task(self._check(session))
            raise

    async def close(self) -> None:
        """Ends the session and waits for it: the process gets two seconds, then SIGTERM, then SIGKILL."""
        opening, self._opening = self._opening, None
        self._held.clear()
        if opening is not None:
            with suppress(Exception):
                await (await opening).close()

    async def _started(self) -> _Session:
        if self._checking is not None:
            await asyncio.shield(self._checking)
        if self._has_ended and not self._restarts:
            raise ConnectionError("the MCP server of this episode has ended, and with it what it knew")
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(_Session.start(self._server))
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # callers may be gone
        session = await asyncio.shield(self._opening)  # others wait for it too
        self._held[:] = [session]
        return session

    async def _check(self, session: _Session) -> None:
        """Ends a session whose server does not answer any more."""
        try:
            await asyncio.wait_for(session.client.list_tools(), HEALTH_S)
        except Exception:  # whatever the package raises, this server gives no answers any more
            self._opening = None
            self._held.clear()
            self._has_ended = True
            session.close_soon()
            if not self._has_warned:
                self._has_warned = self._restarts
                again = "reached" if self._server.is_address else "started"
                then = f"is {again} again by the next call" if self._restarts else "is gone for the rest of its rollout"
                logger.warning(
                    "the MCP server '%s' has ended or hangs, and %s%s", self._server.target, then, session.last_words()
                )
        finally:
            self._checking = None


class _Session:
    """A client that is connected, and the task that holds it: the package wants it entered and left by one task."""

    def __init__(self, server: Server):
        self.client: Client
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read once the session has ended
        """The standard error of a process, which writes at its end even after it was emptied."""
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)
        self._holder = self._loop.create_task(self._hold())
        _OPEN.add(self)
        self._holder.add_done_callback(lambda _: _OPEN.discard(self))

    @classmethod
    async def start(cls, server: Server) -> _Session:
        """A connected session. ConnectionError with the process's last words otherwise."""
        async with nullcontext() if server.is_address else _STARTS:
            session = cls(server)
            opened = asyncio.create_task(session._opened.wait())
            await asyncio.wait(
                {opened, session._holder}, timeout=server.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            opened.cancel()
            if session._opened.is_set():
                return session
            problem = f"no answer within {server.start_timeout_s:g} seconds"
            if session._holder.done():
                problem = _innermost_text(session._holder.exception())
            session._holder.cancel()
            await asyncio.wait({session._holder})
        verb = "reached" if server.is_address else "started"
        raise ConnectionError(f"the MCP server '{server.target}' could not be {verb}: {problem}{session.last_words()}")

    def last_words(self) -> str:
        """The end of the process's standard error, as the end of a message."""
        file = self._errors.fileno()
        end = os.pread(file, _MAX_TAIL, max(0, os.fstat(file).st_size - _MAX_TAIL))
        text = end.decode(errors="replace").strip()
        return f". Its last messages:\n{text}" if text else ""

    def drop_messages(self) -> None:
        """Empties the file of the process's messages if they are too many. Many servers write a line for each call."""
        if os.fstat(self._errors.fileno()).st_size > MAX_MESSAGES:
            os.ftruncate(self._errors.fileno(), 0)

    def close_soon(self) -> None:
        """Begins to end the session; on any thread."""
        with suppress(RuntimeError):  # the loop may be closed, and the session with it
            self._loop.call_soon_threadsafe(self._closing.set)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait({self._holder})

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                # Without a cache `list_tools` always asks the server.
                self.client = await stack.enter_async_context(Client(transport, cache=None))
                self._opened.set()
                await self._closing.wait()
        except Exception:  # once the session is open, its calls report their own errors
            if not self._opened.is_set():
                raise
            logger.debug("the session with '%s' ended with an error", self._server.target, exc_info=True)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        """The transport of the client; the stack closes its parts."""
        if self._server.is_address:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            timeout = httpx2.Timeout(self._server.start_timeout_s, read=None)  # calls have deadlines of their own
            client = httpx2.AsyncClient(headers=dict(self._server.headers or {}), timeout=timeout)
            return streamable_http_client(self._server.target, http_client=await stack.enter_async_context(client))
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command, *arguments = shlex.split(self._server.target)
        parameters = StdioServerParameters(command=command, args=arguments, env=dict(self._server.env or {}))
        return stdio_client(parameters, errlog=self._errors)


_OPEN: set[_Session] = set()
"""Sessions whose servers have not ended yet."""


@atexit.register
def _close_all() -> None:
    """Ends all servers before the interpreter ends. The end of the loop would cancel those that are ending."""

    async def close() -> None:
        await asyncio.gather(*(session.close() for session in _OPEN))

    if _OPEN:
        with suppress(FuturesTimeout):
            _LOOP.submit(close()).result(EXIT_S)


def _close_soon(held: list[_Session]) -> None:
    for session in held:
        session.close_soon()


def _innermost_text(error: BaseException | None) -> str:
    """The error that a group of errors is about, in a line."""
    while (errors := getattr(error, "exceptions", None)) is not None:
        error = errors[0]
    return f"{type(error).__name__}: {error}"
