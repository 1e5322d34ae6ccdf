"""Compares the parameters that a checkpoint's run has trained with those of the run that resumes from it.

Nothing is loaded: the manifest names the trained parameters and the adapter's settings, and the files of weights name
their tensors. Checkpoints without a manifest have the latter alone, and the shapes of the optimizer's state.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME

from groupgrad import dist
from groupgrad.checkpoints import sharded_files
from groupgrad.checkpoints.choosing import ResumePoint
from groupgrad.checkpoints.manifest import Manifest
from groupgrad.errors import CheckpointError
from groupgrad.models.adapters import active_adapters, adapter_settings, is_adapted, leaves_base_unchanged_by
from groupgrad.models.load import saved_shapes
from groupgrad.models.unwrapping import unwrap
from groupgrad.models.weights import checkpoint_weights, plain_name

logger = logging.getLogger(__name__)

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

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
_LORA_MATRIX = re.compile(r"\.lora_(embedding_)?[AB]\b")


@dataclass(slots=True)
class Misfit:
    """What keeps a run from going on with a checkpoint's parameters; empty texts and lists if nothing does."""

    weights: list[str] = field(default_factory=list)
    """Sentences about weights that the checkpoint lacks, has too many of, or has in other shapes."""
    adapter: list[str] = field(default_factory=list)
    """Sentences about an adapter that is another one."""
    trained: list[str] = field(default_factory=list)
    """Sentences about parameters that only one of the two trains, or trains in another dtype or order."""

    def error(self, folder: Path, *, partial: bool) -> CheckpointError | None:
        """What to raise; None if nothing differs. `partial`: the run could go on without the optimizer's state."""
        if not (self.weights or self.adapter or self.trained):
            return None
        partial = partial and not self.weights and not self.adapter
        if self.adapter:
            remedy = "give the adapter the settings that it had"
        elif self.weights:
            remedy = "load the model that it began with"
        else:
            remedy = "freeze and train what the checkpoint's run did, in the same dtype"
        remedy += ", or begin a new run from its weights (model=the checkpoint's folder, without a resume)"
        if partial:
            remedy += (
                ", or set allow_partial_resume=True, with which parameters that both train keep their optimizer state"
            )
        found = "; ".join([*self.adapter, *self.weights, *self.trained])
        return CheckpointError(f"{folder} has other parameters than this run: {found}. To go on, {remedy}")


def check(trainer: Any, point: ResumePoint, reference: Mapping[str, str] | None) -> None:
    """CheckpointError if the run trains other parameters than the checkpoint's, or has another reference.

    With `allow_partial_resume` a warning, where the checkpoint's weights are the model's and compute the same.
    """
    args, by_order = trainer.args, trainer.is_deepspeed_enabled
    found = misfit(point.folder, point.manifest, trainer.model, trainer.optimizer, by_order=by_order)
    may_be_partial = not by_order and not sharded_files.is_present(point.folder)
    if error := found.error(point.folder, partial=may_be_partial):
        if not may_be_partial or found.weights or found.adapter or not args.allow_partial_resume:
            raise error
        if dist.is_main():
            logger.warning(
                "allow_partial_resume: %s: %s; what both train keeps its optimizer state, the rest begins anew",
                point.folder,
                "; ".join(found.trained),
            )
    then = None if point.manifest is None else point.manifest.reference
    if then is None or reference is None or then == reference:
        return
    parts_then, parts_now = (each["digest"].partition(":")[0] for each in (then, reference))
    if parts_then != parts_now or then["digest"] == reference["digest"]:
        return  # shards of other numbers of ranks cannot be compared
    text = (
        f"the KL divergence of {point.folder} was measured from {then['name']!r}, and this run has a reference with "
        f"other weights ({reference['name']!r})"
    )
    if not args.allow_partial_resume:
        raise CheckpointError(
            f"{text}. Pass the model that the run began with (model={then['name']!r}), to which the checkpoint's "
            "weights are then loaded; or set allow_partial_resume=True to measure from the new reference"
        )
    if dist.is_main():
        logger.warning("allow_partial_resume: %s, from which it is measured from now on", text)


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


def misfit(folder: Path, manifest: Manifest | None, model: nn.Module, optimizer: Any, *, by_order: bool) -> Misfit:
    """What differs between a checkpoint's parameters and the run's.

    `optimizer` may be None before it is made. `by_order`: the optimizer's state can only be matched by the order of the
    parameters, and dtypes are the optimizer's affair.
    """
    inner: Any = unwrap(model)
    found = Misfit()
    then, now = _adapter_then(folder, manifest, inner), adapter_settings(inner)
    if (then is None) != (now is None):
        found.adapter.append(_adapter_on_one_side(then))
        return found
    names_then = None if manifest is None else manifest.trained
    if names_then is not None:
        _compare_trained(found, names_then, trained_parameters(inner, optimizer), by_order=by_order)
    if now is not None and then is not None:
        if names_then is None:
            found.weights += _differences(*_adapter_shapes(folder, inner))
        elif found.trained and not _only_dtypes(names_then, trained_parameters(inner)):
            found.weights, found.trained = found.trained, []  # the checkpoint has no weights but these
        found.adapter += _other_settings(then, now, all_of_them=bool(found.weights))
    else:
        found.weights += _differences(*_whole_shapes(folder, inner))
        found.trained = [] if found.weights else found.trained  # which would name them again
    return found


