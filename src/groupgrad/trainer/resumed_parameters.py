"""Compares the parameters that a checkpoint's run has trained with those of the run that resumes from it.

Nothing is loaded: the manifest names the trained parameters and the adapter's settings. Checkpoints without a manifest
have the settings alone; what else differs shows when their weights and their optimizer's state are loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad.checkpoints import sharded_files
from groupgrad.checkpoints.choosing import ResumePoint
from groupgrad.checkpoints.manifest import Manifest
from groupgrad.errors import CheckpointError
from groupgrad.models.adapters import active_adapters, adapter_settings, is_adapted, leaves_base_unchanged_by
from groupgrad.models.unwrapping import unwrap
from groupgrad.models.weights import plain_name

logger = logging.getLogger(__name__)

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


def check(trainer: Any, point: ResumePoint, reference: Mapping[str, str] | None) -> None:
    """CheckpointError if the run trains other parameters than the checkpoint's, or has another reference.

    With `allow_partial_resume` a warning, where the checkpoint's weights are the model's and compute the same.
    """
    model, by_order = unwrap(trainer.model), trainer.is_deepspeed_enabled
    folder, manifest = point.folder, point.manifest
    then = None if manifest is None else manifest.trained
    now = trained_parameters(model, trainer.optimizer)
    trained = [] if then is None else _differences(then, now, by_order=by_order)
    settings_then, settings_now = _adapter_then(folder, manifest, model), adapter_settings(model)
    adapter: list[str] = []
    # A checkpoint of an adapter has no weights but the trained ones.
    lacks_weights = settings_now is not None and then is not None and not _same_shapes(then, now)
    if (settings_then is None) != (settings_now is None):
        adapter, trained = [_adapter_on_one_side(settings_then)], []
    elif settings_then is not None and settings_now is not None:
        adapter = _other_settings(settings_then, settings_now, all_of_them=then is None or lacks_weights)
    if adapter or trained:
        may_be_partial = not (adapter or lacks_weights or by_order or sharded_files.is_present(folder))
        if not (may_be_partial and trainer.args.allow_partial_resume):
            raise _misfit(folder, adapter, trained, may_be_partial=may_be_partial)
        if dist.is_main():
            logger.warning(
                "allow_partial_resume: %s: %s; what both train keeps its optimizer state, the rest begins anew",
                folder,
                "; ".join(trained),
            )
    if manifest is not None and manifest.reference is not None and reference is not None:
        _check_reference(folder, manifest.reference, reference, allow_partial=trainer.args.allow_partial_resume)


def _misfit(folder: Path, adapter: list[str], trained: list[str], *, may_be_partial: bool) -> CheckpointError:
    if adapter:
        remedy = "give the adapter the settings that it had"
    else:
        remedy = "load the model that it began with, and freeze and train what its run did, in the same dtype"
    remedy += ", or begin a new run from its weights (model=the checkpoint's folder, without a resume)"
    if may_be_partial:
        remedy += ", or set allow_partial_resume=True, with which parameters that both train keep their optimizer state"
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
    if dist.is_main():
        logger.warning("allow_partial_resume: %s, from which it is measured from now on", text)


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


def _same_shapes(then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return {name: _shape(text) for name, text in then.items()} == {name: _shape(text) for name, text in now.items()}


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
