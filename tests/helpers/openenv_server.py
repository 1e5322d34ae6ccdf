"""OpenEnv servers in tests, by the package: `python openenv_server.py PORT [mcp]`."""

from __future__ import annotations

import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Move(Action):
    by: int = Field(description="How far to go.")
    wait_s: float = 0.0


class Place(Observation):
    place: int
    note: str = ""


class Walk(Environment):
    """From `start` to 10; a step has the reward of its way, and the episode ends there."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def reset(self, seed: int | None = None, start: int = 0, **kwargs: Any) -> Place:
        self.place = start
        return Place(place=start, note="Go to 10.")

    def step(self, action: Move, **kwargs: Any) -> Place:
        time.sleep(action.wait_s)
        self.place += action.by
        return Place(place=self.place, reward=action.by / 10, done=self.place >= 10)

    @property
    def state(self) -> State:
        return State(step_count=0)


class Tools(MCPEnvironment):
    """An environment whose actions are tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")
        self.count = 0

        @server.tool
        def add(step: int) -> str:
            """Adds to the count."""
            self.count += step
            return f"the count is {self.count}"

        @server.tool
        def fail() -> str:
            """Fails."""
            raise ValueError("it is late")

        super().__init__(server)

    def reset(self, seed: int | None = None, **kwargs: Any) -> Observation:
        self.count = 0
        return Observation(metadata={"hint": "count"})

    def _step_impl(self, action: Action, **kwargs: Any) -> Observation:
        raise ValueError("tools only")

    @property
    def state(self) -> State:
        return State(step_count=0)


if __name__ == "__main__":
    kinds = (Tools, CallToolAction, CallToolObservation) if sys.argv[2:] == ["mcp"] else (Walk, Move, Place)
    app = create_app(*kinds, env_name="tests", max_concurrent_envs=32)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
