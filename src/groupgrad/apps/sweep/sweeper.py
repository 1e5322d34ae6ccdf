"""Trains the arms of a sweep in turns, drops those that fall behind, and takes commands between turns."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from groupgrad import stopping
from groupgrad.apps.sweep import compare
from groupgrad.apps.sweep.arm_turns import COMMAND_CHECK_S, ERROR_FILE, ArmTurns, fail, ready_arms
from groupgrad.apps.sweep.commands import apply_commands
from groupgrad.apps.sweep.device_workers import LOST, Device, DeviceWorkers, find_devices
from groupgrad.apps.sweep.factory import ArmFactory
from groupgrad.apps.sweep.report import steps_so_far
from groupgrad.apps.sweep.store import FAILED, WAITING, Arm, Decision, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan, merged
from groupgrad.run_folder.run_lock import locked

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Worker processes that an arm may lose after one step before it counts as failed."""


class Sweeper:
    """A sweep in progress in a folder, which holds `sweep.sqlite` and a folder for each arm."""

    def __init__(self, plan: SweepPlan, folder: str | Path, factory: ArmFactory):
        self.plan, self.factory = plan, factory
        self.devices = find_devices(plan.devices, on_cpu=bool(plan.base.get("use_cpu")))
        self.store = Store(folder, create=True)
        self.turns = ArmTurns(plan, self.store, factory)
        self._losses: Counter[tuple[int, int]] = Counter()
        """Worker processes that were lost in a turn, by the arm's number and step."""

    # -------------------------------------------------------------------------------------------------- the course

    def prepare(self, description: dict[str, Any]) -> None:
        """Checks every arm and writes the arms into a new sweep; an existing one must have the same `description`, but
        for its devices.

        ValueError, which names the arms, if some cannot work.
        """
        description = {key: value for key, value in description.items() if key != "devices"}
        # As the store gives it back; a function becomes its name.
        text = json.dumps(description, default=lambda value: getattr(value, "__qualname__", None) or str(value))
        description = json.loads(text)
        stored = self.store.fact("plan")
        if stored is not None:
            if stored != description:
                changed = sorted(key for key in {*stored, *description} if stored.get(key) != description.get(key))
                raise ValueError(
                    f"{self.store.folder} holds a sweep with another {', '.join(changed)}; set another output_dir, or "
                    "clone arms with `groupgrad sweep clone` to change what they train"
                )
            return
        arms = self.plan.first_arms()
        problems: dict[str, list[str]] = {}
        for number, changes in enumerate(arms, start=1):
            try:
                self.factory.check(merged(self.plan.base, changes))
            except (ValueError, TypeError, ImportError) as error:
                problems.setdefault(str(error), []).append(self.plan.name_of(number, changes))
        if problems:
            lines = [f"  {', '.join(names)}: {problem}" for problem, names in problems.items()]
            raise ValueError("some arms cannot be trained:\n" + "\n".join(lines))
        self.store.add_arms(
            [(self.plan.name_of(number, changes), 0, changes) for number, changes in enumerate(arms, start=1)]
        )
        self.store.set_fact("metric", self.plan.metric)
        self.store.set_fact("base", self.plan.base)
        self.store.set_fact("plan", description)

    def run(self) -> int:
        """Trains until no arm has steps to make. Returns the number of arms that have failed."""
        with locked(self.store.folder):
            if self.devices:
                self._run_on_devices()
            else:
                self._run_here()
        return sum(arm.state == FAILED for arm in self.store.arms())

    def _run_here(self) -> None:
        while True:
            self._settle()
            arm = self._next()
            if arm is None:
                return
            self._turn(arm)

    def _run_on_devices(self) -> None:
        """Stopped, after the checkpoints of all arms in progress, if a signal has come."""
        with (
            stopping.received_signals(),
            DeviceWorkers(self.plan, self.store.folder, self.factory, self.devices) as workers,
        ):
            while True:
                self._settle(workers.busy)
                signal = stopping.requested()
                if signal is None:
                    for arm, device in workers.hand_out(ready_arms(self.plan, self.store)):
                        self._announce(arm, device)
                    if not workers.busy:
                        return
                elif workers.busy:
                    workers.stop_turns()
                else:
                    message = f"{signal} stopped the sweep; started again, it goes on from the arms' checkpoints"
                    logger.warning("%s", message)
                    raise stopping.Stopped(signal, message)
                for arm, error in workers.wait(COMMAND_CHECK_S):
                    self._end_turn(arm, error)

    def _end_turn(self, arm: Arm, error: BaseException | None) -> None:
        """Takes notice of the end of a worker's turn. A lost process costs the turn, too many of them the arm."""
        if isinstance(error, LOST):
            logger.warning("arm %s lost its worker process (%s)", arm.name, error)
            self._losses[arm.id, arm.step] += 1
            if self._losses[arm.id, arm.step] == MAX_LOSSES:
                del self._losses[arm.id, arm.step]
                text = f"it lost {MAX_LOSSES} worker processes after its step {arm.step}, the last one {error}"
                fail(self.store, arm, RuntimeError(text))
        elif error is not None:
            raise error
        self._report(arm)

    def _settle(self, busy: Collection[int] = ()) -> None:
        """Takes the commands for arms that are not `busy`, and decides about arms at rungs."""
        for refusal in self.apply_commands(busy).values():
            logger.warning("%s", refusal)
        self._decide()

    def _next(self) -> Arm | None:
        """The arm to train next: the least advanced one that does not wait for a rung."""
        return next(iter(ready_arms(self.plan, self.store)), None)

    def _turn(self, arm: Arm) -> None:
        """Trains an arm for a turn in this process."""
        self._announce(arm)
        stopped = self.turns.take(arm)
        self._report(arm)
        if stopped is not None:
            raise stopped

    def _announce(self, arm: Arm, device: Device | None = None) -> None:
        verb, where = "goes on from" if arm.step else "begins at", "" if device is None else f" on {device.name}"
        logger.info("arm %s %s step %d of %s%s", arm.name, verb, arm.step, arm.max_steps or "its run", where)

    def _report(self, arm: Arm) -> None:
        """Reports the failure of an arm that has failed in its turn."""
        now = next((stored for stored in self.store.arms() if stored.id == arm.id), arm)
        if now.state == FAILED:
            place = self.store.folder_of(arm) / ERROR_FILE
            step = steps_so_far(self.store)[now.name]
            logger.error("arm %s failed after step %d: %s (%s has more)", now.name, step, now.reason, place)

    # ------------------------------------------------------------------------------------------ successive halving

    def _decide(self) -> None:
        """Compares the arms that stand at a rung, once no arm of their cohort that is being trained is below it."""
        halving = self.plan.halving
        if halving is None:
            return
        at_rungs = [arm for arm in self.store.arms() if arm.state == WAITING and self.plan.is_at_rung(arm)]
        for cohort, rung in sorted({(arm.cohort, arm.rung) for arm in at_rungs}):
            arms = self.store.arms()  # the last decision may have dropped some
            waiting = [arm for arm in arms if arm.state == WAITING]
            arms_at_rung = [arm for arm in waiting if arm.cohort == cohort and arm.rung == rung]
            below = [arm for arm in waiting if arm.cohort == cohort and arm.rung < rung]
            if below or not all(map(self.plan.is_at_rung, arms_at_rung)):
                continue
            self._judge([arm for arm in arms if arm.cohort == cohort], arms_at_rung, rung)

    def _judge(self, cohort: Sequence[Arm], at_rung: Sequence[Arm], rung: int) -> None:
        """Lets arms pass a rung, or drops them, by comparison with all of the cohort that have reached it."""
        assert self.plan.halving is not None
        spans: dict[int, tuple[int, int]] = {}
        compared, num_rungs = {}, 1
        for arm in cohort:
            rungs = self.plan.rungs(arm.max_steps or 0)
            if rung < len(rungs) and arm.step >= rungs[rung] and arm.state != FAILED:
                spans[arm.id] = compare.compared_steps(rungs[rung], rungs), rungs[rung]
                compared[arm.id] = self.store.rewards(arm.id, *spans[arm.id])
                num_rungs = len(rungs)
        names = {arm.id: arm.name for arm in at_rung}
        verdicts = compare.judge(compared, self.plan.metric, self.plan.halving, num_rungs)
        verdicts = [verdict for verdict in verdicts if verdict.arm in names]
        dropped = {verdict.arm: f"rung {rung + 1}: {verdict.text}" for verdict in verdicts if not verdict.goes_on}
        leads = [None if verdict.behind is None else astuple(verdict.behind) for verdict in verdicts]
        rows = [
            Decision(at_rung[0].cohort, rung, v.arm, *spans[v.arm], v.text, lead) for v, lead in zip(verdicts, leads)
        ]
        self.store.pass_rung(names, rung + 1, dropped, rows)
        for row in rows:
            where = rung + 1, row.after + 1, row.step, names[row.arm]
            logger.info("rung %d (steps %d-%d), arm %s: %s", *where, row.text)

    # ---------------------------------------------------------------------------------------------------- commands

    def apply_commands(self, busy: Collection[int] = ()) -> dict[int, str]:
        """`commands.apply_commands` for this sweep."""
        return apply_commands(self.store, lambda: (self.plan, self.factory), busy)
