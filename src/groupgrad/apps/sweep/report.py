"""Reports on a sweep: its arms in order, and its cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.apps.runs.run_folder import steps_made
from groupgrad.apps.sweep import compare
from groupgrad.apps.sweep.store import DONE, DROPPED, FAILED, STOPPED, WAITING, Arm, Store
from groupgrad.run_folder.run_lock import is_trained

LAST_SHARE = 0.1
"""Share of an arm's run whose last steps are averaged."""

_ORDER = {DONE: 0, WAITING: 0, STOPPED: 1, DROPPED: 2, FAILED: 3}
"""Arms in the race come first, then those that have left it."""


@dataclass(slots=True, frozen=True)
class Result:
    """An arm and its mean reward in its last steps: those after which halving dropped it, or else its latest steps, a
    tenth of the length of its run."""

    name: str
    state: str
    step: int
    max_steps: int | None
    changes: dict[str, Any]
    reward: float
    """NaN where nothing was scored yet."""
    behind: compare.MeanDifference | None
    """The best arm's lead in the last steps that both have made. For an arm that was dropped, the lead of the arm that
    was the best at that rung."""
    reason: str
    compared: tuple[int, int]
    """First and last of the steps that `reward` is about."""
    rung: int | None = None
    """The rung, counted from 1, at which it was dropped."""
    is_apart: bool = False
    """True if the reward of the best arm is that of other steps than `compared`; `behind` is about equal ones."""

    @property
    def behind_text(self) -> str:
        """Its distance behind the best arm in words, or ahead of it, as it may be in the steps that both have made."""
        if self.behind is None or self.behind.num < 2:
            return ""
        is_ahead = self.behind.mean < 0
        words = "ahead of the first by " if is_ahead else "", " in the same steps" if is_ahead or self.is_apart else ""
        return self.behind.text.join(words)


@dataclass(slots=True, frozen=True)
class Cost:
    """The cost of a sweep."""

    steps: int
    """Optimizer steps that arms have made."""
    all_steps: int
    """Optimizer steps if all arms were trained to their end."""
    train_s: float
    switch_s: float

    @property
    def switch_share(self) -> float:
        """Share of the time that went into switching between arms."""
        total = self.train_s + self.switch_s
        return self.switch_s / total if total else 0.0


def results(store: Store) -> list[Result]:
    """All arms, the best one first. Arms that are stopped, dropped or failed stand below those in the race, in this
    order; among arms of one group, those that have passed more rungs come first."""
    metric = store.fact("metric") or compare.COMBINED
    last = {decision.arm: decision for decision in store.decisions()}
    drops = {arm.id: last[arm.id] for arm in store.arms() if arm.state == DROPPED}
    found = []
    for arm in store.arms():
        after = drops[arm.id].after if arm.id in drops else max(0, arm.step - _window(arm))
        steps = store.rewards(arm.id, after, arm.step)
        found.append((arm, compare.mean(steps, metric) if steps else math.nan, after))
    found.sort(key=lambda row: (_ORDER[row[0].state], -row[0].rung, -row[1] if math.isfinite(row[1]) else math.inf))
    best, _, best_after = next((row for row in found if math.isfinite(row[1])), (None, math.nan, 0))
    rows = []
    for arm, reward, after in found:
        drop, behind = drops.get(arm.id), None
        if drop is not None and drop.behind is not None:
            behind = compare.MeanDifference(*drop.behind)
        elif drop is None and best is not None and arm.id != best.id:
            behind = _behind(store, best, arm, metric)
        max_steps = arm.max_steps or planned_steps(store, arm)
        numbers = arm.state, arm.step, max_steps, arm.changes, reward, behind, arm.reason
        rung = None if drop is None else drop.rung + 1
        is_apart = drop is None and best is not None and (after, arm.step) != (best_after, best.step)
        rows.append(Result(arm.name, *numbers, compared=(after + 1, arm.step), rung=rung, is_apart=is_apart))
    return rows


