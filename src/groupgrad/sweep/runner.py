"""Trains the arms of a sweep in turns, drops those that fall behind, and takes commands between turns."""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from groupgrad import dist
from groupgrad.errors import CheckpointNotSaved
from groupgrad.modeling.base_models import BaseModels
from groupgrad.sweep import compare
from groupgrad.sweep.arm_run import ArmRun
from groupgrad.sweep.common_work import CommonWork
from groupgrad.sweep.factory import ArmFactory
from groupgrad.sweep.plan import SweepPlan, arm_name, merged
from groupgrad.sweep.report import cost
from groupgrad.sweep.sharing import SharedWeights
from groupgrad.sweep.store import DONE, FAILED, STOPPED, WAITING, Arm, Command, Decision, Store
from groupgrad.sweep.trials import ask_trials
from groupgrad.trainer.run_lock import locked

logger = logging.getLogger(__name__)

FIRST_TURN = 5
"""Steps of a turn before its cost is known."""
SWITCH_SHARE = 0.025
"""Share of the time that switching between arms should take."""
LONGEST_TURN = 5
"""Times of a turn that pays for its own switch alone. A sweep that is killed loses the turn that it is in."""
COMMAND_CHECK_S = 1.0
"""Time between two looks for commands, which end a turn after its present step."""
MEMORY_SHARE = 0.5
"""Share of the free memory that trainers may keep between turns."""
GPU_MEMORY_SHARE = 0.25
"""The same of a GPU's memory, whose greater part a turn needs for activations and caches."""
ERROR_FILE = "error.txt"


