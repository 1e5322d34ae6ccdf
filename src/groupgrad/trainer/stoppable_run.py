"""Stops a run at a signal: all ranks agree, the last whole step is saved, and the process exits with a code of its own.

At the end of a step nothing is in progress, so the step's own checkpoint is written. A signal that comes while
rollouts are sampled or scored leaves them, and the checkpoint is that of the last whole step: what such work changes
(generation batches, random states, the count of tokens) is remembered when a step begins. Metrics and completions of a
step are logged when it ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from groupgrad import dist, stopping
from groupgrad.activity import doing
from groupgrad.batch import Batch
from groupgrad.config.launcher import holds_parts
from groupgrad.errors import CheckpointNotSaved
from groupgrad.run_folder.completions import CompletionLog
from groupgrad.stopping import Paused, Stopped, StopRequested
from groupgrad.trainer.best_metric import value_of_best_metric
from groupgrad.trainer.callbacks import SameOnRanks
from groupgrad.trainer.checkpointed_run import CheckpointedRun
from groupgrad.trainer.kept_state import KeptState, random_states, set_random_states

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class LastStep:
    """The state that sampling and scoring change, as it was when a step began."""

    step: int
    """Optimizer steps made."""
    generation_batches: dict[int, Batch]
    """Generation batches that the buffer held, by number."""
    random_states: tuple[Any, ...]
    """See `kept_state.random_states`."""
    num_input_tokens_seen: int

    def restore(self, trainer: Any) -> None:
        """Puts the state back for a checkpoint."""
        set_random_states(self.random_states)
        trainer.state.num_input_tokens_seen = self.num_input_tokens_seen
        trainer.buffer.batches = dict(self.generation_batches)


class RememberLastStep(TrainerCallback):
    """Keeps the state before each step, for a signal that comes while the step samples or scores."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stores the state at the beginning of this step, in place of the previous step's."""
        batches = dict(self._trainer.buffer.batches)
        self._trainer._last_step = LastStep(state.global_step, batches, random_states(), state.num_input_tokens_seen)


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


