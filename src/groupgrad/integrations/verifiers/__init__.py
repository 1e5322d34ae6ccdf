"""Environments of verifiers: their data set, and an agent that plays and scores them through the address.

It needs the package `verifiers`, of which the environments with `load_environment` are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from groupgrad.integrations.agents.session import AgentSession


class Loaded(NamedTuple):
    """The arguments that an environment gives: `GRPOTrainer(agent=..., train_dataset=..., eval_dataset=...)`."""

    dataset: Any
    """A `datasets.Dataset` with the environment's rows."""
    eval_dataset: Any
    """Its held-out rows; None if it has none of its own."""
    agent: EnvironmentAgent


class EnvironmentAgent:
    """Runs a rollout of the environment against a session's address, and returns its rubric's reward.

    The rubric's weights count in the reward; what its functions gave is logged under their names.
    """

    def __init__(self, environment: Any, name: str, sampling_args: Mapping[str, Any]):
        self.environment, self.__name__, self._sampling_args = environment, name, dict(sampling_args)

    async def __call__(self, row: Mapping[str, Any], session: AgentSession) -> float:
        """The reward of a row's rollout. RuntimeError for a rollout that verifiers calls failed."""
        from verifiers.clients import OpenAIChatCompletionsClient

        given = {name: value for name, value in row.items() if value is not None}  # Arrow fills missing fields in
        client = OpenAIChatCompletionsClient(session.async_openai())
        output = await self.environment.run_rollout(given, client, session.model, sampling_args=self._sampling_args)
        if output.get("error"):
            raise RuntimeError(f"the environment {self.__name__!r} failed: {output['error']}")
        for name, value in (output.get("metrics") or {}).items():
            session.log_metric(name, float(value))
        return float(output["reward"])


def load(name: str, *, sampling_args: Mapping[str, Any] | None = None, **arguments: Any) -> Loaded:
    """An installed environment by its name, made with these arguments.

    `sampling_args` go into each of its requests, such as `max_tokens` of a turn. ImportError without verifiers,
    ValueError for an environment that is not installed.
    """
    try:
        from verifiers.utils.env_utils import load_environment
    except ImportError as error:
        raise ImportError(f"environments of verifiers need the package: pip install verifiers ({error})") from error
    environment = load_environment(name, **arguments)
    held_out = environment.get_eval_dataset() if getattr(environment, "eval_dataset", None) is not None else None
    return Loaded(environment.get_dataset(), held_out, EnvironmentAgent(environment, name, sampling_args or {}))
