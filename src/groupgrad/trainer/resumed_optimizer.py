"""Restores an optimizer and its schedule from a checkpoint, each parameter's state by the parameter's name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from groupgrad import dist
from groupgrad.checkpoints import sharded_files
from groupgrad.checkpoints.choosing import ResumePoint
from groupgrad.checkpoints.manifest import OPTIMIZER, SCHEDULER
from groupgrad.errors import CheckpointError
from groupgrad.models.shards import is_fully_sharded
from groupgrad.trainer.resumed_parameters import trained_parameters

logger = logging.getLogger(__name__)

OPTIMIZER_OPTIONS = {
    "learning_rate": ("initial_lr", None),
    "weight_decay": ("weight_decay", None),
    "adam_beta1": ("betas", 0),
    "adam_beta2": ("betas", 1),
    "adam_epsilon": ("eps", None),
}
"""Option -> key and index in an optimizer's parameter groups, which a checkpoint restores."""

_OF_PARAMETERS_SHAPE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum", "z"),
    *("acc_delta", "prev", "state1", "state2"),
}
"""States that optimizers keep for each number of a parameter."""


def class_name(optimizer: Any) -> str:
    """Class of an optimizer, without accelerate's wrapper."""
    return type(getattr(optimizer, "optimizer", None) or optimizer).__name__


def restore(trainer: Any, point: ResumePoint) -> bool:
    """Restores the optimizer and the schedule of a run without DeepSpeed; True if the optimizer has a state.

    Collective under FSDP. What is damaged or missing starts anew, the schedule at its step. CheckpointError if the
    optimizer is another one.
    """
    optimizer, scheduler, folder = trainer.optimizer, trainer.lr_scheduler, point.folder
    partial = trainer.args.allow_partial_resume
    saved, present = point.manifest and point.manifest.optimizer, class_name(optimizer)
    if saved is not None and saved != present:
        if not partial:
            raise CheckpointError(
                f"the optimizer of {folder} is {saved} and this run's is {present} (optim="
                f"{trainer.args.optimizer_name!r}), which cannot continue its state; set optim as it was, or "
                "allow_partial_resume=True to begin with a new optimizer"
            )
        _say("the optimizer of %s is %s, this run's %s starts anew", folder, saved, present)
        forward_scheduler(trainer)
        return False
    missing = [name for name in (OPTIMIZER, SCHEDULER) if not (folder / name).is_file()]
    if len(missing) == 2:
        _say("%s holds no optimizer: a new one starts, at the step of the schedule", folder)
        forward_scheduler(trainer)
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
    has_groups = True
    if in_shards:
        sharded_files.load_optimizer(folder, trainer.model, optimizer)
    elif OPTIMIZER not in lacks:
        is_loaded, has_groups = _load(trainer, point)
        lacks += [] if is_loaded else [OPTIMIZER]
    if not lacks and has_groups:
        scheduler.load_state_dict(torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True))
    else:
        forward_scheduler(trainer)
    if lacks:
        _say("%s of %s: %s anew", " and ".join(lacks), folder, "start" if len(lacks) > 1 else "starts")
    return OPTIMIZER not in lacks


def forward_scheduler(trainer: Any) -> None:
    """Moves a new scheduler to the step of the run."""
    scheduler = trainer.lr_scheduler
    if hasattr(scheduler, "last_epoch"):
        scheduler.last_epoch = trainer.state.global_step - 1
        scheduler._step_count = trainer.state.global_step
        scheduler.step()


def optimizer_options(optimizer: Any) -> dict[str, Any]:
    """The options that an optimizer's first parameter group has as numbers; others of `OPTIMIZER_OPTIONS` are left out.

    Some optimizers use the names for other things, as Adafactor does for a pair of `eps`.
    """
    groups = getattr(optimizer, "param_groups", None) or [{}]
    group = {**groups[0], "initial_lr": groups[0].get("initial_lr", groups[0].get("lr"))}
    found: dict[str, Any] = {}
    for name, (key, index) in OPTIMIZER_OPTIONS.items():
        value = group.get(key)
        value = value[index] if index is not None and isinstance(value, (list, tuple)) else value
        if isinstance(value, (int, float, torch.Tensor)):
            found[name] = float(value)
    return found


