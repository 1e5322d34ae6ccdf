"""Resumes a run from a verified checkpoint: weights, optimizer, schedule, data and random streams.

A run goes on with the parameters that its checkpoint has trained. The manifest names them and the adapter's settings,
so that others are refused before anything is loaded. Checkpoints without a manifest have the settings alone; what else
differs shows when their weights and their optimizer's state are loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from groupgrad import dist
from groupgrad.checkpoints import sharded_files
from groupgrad.checkpoints.choosing import ResumePoint, choose
from groupgrad.checkpoints.manifest import OPTIMIZER, SCHEDULER, Manifest
from groupgrad.errors import CheckpointError
from groupgrad.models.adapters import active_adapters, adapter_settings, is_adapted, leaves_base_unchanged_by
from groupgrad.models.load import load_renamed_checkpoint
from groupgrad.models.model_names import model_source
from groupgrad.models.shards import is_fully_sharded, is_sharded
from groupgrad.models.unwrapping import unwrap
from groupgrad.models.weights import plain_name
from groupgrad.trainer import changed_options

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
            _check_parameters(trainer, self.point, reference)
        if self.point.damage:
            lost = ", ".join(f"{name}, which {reason}" for name, reason in self.point.damage.items())
            _say("allow_partial_resume: %s starts without %s", self.point.folder, lost)
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
            _say("steps had other sizes in %s: the data go on behind its %d prompts", point.folder, used)

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
                raise_if_missing(missing, inner, folder)

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
        args, optimizer, scheduler = trainer.args, trainer.optimizer, trainer.lr_scheduler
        then = dict({} if point.manifest is None else point.manifest.options)
        now = changed_options.deciding_options(args)
        intervals = changed_options.changed_intervals(trainer.state, args)
        if trainer.is_deepspeed_enabled:
            otherwise()
            restored = True
        else:
            now["learning_rate"] = _learning_rate(optimizer)
            if restored := _restore_optimizer(trainer, point):
                then["learning_rate"] = _learning_rate(optimizer)
        rows = changed_options.differences(
            then,
            now,
            keeps_optimizer=restored,
            new_learning_rate=args.resume_learning_rate,
            reference=model_source(trainer.model) if trainer.reference is not None else None,
        )
        changed_options.report([*rows, *intervals], checkpoint)
        rates: tuple[Any, Any] = now["learning_rate"], then.get("learning_rate")
        if restored and args.resume_learning_rate and all(rates):
            scale_learning_rate(optimizer, scheduler, rates[0] / rates[1])
        if restored and rows:
            _apply_schedule(optimizer, scheduler)
        trainer.run_state.load(checkpoint, world_size=point.world_size, without=point.damage)

    def load_random_streams(self, checkpoint: str | None, otherwise: Callable[[], None]) -> None:
        """Restores the random streams, unless their file is damaged."""
        args = self._trainer.args
        name = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
        if checkpoint is None or self.point is None or name not in self.point.damage:
            otherwise()


# ------------------------------------------------------------------------------------------ optimizer and schedule

_OF_PARAMETERS_SHAPE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum", "z"),
    *("acc_delta", "prev", "state1", "state2"),
}
"""States that optimizers keep for each number of a parameter."""


def optimizer_class(optimizer: Any) -> str:
    """Class of an optimizer, without accelerate's wrapper."""
    return type(getattr(optimizer, "optimizer", None) or optimizer).__name__


