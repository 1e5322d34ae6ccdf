"""Saves and resumes a run of `transformers.Trainer`: checkpoints that are whole or not there."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from groupgrad import dist, stopping
from groupgrad.activity import Hung, doing
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.checkpoints import saving, sharded_files
from groupgrad.checkpoints.choosing import ResumePoint, choose
from groupgrad.checkpoints.manifest import Manifest, file_names
from groupgrad.checkpoints.plausible import SCHEDULER, TRAINER_STATE
from groupgrad.config import GRPOConfig
from groupgrad.errors import CheckpointNotSaved, NonFiniteError
from groupgrad.integrations.sharding.fsdp import is_fully_sharded, whole_parameters
from groupgrad.memory.free_memory import free_bytes
from groupgrad.models.adapters import adapter_settings, is_adapted
from groupgrad.models.load import load_renamed_checkpoint
from groupgrad.models.model_names import model_source
from groupgrad.models.policy_checks import nonfinite_weights
from groupgrad.models.reference import Reference
from groupgrad.models.unwrapping import unwrap
from groupgrad.trainer import resumed_optimizer, resumed_options, resumed_parameters
from groupgrad.trainer.callbacks import RunState
from groupgrad.trainer.kept_state import KeptState, set_random_states

logger = logging.getLogger(__name__)


SHARE_FOR_COPY = 0.5
"""Share of the free memory that the copy of a checkpoint may take; sampling and training need the rest."""

WAIT_OF_HUNG_S = 5.0
"""Time that a run which ends because a phase hangs waits for a checkpoint under way."""


@dataclass(slots=True, frozen=True)
class SaveUnderWay:
    """A checkpoint that is written while training goes on."""

    save: saving.SaveBehind
    state: Any
    """`TrainerState` of its step, for `on_save`."""
    best: str | None
    """The best checkpoint before it."""


class CheckpointedRun(Trainer):
    """`transformers.Trainer` whose checkpoints are whole or not there, and verified before they are read."""

    args: GRPOConfig
    model: Any
    optimizer: Any
    callback_handler: Any
    plan: GenerationPlan
    reference: Reference | None
    run_state: RunState
    """Everything that a step depends on beyond what `transformers.Trainer` saves."""
    trial: Any = None
    """The trial of a hyperparameter search that is under way, whose run has a folder of its own."""
    _resumed_from: ResumePoint | None = None
    """The verified checkpoint that the present training began with."""
    _not_saved: str | None = None
    """Why the last checkpoint of this training could not be written; None if it was."""
    _data_offset: int = 0
    """Prompts by which the data are further than this run's sizes say, after a resume with other sizes."""
    _kept_state: KeptState | None = None
    """The state of the checkpoint with which the last training has paused, or with which the present one goes on."""
    _last_size: int | None = None
    """Bytes of the last checkpoint."""
    _save_under_way: SaveUnderWay | None = None
    """The checkpoint that is being written behind training; the same on all ranks."""
    _saved_step: int | None = None
    """The last step that this training has saved in its folder."""
    _told_of_memory = False

    # ------------------------------------------------------------------------------------------------------ saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Collective. Writes the checkpoint of the present step, or begins to; without space training goes on and a
        later save may succeed."""
        self._finish_save()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_folder, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        best, expected = self.state.best_model_checkpoint, self._expected_bytes()
        vars(self.callback_handler).pop("on_save", None)
        begin = saving.save_behind if self._may_save_behind(expected) else saving.save
        try:
            saved = begin(run_folder, step, self._save_parts(run_folder), self._description, expected_bytes=expected)
        except saving.SaveFailed as error:
            self._note_not_saved(error, best)
            self._skip_on_save()
            return
        if isinstance(saved, saving.SaveBehind):
            self._save_under_way = SaveUnderWay(saved, copy.copy(self.state), best)
            self._skip_on_save()
        else:
            self._note_saved(saved)

    def _may_save_behind(self, expected_bytes: int) -> bool:
        """Collective. True if the next checkpoint is written while training goes on, which a signal would end."""
        if not self.args.save_in_background:
            return False
        free = free_bytes(torch.device("cpu"))
        is_short = self.args.should_save and expected_bytes > SHARE_FOR_COPY * free
        is_short, is_last = (any(c) for c in zip(*dist.all_gather_objects((is_short, bool(stopping.requested())))))
        if is_short and not self._told_of_memory:
            self._told_of_memory = True
            _say(
                "save_in_background: a copy of the checkpoint takes about %s bytes of memory, and %s are free, half of "
                "them for training; so training waits for this checkpoint to be written",
                f"{expected_bytes:,}",
                f"{free:,}",
            )
        return not is_short and not is_last

    def _finish_save(self, *, wait: bool = True) -> None:
        """Collective where a save is under way. Waits for it, or, without `wait`, returns if some rank still writes;
        then does what follows a save: rotation, push, `on_save`."""
        under_way = self._save_under_way
        if under_way is None:
            return
        if not wait and not all(dist.all_gather_objects(under_way.save.is_done())):
            return
        self._save_under_way = None
        with doing("saving"):
            try:
                folder = under_way.save.finish()
            except saving.SaveFailed as error:
                self._note_not_saved(error, under_way.best)
                return
            self._note_saved(folder)
        should_save = self.control.should_save
        vars(self.callback_handler).pop("on_save", None)
        self.control = self.callback_handler.on_save(self.args, under_way.state, self.control)
        self.control.should_save = should_save

    @contextmanager
    def _waits_for_save(self) -> Iterator[None]:
        """Context of training, which does not end while this rank writes a checkpoint; a second interrupt ends it."""
        self._told_of_memory = False
        wait_s: float | None = None
        try:
            yield
        except KeyboardInterrupt:
            wait_s = 0.0
            raise
        except Hung:
            wait_s = WAIT_OF_HUNG_S
            raise
        finally:
            self._end_save(wait_s)

    def _end_save(self, timeout_s: float | None = None) -> None:
        """Waits for what this rank writes, without the other ranks."""
        under_way = self._save_under_way
        if under_way is None:
            return
        with doing("saving"):
            if not under_way.save.wait(timeout_s):
                return
        self._save_under_way = None
        if under_way.save.error is not None:
            logger.error("%s; older checkpoints are as they were", under_way.save.error)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_save()
        return super()._finalize_training(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _note_saved(self, folder: Path) -> None:
        """After a checkpoint has its name: push it, and remove older ones."""
        self._not_saved = None
        self._saved_step = saving.step_of(folder)
        self._last_size = sum((folder / name).stat().st_size for name in file_names(folder))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            saving.rotate(folder.parent, self.args.save_total_limit, folder, self.state.best_model_checkpoint)

    def _note_not_saved(self, error: saving.SaveFailed, best: str | None) -> None:
        """After a checkpoint could not be written; `best` is the best one without it."""
        self._not_saved, self.state.best_model_checkpoint = str(error), best
        logger.error("%s; older checkpoints are as they were, and training goes on without this one", error)

    def _skip_on_save(self) -> None:
        """Skips `on_save` for a checkpoint that is not there, or not yet: some callbacks would read it."""

        def skipped(args: Any, state: Any, control: Any) -> Any:
            vars(self.callback_handler).pop("on_save")
            control.should_save = False
            return control

        self.callback_handler.on_save = skipped

    def _save_parts(self, run_folder: Path) -> list[Callable[[Path], None]]:
        """Functions that write this rank's parts of a checkpoint into a folder; the ranks meet between them."""
        parts = [lambda aside: self._write_model(str(aside))]
        if not self.args.save_only_model:
            parts += [self._write_optimizer, lambda aside: self._save_rng_state(str(aside))]
        return [*parts, lambda aside: self._write_trainer_state(run_folder, aside)]

    def _write_model(self, folder: str) -> None:
        """Collective. The model as `save_model` writes it; for a run that FSDP shards and may resume, in shards."""
        if not is_fully_sharded(self.model) or self.args.save_only_model:
            self.save_model(folder, _internal_call=True)
            return
        self._check_weights()
        sharded_files.save_model(Path(folder), self.model, trained_only=is_adapted(self.model))
        if self.args.should_save:
            self._save_beside_weights(folder)

    def _check_weights(self) -> None:
        """NonFiniteError, on every rank that has them, for trained weights that are not finite.

        Collective for a model that FSDP shards, of which one rank may have them alone: all ranks raise.
        """
        with dist.errors_on_all_ranks() if is_fully_sharded(self.model) else nullcontext():
            if bad := nonfinite_weights(unwrap(self.model), trained_only=True):
                raise NonFiniteError(
                    f"step {self.state.global_step}: {bad}, so they are not saved; go on from the last checkpoint with "
                    "a lower learning_rate"
                )

    def _save_beside_weights(self, folder: str) -> None:
        """Writes the configurations, the tokenizer and the arguments, as `Trainer._save` does beside the weights."""
        model: Any = self.model
        for config in (*getattr(model, "peft_config", {}).values(), model.config, model.generation_config):
            config.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Collective under FSDP, whose optimizer is written in shards."""
        if not is_fully_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded_files.save_optimizer(Path(output_dir), self.model, self.optimizer)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _write_optimizer(self, aside: Path) -> None:
        with saving.refusals_at_the_end(aside) if self.is_deepspeed_enabled else nullcontext():
            self._save_optimizer_and_scheduler(str(aside))
        self._save_scaler(str(aside))

    def _write_trainer_state(self, run_folder: Path, aside: Path) -> None:
        self._note_best(run_folder, aside)
        if self.args.should_save:
            self._collect_callback_states()
            self.state.save_to_json(str(aside / TRAINER_STATE))

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
        """Expected bytes of the next checkpoint: as many as the last one has, or else weights and optimizer state."""
        if self._last_size is not None:
            return self._last_size
        model, optimizer = unwrap(self.model), self.optimizer
        adapter = hasattr(model, "peft_config")
        # ZeRO-3 leaves a parameter without numbers between passes.
        sizes = [(p, getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad or not adapter]
        weights = sum(num_numbers * p.element_size() for p, num_numbers in sizes)
        if self.args.save_only_model or optimizer is None:
            return weights
        if self.is_deepspeed_enabled:  # two moments and the weights in float32, over all ranks
            return weights + sum(12 * num_numbers for p, num_numbers in sizes if p.requires_grad)
        states = getattr(optimizer, "state", {}).values()
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return weights + sum(tensor.nbytes for tensor in tensors)

    def _description(self) -> dict[str, Any]:
        """The manifest's fields beside step, ranks and files."""
        has_optimizer = not self.args.save_only_model
        return {
            "versions": resumed_options.installed_versions(),
            "options": resumed_options.deciding_options(self.args),
            "optimizer": resumed_optimizer.class_name(self.optimizer) if has_optimizer else None,
            "prompts_used": self._data_offset
            + self._prompts_used(self.state.global_step, is_shifted=self._data_offset != 0),
            "trained": resumed_parameters.trained_parameters(self.model, self.optimizer),
            "adapter": json.loads(json.dumps(adapter_settings(unwrap(self.model)), default=str)),
            "reference": self._reference_identity(),
        }

    def _reference_identity(self) -> dict[str, str] | None:
        """Collective. Name and digest of the model that the KL divergence is measured from, if it stays the same."""
        if self.reference is None or self.args.sync_ref_model:
            return None
        return {"name": model_source(self.model), "digest": self.reference.digest()}

    def _prompts_used(self, step: int, *, is_shifted: bool) -> int:
        """Prompts that a run of these sizes has used after `step` optimizer steps, without its offset."""
        num_rows = None if isinstance(self.train_dataset, IterableDataset) else len(self.train_dataset)  # pyright: ignore
        drop_last = self.args.dataloader_drop_last
        return self.plan.prompts_used(step, num_rows, drop_last=drop_last, is_shifted=is_shifted)

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
        run_folder = Path(self._get_output_dir(self.trial))
        self._end_save()
        with dist.errors_on_all_ranks():
            if self.args.should_save and os.access(run_folder, os.W_OK):
                saving.sweep(run_folder)
        self._not_saved, self._saved_step, self._data_offset = None, None, 0
        reference = self._reference_identity()  # now, since DeepSpeed may change the weights' dtype later
        kept = self._kept_state
        if kept is not None and kept.fits(self, request):
            kept.take_schedule(self)
            self._resumed_from = ResumePoint(kept.checkpoint, Manifest.read(kept.checkpoint))
            self._continue_data(self._resumed_from)
            return str(kept.checkpoint)
        self._kept_state = None
        allow_partial = self.args.allow_partial_resume
        self._resumed_from = choose(run_folder, request, allow_partial=allow_partial)
        if self._resumed_from is None:
            return None
        with dist.errors_on_all_ranks():
            resumed_parameters.check(self, self._resumed_from, reference)
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
        """Collective under FSDP. Restores the weights, whole or in shards, whichever way they were saved."""
        if self._kept(resume_from_checkpoint) is not None:
            return
        inner = unwrap(model or self.model)
        if sharded_files.is_present(resume_from_checkpoint):
            sharded_files.load_model(resume_from_checkpoint, inner, trained_only=is_adapted(inner))
            return
        with whole_parameters(inner, keep_changes=True):
            if not load_renamed_checkpoint(inner, resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """`Trainer`'s, without the second names of tied weights, which no checkpoint has."""
        tensors = unwrap(self.model).state_dict(keep_vars=True)
        loaded = {id(tensor) for name, tensor in tensors.items() if name not in load_result.missing_keys}
        missing = [name for name in load_result.missing_keys if id(tensors.get(name)) not in loaded]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_best_model(self) -> None:
        folder, inner = self.state.best_model_checkpoint, unwrap(self.model)
        if folder is not None:
            choose(Path(str(self.args.output_dir)), folder)
        if folder is not None and sharded_files.is_present(folder):
            sharded_files.load_model(folder, inner, trained_only=is_adapted(inner))
            return
        with whole_parameters(inner, keep_changes=True):
            if self.is_deepspeed_enabled or folder is None or not load_renamed_checkpoint(inner, folder):
                super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restores optimizer, scheduler and the run's state. CheckpointError if the optimizer is another one."""
        point = self._resumed_from
        if checkpoint is None or point is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if (kept := self._kept(checkpoint)) is not None:
            kept.restore(self)
            return
        then = {} if point.manifest is None else point.manifest.options
        intervals = resumed_options.changed_intervals(self.state, self.args)
        configured = resumed_options.optimizer_options(self.optimizer)
        if self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
        restored = self.is_deepspeed_enabled or resumed_optimizer.restore(self, point)
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
            reference=model_source(self.model) if self.reference is not None else None,
        )
        dropout = resumed_parameters.changed_dropout(point.folder, point.manifest, self.model)
        further = [resumed_options.ChangedOption(name, *values) for name, values in dropout.items()]
        resumed_options.report([*rows, *intervals, *further], checkpoint)
        if restored and self.args.resume_learning_rate:
            resumed_options.apply_learning_rate(self.optimizer, self.lr_scheduler, configured, old)
        if restored and rows:
            resumed_options.apply_schedule(self.optimizer, self.lr_scheduler)
        self.run_state.load(checkpoint, world_size=point.world_size, without=point.damage)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._kept(checkpoint) is None and (checkpoint is None or self._is_intact("scaler.pt")):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if (kept := self._kept(checkpoint)) is not None:
            set_random_states(kept.random_states)
            self._kept_state = None  # nothing is restored after the random streams
            return
        name = "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"
        if checkpoint is None or self._is_intact(name):
            super()._load_rng_state(checkpoint)

    def _kept(self, checkpoint: str | None) -> KeptState | None:
        """The state of a checkpoint, if this trainer still has it."""
        kept = self._kept_state
        return kept if kept is not None and checkpoint is not None and Path(checkpoint) == kept.checkpoint else None

    def _is_intact(self, name: str) -> bool:
        return self._resumed_from is None or name not in self._resumed_from.damage


def _say(text: str, *values: object) -> None:
    if dist.is_main():
        logger.warning(text, *values)
