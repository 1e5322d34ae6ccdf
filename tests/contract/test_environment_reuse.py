"""`reuse_environments`: how many environments a training makes, and when it closes them."""

from __future__ import annotations

from typing import Any

import pytest


class Counted:
    """Counts its instances and notes, for each, how often it was reset and closed."""

    made: list[Counted]

    def __init__(self) -> None:
        self.resets, self.closes = 0, 0
        Counted.made.append(self)

    def reset(self, **row: Any) -> None:
        self.resets += 1

    def count(self) -> int:
        """Counts."""
        return self.resets

    def close(self) -> None:
        self.closes += 1


def is_open(environments: list[Counted], completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that needs the environments as the rollouts have left them."""
    assert all(environment.closes == 0 for environment in environments)
    return [float(len(str(completion)) % 5) for completion in completions]


class WithoutClose(Counted):
    close = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("factory", "reuse", "num_made"),
    [
        (Counted, True, 8),
        (Counted, False, 24),
        (Counted, None, 24),  # by default those that can be closed serve one rollout
        (WithoutClose, None, 8),  # and those that cannot are reused
    ],
)
def test_how_often_an_environment_serves(make_agents: Any, factory: Any, reuse: bool | None, num_made: int) -> None:
    Counted.made = []
    config = {"max_completion_length": 4, "max_steps": 3, "reuse_environments": reuse}
    make_agents(config, environment_factory=factory, reward_funcs=is_open).train()
    assert [made.resets for made in Counted.made] == [24 // num_made] * num_made
    assert factory is WithoutClose or [made.closes for made in Counted.made] == [1] * num_made


def test_the_option_is_warned_of_where_there_are_no_environments(make_trainer: Any) -> None:
    with pytest.warns(UserWarning, match="reuse_environments has no effect: there are no tools"):
        make_trainer({"reuse_environments": False})
