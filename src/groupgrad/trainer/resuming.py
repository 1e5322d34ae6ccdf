"""Resumes a run from a verified checkpoint: weights, optimizer, schedule, data and random streams."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets import IterableDataset

from groupgrad import dist
from groupgrad.checkpoints import sharded_files
from groupgrad.checkpoints.choosing import ResumePoint, choose
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

    def begin(self, request: str | bool | None) -> str | None:
        """Collective. Returns the verified checkpoint to resume from, or None for a new start."""
        trainer, self.data_offset = self._trainer, 0
        reference = self.reference_identity()  # now, since DeepSpeed may change the weights' dtype later
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
        trainer = self._trainer
        folder = str(trainer.state.best_model_checkpoint)
        choose(Path(str(trainer.args.output_dir)), folder)
        self.load_weights(folder, trainer.model, otherwise)

    def load_optimizer(self, checkpoint: str | None, otherwise: Callable[[], None]) -> None:
        """Restores optimizer, scheduler and the run's state. CheckpointError if the optimizer is another one."""
        trainer, point = self._trainer, self.point
        if checkpoint is None or point is None:
            otherwise()
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

    def load_random_streams(self, checkpoint: str | None, otherwise: Callable[[], None]) -> None:
        """Restores the random streams, unless their file is damaged."""
        args = self._trainer.args
        name = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
        if checkpoint is None or self.point is None or name not in self.point.damage:
            otherwise()
