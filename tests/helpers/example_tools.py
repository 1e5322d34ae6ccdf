"""Tools in tests: functions that the model may call, and calls of them."""

from __future__ import annotations

import asyncio
from typing import Any

from groupgrad.chat import ToolCall
from groupgrad.concurrency.workers import Workers
from groupgrad.envs.tools import ToolBox, ToolOptions, ToolReply, make_tools

PATIENT = ToolOptions(timeout_s=5.0)
HASTY = ToolOptions(timeout_s=0.2)


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b


def returning(value: Any) -> Any:
    """A tool named `give` that returns `value`."""

    def give() -> str:
        """Gives it."""
        return value

    return give


def call_tool(workers: Workers, tools: Any, call: ToolCall, options: ToolOptions = PATIENT) -> ToolReply:
    return ToolBox(make_tools(tools)).call(call, workers, options).result(10)


class Shop:
    """A shop."""

    def price(self, item: str, count: int = 1) -> float:
        """The price of an item.

        Args:
            item: What it is.
            count: How many of it.
        """
        return count * len(item) / 2

    def __call__(self, item: str) -> str:
        """Buys something.

        Args:
            item: What it is.
        """
        return f"bought {item}"

    @staticmethod
    def hours() -> str:
        """When it is open."""
        return "always"
