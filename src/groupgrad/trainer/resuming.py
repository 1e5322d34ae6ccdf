"""Resumes a run from a verified checkpoint: weights, optimizer, schedule, data and random streams.

A paused run goes on without reading its checkpoint, from the state that its trainer has kept (`KeptState`).
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset

from groupgrad import dist
from groupgrad.checkpoints import sharded_files
from groupgrad.checkpoints.choosing import ResumePoint, choose
from groupgrad.checkpoints.manifest import Manifest
from groupgrad.models.adapters import is_adapted
from groupgrad.models.load import load_renamed_checkpoint
from groupgrad.models.model_names import model_source
from groupgrad.models.shards import is_sharded
from groupgrad.models.unwrapping import unwrap
from groupgrad.trainer import changed_options, resumed_optimizer, resumed_parameters

logger = logging.getLogger(__name__)


class Resume:
    """Finds and loads the checkpoint from which a training goes on, if there is one.

    Methods named `load_...` take the place of `Trainer`'s and get these as `otherwise`.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.point: ResumePoint | None = None
        """The verified checkpoint that the present training began with."""
        self.data_offset = 0
        """Prompts by which the data are further than this run's sizes say, after a resume with other sizes."""
        self._kept: KeptState | None = None
        """The state of the checkpoint with which the last training has paused, or the present one goes on."""

    def begin(self, request: str | bool | None) -> str | None:
        """Collective. Returns the verified checkpoint to resume from, or None for a new start."""
        trainer, self.data_offset = self._trainer, 0
        reference = self.reference_identity()  # now, since DeepSpeed may change the weights' dtype later
        kept = self._kept
        if kept is not None and kept.fits(trainer, request):
            kept.take_schedule(trainer)
            self.point = ResumePoint(kept.checkpoint, Manifest.read(kept.checkpoint))
            self._continue_data(self.point)
            return str(kept.checkpoint)
        self._kept = None
        run_folder = Path(trainer._get_output_dir(trainer.trial))
        self.point = choose(run_folder, request, allow_partial=trainer.args.allow_partial_resume)
        if self.point is None:
            return None
        with dist.errors_on_all_ranks():
            resumed_parameters.check(trainer, self.point, reference)
        if self.point.damage and dist.is_main():
            logger.warning(
                "allow_partial_resume: %s starts without %s",
                self.point.folder,
                ", ".join(f"{name}, which {reason}" for name, reason in self.point.damage.items()),
            )
        self._continue_data(self.point)
        return str(self.point.folder)

    def keep(self, checkpoint: Path) -> None:
        """Keeps the present state while `checkpoint` is written, for a training that goes on from there later."""
        self._kept = KeptState.of(self._trainer, checkpoint)

    def reference_identity(self) -> dict[str, str] | None:
        """Collective. Name and digest of the model that the KL divergence is measured from, if it stays the same."""
        trainer = self._trainer
        if trainer.reference is None or trainer.args.sync_ref_model:
            return None
        return {"name": model_source(trainer.model), "digest": trainer.reference.digest()}

    def prompts_used(self, step: int) -> int:
        """Prompts that the run has used after `step` optimizer steps."""
        return self.data_offset + self._planned(step, is_shifted=self.data_offset != 0)

    def _planned(self, step: int, *, is_shifted: bool) -> int:
        """Prompts that a run of these sizes has used after `step` optimizer steps, without its offset."""
        rows = self._trainer.train_dataset
        num_rows = None if isinstance(rows, IterableDataset) else len(rows)  # pyright: ignore[reportArgumentType]
        drop_last = self._trainer.args.dataloader_drop_last
        return self._trainer.plan.prompts_used(step, num_rows, drop_last=drop_last, is_shifted=is_shifted)

    def _continue_data(self, point: ResumePoint) -> None:
        """Goes on behind the prompts that the checkpoint's run has used, if its steps had other sizes."""
        manifest = point.manifest
        if manifest is None or manifest.prompts_used is None or self._trainer.args.ignore_data_skip:
            return
        used, step = manifest.prompts_used, manifest.step
        if used != self._planned(step, is_shifted=False):
            self.data_offset = used - self._planned(step, is_shifted=True)
            if dist.is_main():
                logger.warning("steps had other sizes in %s: the data go on behind its %d prompts", point.folder, used)

    def load_weights(self, folder: str, model: Any, otherwise: Callable[[], None]) -> None:
        """Collective under FSDP. Restores the weights, whole or in shards, whichever way they were saved."""
        if self._has_kept(folder):
            return
        inner = unwrap(model)
        if sharded_files.is_present(folder):
            sharded_files.load_model(folder, inner, trained_only=is_adapted(inner))
            return
        whole = nullcontext()
        if is_sharded(inner):
            from groupgrad.integrations.sharding.fsdp import whole_parameters

            whole = whole_parameters(inner, keep_changes=True)
        with whole:
            missing = None if self._trainer.is_deepspeed_enabled else load_renamed_checkpoint(inner, folder)
            if missing is None:
                otherwise()
            else:
                resumed_parameters.raise_if_missing(missing, inner, folder)

    def load_best_weights(self, otherwise: Callable[[], None]) -> None:
        """Loads the best checkpoint once training has ended. CheckpointError if it is damaged."""
        trainer, self._kept = self._trainer, None  # the weights in memory are the last ones
        folder = str(trainer.state.best_model_checkpoint)
        choose(Path(str(trainer.args.output_dir)), folder)
        self.load_weights(folder, trainer.model, otherwise)

    def load_optimizer(self, checkpoint: str | None, otherwise: Callable[[], None]) -> None:
        """Restores optimizer, scheduler and the run's state. CheckpointError if the optimizer is another one."""
        trainer, point = self._trainer, self.point
        if checkpoint is None or point is None:
            otherwise()
            return
        if self._has_kept(checkpoint):
            assert self._kept is not None
            self._kept.restore(trainer)
            return
        then = {} if point.manifest is None else point.manifest.options
        intervals = changed_options.changed_intervals(trainer.state, trainer.args)
        configured = resumed_optimizer.optimizer_options(trainer.optimizer)
        if trainer.is_deepspeed_enabled:
            otherwise()
        restored = trainer.is_deepspeed_enabled or resumed_optimizer.restore(trainer, point)
        old = resumed_optimizer.optimizer_options(trainer.optimizer) if restored else {}
        if trainer.is_deepspeed_enabled:  # which has restored its optimizer already
            old = {name: then[name] for name in old if name in then}
            configured = {name: getattr(trainer.args, name) for name in old}
        rows = changed_options.differences(
            then,
            changed_options.deciding_options(trainer.args),
            old,
            configured,
            new_learning_rate=trainer.args.resume_learning_rate,
            reference=model_source(trainer.model) if trainer.reference is not None else None,
        )
        changed_options.report([*rows, *intervals], checkpoint)
        if restored and trainer.args.resume_learning_rate:
            resumed_optimizer.apply_learning_rate(trainer.optimizer, trainer.lr_scheduler, configured, old)
        if restored and rows:
            resumed_optimizer.apply_schedule(trainer.optimizer, trainer.lr_scheduler)
        trainer.run_state.load(checkpoint, world_size=point.world_size, without=point.damage)

    def load_scaler(self, checkpoint: str | None, otherwise: Callable[[], None]) -> None:
        """Restores the scaler of float16 gradients, unless it stayed in memory or its file is damaged."""
        if not self._has_kept(checkpoint) and (checkpoint is None or self._is_intact("scaler.pt")):
            otherwise()

    def load_random_streams(self, checkpoint: str | None, otherwise: Callable[[], None]) -> None:
        """Restores the random streams, from memory if the trainer has kept them."""
        if self._has_kept(checkpoint):
            assert self._kept is not None
            set_random_states(self._kept.random_states)
            self._kept = None  # nothing is restored after the random streams
            return
        args = self._trainer.args
        name = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
        if checkpoint is None or self._is_intact(name):
            otherwise()

    def _has_kept(self, checkpoint: str | None) -> bool:
        """True if this trainer still has the state of a checkpoint in memory."""
        return self._kept is not None and checkpoint is not None and Path(checkpoint) == self._kept.checkpoint

    def _is_intact(self, name: str) -> bool:
        return self.point is None or name not in self.point.damage


