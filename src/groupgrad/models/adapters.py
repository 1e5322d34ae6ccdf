"""PEFT adapters on the policy: adds and loads them, and rejects those that cannot be trained."""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

_TASKS = (None, "CAUSAL_LM")

_INITS_OVER_UNCHANGED_BASE = frozenset({"gaussian", "eva"})
"""LoRA initialisations that leave the base weights unchanged; others subtract the adapter from them."""

_UNMERGED = "cannot be merged into the weights"
_REFUSED_KINDS = {
    "ADALORA": "moves its ranks between layers (update_and_allocate) in a training loop of its own",
    "LILY": _UNMERGED,
    "MULTITASK_PROMPT_TUNING": "needs task_ids with each row, and no data set here has them",
    "POLY": "needs task_ids with each row, and no data set here has them",
    "PVERA": "adds noise in training, so it computes something else than its merged weights do",
    "SHADOW": _UNMERGED,
    "XLORA": "weighs other adapters by what stands in the text, so it is no change of weights",
}
"""Kinds of peft 0.21 that cannot be trained here, and why."""


def is_adapted(model: Any) -> bool:
    """True for a model with a PEFT adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def active_adapters(model: Any) -> list[str]:
    """Names of the active adapters; empty without any."""
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None) or []
    return [active] if isinstance(active, str) else list(active)


def adapter_settings(model: Any) -> dict[str, Any] | None:
    """The settings of the active adapter that are not None, sets sorted; None without an adapter."""
    if not is_adapted(model):
        return None
    given = model.peft_config[next(iter(active_adapters(model)), next(iter(model.peft_config)))].to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in given.items()}
    return {name: getattr(value, "value", value) for name, value in plain.items() if value is not None}


def leaves_base_unchanged(peft_config: Any) -> bool:
    """True if an adapter of this configuration begins without a change of the base model's weights."""
    return leaves_base_unchanged_by(getattr(peft_config, "init_lora_weights", True))


def leaves_base_unchanged_by(init: Any) -> bool:
    """The same for a value of `init_lora_weights`."""
    return not isinstance(init, str) or init.lower() in _INITS_OVER_UNCHANGED_BASE


