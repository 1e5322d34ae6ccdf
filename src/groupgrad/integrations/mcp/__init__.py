"""Tools of MCP servers (https://modelcontextprotocol.io), by the official package `mcp`."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from groupgrad import compat
from groupgrad.envs.env_spec import NOT_TOOLS
from groupgrad.integrations.mcp.connection import Connection, Server, on_loop, run_on_loop
from groupgrad.spelling import did_you_mean

__all__ = ["McpEnvironment", "ToolError", "mcp_environment", "mcp_tools"]


class ToolError(RuntimeError):
    """A tool answered with an error; the message is what it said."""


def mcp_tools(
    server: str,
    *,
    names: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
) -> list[Callable[..., Any]]:
    """The tools of an MCP server, for `GRPOTrainer(tools=...)`: one server for all rollouts of this process.

    Names, descriptions and schemas are the server's; characters that no name in Python has become `_`. Calls run side
    by side. One that has not ended after `tool_timeout_s` is cancelled and fails, and so do the calls during which the
    server ends. A server that has ended, or does not answer, is started again by the next call. It ends with the tools
    or with the interpreter.

    Args:
        server: A command with its arguments, such as `"python server.py --port 1"`, which is started without a shell
            and spoken to by its standard input and output; or the address of a running server (streamable HTTP), such
            as `"http://127.0.0.1:8000/mcp"`.
        names: The tools to use, as the server names them; all by default.
        env: Environment variables of the process. It inherits only HOME, LOGNAME, PATH, SHELL, TERM and USER.
        headers: Headers of each request to an address, such as a key.
        start_timeout_s: Seconds that the server may take to start and to answer.

    Raises:
        ConnectionError: If the server cannot be started or reached; with what it wrote last.
        ValueError: For names that it does not have.
        ImportError: If the package `mcp` is missing or too old.
    """
    _check_ready()
    connection = Connection(Server(server, env, headers, start_timeout_s))
    described = _chosen(run_on_loop(connection.list_tools()), names, server)
    return [_function(connection, tool) for tool in described]


def mcp_environment(
    server: str,
    *,
    names: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
) -> type[McpEnvironment]:
    """A class for `GRPOTrainer(environment_factory=...)` whose tools are those of an MCP server, one a rollout.

    For servers with a state: each rollout has its own process, or its own session with an address, from `reset` to
    `close`. One that ends, or does not answer, stays away for the rest of its rollout, whose calls then fail. A
    subclass may have rewards and tools of its own, see `McpEnvironment`. Arguments and errors are those of `mcp_tools`;
    the server is started once here to ask for its tools. ValueError also for tools whose names mean something else in
    an environment: leave them out by `names`.
    """
    _check_ready()
    where = Server(server, env, headers, start_timeout_s)
    first = Connection(where)
    try:
        described = _chosen(run_on_loop(first.list_tools()), names, server)
    finally:
        run_on_loop(first.close())
    methods = {method.__name__: method for method in map(_method, described)}
    if taken := [name for name in methods if name in NOT_TOOLS or name.startswith("_")]:
        raise ValueError(
            f"'{server}' has the tool {taken[0]!r}, a name that only the trainer calls in an environment; leave it out "
            f"by names=[...]"
        )
    return type("McpEnvironment", (McpEnvironment,), {"_server": where, **methods})


class McpEnvironment:
    """An environment that has a server of its own; `mcp_environment` makes subclasses with tools.

    A subclass may override `reset` (call `await super().reset()` first) and add `get_reward` and further tools; all of
    them may ask the server by `await self._call("name", argument=...)`, also tools that the model does not have.
    """

    _server: ClassVar[Server]

    def __init__(self) -> None:
        self._connection = Connection(self._server, restarts=False)

    async def reset(self, **row: Any) -> None:
        """Starts the server unless it runs."""
        await on_loop(self._connection.open())

    async def close(self) -> None:
        """Ends the server."""
        await on_loop(self._connection.close())

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        """The result of a tool: a text, or content blocks where it has images. ToolError if it answers with an error,
        ConnectionError if the server is gone."""
        return await _call(self._connection, name, arguments)


def _check_ready() -> None:
    compat.require("mcp", "a tool of an MCP server")
    if problems := compat.unsupported_versions(["mcp"]):
        raise ImportError(f"{problems[0]}; run `pip install 'groupgrad[mcp]'`")


def _chosen(described: list[Any], names: Sequence[str] | None, server: str) -> list[Any]:
    by_name = {tool.name: tool for tool in described}
    for name in names or ():
        if name not in by_name:
            hint = did_you_mean(name, by_name, otherwise=f"it has {', '.join(by_name)}")
            raise ValueError(f"'{server}' has no tool {name!r}; {hint}")
    return described if names is None else [by_name[name] for name in names]


def _function(connection: Connection, tool: Any) -> Callable[..., Any]:
    async def call(**arguments: Any) -> Any:
        return await _call(connection, tool.name, arguments)

    return _described(call, tool)


def _method(tool: Any) -> Callable[..., Any]:
    async def call(self: McpEnvironment, /, **arguments: Any) -> Any:
        return await self._call(tool.name, **arguments)

    return _described(call, tool)


def _described(function: Callable[..., Any], tool: Any) -> Callable[..., Any]:
    name = re.sub(r"\W|^(?=\d)", "_", tool.name)
    name = f"{name}_" if keyword.iskeyword(name) else name
    description = inspect.cleandoc(tool.description or tool.title or "")
    schema = {"name": name, "description": description, "parameters": tool.input_schema}
    function.__name__, function.__doc__ = name, description
    function.__dict__["tool_schema"] = {"type": "function", "function": schema}
    return function


async def _call(connection: Connection, name: str, arguments: dict[str, Any]) -> Any:
    result = await on_loop(connection.call(name, arguments))
    blocks = [_block(block) for block in result.content]
    if all(block["type"] == "text" for block in blocks):
        text = "\n".join(block["text"] for block in blocks)
        if result.is_error:
            raise ToolError(text)
        return text if blocks or result.structured_content is None else result.structured_content
    return blocks


def _block(block: Any) -> dict[str, Any]:
    """A part of a result as a content block of a chat. Sound and files are only named."""
    if block.type == "text":
        return {"type": "text", "text": block.text}
    if block.type == "image":
        return {"type": "image", "base64": block.data}
    held = getattr(block, "resource", block)
    text = getattr(held, "text", None) or f"[{block.type}: {getattr(held, 'uri', None) or held.mime_type}]"
    return {"type": "text", "text": text}
