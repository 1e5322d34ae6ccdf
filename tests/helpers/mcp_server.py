"""An MCP server in tests: `python mcp_server.py [http PORT]`, by the official package."""

from __future__ import annotations

import base64
import os
import sys
import time
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

server = MCPServer("tests", log_level="WARNING")
counted: list[int] = []
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@server.tool()
def add(step: int) -> str:
    """Adds to the count.

    It is the server's own.
    """
    counted.append(step)
    return f"the count is {sum(counted)}"


@server.tool(name="who-is")
def who(verbose: bool = False) -> str:
    """The number of the process."""
    return str(os.getpid())


@server.tool()
def divide(a: float, b: float) -> float:
    """Divides."""
    return a / b


@server.tool()
def parts(items: list[str], table: dict[str, Any] | None = None) -> list[str]:
    """Gives back what it gets."""
    return items


@server.tool()
def chatter(text: str, times: int) -> str:
    """Writes messages."""
    print(text * times, file=sys.stderr, flush=True)
    return "said"


@server.tool()
def die() -> str:
    """Ends the server."""
    print("I am ending", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Blocks the whole server."""
    time.sleep(60)
    return "late"


@server.tool()
async def slow(seconds: float) -> str:
    """Takes its time, and lets others go on."""
    import anyio

    await anyio.sleep(seconds)
    return "slept"


@server.tool()
def secret() -> str:
    """A variable of the environment."""
    return os.environ.get("SECRET", "none")


@server.tool(name="while")
def keyword() -> str:
    """Has a word of Python as its name."""
    return "ok"


@server.tool()
def refuse(why: str) -> str:
    """Refuses."""
    raise ToolError(why)


@server.tool()
def at_least_one(number: Annotated[int, Field(ge=1)]) -> int:
    """Takes some numbers."""
    return number


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """A text and a picture."""
    return ["one pixel", Image(data=base64.b64decode(PIXEL), format="png")]


@server.tool()
def caller(context: Context) -> str:
    """The key that the request has."""
    return context.request_context.request.headers["authorization"]


@server.tool()
def reset() -> str:
    """Has the name of a method that the trainer calls."""
    return "ok"


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    elif sys.argv[1:2] == ["mute"]:
        time.sleep(60)
    elif sys.argv[1:2] == ["broken"]:
        sys.exit("no such data base")
    else:
        server.run("stdio")