class Sweeper:
    """A sweep in progress in a folder, which holds `sweep.sqlite` and a folder for each arm."""

    def __init__(self, plan: SweepPlan, folder: str | Path, factory: ArmFactory):
        if dist.world_size() > 1:
            raise ValueError(
                f"a sweep trains its arms in one process, and this is one of {dist.world_size()}; start it without a "
                "launcher"
            )
        self.plan, self.factory = plan, factory
        self.store = Store(folder, create=True)
        self._runs: dict[int, ArmRun] = {}
        """Trainers that are kept, the one of the last turn last."""
        self._bases, self._weights, self._work = BaseModels(), SharedWeights(), CommonWork()
        self._free_at_start = psutil.virtual_memory().available

    # -------------------------------------------------------------------------------------------------- the course

    def prepare(self, description: dict[str, Any]) -> None:
        """Checks every arm and writes the arms into a new sweep; an existing one must have the same `description`.

        ValueError, which names the arms, if some cannot work.
        """
        # As the store gives it back; a function becomes its name.
        text = json.dumps(description, default=lambda value: getattr(value, "__qualname__", None) or str(value))
        description = json.loads(text)
        known = self.store.fact("plan")
        if known is not None:
            if known != description:
                changed = sorted(key for key in {*known, *description} if known.get(key) != description.get(key))
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
                problems.setdefault(str(error), []).append(arm_name(number, changes))
        if problems:
            lines = [f"  {', '.join(names)}: {problem}" for problem, names in problems.items()]
            raise ValueError("some arms cannot be trained:\n" + "\n".join(lines))
        self.store.add_arms([(arm_name(number, changes), 0, changes) for number, changes in enumerate(arms, start=1)])
        self.store.set_fact("metric", self.plan.metric)
        self.store.set_fact("base", self.plan.base)
        self.store.set_fact("plan", description)

    def run(self) -> int:
        """Trains until no arm has steps to make. Returns the number of arms that have failed."""
        with locked(self.store.folder):
            while True:
                for refusal in self.apply_commands().values():
                    logger.warning("%s", refusal)
                self._decide()
                arm = self._next()
                if arm is None:
                    if not self._ask():
                        break
                    continue
                self._turn(arm)
        return sum(arm.state == FAILED for arm in self.store.arms())

    def _next(self) -> Arm | None:
        """The arm whose turn it is: the one that has come least far of those that do not wait for a rung."""
        waiting = [arm for arm in self.store.arms() if arm.state == WAITING and not self._is_at_rung(arm)]
        return min(waiting, key=lambda arm: (arm.cohort, arm.step / (arm.max_steps or math.inf), arm.id), default=None)

    def _turn(self, arm: Arm) -> None:
        """Trains an arm for a turn; its failure is written down and ends no other arm."""
        verb = "goes on from" if arm.step else "begins at"
        logger.info("arm %s %s step %d of %s", arm.name, verb, arm.step, arm.max_steps or "its run")
        try:
            run = self._run_of(arm)
            turn, max_steps, rewards = run.turn(arm.step, self._end_of_turn(arm))
        except (Exception, CheckpointNotSaved) as error:
            self._fail(arm, error)
            return
        if run.stopped is not None and (turn.last_step <= arm.step or not max_steps):
            raise run.stopped  # before the arm has gone on
        state = DONE if turn.last_step >= max_steps else WAITING
        self.store.end_turn(arm.id, turn, max_steps, rewards, state)
        run.remove_checkpoints(turn.last_step)
        if run.stopped is not None:
            raise run.stopped
        if state == DONE:
            self._drop_run(arm.id)
        self._keep_within_memory()

    def _end_of_turn(self, arm: Arm) -> Callable[[int], int]:
        """A function that is asked after each step of a run of so many steps for the last one of the turn: the one that
        was planned when the turn began, or 0, the present one, if a command has come."""
        planned: int | None = None
        next_look = 0.0

        def until(max_steps: int) -> int:
            nonlocal planned, next_look
            if planned is None:
                planned = self.turn_end(arm, max_steps)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + COMMAND_CHECK_S
                planned = 0 if self.store.queued() else planned
            return planned

        return until

    def turn_end(self, arm: Arm, max_steps: int) -> int:
        """The last step of the arm's present turn in a run of `max_steps` steps.

        Turns of about equal lengths lead to the next rung.
        """
        rungs = self._rungs(max_steps)
        limit = rungs[arm.rung] if arm.rung < len(rungs) else max_steps
        if self.plan.turn_steps is not None:
            return min(arm.step + self.plan.turn_steps, limit)
        ready = [other for other in self.store.arms() if other.state == WAITING and not self._is_at_rung(other)]
        num_turns = max(1, round((limit - arm.step) / self._steps_by_cost(is_alone=len(ready) == 1)))
        return arm.step + math.ceil((limit - arm.step) / num_turns)

    def _steps_by_cost(self, *, is_alone: bool) -> int:
        """As many steps as bring the cost of all switches so far, and of the next one, within its share; turns that
        rungs have cut short are made up for. An arm that is alone takes the longest turns: their ends serve only a
        sweep that is killed."""
        turns = [turn for turn in self.store.turns() if turn.last_step > turn.first_step]
        turns = [turn for turn in turns if turn.first_step > 0] or turns  # a first turn writes and warms up more
        if not turns:
            return FIRST_TURN
        step_s = statistics.median(turn.train_s / (turn.last_step - turn.first_step) for turn in turns)
        switch_s, spent = statistics.median(turn.switch_s for turn in turns), cost(self.store)
        wanted_s = [seconds * (1 - SWITCH_SHARE) / SWITCH_SHARE for seconds in (switch_s, spent.switch_s)]
        missing_s = wanted_s[0] + max(0.0, wanted_s[1] - spent.train_s)
        longest_s = LONGEST_TURN * wanted_s[0]
        missing_s = longest_s if is_alone else min(missing_s, longest_s)
        return max(FIRST_TURN, math.ceil(missing_s / max(step_s, 1e-6)))

    # ------------------------------------------------------------------------------------------------ the trainers

    def folder_of(self, arm: Arm) -> Path:
        """The folder of an arm's run."""
        return self.store.folder / "arms" / arm.name

    def settings_of(self, arm: Arm) -> dict[str, Any]:
        """The settings of an arm's run, but for its folder."""
        settings = merged(self.plan.base, arm.changes)
        if arm.weights_step is not None:
            settings = self.factory.with_weights(settings, self.folder_of(arm) / "start")
        return settings

    def _run_of(self, arm: Arm) -> ArmRun:
        if arm.id in self._runs:
            self._runs[arm.id] = self._runs.pop(arm.id)
            return self._runs[arm.id]
        with self._bases.in_use():
            trainer = self.factory.build(self.settings_of(arm), self.folder_of(arm))
        if trainer.args.save_only_model:
            raise ValueError("save_only_model=True leaves nothing to resume a turn from; set it to False")
        if self.plan.metric not in (compare.COMBINED, *trainer.rewards.names):
            raise ValueError(
                f"metric={self.plan.metric!r} is no reward of this arm; set it to {compare.COMBINED}, or to one of "
                f"{', '.join(trainer.rewards.names)}"
            )
        self._weights.share(trainer.model)
        self._work.join(trainer)
        run = self._runs[arm.id] = ArmRun(trainer, self.folder_of(arm))
        return run

    def _keep_within_memory(self) -> None:
        """Gives up the trainers that were used longest ago where all of them take too much memory; their checkpoints
        are on the disk."""
        while len(self._runs) > 1 and not self._fit_in_memory(list(self._runs.values())):
            self._drop_run(next(iter(self._runs)))

    def _fit_in_memory(self, runs: Sequence[ArmRun]) -> bool:
        """True if these trainers may stay: on a CPU by the sizes of what they train, on a GPU by all memory in use."""
        device = runs[-1].trainer.args.device
        if device.type == "cpu":
            return sum(run.trained_bytes for run in runs) <= MEMORY_SHARE * self._free_at_start
        if device.type == "cuda":
            available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            return torch.cuda.memory_allocated(device) <= GPU_MEMORY_SHARE * available
        return False  # the memory in use is not known

    def _drop_run(self, arm: int) -> None:
        if self._runs.pop(arm, None) is not None:
            gc.collect()

    def _fail(self, arm: Arm, error: BaseException) -> None:
        self._runs.pop(arm.id, None)
        folder = self.folder_of(arm)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR_FILE).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        reason = f"{type(error).__name__}: {error}"
        logger.error("arm %s failed after step %d: %s (%s has more)", arm.name, arm.step, reason, folder / ERROR_FILE)
        self.store.set_state(arm.id, FAILED, reason)

    # ------------------------------------------------------------------------------------------ successive halving

    def _rungs(self, max_steps: int) -> list[int]:
        return [] if self.plan.halving is None else self.plan.halving.rungs(max_steps)

    def _is_at_rung(self, arm: Arm) -> bool:
        """True if the arm waits for the others of its cohort at a rung."""
        rungs = self._rungs(arm.max_steps) if arm.max_steps else []
        return arm.rung < len(rungs) and arm.step >= rungs[arm.rung]

    def _decide(self) -> None:
        """Compares the arms that stand at a rung, once no arm of their cohort that is being trained is below it."""
        halving = self.plan.halving
        if halving is None:
            return
        at_rungs = [arm for arm in self.store.arms() if arm.state == WAITING and self._is_at_rung(arm)]
        for cohort, rung in sorted({(arm.cohort, arm.rung) for arm in at_rungs}):
            arms = self.store.arms()  # the last decision may have dropped some
            waiting = [arm for arm in arms if arm.state == WAITING]
            own = [arm for arm in waiting if arm.cohort == cohort and arm.rung == rung]
            below = [arm for arm in waiting if arm.cohort == cohort and arm.rung < rung]
            if below or not all(map(self._is_at_rung, own)):
                continue
            self._judge([arm for arm in arms if arm.cohort == cohort], own, rung)

    def _judge(self, cohort: Sequence[Arm], own: Sequence[Arm], rung: int) -> None:
        """Lets the arms `own` pass a rung or drops them, by comparison with all of the cohort that have reached it."""
        assert self.plan.halving is not None
        spans: dict[int, tuple[int, int]] = {}
        compared, num_rungs = {}, 1
        for arm in cohort:
            rungs = self._rungs(arm.max_steps or 0)
            if rung < len(rungs) and arm.step >= rungs[rung] and arm.state != FAILED:
                spans[arm.id] = compare.compared_steps(rungs[rung], rungs), rungs[rung]
                compared[arm.id] = self.store.rewards(arm.id, *spans[arm.id])
                num_rungs = len(rungs)
        names = {arm.id: arm.name for arm in own}
        verdicts = compare.judge(compared, self.plan.metric, self.plan.halving, num_rungs)
        verdicts = [verdict for verdict in verdicts if verdict.arm in names]
        dropped = {verdict.arm: f"rung {rung + 1}: {verdict.text}" for verdict in verdicts if not verdict.goes_on}
        leads = [None if verdict.behind is None else astuple(verdict.behind) for verdict in verdicts]
        rows = [Decision(own[0].cohort, rung, v.arm, *spans[v.arm], v.text, lead) for v, lead in zip(verdicts, leads)]
        self.store.pass_rung(names, rung + 1, dropped, rows)
        for row in rows:
            where = rung + 1, row.after + 1, row.step, names[row.arm]
            logger.info("rung %d (steps %d-%d), arm %s: %s", *where, row.text)
        for arm in dropped:
            self._drop_run(arm)

    def _ask(self) -> bool:
        """Adds the next trials of Optuna; False if the sweep has had all of its arms."""
        arms = self.store.arms()
        cohort = max((arm.cohort for arm in arms), default=0) + 1
        asked = ask_trials(self.plan, self.store)
        start = self.store.num_arms() + 1
        self.store.add_arms([(arm_name(start + i, changes), cohort, changes) for i, changes in enumerate(asked)])
        return bool(asked)

    # ---------------------------------------------------------------------------------------------------- commands

    def apply_commands(self) -> dict[int, str]:
        """Does what has been asked since the last turn. Returns, by the command's number, why it cannot be done."""
        refused: dict[int, str] = {}
        for command in self.store.queued():
            arm = next((arm for arm in self.store.arms() if arm.id == command.arm), None)
            if arm is None:
                self.store.take(command, refused=True, message="the arm was deleted")
                continue
            try:
                getattr(self, f"_{command.kind}")(command, arm)
            except (ValueError, TypeError, OSError) as error:
                refused[command.id] = f"{command.kind} of arm {arm.name} was refused: {error}"
                self.store.take(command, refused=True, message=str(error))
        return refused

    def _stop(self, command: Command, arm: Arm) -> None:
        if arm.state != WAITING:
            raise ValueError(f"arm {arm.name} is {arm.state}, only an arm that is {WAITING} can be stopped")
        self.store.take(command, state=(STOPPED, "stopped by a command"))
        self._drop_run(arm.id)

    def _resume(self, command: Command, arm: Arm) -> None:
        if arm.state in (WAITING, DONE):
            raise ValueError(f"arm {arm.name} is {arm.state}, there is nothing to resume")
        self.store.take(command, state=(WAITING, ""))

    def _delete(self, command: Command, arm: Arm) -> None:
        self._drop_run(arm.id)
        shutil.rmtree(self.folder_of(arm), ignore_errors=True)
        self.store.take(command, state=("deleted", "deleted by a command"))

    def _clone(self, command: Command, arm: Arm) -> None:
        changes = {**arm.changes, **command.changes}
        name = arm_name(self.store.num_arms() + 1, changes)
        clone = replace(arm, name=name, changes=changes, weights_step=None)
        if command.from_weights:
            clone = replace(clone, name=f"{name}-from={arm.id:02d}", weights_step=arm.step)
        self.factory.check(self.settings_of(clone))
        if command.from_weights:
            _copy_weights(self.folder_of(arm), arm.step, self.folder_of(clone) / "start")
        row = clone.name, arm.cohort, changes, clone.weights_step
        self.store.take(command, clone=row, message=clone.name)


def _copy_weights(folder: Path, step: int, start: Path) -> None:
    """Copies model and tokenizer of the last checkpoint of a run, or of the finished run. ValueError without one."""
    checkpoint = folder / f"checkpoint-{step}"
    source = checkpoint if checkpoint.is_dir() else folder
    if not step or not any(source.glob("*.safetensors")):
        raise ValueError(f"{folder} has no weights yet: the arm has made {step} steps; clone it after its first turn")
    kept = [path for path in source.iterdir() if path.is_file() and path.suffix in (".safetensors", ".json", ".jinja")]
    kept += [path for path in source.iterdir() if path.name in ("merges.txt", "vocab.txt", "tokenizer.model")]
    shutil.rmtree(start, ignore_errors=True)
    start.mkdir(parents=True)
    for path in kept:
        if path.name != "trainer_state.json":
            shutil.copy2(path, start / path.name)