def apply_learning_rate(optimizer: Any, scheduler: Any, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Scales the learning rates of a restored optimizer and its scheduler from the checkpoint's to the configured one.

    The schedule goes on at its step, towards the new rate.
    """
    if "learning_rate" not in new or not old.get("learning_rate") or new["learning_rate"] == old["learning_rate"]:
        return
    factor = new["learning_rate"] / old["learning_rate"]
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] = group[key] * factor
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]


def apply_schedule(optimizer: Any, scheduler: Any) -> None:
    """Sets a restored optimizer's learning rates by this run's schedule instead of the checkpoint's.

    Only schedules that are functions of the step have them; others go on from the checkpoint's.
    """
    if isinstance(scheduler, LambdaLR):
        rates = [rate * part(scheduler.last_epoch) for rate, part in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        scheduler._last_lr = rates


def _load(trainer: Any, point: ResumePoint) -> tuple[bool, bool]:
    """Whether the state fits this optimizer, and whether it has as many groups of parameters.

    CheckpointError if it does not fit, unless the resume may be partial.
    """
    args, optimizer = trainer.args, trainer.optimizer
    on_device = args.world_size > 1 and args.device.type != "cpu"  # several copies may not fit into host memory
    place = args.device if on_device else "cpu"
    state = torch.load(point.folder / OPTIMIZER, map_location=place, weights_only=True)
    now = list(trained_parameters(trainer.model, optimizer))
    then = None if point.manifest is None or point.manifest.trained is None else list(point.manifest.trained)
    num_groups = len(state["param_groups"])
    if then is not None and then != now:
        state = matched_by_name(state, then, optimizer.state_dict()["param_groups"], now)
    elif then is None and (problem := _problem(state, optimizer, now)):
        if not args.allow_partial_resume:
            raise CheckpointError(
                f"the optimizer of {point.folder} has the state of other parameters than this run trains: {problem}. "
                "Freeze and train what the checkpoint's run did, with the same model and adapter, or set "
                "allow_partial_resume=True to begin with a new optimizer"
            )
        _say("the optimizer of %s does not fit: %s", point.folder, problem)
        return False, num_groups == len(optimizer.param_groups)
    optimizer.load_state_dict(state)
    return True, num_groups == len(optimizer.param_groups)


def matched_by_name(
    state: Mapping[str, Any], then: Sequence[str], groups: Sequence[Mapping[str, Any]], now: Sequence[str]
) -> dict[str, Any]:
    """An optimizer's saved state for parameters in another order or other groups; new parameters have none.

    The optimizer that was saved numbers its parameters as `then` names them, the present one as `now` does and in the
    `groups` of its own state. A group goes on with the options of the one that its first known parameter was in; one
    of new parameters takes the learning rate alone.
    """
    places = {name: place for place, name in enumerate(then)}
    options = {place: group for group in state["param_groups"] for place in group["params"]}
    rates = {key: value for key, value in state["param_groups"][0].items() if key in ("lr", "initial_lr")}
    states: dict[int, Any] = {}
    merged: list[dict[str, Any]] = []
    for group in groups:
        numbers: list[int] = group["params"]
        old_place_of = {place: places[now[place]] for place in numbers if places.get(now[place]) in options}
        states |= {place: state["state"][old] for place, old in old_place_of.items() if old in state["state"]}
        first = next(iter(old_place_of.values()), None)
        merged.append({**group, **(rates if first is None else options[first]), "params": group["params"]})
    return {**state, "state": states, "param_groups": merged}


def _problem(state: Mapping[str, Any], optimizer: Any, names: Sequence[str]) -> str | None:
    """Why a state without names cannot be this optimizer's; None if its groups and shapes fit."""
    sizes_then = [len(group["params"]) for group in state["param_groups"]]
    sizes_now = [len(group["params"]) for group in optimizer.param_groups]
    if sizes_then != sizes_now:
        return f"its groups have {sizes_then} parameters and this run's {sizes_now}"
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
                found.append(f"{names[place]} is {tuple(parameter.shape)} here and {min(shapes)} there")
            place += 1
    return "; ".join(found[:4]) or None


def _say(text: str, *values: object) -> None:
    if dist.is_main():
        logger.warning(text, *values)
