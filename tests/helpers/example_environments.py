"""Environments in tests, and functions that play with them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from groupgrad.chat import ToolCall
from groupgrad.concurrency.workers import Workers
from groupgrad.envs.environments import EnvHandle, Environments
from groupgrad.envs.tools import ToolOptions, ToolReply

PATIENT = ToolOptions(timeout_s=5)
HASTY = ToolOptions(timeout_s=0.2)


class Base:
    """Keeps a list of its instances, and what was done to each."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.release = threading.Event()
        self.made.append(self)

    def close(self) -> None:
        self.log.append("close")


class Counter(Base):
    def reset(self, **kwargs: Any) -> str:
        self.count = 0
        self.log.append(kwargs)
        return "Counter reset to 0.\n"

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.count

    async def decrement(self, step: int) -> int:
        """Decrement it.

        Args:
            step: Value to take from the counter.
        """
        await asyncio.sleep(0)
        self.count -= step
        return self.count

    @staticmethod
    def limit() -> int:
        """The highest count."""
        return 100

    def hang(self) -> str:
        """Hangs."""
        self.release.wait()
        return "late"

    @property
    def twice(self) -> int:
        return 2 * self.count

    def _private(self) -> None: ...

    def get_reward(self) -> float:
        return self.count / 10


class Child(Counter):
    def increment(self, step: int) -> int:
        """Add twice as much.

        Args:
            step: Half of what is added.
        """
        return super().increment(2 * step)

    def extra(self) -> str:
        """Says something."""
        return "extra"

    hang = None  # type: ignore[assignment] # hides the inherited tool


class Silent(Base):
    async def reset(self, prompt: list[Any], level: int = 1) -> None:
        await asyncio.sleep(0)
        self.log.append((prompt, level))

    async def get_reward(self) -> float | None:
        await asyncio.sleep(0)
        return None


def names(handle: EnvHandle) -> list[str]:
    return [schema["function"]["name"] for schema in handle.toolbox.schemas]


def call_method(
    handle: EnvHandle, workers: Workers, name: str, options: ToolOptions = PATIENT, **arguments: Any
) -> ToolReply:
    return handle.toolbox.call(ToolCall(name, arguments), workers, options).result(10)


def start(environments: Environments, workers: Workers, row: dict[str, Any] | None = None) -> EnvHandle:
    handle = environments.acquire(row or {})
    assert handle.reset(row or {}, workers, 5).result(10).error is None
    return handle


def variant(reset: Any = None, **methods: Any) -> type:
    """A class of environments with these methods."""
    return type("Variant", (Base,), {"reset": reset or (lambda self, **kwargs: None), **methods})
