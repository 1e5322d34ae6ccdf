"""The state of a sweep in one SQLite file, which the sweep writes and commands read and add to."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FILE = "sweep.sqlite"
ARMS = "arms"
"""Folder of the arms' runs within the sweep's folder."""

WAITING, STOPPED, DROPPED, DONE, FAILED, DELETED = "waiting", "stopped", "dropped", "done", "failed", "deleted"
"""States of an arm: it has steps to make; a person stopped it; halving dropped it; all steps were made; an error ended
it; it was deleted."""

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS arms (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, cohort INTEGER NOT NULL, parent INTEGER, changes TEXT NOT NULL,
    state TEXT NOT NULL, step INTEGER NOT NULL DEFAULT 0, max_steps INTEGER, rung INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '', weights_step INTEGER
);
CREATE TABLE IF NOT EXISTS turns (
    arm INTEGER NOT NULL, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL,
    train_s REAL NOT NULL, switch_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS rewards (
    arm INTEGER NOT NULL, step INTEGER NOT NULL, prompts TEXT NOT NULL, means TEXT NOT NULL, PRIMARY KEY (arm, step)
);
CREATE TABLE IF NOT EXISTS commands (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, arm INTEGER NOT NULL, changes TEXT NOT NULL,
    from_weights INTEGER NOT NULL, state TEXT NOT NULL, message TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS decisions (
    cohort INTEGER NOT NULL, rung INTEGER NOT NULL, arm INTEGER NOT NULL, after INTEGER NOT NULL, step INTEGER NOT NULL,
    text TEXT NOT NULL, behind TEXT NOT NULL
);
"""


@dataclass(slots=True, frozen=True)
class Arm:
    """One configuration of a sweep and how far it has come."""

    id: int
    name: str
    cohort: int
    parent: int | None
    changes: dict[str, Any]
    """Its changes to the sweep's base; a clone's include its parent's."""
    state: str
    step: int
    max_steps: int | None
    """None until its first turn."""
    rung: int
    """Rungs of halving that it has passed."""
    reason: str
    """Why it is in its state."""
    weights_step: int | None
    """Step of the parent whose weights it begins with; None for an arm that begins as the base does."""


class Command(NamedTuple):
    """A command for an arm, from a user, and what has become of it."""

    id: int
    kind: str
    arm: int
    name: str
    """Name of the arm."""
    changes: dict[str, Any]
    from_weights: bool
    state: str
    """`queued`, `done` or `refused`."""
    message: str
    """Why it was refused, or the name of the clone."""


@dataclass(slots=True, frozen=True)
class PromptRewards:
    """The mean reward of each group of an arm's step."""

    prompts: tuple[str, ...]
    """Hashes of the prompts."""
    means: dict[str, tuple[float, ...]]
    """Name of a reward, or `reward` for their weighted sum, -> mean over the prompt's completions."""


@dataclass(slots=True, frozen=True)
class ArmTurn:
    """A turn of an arm: its steps, the seconds that they took, and the seconds around them."""

    first_step: int
    last_step: int
    train_s: float
    switch_s: float


class Decision(NamedTuple):
    """A decision of halving about an arm at a rung."""

    cohort: int
    rung: int
    """Counted from 0."""
    arm: int
    after: int
    """The step after which rewards were compared, up to `step`."""
    step: int
    text: str
    behind: Sequence[Any] | None
    """The fields of the best arm's lead (`compare.MeanDifference`); None for the best arm."""