def changed_dropout(folder: Path, manifest: Manifest | None, model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The adapter's settings that a resumed run may change, with both values."""
    then, now = _adapter_then(folder, manifest, unwrap(model)) or {}, adapter_settings(unwrap(model)) or {}
    return {
        f"peft_config.{name}": (then[name], value)
        for name, value in now.items()
        if _is_free(name) and name in then and then[name] != value
    }


def _compare_trained(found: Misfit, then: Mapping[str, str], now: Mapping[str, str], *, by_order: bool) -> None:
    if added := [f"{name} ({now[name]})" for name in now if name not in then]:
        found.trained.append(f"not trained then: {_some(added)}")
    if removed := [f"{name} ({then[name]})" for name in then if name not in now]:
        found.trained.append(f"trained then and not now: {_some(removed)}")
    changed = [
        f"{name} is {then[name]} there and {now[name]} here"
        for name in now
        if name in then and then[name] != now[name] and not (by_order and _shape(then[name]) == _shape(now[name]))
    ]
    if changed:
        found.trained.append(f"changed: {_some(changed)}")
    if by_order and not found.trained and list(then) != list(now):
        found.trained.append("the parameters have another order, by which alone DeepSpeed knows them")


def _only_dtypes(then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return {name: _shape(text) for name, text in then.items()} == {name: _shape(text) for name, text in now.items()}


def _differences(there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Sentences about weights that only a checkpoint or only the model has, or that differ in shape."""
    found = []
    if missing := [f"{name} ({_size(here[name])})" for name in here if name not in there]:
        found.append(f"only here: {_some(missing)}")
    if further := [f"{name} ({_size(there[name])})" for name in there if name not in here]:
        found.append(f"only there: {_some(further)}")
    changed = [
        f"{name} is {_size(there[name])} there and {_size(here[name])} here"
        for name in here
        if name in there and there[name] != here[name]
    ]
    return [*found, f"changed: {_some(changed)}"] if changed else found


def _whole_shapes(folder: Path, model: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The shapes of a checkpoint's weights and of the model's, each tied tensor once and by the same name.

    Both empty where the checkpoint's files do not tell shapes.
    """
    first: dict[int, str] = {}
    tensors = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    if sharded_files.is_present(folder):  # whose names are those in memory
        there = {plain_name(name): shape for name, shape in sharded_files.saved_shapes(folder).items()}
        here = {name: tuple(tensors[name].shape) for name in first.values()}
    elif there := saved_shapes(folder):
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        saved = checkpoint_weights(model, shapes_only=True)
        here = {name: tuple(tensor.shape) for name, tensor in saved if name not in ignored}
    else:
        return {}, {}
    renamed: dict[str, tuple[int, ...]] = {}
    for name, shape in there.items():
        alias = names.get(name, name)
        is_copy = alias != name and (alias not in there or _are_equal(folder, name, alias))
        renamed[alias if is_copy else name] = shape
    return renamed, here


def _are_equal(folder: Path, *names: str) -> bool:
    """True if two tensors of a checkpoint's only file are equal; ranks that shard a model save tied ones twice."""
    path = folder / SAFE_WEIGHTS_NAME
    if not path.is_file():
        return True
    with safe_open(path, framework="pt") as file:
        one, other = (file.get_tensor(name) for name in names)
    return one.shape == other.shape and bool((one == other).all())


def _adapter_then(folder: Path, manifest: Manifest | None, model: Any) -> Mapping[str, Any] | None:
    if manifest is not None and manifest.trained is not None:
        return manifest.adapter
    names = active_adapters(model) if is_adapted(model) else []
    places = (
        folder,
        *(folder / name for name in names),
        *(path.parent for path in folder.glob(f"*/{_ADAPTER_CONFIG}")),
    )
    for path in (place / _ADAPTER_CONFIG for place in places):
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
        and not _is_free(name)
        and _sorted(then[name]) != _sorted(value)
        and not (name == _INITIALISATION and all(map(leaves_base_unchanged_by, (then[name], value))))
    ]


def _is_free(name: str) -> bool:
    """True for a setting that a run may change where it resumes."""
    return name.endswith("dropout")


def _adapter_shapes(folder: Path, model: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of the LoRA matrices in an adapter's file, and of the model's by the names that peft gives them there."""
    adapter = next(iter(active_adapters(model)), "default")
    there = saved_shapes(folder, _ADAPTER_WEIGHTS) or saved_shapes(folder / adapter, _ADAPTER_WEIGHTS)
    here = {
        plain_name(name).replace(f".{adapter}", ""): tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _LORA_MATRIX.search(name)
    }
    there = {name: shape for name, shape in there.items() if _LORA_MATRIX.search(name)}
    return (there, here) if there else ({}, {})


def _described(parameter: Any) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {_size(getattr(parameter, 'ds_shape', parameter.shape))}"


def _shape(text: str) -> str:
    return text.partition(" ")[2]


def _size(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value


def _some(texts: list[str]) -> str:
    more = len(texts) - _NUM_SHOWN
    return ", ".join(texts[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