class StoppableRun(CheckpointedRun):
    """A run that a signal stops without the loss of a whole step."""

    completion_log: CompletionLog
    _start_folder: str
    """Working directory in which the trainer was made, to which a relative `output_dir` belongs."""
    due_evaluation: DueEvaluation
    pause_at: Callable[[int], int] | None = None
    """Maps the run's number of steps to the step after which it pauses; None for no pause.

    To pause, `train` saves a checkpoint and raises `stopping.Paused`; the run can be resumed from there later. A sweep
    sets it for its arms.
    """
    _told_of_best_metric = False
    _receives_signals = False
    _stop_at_step_end: StopAtStepEnd | None = None
    _last_step: LastStep | None = None
    """The state at the beginning of the step that was begun last."""

    @property
    def _is_pausing(self) -> bool:
        """True while the checkpoint of a pause is written, which no run without pauses has."""
        return self._stop_at_step_end is not None and self._stop_at_step_end.name == stopping.PAUSE

    def _warn_if_finished(self, first_step: int) -> None:
        """Warns if a resumed run was already finished at its `first_step`."""
        if self.state.global_step == first_step >= self.state.max_steps:
            logger.warning(
                "the checkpoint is at step %d and the run has %d, so it is finished and no step was taken; raise "
                "max_steps or num_train_epochs to train further",
                self.state.global_step,
                self.state.max_steps,
            )

    @contextmanager
    def _whole_output_dir(self) -> Iterator[None]:
        """Context in which `args.output_dir` is a whole path.

        A reward function or a tool may change the folder that relative paths belong to.
        """
        given = self.args.output_dir
        self.args.output_dir = os.path.join(self._start_folder, str(given))
        try:
            yield
        finally:
            self.args.output_dir = given

    @contextmanager
    def _stops_at_signals(self) -> Iterator[None]:
        """Collective. Receives signals while the body trains; raises Stopped if one ends it before its last step.

        No rank receives signals if any of them trains outside of its main thread, which alone gets Python's signals.
        """
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._receives_signals = all(dist.all_gather_objects(on_main_thread))
        if not self._receives_signals or stopping.is_receiving():  # an inner training leaves signals to the outer one
            self._receives_signals = False
            if self.pause_at is None:
                yield
                return
        self._stop_at_step_end = StopAtStepEnd(self.due_evaluation, self.pause_at)
        callbacks: list[TrainerCallback] = [self._stop_at_step_end]
        if self._receives_signals:
            callbacks.append(RememberLastStep(self))
        for callback in callbacks:
            self.add_callback(callback)
        ignored = ("SIGTERM",) if self.args.enable_jit_checkpoint else ()
        received = stopping.received_signals(ignored=ignored, leaves_work=not holds_parts(self.args))
        with received if self._receives_signals else nullcontext():
            try:
                yield
            except StopRequested as stop:
                self._save_last_step()
                dist.raise_on_all_ranks(None)  # a launcher ends the other ranks when the first one exits
                raise self._stopped(str(stop)) from None
            finally:
                self._receives_signals, self._stop_at_step_end = False, None
                for callback in callbacks:
                    self.remove_callback(callback)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """`Trainer._run_epoch`; raises StopRequested if a signal ended it, which skips the end of training."""
        super()._run_epoch(*args, **kwargs)
        stop = self._stop_at_step_end
        if stop is not None and stop.name is not None and self.state.global_step < self.state.max_steps:
            raise StopRequested(stop.name)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """`Trainer._evaluate`; a schedule that follows a metric stays where it is if nothing was measured for it."""
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        if not skip_scheduler and type(self.lr_scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR"):
            scheduler: Any = self.lr_scheduler
            value = self._value_of_best_metric(metrics)
            if value is not None:
                scheduler.step(value)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """`Trainer._determine_best_metric`; an evaluation that measured nothing for the metric is not better."""
        if self.args.metric_for_best_model is not None and self._value_of_best_metric(metrics) is None:
            return False
        return super()._determine_best_metric(metrics, trial)

    def _value_of_best_metric(self, metrics: Mapping[str, float]) -> float | None:
        """The metric that chooses the best model; None, with one warning a run, if nothing was measured for it."""
        value = value_of_best_metric(self.args, metrics)
        if value is None and not self._told_of_best_metric:
            self._told_of_best_metric = True
            if dist.is_main():
                logger.warning(
                    "step %d: the evaluation measured nothing for metric_for_best_model=%r, as where no row gives a "
                    "loss or a function did not log it; it counts as not better than others. It has %s",
                    self.state.global_step,
                    self.args.metric_for_best_model,
                    ", ".join(sorted(metrics)),
                )
        return value

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with stopping.finishing(), doing("saving"):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._is_pausing:
            self._kept_state = KeptState.of(self, Path(self._get_output_dir(self.trial)) / Path(output_dir).name)

    def _save_last_step(self) -> None:
        """Collective. Writes the checkpoint of the last whole step, unless it exists already or no step was made."""
        with stopping.finishing():
            self._finish_save()
        step, last, resumed = self.state.global_step, self._last_step, self._resumed_from
        folder = Path(self._get_output_dir(self.trial)) / f"checkpoint-{step}"
        if not step or self._saved_step == step or (resumed is not None and resumed.folder == folder):
            return
        if last is not None and last.step == step:
            last.restore(self)
        self._save_checkpoint(self.model, self.trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _stopped(self, name: str) -> Stopped:
        if name == stopping.PAUSE:
            if self._not_saved is not None:
                raise CheckpointNotSaved(f"{self._not_saved}; a paused run cannot go on without its checkpoint")
            return Paused(self.state.global_step, self.state.max_steps)
        step, folder = self.state.global_step, self._get_output_dir(self.trial)
        way = (
            "resume_from_checkpoint=True" if self.pause_at is None else "the sweep, started again by the same command,"
        )
        saved = f"checkpoint-{step} in {folder} has it, and {way} goes on from there"
        if not step:
            saved = "no step was finished, so there is nothing to save"
        elif self._not_saved is not None:
            saved = self._not_saved
        message = f"{name} stopped the run after step {step} of {self.state.max_steps}: {saved}"
        if dist.is_main():
            logger.warning("%s", message)
        return Stopped(name, message)
