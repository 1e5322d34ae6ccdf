"""Errors with a name of their own. Everything else is a `ValueError` or `TypeError` that says the value seen, why it
cannot work and what to set."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot work; the message lists every broken rule."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            lines = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
            super().__init__(f"{len(problems)} settings cannot work:\n{lines}")


class UnavailableError(ValueError):
    """A documented feature whose part of groupgrad does not exist in this version."""


class RewardError(ValueError):
    """A reward function failed or returned something that cannot be used; the message names function, step and row."""


class RolloutError(ValueError):
    """Rollouts could not be made: environments that fail, or a rollout function that returns what cannot be used."""


class WeightsLost(RuntimeError):
    """An engine no longer has the weights that rows were to be sampled from, and they cannot be sent again."""
