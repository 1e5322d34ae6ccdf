"""Trains arms of a sweep for a turn each."""

from __future__ import annotations

import gc
import math
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from groupgrad.apps.sweep import compare
from groupgrad.apps.sweep.factory import ArmFactory
from groupgrad.apps.sweep.store import DONE, FAILED, WAITING, Arm, ArmTurn, PromptRewards, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan, arm_settings
from groupgrad.checkpoints.saving import step_of
from groupgrad.errors import CheckpointNotSaved
from groupgrad.garbage import existing_objects_skipped
from groupgrad.rollout.collector import Experience
from groupgrad.stopping import Paused, Stopped

FIRST_TURN = 5
"""Steps of a turn before its cost is known."""
SWITCH_SHARE = 0.025
"""Share of the time that switching between arms should take."""
LONGEST_TURN = 5
"""Length of the turns of an arm that is alone, in multiples of those of others; a killed sweep loses its last turn."""
COMMAND_CHECK_S = 1.0
"""Time between two looks for commands, which end a turn after its present step."""
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

    def take(self, arm: Arm) -> Stopped | None:
        """Trains an arm for one turn and records its progress; a failure is recorded and ends this arm only.

        Returns the exception of the signal that stopped the turn, or None.
        """
        try:
            run = self.run_of(arm)
            turn, max_steps, rewards = run.turn(arm.step, self._end_of_turn(arm))
        except (Exception, CheckpointNotSaved) as error:
            fail(self.store, arm, error)
            return None
        if run.stopped is None or (turn.last_step > arm.step and max_steps):  # else the arm has not gone on
            state = DONE if turn.last_step >= max_steps else WAITING
            self.store.end_turn(arm.id, turn, max_steps, rewards, state)
            run.remove_checkpoints(turn.last_step)
        return run.stopped

    def run_of(self, arm: Arm) -> ArmRun:
        """The run of an arm, with a new trainer. ValueError for settings with which there are no turns."""
        gc.collect()  # trainers are in cycles, and this one needs the memory of the last one
        run = ArmRun(lambda folder: self.trainer_of(arm, folder), self.store.folder_of(arm))
        trainer = run.trainer
        if trainer.args.save_only_model:
            raise ValueError("save_only_model=True leaves nothing to resume a turn from; set it to False")
        if self.plan.metric not in (compare.COMBINED, *trainer.rewards.names):
            raise ValueError(
                f"metric={self.plan.metric!r} is no reward of this arm; set it to {compare.COMBINED}, or to one of "
                f"{', '.join(trainer.rewards.names)}"
            )
        trainer.progress.name = arm.name
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


class ArmRun(TrainerCallback):
    """An arm in its turn, which resumes the run from its checkpoint and ends with the next one.

    A turn is therefore nothing but a run that is interrupted and resumed, which leaves its numbers as they are.
    """

    def __init__(self, make_trainer: Callable[[Path], Any], folder: Path):
        self._began = time.perf_counter()
        self.trainer, self.folder = make_trainer(folder), folder
        trainer = self.trainer
        self.stopped: Stopped | None = None
        """The signal that has ended the turn before its time."""
        self._first_began: float | None = None
        self._last_ended = 0.0
        """Times of the turn's first and last step."""
        self._rewards: dict[int, PromptRewards] = {}
        trainer.args.save_total_limit = None  # the checkpoint of the last turn stays until the next turn has ended
        trainer.add_callback(self)
        trainer.on_experience = self._note_rewards

    def turn(self, step: int, until: Callable[[int], int]) -> tuple[ArmTurn, int, dict[int, PromptRewards]]:
        """Trains from `step` to the step that `until` gives for the run's length; the turn, the run's length, and the
        rewards of the turn's steps. The model is saved after the last step of all."""
        trainer = self.trainer
        trainer.stops.pause_at = until
        resume_from = str(self.folder / f"checkpoint-{step}") if step else None
        with existing_objects_skipped():  # each training begins with a garbage collection
            try:
                trainer.train(resume_from_checkpoint=resume_from)
                last_step = trainer.state.global_step
                trainer.save_model(str(self.folder))
            except Paused as pause:
                last_step = pause.step
            except Stopped as stop:
                self.stopped, last_step = stop, max(step, trainer.state.global_step)
                if not (self.folder / f"checkpoint-{last_step}").is_dir():
                    last_step = step  # nothing later could be saved
        train_s = 0.0 if self._first_began is None else self._last_ended - self._first_began
        switch_s = max(0.0, time.perf_counter() - self._began - train_s)
        rewards = {step: found for step, found in self._rewards.items() if step <= last_step}
        return ArmTurn(step, last_step, train_s, switch_s), trainer.state.max_steps, rewards

    def remove_checkpoints(self, before: int) -> None:
        """Removes the checkpoints of steps before the last turn's end that the arm's own settings do not ask for."""
        args, state = self.trainer.args, self.trainer.state
        if args.save_strategy not in (SaveStrategy.STEPS, SaveStrategy.NO):
            return  # whether the settings have asked for a checkpoint cannot be told from its step
        every = state.save_steps if args.save_strategy == SaveStrategy.STEPS else 0
        for folder in self.folder.glob("checkpoint-*"):
            step = step_of(folder)
            if -1 < step < before and not (every and step % every == 0):
                shutil.rmtree(folder, ignore_errors=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes the first step's time."""
        if self._first_began is None:
            self._first_began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes the time of the last step so far."""
        self._last_ended = time.perf_counter()

    def _note_rewards(self, experience: Experience) -> None:
        """Keeps the mean reward of each group of a generation batch."""
        table, step = experience.table, self.trainer.state.global_step + 1
        if not experience.rollouts:
            return
        groups: dict[int, list[int]] = {}
        for place, rollout in enumerate(experience.rollouts):
            groups.setdefault(rollout.prompt.group, []).append(place)
        columns = {compare.COMBINED: experience.combined_rewards}
        columns |= {name: table.rewards[:, index].tolist() for index, name in enumerate(table.names)}
        before = self._rewards.get(step, PromptRewards((), {}))
        prompts = tuple(_digest(experience.rollouts[places[0]].prompt.identity) for places in groups.values())
        means = {
            name: before.means.get(name, ()) + tuple(_mean([column[i] for i in places]) for places in groups.values())
            for name, column in columns.items()
        }
        self._rewards[step] = PromptRewards(before.prompts + prompts, means)


def _mean(values: list[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return sum(scored) / len(scored) if scored else math.nan


def _digest(identity: Any) -> str:
    return blake2b(repr(identity).encode(), digest_size=8).hexdigest()