class Store:
    """The file of a sweep. Several processes may use it at once."""

    def __init__(self, folder: str | Path, *, create: bool = False):
        self.folder = Path(folder)
        self.path = self.folder / FILE
        if not create and not self.path.is_file():
            raise ValueError(f"{str(folder)!r} holds no sweep: there is no {FILE}; give the output_dir of a sweep")
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._connected() as db:
            db.executescript(_TABLES)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is written, or none."""
        with closing(sqlite3.connect(self.path, timeout=60)) as db, db:
            yield db

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._connected() as db:
            return db.execute(query, values).fetchall()

    # ------------------------------------------------------------------------------------------------------- facts

    def fact(self, key: str) -> Any:
        """The value stored under a key; None if there is none."""
        rows = self._rows("SELECT value FROM facts WHERE key = ?", key)
        return json.loads(rows[0][0]) if rows else None

    def set_fact(self, key: str, value: Any) -> None:
        """Stores a value of JSON under a key."""
        with self._connected() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value, default=str)))

    # -------------------------------------------------------------------------------------------------------- arms

    def arms(self) -> list[Arm]:
        """All arms but deleted ones, in the order of their numbers."""
        rows = self._rows(f"SELECT * FROM arms WHERE state != '{DELETED}' ORDER BY id")
        return [Arm(row[0], row[1], row[2], row[3], json.loads(row[4]), *row[5:]) for row in rows]

    def folder_of(self, arm: Arm) -> Path:
        """The folder of an arm's run."""
        return self.folder / ARMS / arm.name

    def find(self, text: str) -> Arm:
        """The arm of a number, a name, or the only name that begins so. ValueError if there is none."""
        arms = self.arms()
        found = [arm for arm in arms if text in (str(arm.id), arm.name)]
        found = found or [arm for arm in arms if arm.name.startswith(text)]
        if len(found) != 1:
            names = ", ".join(arm.name for arm in found or arms)
            which = "names several arms" if found else "is no arm of the sweep"
            raise ValueError(f"{text!r} {which}; name one of {names} by its number or its name")
        return found[0]

    def num_arms(self) -> int:
        """Number of arms that there have ever been."""
        return self._rows("SELECT count(*) FROM arms")[0][0]

    def add_arms(self, arms: Sequence[tuple[str, int, Mapping[str, Any]]]) -> None:
        """Adds arms: name, cohort and changes of each."""
        with self._connected() as db:
            for name, cohort, changes in arms:
                _add(db, name, cohort, changes)

    def set_state(self, arm: int, state: str, reason: str = "") -> None:
        """Changes the state of an arm."""
        with self._connected() as db:
            db.execute("UPDATE arms SET state = ?, reason = ? WHERE id = ?", (state, reason, arm))

    def pass_rung(
        self, arms: Iterable[int], rung: int, dropped: Mapping[int, str], decided: Iterable[Decision]
    ) -> None:
        """Records a decision of halving: which arms go on, which are dropped and why, and the rows of its table."""
        with self._connected() as db:
            for arm in arms:
                db.execute("UPDATE arms SET rung = ? WHERE id = ?", (rung, arm))
            for arm, reason in dropped.items():
                db.execute("UPDATE arms SET state = ?, reason = ? WHERE id = ?", (DROPPED, reason, arm))
            rows = [(*row[:-1], json.dumps(row.behind)) for row in decided]
            db.executemany("INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def decisions(self) -> list[Decision]:
        """The decisions of halving, in their order."""
        rows = self._rows("SELECT * FROM decisions ORDER BY rowid")
        return [Decision(*row)._replace(behind=json.loads(row[-1])) for row in rows]

    # ------------------------------------------------------------------------------------------------------- turns

    def end_turn(
        self, arm: int, turn: ArmTurn, max_steps: int, rewards: Mapping[int, PromptRewards], state: str = WAITING
    ) -> None:
        """Writes a turn of an arm, once the checkpoint of its last step is on the disk."""
        with self._connected() as db:
            db.execute(
                "UPDATE arms SET step = ?, max_steps = ?, state = ?, reason = '' WHERE id = ?",
                (turn.last_step, max_steps, state, arm),
            )
            times = turn.train_s, turn.switch_s
            db.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?)", (arm, turn.first_step, turn.last_step, *times))
            for step, found in rewards.items():
                row = arm, step, json.dumps(found.prompts), json.dumps(found.means)
                db.execute("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?, ?)", row)

    def turns(self) -> list[ArmTurn]:
        """The turns of all arms, in their order."""
        return [ArmTurn(*row[1:]) for row in self._rows("SELECT * FROM turns ORDER BY rowid")]

    def rewards(self, arm: int, after: int, until: int) -> dict[int, PromptRewards]:
        """The rewards of an arm's steps in (after, until]."""
        query = "SELECT step, prompts, means FROM rewards WHERE arm = ? AND step > ? AND step <= ? ORDER BY step"
        found = {}
        for step, prompts, means in self._rows(query, arm, after, until):
            by_name = {name: tuple(values) for name, values in json.loads(means).items()}
            found[step] = PromptRewards(tuple(json.loads(prompts)), by_name)
        return found

    # ---------------------------------------------------------------------------------------------------- commands

    def queue(self, kind: str, arm: int, changes: Mapping[str, Any] | None = None, from_weights: bool = False) -> int:
        """Adds a command, which the sweep takes between two turns; its number."""
        with self._connected() as db:
            values = time.time(), kind, arm, json.dumps(dict(changes or {})), int(from_weights), "queued"
            columns = "time, kind, arm, changes, from_weights, state"
            return int(db.execute(f"INSERT INTO commands ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values).lastrowid or 0)

    def queued(self) -> list[Command]:
        """The commands that have not been taken."""
        return self._commands("WHERE c.state = 'queued' ORDER BY c.id")

    def commands(self, count: int) -> list[Command]:
        """The last commands, the newest first."""
        return self._commands("ORDER BY c.id DESC LIMIT ?", count)

    def _commands(self, which: str, *values: Any) -> list[Command]:
        columns = "c.id, c.kind, c.arm, a.name, c.changes, c.from_weights, c.state, c.message"
        rows = self._rows(f"SELECT {columns} FROM commands c JOIN arms a ON a.id = c.arm {which}", *values)
        return [Command(*row)._replace(changes=json.loads(row[4]), from_weights=bool(row[5])) for row in rows]

    def take(
        self,
        command: Command,
        *,
        message: str = "",
        refused: bool = False,
        state: tuple[str, str] | None = None,
        clone: tuple[str, int, Mapping[str, Any], int | None] | None = None,
    ) -> None:
        """Writes that a command was taken, with what it does: another state and reason of its arm, or a clone (name,
        cohort, changes, step of the parent's weights)."""
        with self._connected() as db:
            word = "refused" if refused else "done"
            db.execute("UPDATE commands SET state = ?, message = ? WHERE id = ?", (word, message, command.id))
            if state is not None:
                db.execute("UPDATE arms SET state = ?, reason = ? WHERE id = ?", (*state, command.arm))
            if clone is not None:
                name, cohort, changes, weights_step = clone
                _add(db, name, cohort, changes, command.arm, weights_step)

    def command_state(self, command: int) -> tuple[str, str]:
        """State and message of a command."""
        return self._rows("SELECT state, message FROM commands WHERE id = ?", command)[0]


def _add(
    db: sqlite3.Connection,
    name: str,
    cohort: int,
    changes: Mapping[str, Any],
    parent: int | None = None,
    weights_step: int | None = None,
) -> None:
    columns = "name, cohort, parent, changes, state, weights_step"
    values = name, cohort, parent, json.dumps(dict(changes)), WAITING, weights_step
    db.execute(f"INSERT INTO arms ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
