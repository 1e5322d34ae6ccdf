"""Compares the options of a checkpoint with those of the run that resumes from it."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from groupgrad import compat, dist
from groupgrad.config import GRPOConfig

logger = logging.getLogger(__name__)

_PREFIXES = (
    *("dataloader_", "eval_", "hub_", "log_", "logging_", "push_to_hub", "record_", "report_", "save_", "skip_"),
    "trackio_",
)
_WITHOUT_INFLUENCE = {
    *("allow_partial_resume", "auto_find_batch_size", "ddp_timeout", "debug", "disable_tqdm", "do_eval"),
    *("derived_settings", "do_predict", "do_train", "enable_jit_checkpoint", "greater_is_better"),
    *("include_for_metrics", "include_num_input_tokens_seen", "load_best_model_at_end", "local_rank"),
    *("metric_for_best_model", "num_completions_to_print", "num_generations_eval", "output_dir"),
    "per_device_eval_batch_size",
    *("prediction_loss_only", "project", "ray_scope", "restore_callback_states_from_checkpoint", "rollouts_keep"),
    *("resume_from_checkpoint", "resume_learning_rate", "run_name", "tool_threads", "vllm_group_port"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
}
_PACKAGES = ("groupgrad", "torch", "transformers", "accelerate", "datasets", "numpy", "peft", "deepspeed", "vllm")

OPTIMIZER_OPTIONS = {
    "learning_rate": ("initial_lr", None),
    "weight_decay": ("weight_decay", None),
    "adam_beta1": ("betas", 0),
    "adam_beta2": ("betas", 1),
    "adam_epsilon": ("eps", None),
}
"""Option -> key and index in an optimizer's parameter groups, which a checkpoint restores."""


@dataclass(slots=True, frozen=True)
class ChangedOption:
    """An option whose value differs from the checkpoint's."""

    name: str
    then: Any
    now: Any
    winner: str = "now"
    """`now` or `then`, perhaps with a remark."""


def deciding_options(config: GRPOConfig) -> dict[str, Any]:
    """The options that decide a run's results, as JSON values."""
    options = {**deciding(config.to_dict()), "world_size": config.world_size}
    return json.loads(json.dumps(options, default=str))


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the configuration fields that influence a run's results."""
    return {
        name: value
        for name, value in settings.items()
        if name not in _WITHOUT_INFLUENCE and not name.startswith(_PREFIXES) and not name.endswith("_token")
    }


def installed_versions() -> dict[str, str]:
    """Releases of the libraries that decide results, by name."""
    found = {name: compat.installed_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


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


def differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    optimizer_then: Mapping[str, Any],
    optimizer_now: Mapping[str, Any],
    *,
    new_learning_rate: bool,
    reference: str | None = None,
) -> list[ChangedOption]:
    """The options that differ, and which value is in force.

    `optimizer_then` and `optimizer_now` are what the optimizer has restored and what it was made with. `reference` is
    the name of the reference model, perhaps empty; a checkpoint of a run without a KL term knows of none.
    """
    first = f"now, the KL is measured from {reference or 'the model'!r} as it was loaded"
    found = [
        ChangedOption(name, then[name], value, first if name == "beta" and not then[name] and value else "now")
        for name, value in now.items()
        if name in then and then[name] != value and name not in optimizer_then
    ]
    for name, value in optimizer_then.items():
        other = optimizer_now.get(name, value)
        if other != value:
            winner = "then, the optimizer's state has it"
            if name == "learning_rate":
                winner = "now" if new_learning_rate else "then; resume_learning_rate=True applies the new one"
            found.append(ChangedOption(name, value, other, winner))
    return found


def changed_intervals(state: TrainerState, config: GRPOConfig) -> list[ChangedOption]:
    """The intervals of a checkpoint's `state` that the configuration changes, in steps, as far as they are in use."""
    new = copy.copy(state)
    new.compute_steps(config, state.max_steps)
    in_use = {
        "save_steps": config.save_strategy == SaveStrategy.STEPS,
        "eval_steps": config.eval_strategy == IntervalStrategy.STEPS,
        "logging_steps": config.logging_strategy == IntervalStrategy.STEPS,
    }
    pairs = {name: (getattr(state, name), getattr(new, name)) for name, is_used in in_use.items() if is_used}
    return [ChangedOption(name, then, now) for name, (then, now) in pairs.items() if then != now]


def table(rows: list[ChangedOption]) -> str:
    """The differences as lines of text."""
    cells = [("option", "then", "now", "in force")]
    cells += [(row.name, _short(row.then), _short(row.now), row.winner) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join(
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths)) + f"  {line[3]}" for line in cells
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def report(rows: list[ChangedOption], folder: Any) -> None:
    """Logs the differences once over all ranks."""
    if rows and dist.is_main():
        logger.warning("options differ from those of %s:\n%s", folder, table(rows))


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