@dataclass(slots=True)
class KeptState:
    """The part of a paused run's checkpoint that its trainer loses unless it is kept here, in memory.

    Weights, gradient scaler and the optimizer's moments stay where they are. The trainer's next training makes a new
    schedule and new parts of the run, and other runs move the random streams of the process.
    """

    checkpoint: Path
    """Folder of the checkpoint that holds the same state."""
    run: dict[str, Any]
    """State of the run's parts, by name."""
    random_states: tuple[Any, ...]
    """Random states of Python, NumPy, PyTorch and the present CUDA device; None where no device is in use."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's settings of each group of parameters, the present learning rate among them."""
    schedule: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Any, checkpoint: Path) -> KeptState | None:
        """Copies the state while `checkpoint` is being written; None with several ranks, DeepSpeed or FSDP."""
        if dist.is_active() or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return None
        return cls(checkpoint, copy.deepcopy(trainer.run_state.states()), random_states())

    def fits(self, trainer: Any, request: Any) -> bool:
        """True if this state can replace the checkpoint that a training resumes from (`request`)."""
        is_asked = isinstance(request, str) and Path(request) == self.checkpoint and self.checkpoint.is_dir()
        return is_asked and self.checkpoint.name == f"checkpoint-{trainer.state.global_step}"

    def take_schedule(self, trainer: Any) -> None:
        """Copies the schedule and the learning rates, which the next training sets anew when it begins."""
        self.groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in trainer.optimizer.param_groups
        ]
        self.schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())

    def restore(self, trainer: Any) -> None:
        """Restores the schedule and the run's parts, after the new training has made its own."""
        for group, kept in zip(trainer.optimizer.param_groups, self.groups, strict=True):
            group.update(kept)
        trainer.lr_scheduler.load_state_dict(self.schedule)
        trainer.run_state.set_states(self.run)


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
