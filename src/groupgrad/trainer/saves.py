"""Writes the checkpoints of a run: whole or not there."""

# What a checkpoint holds, in the order in which `checkpoints/saving.py` has it written to a folder aside:
#
#   the model        as `save_model` writes it; in shards for a run under FSDP that may resume
#   the optimizer    with schedule and scaler                       not with `save_only_model`
#   the run's state  random streams, and `RunState` of each rank    not with `save_only_model`
#   the trainer's    counts, logs, the best step, states of callbacks
#   the manifest     `_description`, and size and digest of each file; then the folder gets its name
#
# `checkpoints/choosing.py` verifies the digests before a run resumes, and `resuming.py` loads in the order above.

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from groupgrad import dist, stopping
from groupgrad.activity import doing
from groupgrad.checkpoints import saving, sharded_files
from groupgrad.checkpoints.manifest import SCHEDULER, TRAINER_STATE
from groupgrad.errors import CheckpointNotSaved, NonFiniteError
from groupgrad.models.adapters import adapter_settings, is_adapted
from groupgrad.models.load import nonfinite_weights
from groupgrad.models.shards import is_fully_sharded, unsharded_classes
from groupgrad.models.unwrapping import unwrap
from groupgrad.run_folder.progress import bars_on_terminals_only
from groupgrad.trainer import changed_options
from groupgrad.trainer.resuming import Resume, optimizer_class, trained_parameters

logger = logging.getLogger(__name__)