def add_adapter(model: nn.Module, peft_config: Any, *, keep_dtype: bool = False) -> nn.Module:
    """Wraps `model` in a new adapter described by `peft_config`, which stays unchanged.

    The adapter's weights are float32 over weights in half precision, or of their dtype with `keep_dtype`.

    ImportError without peft, TypeError for another config class, ValueError if the model has an adapter or the config
    does not fit it. Warns about `target_modules` that the model lacks if it has others of them.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError("peft_config is given, but peft is not installed: pip install 'peft>=0.20'")
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"peft_config is a {type(peft_config).__name__}; it must be a peft.PeftConfig such as peft.LoraConfig(...)"
        )
    if is_adapted(model):
        raise ValueError(
            "the model already has an adapter and peft_config is given too; pass the PeftModel alone to go on training "
            "its adapter, or the base model with peft_config to start a new one"
        )
    _check_config(model, peft_config)
    try:
        # peft completes the config it gets with facts about this model.
        config: Any = copy.deepcopy(peft_config)
        return get_peft_model(model, config, autocast_adapter_dtype=not keep_dtype)  # pyright: ignore
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"peft_config does not fit this {type(model).__name__}: {error}") from error


def load_adapter(base: nn.Module, adapter_id: str, *, revision: str | None = None) -> nn.Module:
    """Loads the trained adapter of an id or directory onto `base`, ready for further training.

    ValueError if the adapter has modules that the model lacks, or of another shape.
    """
    from peft import PeftModel

    problem: Any = None
    cause: Exception | None = None
    kwargs: Any = {} if revision is None else {"revision": revision}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = PeftModel.from_pretrained(base, adapter_id, is_trainable=True, **kwargs)  # pyright: ignore
        except (ValueError, RuntimeError, KeyError) as error:
            model, problem, cause = base, error, error
    for warning in caught:
        # peft only warns about missing weights, and initialises them at random.
        if "missing adapter keys" in str(warning.message):
            problem = warning.message
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if problem is not None:
        name = getattr(base, "name_or_path", "")
        described = f"{type(base).__name__} ({name})" if name else type(base).__name__
        raise ValueError(
            f"the adapter {adapter_id} does not fit {described}; it was made for another model: "
            f"{' '.join(str(problem).split())[:600]}. Use the base model that its adapter_config.json names, or train "
            "a new adapter (peft_config)"
        ) from cause
    return model


@contextmanager
def dora_scales_kept(model: nn.Module) -> Iterator[None]:
    """Inside, each DoRA layer computes the norm of its weights once; the weights must not change meanwhile.

    peft computes it in every pass, from the product of A and B: a decode step of few tokens takes ten times as long.
    Its own `DoraCaching` would keep that product too, which is as large as the weight.
    """
    dora = sys.modules.get("peft.tuners.lora.dora")
    layers: list[Any] = [] if dora is None else [part for part in model.modules() if type(part) is dora.DoraLinearLayer]
    layers = [layer for layer in layers if "get_weight_norm" not in vars(layer)]
    for layer in layers:
        _keep_norms(layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["get_lora_weight"], vars(layer)["get_weight_norm"]


def _keep_norms(layer: Any) -> None:
    """Replaces two methods, of which a pass calls the first for the argument of the second."""
    kind, norms, product = type(layer), {}, partial(torch.zeros, ())

    def get_lora_weight(**parts: Any) -> torch.Tensor:
        nonlocal product
        product = partial(kind.get_lora_weight, layer, **parts)
        return torch.zeros(())  # the product is computed where the norm is not known

    def get_weight_norm(*, weight: torch.Tensor, lora_weight: torch.Tensor, **parts: Any) -> torch.Tensor:
        key = parts["adapter_name"], weight.dtype
        if key not in norms:
            lora_weight = product().to(weight.dtype).detach()
            norms[key] = kind.get_weight_norm(layer, weight=weight, lora_weight=lora_weight, **parts).detach()
        return norms[key]

    vars(layer).update(get_lora_weight=get_lora_weight, get_weight_norm=get_weight_norm)  # `setattr` is a module's


def check_adapter(model: Any) -> None:
    """ValueError for an adapter that is merged into the weights or inactive, or of a kind that cannot be trained here.

    Warns if the base model's name differs from the one the adapter was trained on, which may be a copy of the same
    weights, and if weights of the base model train, since they are not saved with an adapter.
    """
    if not is_adapted(model):
        return
    merged = [name for name, module in model.named_modules() if getattr(module, "merged", False) is True]
    if merged:
        raise ValueError(
            f"the adapter is merged into the weights ({merged[0]} and others), so that training it would change "
            "nothing; call model.unmerge_adapter() first"
        )
    for config in model.peft_config.values():
        if (obstacle := _kind_obstacle(config)) is not None:
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(
                f"the adapter is a {type(config).__name__} ({kind}), which {obstacle}; use peft.LoraConfig, or another "
                "kind that the table of adapters in docs/models.md has"
            )
        if getattr(config, "lora_bias", False) or config.peft_type == "BEFT":
            for name, layer in model.named_modules():
                if hasattr(layer, "get_base_layer") and getattr(layer.get_base_layer(), "bias", 0) is None:
                    raise ValueError(
                        f"the adapter adds a bias to {name}, which has none, so peft cannot merge it; name layers with "
                        "a bias in target_modules, or set lora_bias=False"
                    )
    _check_trained_parameters(model)
    base = model.get_base_model()
    for name in active_adapters(model):
        config = model.peft_config[name]
        trained_on, loaded = config.base_model_name_or_path, getattr(base, "name_or_path", None)
        if trained_on and loaded and _base_name(trained_on) != _base_name(loaded):
            warnings.warn(
                f"the adapter {name!r} was trained on {trained_on}, and the model was loaded from {loaded}; on other "
                "weights than its own it means nothing"
            )


def _kind_obstacle(config: Any) -> str | None:
    """Why an adapter of this kind cannot be trained; None for a learned prompt, and for a change of weights.

    A change of weights acts on each token alone and can be merged, so sampling and training see one policy in every
    layout.
    """
    settings = [name for name in ("use_asa", "alora_invocation_tokens", "arrow_config") if getattr(config, name, None)]
    if settings:
        return f"changes with training steps or with other tokens ({settings[0]}), so it is no change of weights"
    return _REFUSED_KINDS.get(config.peft_type)


def _check_trained_parameters(model: Any) -> None:
    """ValueError if only inactive adapters train; a warning if weights of the base model do."""
    active = active_adapters(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapters_of = {name: set(name.split(".")) & set(model.peft_config) for name in trained}
    if trained and all(owners and not owners & set(active) for owners in adapters_of.values()):
        raise ValueError(
            f"only {trained[0]} and others of adapters that are not in use would train; the adapter in use is "
            f"{', '.join(active) or 'none'}: call model.set_adapter(...) with the one to train"
        )
    saves_biases = any(getattr(model.peft_config[name], "bias", "none") != "none" for name in active)
    base = [name for name, owners in adapters_of.items() if not owners and not (saves_biases and name.endswith("bias"))]
    if base:
        warnings.warn(
            f"{base[0]} ({len(base)} weights of the base model) will train too, but only the adapter is saved; name "
            "such modules in modules_to_save, or freeze them"
        )


def _check_config(model: nn.Module, config: Any) -> None:
    """ValueError for a config of another task, or with names that the model lacks, which peft ignores silently."""
    task = getattr(config.task_type, "value", config.task_type)
    if task not in _TASKS:
        raise ValueError(
            f"peft_config.task_type is {task!r}, which wraps the model in a head of another kind; set it to 'CAUSAL_LM'"
        )
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    for field, names in (
        ("modules_to_save", modules),
        ("feedforward_modules", modules),
        ("target_parameters", parameters),
    ):
        if missing := _missing(getattr(config, field, None), names):
            raise ValueError(
                f"{field} names {', '.join(missing)}, and this {type(model).__name__} has none of that name; take it "
                "out, or set it to the end of a name of model.named_parameters()"
            )
    targets = getattr(config, "target_modules", None) or []
    missing = _missing(targets, modules)
    if missing and len(missing) < len(targets):
        warnings.warn(
            f"target_modules names {', '.join(missing)}, and this {type(model).__name__} has no such module: the "
            "adapter is on the others alone"
        )


def _missing(endings: Any, names: list[str]) -> list[str]:
    """The endings that no dotted name has; empty for a str, which is a regular expression that peft matches."""
    if not endings or isinstance(endings, str):
        return []
    return sorted(x for x in endings if not any(name == x or name.endswith("." + x) for name in names))


def _base_name(name: str) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1]
