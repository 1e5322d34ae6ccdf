"""Stops a run at a signal: all ranks agree, the last whole step is saved, and the process exits with a code of its own.

At the end of a step nothing is in progress, so the step's own checkpoint is written. A signal that comes while
rollouts are sampled or scored leaves them, and the checkpoint is that of the last whole step: what such work changes
(generation batches, random states, the count of tokens) is remembered when a step begins. Metrics and completions of a
step are logged when it ends.
"""

from __future__ import annotations

import logging
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from groupgrad import dist, stopping
from groupgrad.batch import Batch
from groupgrad.config.launcher import holds_parts
from groupgrad.errors import CheckpointNotSaved
from groupgrad.stopping import Paused, Stopped, StopRequested
from groupgrad.trainer.resuming import Resume
from groupgrad.trainer.run_state import SameOnRanks
from groupgrad.trainer.saves import Saves

logger = logging.getLogger(__name__)


class LastStep(TrainerCallback):
    """Keeps the state before each step and each evaluation, to which a signal that comes in one of them goes back."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._kept: tuple[int, dict[int, Batch], tuple[Any, ...], int] | None = None
        """Steps made, and what sampling and scoring change: generation batches, random states, tokens seen."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stores the state at the beginning of this step, in place of the previous step's."""
        batches = dict(self._trainer.buffer.batches)
        self._kept = state.global_step, batches, random_states(), state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stores the state at the end of this step: reward functions of an evaluation may draw random numbers."""
        self.on_step_begin(args, state, control)

    def restore(self) -> None:
        """Puts the state of the last whole step back, if a step or an evaluation has begun since, for a checkpoint."""
        trainer = self._trainer
        if self._kept is not None and self._kept[0] == trainer.state.global_step:
            _, batches, streams, trainer.state.num_input_tokens_seen = self._kept
            trainer.buffer.batches = dict(batches)
            set_random_states(streams)


class StopAtStepEnd(TrainerCallback):
    """Logs and saves the step, and ends training, once any rank has received a signal. Collective."""

    name: str | None = None
    """The signal that training was stopped by."""

    def __init__(self, evaluation: DueEvaluation, pause_at: Callable[[int], int] | None):
        self._evaluation, self._pause_at = evaluation, pause_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Requests a log event, a checkpoint and the end of training, and postpones a due evaluation.

        After the run's last step it requests nothing.
        """
        self.name = next(filter(None, dist.all_gather_objects(stopping.requested())), None)
        is_stopped = self.name is not None
        if not is_stopped and self._pause_at is not None and state.global_step >= self._pause_at(state.max_steps):
            self.name = stopping.PAUSE
        if self.name is not None and state.global_step < state.max_steps:
            # A pause leaves the log events where they are in a run without pauses.
            control.should_log = control.should_log or is_stopped
            control.should_save = control.should_training_stop = True
            self._evaluation.is_due, control.should_evaluate = control.should_evaluate, False


class DueEvaluation(SameOnRanks, TrainerCallback):
    """Makes an evaluation that a signal has postponed, before the first step of the resumed run."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.is_due = False
        """True for an evaluation of the last step that is to be made when the run goes on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the postponed evaluation, starting from the random states of the checkpoint. Collective."""
        if self.is_due and args.eval_strategy != "no":
            metrics = self._trainer._evaluate(self._trainer.trial, None)
            self._trainer._determine_best_metric(metrics=metrics, trial=self._trainer.trial)
        self.is_due = False

    def state_dict(self) -> dict[str, Any]:
        """Contains `is_due`, which is also true while an evaluation is in progress."""
        return {"is_due": self.is_due or self._trainer.control.should_evaluate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `is_due`."""
        self.is_due = state["is_due"]


