"""Saves and resumes a run of `transformers.Trainer`: checkpoints that are whole or not there."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from groupgrad import dist
from groupgrad.batching.data_position import prompts_used
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.checkpoints import saving
from groupgrad.checkpoints.choosing import ResumePoint, choose
from groupgrad.checkpoints.plausible import OPTIMIZER, SCHEDULER, TRAINER_STATE
from groupgrad.config import GRPOConfig
from groupgrad.errors import CheckpointError, CheckpointNotSaved
from groupgrad.modeling.load import load_renamed_checkpoint
from groupgrad.modeling.scoring.forward import unwrap
from groupgrad.trainer import resumed_options
from groupgrad.trainer.callbacks import RunState

logger = logging.getLogger(__name__)


class CheckpointedRun(Trainer):
    """`transformers.Trainer` whose checkpoints are whole or not there, and verified before they are read."""

    args: GRPOConfig
    model: Any
    optimizer: Any
    callback_handler: Any
    plan: GenerationPlan
    run_state: RunState
    """Everything that a step depends on beyond what `transformers.Trainer` saves."""
    _resumed_from: ResumePoint | None = None
    """The verified checkpoint that the present training began with."""
    _not_saved: str | None = None
    """Why the last checkpoint of this training could not be written; None if it was."""
    _data_offset: int = 0
    """Prompts by which the data are further than this run's sizes say, after a resume with other sizes."""
    _last_size: int | None = None
    """Bytes that this process wrote into the last checkpoint."""

    # ------------------------------------------------------------------------------------------------------ saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Collective. Writes the checkpoint of the present step; without space training goes on and a later save may
        succeed."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_folder, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        best = self.state.best_model_checkpoint
        vars(self.callback_handler).pop("on_save", None)
        try:
            folder = saving.save(run_folder, step, lambda aside: self._write(run_folder, aside), self._description)
        except saving.SaveFailed as error:
            self._not_saved, self.state.best_model_checkpoint = str(error), best
            logger.error("%s; older checkpoints are as they were, and training goes on without this one", error)
            self._skip_on_save()
            return
        self._not_saved = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            saving.rotate(run_folder, self.args.save_total_limit, folder, self.state.best_model_checkpoint)

    def _skip_on_save(self) -> None:
        """Tell no callback of the checkpoint that could not be written: some would read it."""

        def skipped(args: Any, state: Any, control: Any) -> Any:
            vars(self.callback_handler).pop("on_save")
            control.should_save = False
            return control

        self.callback_handler.on_save = skipped

    def _write(self, run_folder: Path, aside: Path) -> None:
        """Writes this rank's part of a checkpoint into the folder `aside`."""
        if self.args.should_save:
            saving.check_space(run_folder, self.state.global_step, self._expected_bytes())
        self.save_model(str(aside), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(aside))
            self._save_scaler(str(aside))
            self._save_rng_state(str(aside))
        self._note_best(run_folder, aside)
        if self.args.should_save:
            self._collect_callback_states()
            self.state.save_to_json(str(aside / TRAINER_STATE))
            self._last_size = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())

    def _note_best(self, run_folder: Path, aside: Path) -> None:
        """Name the best checkpoint by the path that it has, or will have, in the run's folder."""
        if self.state.best_global_step:
            best = run_folder / f"checkpoint-{self.state.best_global_step}"
            if best.name == aside.name or best.exists():
                self.state.best_model_checkpoint = str(best)

    def _collect_callback_states(self) -> None:
        states: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        known: Any = self.state.stateful_callbacks
        for name, found in states.items():
            known[name] = found if len(found) > 1 else found[0]

    def _expected_bytes(self) -> int:
        """Bytes of the next checkpoint: those of the last one, or else of weights and optimizer state."""
        if self._last_size is not None:
            return self._last_size
        model, optimizer = unwrap(self.model), self.optimizer
        adapter = hasattr(model, "peft_config")
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapter)
        if self.args.save_only_model or optimizer is None:
            return weights
        states = getattr(optimizer, "state", {}).values()
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return weights + sum(tensor.nbytes for tensor in tensors)

    def _description(self) -> dict[str, Any]:
        """The manifest's fields beside step, ranks and files."""
        has_optimizer = not self.args.save_only_model
        return {
            "versions": resumed_options.installed_versions(),
            "options": resumed_options.deciding_options(self.args),
            "optimizer": _class_name(self.optimizer) if has_optimizer else None,
            "prompts_used": self._data_offset
            + self._prompts_used(self.state.global_step, is_shifted=self._data_offset != 0),
        }

    def _prompts_used(self, step: int, *, is_shifted: bool) -> int:
        """Prompts that a run of these sizes has used after `step` optimizer steps, without its offset."""
        num_rows = None if isinstance(self.train_dataset, IterableDataset) else len(self.train_dataset)  # pyright: ignore
        drop_last = self.args.dataloader_drop_last
        return prompts_used(self.plan, step, num_rows, drop_last=drop_last, is_shifted=is_shifted)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.run_state.save(output_dir)

    def _raise_if_not_saved(self) -> None:
        """CheckpointNotSaved if the training that has just ended could not write its last checkpoint."""
        if self._not_saved is not None:
            raise CheckpointNotSaved(
                f"{self._not_saved}; all {self.state.global_step} steps were made, and the weights are in memory: "
                "trainer.save_model(folder) writes them where there is space"
            )

    # ---------------------------------------------------------------------------------------------------- resuming

    def _begin_training(self, request: str | bool | None) -> str | None:
        """Collective. Sweeps the run's folder and returns the verified checkpoint to resume from, or None."""
        run_folder = Path(str(self.args.output_dir))
        with dist.errors_on_all_ranks():
            if self.args.should_save and os.access(run_folder, os.W_OK):
                saving.sweep(run_folder)
        self._not_saved, self._data_offset = None, 0
        allow_partial = self.args.allow_partial_resume
        self._resumed_from = choose(run_folder, request, allow_partial=allow_partial)
        if self._resumed_from is None:
            return None
        if self._resumed_from.damage and dist.is_main():
            logger.warning(
                "allow_partial_resume: %s starts without %s",
                self._resumed_from.folder,
                ", ".join(f"{name}, which {reason}" for name, reason in self._resumed_from.damage.items()),
            )
        self._continue_data(self._resumed_from)
        return str(self._resumed_from.folder)

    def _continue_data(self, point: ResumePoint) -> None:
        """Goes on behind the prompts that the checkpoint's run has used, if its steps had other sizes."""
        if point.manifest is None or point.manifest.prompts_used is None or self.args.ignore_data_skip:
            return
        used, step = point.manifest.prompts_used, point.manifest.step
        if used != self._prompts_used(step, is_shifted=False):
            self._data_offset = used - self._prompts_used(step, is_shifted=True)
            _say("steps had other sizes in %s: the data go on behind its %d prompts", point.folder, used)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled or not load_renamed_checkpoint(unwrap(model or self.model), resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        folder = self.state.best_model_checkpoint
        is_spread = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if folder is not None:
            choose(Path(str(self.args.output_dir)), folder)
        if is_spread or folder is None or not load_renamed_checkpoint(unwrap(self.model), folder):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restores optimizer, scheduler and the run's state. CheckpointError if the optimizer is another one."""
        point = self._resumed_from
        if checkpoint is None or point is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        then = {} if point.manifest is None else point.manifest.options
        configured = resumed_options.optimizer_options(self.optimizer)
        restored = self._restore_optimizer(checkpoint, point)
        old = resumed_options.optimizer_options(self.optimizer) if restored else {}
        if self.is_deepspeed_enabled:  # which has restored its optimizer already
            old = {name: then[name] for name in old if name in then}
            configured = {name: getattr(self.args, name) for name in old}
        rows = resumed_options.differences(
            then,
            resumed_options.deciding_options(self.args),
            old,
            configured,
            new_learning_rate=self.args.resume_learning_rate,
        )
        resumed_options.report(rows, checkpoint)
        if restored and self.args.resume_learning_rate:
            resumed_options.apply_learning_rate(self.optimizer, self.lr_scheduler, configured, old)
        if restored and rows:
            resumed_options.apply_schedule(self.optimizer, self.lr_scheduler)
        self.run_state.load(checkpoint, world_size=point.world_size, without=point.damage)

    def _restore_optimizer(self, checkpoint: str, point: ResumePoint) -> bool:
        """True if the optimizer has the checkpoint's state."""
        saved, present = point.manifest and point.manifest.optimizer, _class_name(self.optimizer)
        if saved is not None and saved != present and not self.is_deepspeed_enabled:
            if not self.args.allow_partial_resume:
                raise CheckpointError(
                    f"the optimizer of {checkpoint} is {saved} and this run's is {present} (optim="
                    f"{self.args.optimizer_name!r}), which cannot continue its state; set optim as it was, or "
                    "allow_partial_resume=True to begin with a new optimizer"
                )
            _say("the optimizer of %s is %s, this run's %s starts anew", checkpoint, saved, present)
            self._forward_scheduler()
            return False
        if not self.is_deepspeed_enabled and not any((point.folder / n).is_file() for n in (OPTIMIZER, SCHEDULER)):
            _say("%s holds no optimizer: a new one starts, at the step of the schedule", checkpoint)
            self._forward_scheduler()
            return False
        lacks = [name for name in (OPTIMIZER, SCHEDULER) if name in point.damage]
        if not lacks:
            super()._load_optimizer_and_scheduler(checkpoint)
            return True
        if OPTIMIZER not in lacks:
            state = torch.load(point.folder / OPTIMIZER, map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(state)
        _say("%s of %s: %s anew", " and ".join(lacks), checkpoint, "start" if len(lacks) > 1 else "starts")
        self._forward_scheduler()
        return OPTIMIZER not in lacks

    def _forward_scheduler(self) -> None:
        """Moves a new scheduler to the step of the run."""
        scheduler: Any = self.lr_scheduler
        if hasattr(scheduler, "last_epoch"):
            scheduler.last_epoch = self.state.global_step - 1
            scheduler._step_count = self.state.global_step
            scheduler.step()

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._is_intact("scaler.pt"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        name = "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"
        if checkpoint is None or self._is_intact(name):
            super()._load_rng_state(checkpoint)

    def _is_intact(self, name: str) -> bool:
        return self._resumed_from is None or name not in self._resumed_from.damage


def _class_name(optimizer: Any) -> str:
    """Class of an optimizer, without accelerate's wrapper."""
    return type(getattr(optimizer, "optimizer", None) or optimizer).__name__


def _say(text: str, *values: object) -> None:
    if dist.is_main():
        logger.warning(text, *values)