def _restore_optimizer(trainer: Any, point: ResumePoint) -> bool:
    """Restores the optimizer and the schedule of a run without DeepSpeed; True if the optimizer has a state.

    Collective under FSDP. What is damaged or missing, and with `allow_partial_resume` what does not fit, starts anew,
    the schedule at its step.
    """
    optimizer, scheduler, folder = trainer.optimizer, trainer.lr_scheduler, point.folder
    partial = trainer.args.allow_partial_resume
    saved, present = point.manifest and point.manifest.optimizer, optimizer_class(optimizer)
    if saved is not None and saved != present:
        if not partial:
            raise CheckpointError(
                f"the optimizer of {folder} is {saved} and this run's is {present} (optim="
                f"{trainer.args.optimizer_name!r}), which cannot continue its state; set optim as it was, or "
                "allow_partial_resume=True to begin with a new optimizer"
            )
        _say("the optimizer of %s is %s, this run's %s starts anew", folder, saved, present)
        _forward_schedule(trainer)
        return False
    missing = [name for name in (OPTIMIZER, SCHEDULER) if not (folder / name).is_file()]
    if len(missing) == 2:
        _say("%s holds no optimizer: a new one starts, at the step of the schedule", folder)
        _forward_schedule(trainer)
        return False
    in_shards = sharded_files.is_present(folder)
    lacks = [name for name in (OPTIMIZER, SCHEDULER) if name in point.damage]
    lacks += [name for name in missing if name not in lacks and not (in_shards and name == OPTIMIZER)]
    if lacks and not partial:
        raise CheckpointError(
            f"{folder} lacks {lacks[0]}, without which the run would go on otherwise than it began; resume from "
            "another checkpoint, or set allow_partial_resume=True to begin anew with what is missing"
        )
    if is_fully_sharded(trainer.model) and not in_shards:
        raise CheckpointError(
            f"the optimizer of {folder} was saved without FSDP, and this run shards its own; resume without fsdp, or "
            "start a new run from its weights (model=the checkpoint's folder)"
        )
    if in_shards:
        sharded_files.load_optimizer(folder, trainer.model, optimizer)
    elif OPTIMIZER not in lacks and not _load_optimizer(trainer, point):
        lacks.append(OPTIMIZER)
    if lacks:
        _forward_schedule(trainer)
        _say("%s of %s: %s anew", " and ".join(lacks), folder, "start" if len(lacks) > 1 else "starts")
    else:
        scheduler.load_state_dict(torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True))
    return OPTIMIZER not in lacks


def _forward_schedule(trainer: Any) -> None:
    """Moves a new scheduler to the step of the run."""
    scheduler = trainer.lr_scheduler
    if hasattr(scheduler, "last_epoch"):
        scheduler.last_epoch = trainer.state.global_step - 1
        scheduler._step_count = trainer.state.global_step
        scheduler.step()


def _learning_rate(optimizer: Any) -> float | None:
    """The learning rate before the schedule; None for an optimizer that finds its own."""
    group = optimizer.param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    return None if rate is None else float(rate)


def scale_learning_rate(optimizer: Any, scheduler: Any, factor: float) -> None:
    """Multiplies the learning rates of a restored optimizer and its schedule, which goes on at its step."""
    if factor == 1:
        return
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] = group[key] * factor
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]


def _apply_schedule(optimizer: Any, scheduler: Any) -> None:
    """Sets a restored optimizer's learning rates by this run's schedule instead of the checkpoint's.

    Only schedules that are functions of the step have them; others go on from the checkpoint's.
    """
    if isinstance(scheduler, LambdaLR):
        rates = [rate * part(scheduler.last_epoch) for rate, part in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        scheduler._last_lr = rates


def _load_optimizer(trainer: Any, point: ResumePoint) -> bool:
    """False if the optimizer's state does not fit, which is a CheckpointError unless the resume may be partial."""
    args, optimizer = trainer.args, trainer.optimizer
    on_device = args.world_size > 1 and args.device.type != "cpu"  # several copies may not fit into host memory
    place = args.device if on_device else "cpu"
    state = torch.load(point.folder / OPTIMIZER, map_location=place, weights_only=True)
    then, now = point.manifest and point.manifest.trained, list(trained_parameters(trainer.model, optimizer))
    problem = _problem(state, optimizer, None if then is None else list(then), now)
    if problem is None:
        optimizer.load_state_dict(state)
        return True
    if not args.allow_partial_resume:
        raise CheckpointError(
            f"the optimizer of {point.folder} has the state of other parameters than this run trains: {problem}. "
            "Freeze and train what the checkpoint's run did, with the same model and adapter, or set "
            "allow_partial_resume=True to begin with a new optimizer"
        )
    _say("the optimizer of %s does not fit: %s", point.folder, problem)
    return False


def _problem(state: Mapping[str, Any], optimizer: Any, then: list[str] | None, now: list[str]) -> str | None:
    """Why a state cannot be this optimizer's; None if its groups and names fit, or, where it has none, its shapes."""
    sizes_then = [len(group["params"]) for group in state["param_groups"]]
    sizes_now = [len(group["params"]) for group in optimizer.param_groups]
    if sizes_then != sizes_now:
        return f"its groups have {sizes_then} parameters and this run's {sizes_now}"
    if then is not None:
        return None if then == now else "it holds others, or the same ones in another order"
    place, found = 0, []
    for old, group in zip(state["param_groups"], optimizer.param_groups):
        for key, parameter in zip(old["params"], group["params"]):
            shapes = {
                tuple(value.shape)
                for name, value in state["state"].get(key, {}).items()
                if name in _OF_PARAMETERS_SHAPE and isinstance(value, torch.Tensor) and value.dim()
            }
            # A projection to a lower rank (GaLore) has states of another shape, and Adafactor may have none of it.
            if shapes and tuple(parameter.shape) not in shapes and "rank" not in group:
                found.append(f"{now[place]} is {tuple(parameter.shape)} here and {min(shapes)} there")
            place += 1
    return "; ".join(found[:4]) or None


# ----------------------------------------------------------------------------------------------- what is trained

_ADAPTER_CONFIG = "adapter_config.json"

_NUM_SHOWN = 4
"""Parameters that an error names of each kind."""

_SEEN_IN_NAMES = {
    *("r", "rank_pattern", "target_modules", "exclude_modules", "modules_to_save", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "trainable_token_indices"),
}
"""Settings of an adapter that change the trained parameters' names or shapes, or nothing."""
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying"),
    *("megatron_config", "megatron_core"),
}
_INITIALISATION = "init_lora_weights"


