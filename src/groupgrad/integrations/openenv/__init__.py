"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv), by the client of its package."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from groupgrad import compat
from groupgrad.concurrency.daemon_threads import USER_LOOP
from groupgrad.envs.env_spec import NOT_TOOLS

__all__ = ["OpenEnvEnvironment", "openenv_environment"]


def openenv_environment(
    address: str,
    *,
    description: str = "Take a step in the environment.",
    reset_columns: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
) -> type[OpenEnvEnvironment]:
    """A class for `GRPOTrainer(environment_factory=...)` over an OpenEnv server, with a session for each rollout.

    The model gets a tool `step`, whose arguments are the fields of the server's action; of an environment with MCP
    tools it gets these. What they return is the observation, see `OpenEnvEnvironment._show`; the reward is the sum of
    the steps' rewards. After a step that ends the episode calls fail. The server must allow as many sessions at once
    as there are rollouts (`max_concurrent_envs` of `create_app`).

    Args:
        address: Where the server listens, such as `"http://127.0.0.1:8000"`.
        description: What the model reads of `step`.
        reset_columns: Columns of the data set that the server's `reset` gets, such as `seed`.
        headers: Headers of each request, such as a key.
        start_timeout_s: Seconds for the server to describe itself, and to open a session.

    Raises:
        ConnectionError: If the server does not answer.
        ValueError: For a tool whose name means something else in an environment.
        ImportError: If the package `openenv` is missing.
    """
    compat.require("openenv", "an environment of OpenEnv")
    request = urllib.request.Request(f"{address.rstrip('/')}/schema", headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=start_timeout_s) as answer:
            action = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise ConnectionError(
            f"no OpenEnv server describes its actions at {request.full_url}: {type(error).__name__}: {error}"
        ) from error
    options: dict[str, Any] = {"base_url": address, "connect_timeout_s": start_timeout_s}
    options["message_timeout_s"] = None  # calls have deadlines of their own
    if headers:  # the client of openenv-core 0.3 has no such argument
        options["headers"] = dict(headers)
    if "tool_name" in action.get("properties", {}):
        described = USER_LOOP.submit(_mcp_tools(options)).result(start_timeout_s)
        methods = {tool["name"]: _tool_method(tool) for tool in described}
    else:
        properties = {name: field for name, field in action["properties"].items() if name != "metadata"}
        methods = {"step": _method("step", description, {**action, "properties": properties}, lambda fields: fields)}
    if taken := [name for name in methods if name in NOT_TOOLS or not name.isidentifier() or name.startswith("_")]:
        raise ValueError(f"the tool {taken[0]!r} of {address} cannot be a method of an environment; rename it there")
    values = {"_client_options": options, "_reset_columns": tuple(reset_columns)}
    return type("OpenEnvEnvironment", (OpenEnvEnvironment,), {**values, **methods})


class OpenEnvEnvironment:
    """A session with an OpenEnv server; `openenv_environment` makes subclasses with tools.

    A subclass may override `_show` and `get_reward`, which has the rewards of the steps in `_rewards`.
    """

    _client_options: ClassVar[dict[str, Any]]
    _reset_columns: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._client = _make_client(self._client_options)
        self._rewards: list[float] = []
        self._is_over = True

    async def reset(self, **row: Any) -> Any:
        """Begins an episode, and returns its first observation."""
        self._rewards = []
        result = await self._client.reset(**{name: row[name] for name in self._reset_columns})
        self._is_over = bool(result.done)
        return self._show(result.observation)

    def get_reward(self) -> float:
        """The sum of the steps' rewards; 0 without any."""
        return sum(self._rewards)

    async def close(self) -> None:
        """Ends the session."""
        await self._client.close()

    def _show(self, observation: dict[str, Any]) -> Any:
        """An observation as the model reads it: a lone text, or JSON without empty fields; a tool's result."""
        if "tool_name" in observation:
            return _tool_result(observation)
        shown = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        values = list(shown.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)

    async def _act(self, action: dict[str, Any]) -> Any:
        if self._is_over:
            raise ValueError("the episode is over")
        try:
            result = await self._client.step(action)
        except RuntimeError:  # the server refuses the action, and the episode goes on
            raise
        except BaseException:
            # After a call that was cancelled or lost its connection, the client would open another session.
            self._is_over = True
            raise
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        self._is_over = bool(result.done)
        return self._show(result.observation)


def _tool_result(observation: dict[str, Any]) -> Any:
    """The result of an MCP tool: its text, or what it returned. RuntimeError if it failed."""
    if error := observation.get("error"):
        raise RuntimeError(error.get("message") or str(error))
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return result
    texts = [block["text"] for block in result["content"] if block["type"] == "text"]
    return "\n".join(texts) if texts else result.get("data")


def _make_client(options: dict[str, Any]) -> Any:
    from openenv.core.generic_client import GenericEnvClient

    return GenericEnvClient(**options)


async def _mcp_tools(options: dict[str, Any]) -> list[dict[str, Any]]:
    client = _make_client(options)
    try:
        await client.reset()
        return (await client.step({"type": "list_tools"})).observation["tools"]
    finally:
        await client.close()


def _tool_method(tool: dict[str, Any]) -> Callable[..., Any]:
    def action(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "call_tool", "tool_name": tool["name"], "arguments": arguments}

    return _method(tool["name"], tool.get("description") or "", tool["input_schema"], action)


def _method(
    name: str, description: str, parameters: dict[str, Any], action: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[..., Any]:
    """A method that takes a step, with the schema that the model reads."""

    async def act(self: OpenEnvEnvironment, /, **arguments: Any) -> Any:
        return await self._act(action(arguments))

    schema = {"name": name, "description": description, "parameters": parameters}
    act.__name__, act.__doc__ = name, description
    act.__dict__["tool_schema"] = {"type": "function", "function": schema}
    return act