class Stops:
    """Ends the trainings of one trainer at a signal without the loss of a whole step, or pauses them."""

    def __init__(self, trainer: Any, saves: Saves, resume: Resume):
        self._trainer, self._saves, self._resume = trainer, saves, resume
        self.due_evaluation = DueEvaluation(trainer)
        self.pause_at: Callable[[int], int] | None = None
        """Maps the run's number of steps to the step after which it pauses; None for no pause.

        To pause, `train` saves a checkpoint and raises `stopping.Paused`; the run can be resumed from there later. A
        sweep sets it for its arms.
        """
        self._at_step_end: StopAtStepEnd | None = None
        self._last_step = LastStep(trainer)

    @property
    def is_pausing(self) -> bool:
        """True while the checkpoint of a pause is written, which no run without pauses has."""
        return self._at_step_end is not None and self._at_step_end.name == stopping.PAUSE

    @contextmanager
    def at_signals(self) -> Iterator[None]:
        """Collective. Receives signals while the body trains; raises Stopped if one ends it before its last step.

        No rank receives signals if any of them trains outside of its main thread, which alone gets Python's signals. An
        inner training leaves them to the outer one.
        """
        on_main_thread = threading.current_thread() is threading.main_thread()
        receives = all(dist.all_gather_objects(on_main_thread)) and not stopping.is_receiving()
        if not receives and self.pause_at is None:
            with exits_are_errors():
                yield
            return
        args = self._trainer.args
        self._at_step_end = StopAtStepEnd(self.due_evaluation, self.pause_at)
        callbacks = [self._at_step_end, *([self._last_step] if receives else [])]
        for callback in callbacks:
            self._trainer.add_callback(callback)
        ignored = ("SIGTERM",) if args.enable_jit_checkpoint else ()
        received = stopping.received_signals(ignored=ignored, leaves_work=not holds_parts(args))
        with received if receives else nullcontext():
            try:
                with exits_are_errors():
                    yield
            except StopRequested as stop:
                self._save_last_step()
                dist.raise_on_all_ranks(None)  # a launcher ends the other ranks when the first one exits
                raise self._stopped(str(stop)) from None
            finally:
                self._at_step_end = None
                for callback in callbacks:
                    self._trainer.remove_callback(callback)

    def end_epoch(self) -> None:
        """StopRequested if a signal has ended the epoch, which skips the end of training."""
        stop, state = self._at_step_end, self._trainer.state
        if stop is not None and stop.name is not None and state.global_step < state.max_steps:
            raise StopRequested(stop.name)

    def _save_last_step(self) -> None:
        """Collective. Writes the checkpoint of the last whole step, unless it exists already or no step was made."""
        trainer = self._trainer
        step, resumed = trainer.state.global_step, self._resume.point
        folder = Path(trainer._get_output_dir(trainer.trial)) / f"checkpoint-{step}"
        if not step or self._saves.last_step == step or (resumed is not None and resumed.folder == folder):
            return
        self._last_step.restore()
        self._saves.write(trainer.trial, is_pause=self.is_pausing)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def _stopped(self, name: str) -> Stopped:
        trainer, not_saved = self._trainer, self._saves.not_saved
        step, max_steps = trainer.state.global_step, trainer.state.max_steps
        if name == stopping.PAUSE:
            if not_saved is not None:
                raise CheckpointNotSaved(f"{not_saved}; a paused run cannot go on without its checkpoint")
            return Paused(step, max_steps)
        way = (
            "resume_from_checkpoint=True" if self.pause_at is None else "the sweep, started again by the same command,"
        )
        saved = f"checkpoint-{step} in {trainer._get_output_dir(trainer.trial)} has it, and {way} goes on from there"
        if not step:
            saved = "no step was finished, so there is nothing to save"
        elif not_saved is not None:
            saved = not_saved
        message = f"{name} stopped the run after step {step} of {max_steps}: {saved}"
        if dist.is_main():
            logger.warning("%s", message)
        return Stopped(name, message)


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raises RuntimeError, naming the line, where the body of the `with` statement raises SystemExit.

    `stopping.Stopped`, with which a signal ends training, is raised outside of the body.
    """
    try:
        yield
    except SystemExit as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"{last.name} ({last.filename}:{last.lineno}) raised SystemExit({error.code!r}), which would end the run "
            "in the middle without an error; raise an exception, or set control.should_training_stop in a callback"
        ) from error


def random_states() -> tuple[Any, ...]:
    """Random states of Python, NumPy, PyTorch and the present CUDA device; None for a device that is not in use."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, ...]) -> None:
    """Puts random states back."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