def order_note(rows: Sequence[Result]) -> str:
    """Says that the order of arms is provisional, if arms in the race have made unlike steps and not all are done."""
    in_race = [row for row in rows if row.state in (DONE, WAITING) and row.step]
    steps = [row.step for row in in_race]
    if len(set(steps)) < 2 or all(row.state == DONE for row in in_race):
        return ""
    return (
        f"The order is provisional: arms in the race have made {min(steps)} to {max(steps)} steps, and their latest "
        "rewards favour those that are further along. The last column compares each with the first in the same steps."
    )


def table(store: Store) -> dict[str, Any]:
    """Returns the arms of a sweep, the best one first, and its cost, as plain types for page and terminal."""
    found = results(store)  # before the arms, of which a clone may make more meanwhile
    arms, total = {arm.name: arm for arm in store.arms()}, cost(store)
    steps, in_turn = steps_so_far(store), arms_in_turn(store)
    rows = [
        {
            "id": arms[row.name].id,
            "parent": arms[row.name].parent,
            "name": row.name,
            "state": row.state,
            "shown_state": shown_state(row, in_turn),
            "step": steps.get(row.name, row.step),
            "max_steps": row.max_steps,
            "reward": row.reward if math.isfinite(row.reward) else None,
            "compared": list(row.compared) if row.step else None,
            "behind": row.behind_text,
            "reason": row.reason,
            "path": str(store.folder_of(arms[row.name])),
        }
        for row in found
    ]
    numbers = {"steps": total.steps, "all_steps": total.all_steps, "switch_share": total.switch_share}
    return {"metric": store.fact("metric") or compare.COMBINED, "note": order_note(found), **numbers, "arms": rows}


def planned_steps(store: Store, arm: Arm) -> int | None:
    """The length of an arm's run by its `max_steps`, which a first turn has not recorded yet; None without that."""
    given = {**(store.fact("base") or {}), **arm.changes}.get("max_steps")
    return given if isinstance(given, int) and given > 0 else None


def cost(store: Store) -> Cost:
    """The steps and seconds of all turns."""
    arms, turns = store.arms(), store.turns()
    lengths = [arm.max_steps for arm in arms if arm.max_steps]
    longest = max(lengths, default=0)
    return Cost(
        steps=sum(turn.last_step - turn.first_step for turn in turns),
        all_steps=sum(arm.max_steps or longest for arm in arms),
        train_s=sum(turn.train_s for turn in turns),
        switch_s=sum(turn.switch_s for turn in turns),
    )


def steps_so_far(store: Store) -> dict[str, int]:
    """Steps of each arm by name, including those of a turn in progress or of one that has failed, which the store does
    not have."""
    steps, is_in_progress = {}, is_trained(store.folder)  # a killed sweep goes on from the arms' checkpoints
    for arm in store.arms():
        has_more = arm.state == FAILED or (arm.state == WAITING and is_in_progress)
        steps[arm.name] = max(arm.step, steps_made(store.folder_of(arm))) if has_more else arm.step
    return steps


def arms_in_turn(store: Store) -> set[str]:
    """Names of the arms that are being trained now, each in its turn."""
    if not is_trained(store.folder):
        return set()
    return {arm.name for arm in store.arms() if arm.state == WAITING and is_trained(store.folder_of(arm))}


def shown_state(row: Result, in_turn: Collection[str]) -> str:
    """The state of an arm in words: `training` for one of `in_turn`, `dropped at rung 2`, else its state."""
    if row.state == WAITING and row.name in in_turn:
        return "training"
    return row.state if row.rung is None else f"{row.state} at rung {row.rung}"


def _window(arm: Arm) -> int:
    """Number of the arm's last steps that are compared."""
    return max(1, math.ceil(LAST_SHARE * (arm.max_steps or 1)))


def _behind(store: Store, best: Arm, arm: Arm, metric: str) -> compare.MeanDifference | None:
    """The best arm's lead over an arm in the last steps that both have made."""
    until = min(best.step, arm.step)
    better, worse = (store.rewards(each.id, until - _window(arm), until) for each in (best, arm))
    return compare.difference(better, worse, metric) if better and worse else None
