"""One arm in training: its trainer, kept between turns, and the turns themselves."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from groupgrad.apps.sweep.compare import COMBINED
from groupgrad.apps.sweep.store import ArmTurn, PromptRewards
from groupgrad.checkpoints.saving import step_of
from groupgrad.garbage import existing_objects_skipped
from groupgrad.rollout.collector import Experience
from groupgrad.stopping import Paused, Stopped


class ArmRun(TrainerCallback):
    """The trainer of an arm. Each turn resumes the run from its checkpoint and ends with the next one.

    A turn is therefore nothing but a run that is interrupted and resumed, which leaves its numbers as they are.
    """

    def __init__(self, trainer: Any, folder: Path):
        self.trainer, self.folder = trainer, folder
        self.stopped: Stopped | None = None
        """The signal that has ended the last turn before its time."""
        self._first_began: float | None = None
        self._last_ended = 0.0
        """Times of the turn's first and last step."""
        self._rewards: dict[int, PromptRewards] = {}
        trainer.args.save_total_limit = None  # the checkpoint of the last turn stays until the next turn has ended
        trainer.add_callback(self)
        trainer.on_experience = self._note_rewards

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained weights, their gradients and the two moments of Adam."""
        return sum(4 * p.nbytes for p in self.trainer.model.parameters() if p.requires_grad)

    def turn(self, step: int, until: Callable[[int], int]) -> tuple[ArmTurn, int, dict[int, PromptRewards]]:
        """Trains from `step` to the step that `until` gives for the run's length; the turn, the run's length, and the
        rewards of the turn's steps. The model is saved after the last step of all."""
        trainer, started = self.trainer, time.perf_counter()
        self._rewards, self._first_began, trainer.stops.pause_at = {}, None, until
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
        switch_s = max(0.0, time.perf_counter() - started - train_s)
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
        columns = {COMBINED: experience.combined_rewards}
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
