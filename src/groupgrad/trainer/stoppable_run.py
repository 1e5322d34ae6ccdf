"""Stops a run at a signal: all ranks agree, the last whole step is saved, and the process exits with a code of its own.

At the end of a step nothing is in progress, so the step's own checkpoint is written. A signal that comes while
rollouts are sampled or scored leaves them, and the checkpoint is that of the last whole step: what such work changes
is remembered when a step begins.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from groupgrad import dist, stopping
from groupgrad.activity import doing
from groupgrad.config.launcher import zero_stage
from groupgrad.stopping import Stopped, StopRequested
from groupgrad.telemetry.completions import CompletionLog
from groupgrad.trainer.checkpointed_run import CheckpointedRun

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class LastStep:
    """The state that a step changes before its optimizer step, as the step before left it."""

    step: int
    """Optimizer steps made."""
    run: dict[str, Any]
    """State of the run's parts, see `RunState.freeze`."""
    random_states: tuple[Any, ...]
    """Random states of Python, NumPy, PyTorch and the present CUDA device; None where no device is in use."""
    num_input_tokens_seen: int
    flos: float

    @classmethod
    def of(cls, trainer: Any) -> LastStep:
        """The present state of a trainer."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        random_states = random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda
        seen = trainer.state.num_input_tokens_seen
        return cls(
            trainer.state.global_step, trainer.run_state.freeze(), random_states, seen, float(trainer.current_flos)
        )

    def restore(self, trainer: Any) -> None:
        """Puts the state back for a checkpoint."""
        python, numpy, cpu, cuda = self.random_states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        trainer.state.num_input_tokens_seen, trainer.current_flos = self.num_input_tokens_seen, self.flos
        trainer.run_state.frozen = self.run


class StopAtStepEnd(TrainerCallback):
    """Has a step logged and saved, and ends training, once a signal has come to any rank. Collective."""

    name: str | None = None
    """The signal that training was stopped by."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a log event, a checkpoint and the end, without an evaluation before them; after the last step for
        nothing."""
        self.name = next(filter(None, dist.all_gather_objects(stopping.requested())), None)
        if self.name is not None and state.global_step < state.max_steps:
            control.should_log = control.should_save = control.should_training_stop = True
            control.should_evaluate = False


class StoppableRun(CheckpointedRun):
    """A run that a signal stops without the loss of a whole step."""

    completion_log: CompletionLog
    _receives_signals = False
    _stop_at_step_end: StopAtStepEnd | None = None
    _saved_step: int | None = None
    """The last step that this training has saved in its folder."""
    _last_step: LastStep | None = None
    """The state at the beginning of the step that was begun last."""

    @contextmanager
    def _stops_at_signals(self) -> Iterator[None]:
        """Collective. Receives signals while the body trains. Stopped if one has ended it before its last step.

        Nothing is received if some rank trains on another thread than its main one, which Python's signals need.
        """
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._receives_signals = all(dist.all_gather_objects(on_main_thread))
        self._saved_step = None
        if not self._receives_signals or stopping.is_receiving():  # an inner training leaves signals to the outer one
            self._receives_signals = False
            yield
            return
        callback = self._stop_at_step_end = StopAtStepEnd()
        self.add_callback(callback)
        ignored = ("SIGTERM",) if self.args.enable_jit_checkpoint else ()
        # Ranks that hold parts of one model are inside collectives whenever they compute with it.
        with stopping.received_signals(ignored=ignored, leaves_work=zero_stage(self.args) != 3):
            try:
                yield
            except StopRequested as stop:
                self._save_last_step()
                dist.raise_on_all_ranks(None)  # a launcher ends the other ranks when the first one exits
                raise self._stopped(str(stop)) from None
            finally:
                self._receives_signals, self._stop_at_step_end = False, None
                self.remove_callback(callback)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """`Trainer._run_epoch`. StopRequested if a signal has ended it, since no training is to be finished then."""
        super()._run_epoch(*args, **kwargs)
        stop = self._stop_at_step_end
        if stop is not None and stop.name is not None and self.state.global_step < self.state.max_steps:
            raise StopRequested(stop.name)

    def _remember_last_step(self) -> None:
        """Keeps the state that a step changes before its optimizer step."""
        if self._receives_signals:
            self._last_step = LastStep.of(self)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with stopping.finishing(), doing("saving"):
            super()._save_checkpoint(model, trial)
        if self._not_saved is None:
            self._saved_step = self.state.global_step

    def _save_last_step(self) -> None:
        """Collective. Writes the checkpoint of the last whole step, unless there is one or no step was made."""
        step, last, resumed = self.state.global_step, self._last_step, self._resumed_from
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{step}"
        if not step or self._saved_step == step or (resumed is not None and resumed.folder == folder):
            return
        if last is not None and last.step == step:
            last.restore(self)
            self.completion_log.drop_step(step)
        try:
            self._save_checkpoint(self.model, None)
        finally:
            self.run_state.frozen = None
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _stopped(self, name: str) -> Stopped:
        step, folder = self.state.global_step, self.args.output_dir
        saved = f"checkpoint-{step} in {folder} has it, and resume_from_checkpoint=True goes on from there"
        if not step:
            saved = "no step was finished, so there is nothing to save"
        elif self._not_saved is not None:
            saved = self._not_saved
        message = f"{name} stopped the run after step {step} of {self.state.max_steps}: {saved}"
        if dist.is_main():
            logger.warning("%s", message)
        return Stopped(name, message)