class Saves:
    """The checkpoints of one trainer. It takes the place of `Trainer._save_checkpoint`, which writes in place."""

    def __init__(self, trainer: Any, resume: Resume):
        self._trainer, self._resume = trainer, resume
        self.not_saved: str | None = None
        """Why the last checkpoint of this training could not be written; None if it was."""
        self.last_step: int | None = None
        """The last step that this training has saved in its folder."""

    def begin_training(self) -> None:
        """Collective. Begins anew, without the saves of an earlier training, and deletes unfinished checkpoints."""
        trainer = self._trainer
        run_folder = Path(trainer._get_output_dir(trainer.trial))
        with dist.errors_on_all_ranks():
            if trainer.args.should_save and os.access(run_folder, os.W_OK):
                saving.sweep(run_folder)
        self.not_saved = self.last_step = None

    def write(self, trial: Any, *, is_pause: bool = False) -> None:
        """Collective. Writes the checkpoint of the present step; without space training goes on and a later save may
        succeed. `is_pause` for the checkpoint of a pause, which a run without pauses does not have."""
        trainer = self._trainer
        if not is_pause:
            with trainer.goes_on_without("the model card"):
                trainer.create_model_card()  # before the checkpoint, which is pushed with it
        with stopping.finishing(), doing("saving"):
            if trainer.hp_search_backend is None and trial is None:
                trainer.store_flos()
            best = trainer.state.best_model_checkpoint
            vars(trainer.callback_handler).pop("on_save", None)
            folder, step = Path(trainer._get_output_dir(trial=trial)), trainer.state.global_step
            try:
                saved = saving.save(folder, step, self._parts(folder), self._description)
            except saving.SaveFailed as error:
                self.not_saved, trainer.state.best_model_checkpoint = str(error), best
                logger.error("%s; older checkpoints are as they were, and training goes on without this one", error)
                self._skip_on_save()
                return
            self.not_saved, self.last_step = None, step
            if trainer.args.push_to_hub:
                trainer._push_from_checkpoint(str(saved))
            if trainer.args.should_save:  # older ones go once this one has its name
                saving.rotate(folder, trainer.args.save_total_limit, saved, trainer.state.best_model_checkpoint)

    def raise_if_not_saved(self) -> None:
        """CheckpointNotSaved if the training that has just ended could not write its last checkpoint."""
        if self.not_saved is not None:
            raise CheckpointNotSaved(
                f"{self.not_saved}; all {self._trainer.state.global_step} steps were made, and the weights are in "
                "memory: trainer.save_model(folder) writes them where there is space"
            )

    def save_model(self, folder: str, *, pushes: bool, otherwise: Callable[[str, bool], None]) -> None:
        """Writes the model: one that is sharded as whole weights of the main process, another by `otherwise`.

        Collective for a sharded model. `pushes` allows a push to the hub, which a checkpoint makes by itself.
        NonFiniteError for weights that are not finite.
        """
        trainer = self._trainer
        self.check_weights()
        with bars_on_terminals_only():
            if not is_fully_sharded(trainer.model):
                otherwise(folder, not pushes)
                return
            from groupgrad.integrations.sharding.fsdp import whole_state_dict

            weights = whole_state_dict(trainer.model)
            with unsharded_classes(trainer.model):
                trainer._save(folder, state_dict=weights)
            if trainer.args.push_to_hub and pushes:
                trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def check_weights(self) -> None:
        """NonFiniteError, on every rank that has them, for trained weights that are not finite.

        Collective for a model that FSDP shards, of which one rank may have them alone: all ranks raise.
        """
        trainer = self._trainer
        with dist.errors_on_all_ranks() if is_fully_sharded(trainer.model) else nullcontext():
            if bad := nonfinite_weights(unwrap(trainer.model), trained_only=True):
                raise NonFiniteError(
                    f"step {trainer.state.global_step}: {bad}, so they are not saved; go on from the last checkpoint "
                    "with a lower learning_rate"
                )

    def _skip_on_save(self) -> None:
        """Skips `on_save` for a checkpoint that is not there: some callbacks would read it."""
        handler: Any = self._trainer.callback_handler

        def skipped(args: Any, state: Any, control: Any) -> Any:
            vars(handler).pop("on_save")
            control.should_save = False
            return control

        handler.on_save = skipped

    # ------------------------------------------------------------------------------------------- what is written

    def _parts(self, run_folder: Path) -> list[Callable[[Path], None]]:
        """Functions that write this rank's parts of a checkpoint into a folder; the ranks meet between them."""
        parts = [self._write_model]
        if not self._trainer.args.save_only_model:
            parts += [self._write_optimizer, self._write_run_state]
        return [*parts, lambda aside: self._write_trainer_state(run_folder, aside)]

    def _write_model(self, aside: Path) -> None:
        """Collective. The model as `save_model` writes it; for a run that FSDP shards and may resume, in shards."""
        trainer = self._trainer
        if not is_fully_sharded(trainer.model) or trainer.args.save_only_model:
            trainer.save_model(str(aside), _internal_call=True)
            return
        self.check_weights()
        sharded_files.save_model(aside, trainer.model, trained_only=is_adapted(trainer.model))
        if trainer.args.should_save:
            self._write_beside_weights(str(aside))

    def _write_beside_weights(self, folder: str) -> None:
        """Writes the configurations, the tokenizer and the arguments, as `Trainer._save` does beside the weights."""
        model: Any = self._trainer.model
        for config in (*getattr(model, "peft_config", {}).values(), model.config, model.generation_config):
            config.save_pretrained(folder)
        if self._trainer.processing_class is not None:
            self._trainer.processing_class.save_pretrained(folder)
        torch.save(self._trainer.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _write_optimizer(self, aside: Path) -> None:
        """Collective under FSDP, whose optimizer is written in shards."""
        trainer = self._trainer
        if is_fully_sharded(trainer.model):
            sharded_files.save_optimizer(aside, trainer.model, trainer.optimizer)
            if trainer.args.should_save:
                scheduler: Any = trainer.lr_scheduler
                torch.save(scheduler.state_dict(), aside / SCHEDULER)
        else:
            trainer._save_optimizer_and_scheduler(str(aside))
        trainer._save_scaler(str(aside))

    def _write_run_state(self, aside: Path) -> None:
        """Random streams, and all state beyond them that a step depends on."""
        self._trainer._save_rng_state(str(aside))
        self._trainer.run_state.save(aside)

    def _write_trainer_state(self, run_folder: Path, aside: Path) -> None:
        trainer = self._trainer
        self._note_best(run_folder, aside)
        if trainer.args.should_save:
            self._collect_callback_states()
            trainer.state.save_to_json(str(aside / TRAINER_STATE))

    def _note_best(self, run_folder: Path, aside: Path) -> None:
        """Names the best checkpoint by the path that it has, or will have, in the run's folder."""
        state = self._trainer.state
        if state.best_global_step:
            best = run_folder / f"checkpoint-{state.best_global_step}"
            if best.name == aside.name or best.exists():
                state.best_model_checkpoint = str(best)

    def _collect_callback_states(self) -> None:
        trainer = self._trainer
        states: dict[str, Any] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        callback_states: Any = trainer.state.stateful_callbacks
        for name, found in states.items():
            callback_states[name] = found if len(found) > 1 else found[0]

    def _description(self) -> dict[str, Any]:
        """The manifest's fields beside step, ranks and files."""
        trainer = self._trainer
        has_optimizer = not trainer.args.save_only_model
        return {
            "versions": changed_options.installed_versions(),
            "options": changed_options.deciding_options(trainer.args),
            "optimizer": optimizer_class(trainer.optimizer) if has_optimizer else None,
            "prompts_used": self._resume.prompts_used(trainer.state.global_step),
            "trained": trained_parameters(trainer.model, trainer.optimizer),
            "adapter": json.loads(json.dumps(adapter_settings(unwrap(trainer.model)), default=str)),
            "reference": self._resume.reference_identity(),
        }
