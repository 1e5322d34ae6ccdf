"""What a round asks for, and what answers it with rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groupgrad.metrics import Metric
from groupgrad.types import Rollout


@dataclass(slots=True, frozen=True)
class RoundRequest:
    """What a round is made of."""

    rows_by_group: Mapping[int, dict[str, Any]]
    """Data-set rows of this rank's groups."""
    rows: Sequence[int]
    """This rank's row numbers."""
    num_rows: int
    """N, over all ranks."""
    num_generations: int
    phase: str
    number: int
    step: int


class RolloutSource(Protocol):
    """Makes this rank's rollouts of a round, in the order of its row numbers. Local, no collective."""

    @property
    def is_exact(self) -> bool:
        """True if its log-probs and entropies are those that training would compute (`Engine.exact`)."""
        ...

    def __call__(self, request: RoundRequest) -> list[Rollout]: ...

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """What it has to say of these rollouts beyond lengths and rewards."""
        ...

    def close(self) -> None:
        """Let go of what it holds. May be called any number of times."""
        ...


def row_seed(run_seed: int, phase: str, round_number: int, row: int) -> int:
    """The seed of a row's random stream. It depends on what the row is, never on who samples it or beside whom."""
    return _number(f"{run_seed}/{phase}/{round_number}/{row}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn's random stream, from its row's; the first turn's is the row's own."""
    return seed if turn == 0 else _number(f"{seed}/turn/{turn}")


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