def _check_parameters(trainer: Any, point: ResumePoint, reference: Mapping[str, str] | None) -> None:
    """CheckpointError if the run trains other parameters than the checkpoint's, or has another reference.

    With `allow_partial_resume` other parameters of the same model are a warning, and the optimizer begins anew.
    """
    model, by_order = unwrap(trainer.model), trainer.is_deepspeed_enabled
    folder, manifest, partial = point.folder, point.manifest, trainer.args.allow_partial_resume
    then = None if manifest is None else manifest.trained
    now = trained_parameters(model, trainer.optimizer)
    trained = [] if then is None else _differences(then, now, by_order=by_order)
    settings_then, settings_now = _adapter_then(folder, manifest, model), adapter_settings(model)
    adapter: list[str] = []
    if (settings_then is None) != (settings_now is None):
        adapter, trained = [_adapter_on_one_side(settings_then)], []
    elif settings_then is not None and settings_now is not None:
        adapter = _other_settings(settings_then, settings_now, all_of_them=then is None or bool(trained))
    if adapter or trained:
        # A checkpoint of an adapter has no weights but the trained ones.
        is_whole = settings_now is None and not (by_order or sharded_files.is_present(folder))
        if not (is_whole and partial and trained):
            raise _misfit(folder, adapter, trained, may_be_partial=is_whole and not adapter)
        _say("allow_partial_resume: %s: %s; the optimizer begins anew", folder, "; ".join(trained))
    if manifest is not None and manifest.reference is not None and reference is not None:
        _check_reference(folder, manifest.reference, reference, allow_partial=partial)


def _misfit(folder: Path, adapter: list[str], trained: list[str], *, may_be_partial: bool) -> CheckpointError:
    if adapter:
        remedy = "give the adapter the settings that it had"
    else:
        remedy = "load the model that it began with, and freeze and train what its run did, in the same dtype"
    remedy += ", or begin a new run from its weights (model=the checkpoint's folder, without a resume)"
    if may_be_partial:
        remedy += ", or set allow_partial_resume=True, with which the optimizer begins anew"
    found = "; ".join([*adapter, *trained])
    return CheckpointError(f"{folder} has other parameters than this run: {found}. To go on, {remedy}")


def _check_reference(folder: Path, then: Mapping[str, str], now: Mapping[str, str], *, allow_partial: bool) -> None:
    """CheckpointError if the KL divergence would be measured from another model; a warning if that is allowed."""
    parts_then, parts_now = (each["digest"].partition(":")[0] for each in (then, now))
    if parts_then != parts_now or then["digest"] == now["digest"]:
        return  # shards of other numbers of ranks cannot be compared
    text = (
        f"the KL divergence of {folder} was measured from {then['name']!r}, and this run has a reference with other "
        f"weights ({now['name']!r})"
    )
    if not allow_partial:
        raise CheckpointError(
            f"{text}. Pass the model that the run began with (model={then['name']!r}), to which the checkpoint's "
            "weights are then loaded; or set allow_partial_resume=True to measure from the new reference"
        )
    _say("allow_partial_resume: %s, from which it is measured from now on", text)


