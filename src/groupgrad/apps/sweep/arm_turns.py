"""Trains arms of a sweep for a turn each, in trainers that stay in this process while its memory suffices."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from groupgrad.apps.sweep import compare
from groupgrad.apps.sweep.arm_run import ArmRun
from groupgrad.apps.sweep.factory import ArmFactory
from groupgrad.apps.sweep.sharing import SharedWeights
from groupgrad.apps.sweep.store import DONE, FAILED, WAITING, Arm, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan, arm_settings
from groupgrad.errors import CheckpointNotSaved
from groupgrad.stopping import Stopped

FIRST_TURN = 5
"""Steps of a turn before its cost is known."""
SWITCH_SHARE = 0.025
"""Share of the time that switching between arms should take."""
LONGEST_TURN = 5
"""Length of the turns of an arm that is alone, in multiples of those of others; a killed sweep loses its last turn."""
COMMAND_CHECK_S = 1.0
"""Time between two looks for commands, which end a turn after its present step."""
MEMORY_SHARE = 0.5
"""Share of the free memory that trainers may keep between turns."""
GPU_MEMORY_SHARE = 0.25
"""The same of a GPU's memory, whose greater part a turn needs for activations and caches."""
ERROR_FILE = "error.txt"


def ready_arms(plan: SweepPlan, store: Store) -> list[Arm]:
    """The arms that have steps to make and do not wait for a rung, the least advanced first."""
    ready = [arm for arm in store.arms() if arm.state == WAITING and not plan.is_at_rung(arm)]
    return sorted(ready, key=lambda arm: (arm.cohort, arm.step / (arm.max_steps or math.inf), arm.id))


def fail(store: Store, arm: Arm, error: BaseException) -> None:
    """Records that an error has ended an arm: its traceback in `ERROR_FILE`, its state in the store."""
    folder = store.folder_of(arm)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR_FILE).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    store.set_state(arm.id, FAILED, f"{type(error).__name__}: {error}")