def raise_if_missing(names: Iterable[str], model: Any, folder: str | Path) -> None:
    """CheckpointError for weights that a checkpoint lacks, but for second names of tied weights, which none has."""
    tensors = unwrap(model).state_dict(keep_vars=True)
    missing = set(names)
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    ignored = set(getattr(unwrap(model), "_keys_to_ignore_on_save", None) or ())
    if lost := [name for name in tensors if name in missing - ignored and id(tensors[name]) not in loaded]:
        raise CheckpointError(
            f"{folder} lacks weights of this run's model: {_some(lost)}. To go on, load the model that it began with"
        )


def trained_parameters(model: nn.Module, optimizer: Any = None) -> dict[str, str]:
    """Dtype and shape of each trained parameter by name.

    They are in the order in which `optimizer` numbers them, or else in the model's.
    """
    named = {id(parameter): (plain_name(name), parameter) for name, parameter in unwrap(model).named_parameters()}
    trained = [key for key, (_, parameter) in named.items() if parameter.requires_grad]
    groups = getattr(optimizer, "param_groups", None) or []
    numbered = [id(parameter) for group in groups for parameter in group["params"]]
    if any(key not in named for key in numbered):  # DeepSpeed's are flat
        numbered = []
    return {named[key][0]: _described(named[key][1]) for key in dict.fromkeys([*numbered, *trained])}


def _differences(then: Mapping[str, str], now: Mapping[str, str], *, by_order: bool) -> list[str]:
    """Sentences about parameters that only one run trains, or trains in another shape or dtype.

    `by_order`: the optimizer's state can only be matched by the order of the parameters, and dtypes are its affair.
    """
    found = []
    if added := [f"{name} ({now[name]})" for name in now if name not in then]:
        found.append(f"not trained then: {_some(added)}")
    if removed := [f"{name} ({then[name]})" for name in then if name not in now]:
        found.append(f"trained then and not now: {_some(removed)}")
    changed = [
        f"{name} is {then[name]} there and {now[name]} here"
        for name in now
        if name in then and then[name] != now[name] and not (by_order and _shape(then[name]) == _shape(now[name]))
    ]
    if changed:
        found.append(f"changed: {_some(changed)}")
    if by_order and not found and list(then) != list(now):
        found.append("the parameters have another order, by which alone DeepSpeed knows them")
    return found


def _adapter_then(folder: Path, manifest: Manifest | None, model: Any) -> Mapping[str, Any] | None:
    if manifest is not None and manifest.trained is not None:
        return manifest.adapter
    names = active_adapters(model) if is_adapted(model) else []
    for path in (place / _ADAPTER_CONFIG for place in (folder, *(folder / name for name in names))):
        if path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            return {name: value for name, value in settings.items() if value is not None}
    return None


def _adapter_on_one_side(then: Mapping[str, Any] | None) -> str:
    if then is None:
        return "it holds a whole model and this run trains an adapter: leave peft_config away"
    settings = ", ".join(f"{name}={then[name]!r}" for name in ("r", "lora_alpha", "target_modules") if name in then)
    return (
        f"it holds a {then.get('peft_type', 'PEFT')} adapter ({settings}) and this run trains the whole model: pass "
        "the peft_config that it was made with"
    )


def _other_settings(then: Mapping[str, Any], now: Mapping[str, Any], *, all_of_them: bool) -> list[str]:
    """Sentences about settings that decide what the same weights compute; `all_of_them` adds those seen in names."""
    left_out = _WITHOUT_EFFECT if all_of_them else _WITHOUT_EFFECT | _SEEN_IN_NAMES
    return [
        f"the adapter's {name} was {then[name]!r} and is {value!r} now"
        for name, value in json.loads(json.dumps(dict(now), default=str)).items()
        if name in then
        and name not in left_out
        and not name.endswith("dropout")  # which a run may change
        and _sorted(then[name]) != _sorted(value)
        and not (name == _INITIALISATION and all(map(leaves_base_unchanged_by, (then[name], value))))
    ]


def _described(parameter: Any) -> str:
    shape = "x".join(map(str, getattr(parameter, "ds_shape", parameter.shape))) or "scalar"
    return f"{str(parameter.dtype).removeprefix('torch.')} {shape}"


def _shape(text: str) -> str:
    return text.partition(" ")[2]


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value


def _some(texts: list[str]) -> str:
    more = len(texts) - _NUM_SHOWN
    return ", ".join(texts[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _say(text: str, *values: object) -> None:
    if dist.is_main():
        logger.warning(text, *values)