class ArmTurns:
    """The turns of one process: the only one of a sweep, or one of `num_workers` processes that share its arms."""

    def __init__(self, plan: SweepPlan, store: Store, factory: ArmFactory, num_workers: int = 0):
        self.plan, self.store, self.factory, self.num_workers = plan, store, factory, num_workers
        self._runs: dict[int, ArmRun] = {}
        """Kept runs by the id of their arm, the most recently used last."""
        self._weights = SharedWeights()
        self._free_at_start = psutil.virtual_memory().available / max(1, num_workers)

    def take(self, arm: Arm) -> Stopped | None:
        """Trains an arm for one turn and records its progress; a failure is recorded and ends this arm only.

        Returns the exception of the signal that stopped the turn, or None.
        """
        try:
            run = self.run_of(arm)
            turn, max_steps, rewards = run.turn(arm.step, self._end_of_turn(arm))
        except (Exception, CheckpointNotSaved) as error:
            self._runs.pop(arm.id, None)
            fail(self.store, arm, error)
            return None
        if run.stopped is None or (turn.last_step > arm.step and max_steps):  # else the arm has not gone on
            state = DONE if turn.last_step >= max_steps else WAITING
            self.store.end_turn(arm.id, turn, max_steps, rewards, state)
            run.remove_checkpoints(turn.last_step)
            if state == DONE:
                self.drop(arm.id)
        if run.stopped is not None:
            self.drop(arm.id)  # which goes on from the checkpoint
        self._keep_within_memory()
        return run.stopped

    def drop(self, arm: int) -> None:
        """Drops an arm's trainer, if there is one."""
        if self._runs.pop(arm, None) is not None:
            gc.collect()

    def run_of(self, arm: Arm) -> ArmRun:
        """The run of an arm, whose trainer is made unless it was kept."""
        if arm.id in self._runs:
            self._runs[arm.id] = self._runs.pop(arm.id)
            return self._runs[arm.id]
        folder = self.store.folder_of(arm)
        trainer = self.trainer_of(arm, folder)
        if trainer.args.save_only_model:
            raise ValueError("save_only_model=True leaves nothing to resume a turn from; set it to False")
        if self.plan.metric not in (compare.COMBINED, *trainer.rewards.names):
            raise ValueError(
                f"metric={self.plan.metric!r} is no reward of this arm; set it to {compare.COMBINED}, or to one of "
                f"{', '.join(trainer.rewards.names)}"
            )
        self._weights.share(trainer.model)
        trainer.progress.name = arm.name
        run = self._runs[arm.id] = ArmRun(trainer, folder)
        return run

    def trainer_of(self, arm: Arm, folder: Path) -> Any:
        """Makes a trainer of an arm for a run in `folder`."""
        return self.factory.build(arm_settings(self.plan, self.store, self.factory, arm), folder)

    # --------------------------------------------------------------------------------------------- length of a turn

    def _end_of_turn(self, arm: Arm) -> Callable[[int], int]:
        """A function of the run's number of steps that returns the last step of the turn; it is called after each step.

        It returns the step planned at its first call, or 0 once a command has come, which ends the turn at the present
        step. In a worker only commands for this arm end the turn, since the sweep's process takes the others.
        """
        planned: int | None = None
        next_look = 0.0

        def until(max_steps: int) -> int:
            nonlocal planned, next_look
            if planned is None:
                planned = self.turn_end(arm, max_steps)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + COMMAND_CHECK_S
                is_asked = any(not self.num_workers or command.arm == arm.id for command in self.store.queued())
                planned = 0 if is_asked else planned
            return planned

        return until

    def turn_end(self, arm: Arm, max_steps: int) -> int:
        """The last step of the arm's present turn in a run of `max_steps` steps.

        Turns of about equal lengths lead to the next rung.
        """
        rungs = self.plan.rungs(max_steps)
        limit = rungs[arm.rung] if arm.rung < len(rungs) else max_steps
        if self.plan.turn_steps is not None:
            return min(arm.step + self.plan.turn_steps, limit)
        is_alone = len(ready_arms(self.plan, self.store)) <= max(1, self.num_workers)
        num_turns = max(1, round((limit - arm.step) / self._steps_by_cost(is_alone=is_alone)))
        return arm.step + math.ceil((limit - arm.step) / num_turns)

    def _steps_by_cost(self, *, is_alone: bool) -> int:
        """Number of steps of a turn that keeps the time of switching between arms at `SWITCH_SHARE`.

        An arm that is alone in its process takes turns that are `LONGEST_TURN` times as long: the end of a turn serves
        it only as a checkpoint.
        """
        turns = [turn for turn in self.store.turns() if turn.last_step > turn.first_step]
        turns = [turn for turn in turns if turn.first_step > 0] or turns  # a first turn writes and warms up more
        if not turns:
            return FIRST_TURN
        step_s = statistics.median(turn.train_s / (turn.last_step - turn.first_step) for turn in turns)
        switch_s = statistics.median(turn.switch_s for turn in turns)
        wanted_s = switch_s * (1 - SWITCH_SHARE) / SWITCH_SHARE * (LONGEST_TURN if is_alone else 1)
        return max(FIRST_TURN, math.ceil(wanted_s / max(step_s, 1e-6)))

    # ------------------------------------------------------------------------------------------------------- memory

    def _keep_within_memory(self) -> None:
        """Drops the least recently used trainers until the others fit into memory; their checkpoints are on disk."""
        while len(self._runs) > 1 and not self._fit_in_memory(list(self._runs.values())):
            self.drop(next(iter(self._runs)))

    def _fit_in_memory(self, runs: Sequence[ArmRun]) -> bool:
        """True if these trainers may stay: on a CPU by the sizes of what they train, on a GPU by all memory in use."""
        device = runs[-1].trainer.args.device
        if device.type == "cpu":
            return sum(run.trained_bytes for run in runs) <= MEMORY_SHARE * self._free_at_start
        if device.type == "cuda":
            available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            return torch.cuda.memory_allocated(device) <= GPU_MEMORY_SHARE * available
        return False  # the memory in use is not known
