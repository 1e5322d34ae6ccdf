"""Checks the trainer's constructor arguments, and joins the spellings that one argument may have."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec

from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from transformers import Trainer, TrainerCallback

from groupgrad import compat
from groupgrad.config import GRPOConfig
from groupgrad.config.launcher import uses_deepspeed, uses_fsdp
from groupgrad.config.unknown_names import advice, no_effect, place_of
from groupgrad.models.liger import check_liger
from groupgrad.models.model_names import model_source
from groupgrad.spelling import nearest
from groupgrad.trainer.stochastic_adamw import check_parameters

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")

_OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("config", "training_args", "grpo_config", "grpo_args"), "args"),
    **dict.fromkeys(("policy", "model_name", "model_name_or_path", "model_id"), "model"),
    **dict.fromkeys(("dataset", "train_data", "data"), "train_dataset"),
    **dict.fromkeys(("eval_data", "test_dataset", "validation_dataset"), "eval_dataset"),
    **dict.fromkeys(("reward_function", "reward_functions", "rewards", "reward"), "reward_funcs"),
    **dict.fromkeys(("lora_config", "adapter_config"), "peft_config"),
    **dict.fromkeys(("env", "environment", "environments", "env_factory"), "environment_factory"),
    "processor": "processing_class",
}
"""Names that other libraries give to an argument."""

_NO_ARGUMENTS: dict[str, str] = {
    "ref_model": "the reference is the policy from before training, kept where args=GRPOConfig(beta=...) is above 0. "
    "Take it out",
    "model_init": "pass model; hyperparameter_search begins each trial with its weights",
    "data_collator": "rows become prompts in the trainer. Take it out",
    "compute_metrics": "call log_metric, which every reward function gets. Take it out",
    "preprocess_logits_for_metrics": "evaluation samples and keeps no logits. Take it out",
    "compute_loss_func": "define batch_loss(model, batch) in a subclass",
    "optimizer_cls_and_kwargs": "set args=GRPOConfig(optim=..., optim_args=...), or pass optimizers=(optimizer, None)",
}
"""Arguments of other trainers that this one does not have, and what to do instead."""


def known_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates a trainer's `__init__`: TypeError that names all arguments that do not exist, and where they belong."""
    parameters = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        texts = [f"no argument {name!r}: {_instead(name, parameters)}" for name in kwargs if name not in parameters]
        if texts:
            raise TypeError(f"GRPOTrainer has {'; '.join(texts)}")
        init(*args, **kwargs)

    return checked


def _instead(name: str, parameters: list[str]) -> str:
    """What to do in place of passing an argument that does not exist."""
    if name in _OTHER_NAMES:
        return f"it is {_OTHER_NAMES[name]!r} here"
    if name in _NO_ARGUMENTS:
        return _NO_ARGUMENTS[name]
    if name in GRPOConfig.__dataclass_fields__:
        reason = no_effect(name)
        return f"it has no effect ({reason}). Take it out" if reason else f"set args=GRPOConfig({name}=...)"
    fields, spelled = GRPOConfig.__dataclass_fields__, "args=GRPOConfig({}=...)".format
    if place := place_of(name, fields, spelled=spelled):
        return place
    if similar := nearest(name, parameters):
        return f"did you mean {similar!r}?"
    return advice(name, fields, spelled=spelled) or "take it out"


def resolve_reward_funcs(reward_funcs: Any, reward_fn: Any, reward_model: Any, environment_factory: Any = None) -> Any:
    """The reward functions by whichever of their three arguments is given; ValueError for none or several of them.

    With environments, which may bring rewards of their own, there may be none: an empty list.
    """
    given = {"reward_funcs": reward_funcs, "reward_fn": reward_fn, "reward_model": reward_model}
    used = {name: value for name, value in given.items() if value is not None and value != []}
    if not used and environment_factory is not None:
        return []
    if not used:
        raise ValueError(
            "no reward source: reward_funcs is empty; give a reward function, a reward model or a list of them"
        )
    if len(used) > 1 and "reward_funcs" in used:
        raise ValueError(f"{' and '.join(used)} are given; put all of them into reward_funcs")
    values = list(used.values())
    return values[0] if len(values) == 1 else values


def resolve_config(args: Any, model: Any, num_generations: int | None) -> GRPOConfig:
    """The configuration, a default one if none is given. TypeError for another kind of arguments object, ImportError
    for kernels whose package is not installed."""
    if args is None:
        name = model_source(model).rstrip("/").rsplit("/", 1)[-1] or type(model).__name__
        args = GRPOConfig(output_dir=f"{name}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"args is a {type(args).__name__}; it must be a groupgrad.GRPOConfig")
    args.settle()
    if num_generations is not None and num_generations != args.num_generations:
        args = replace(args, num_generations=num_generations)
    if args.use_liger_kernel:
        check_liger(args.device)
    return args


def use_one_device(config: GRPOConfig, model: Any) -> None:
    """Keeps a process that sees several GPUs on one of them, unless a device map spreads the model, and says so."""
    if config.n_gpu < 2:
        return
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2:
        logger.warning(
            "this process sees %d GPUs and trains on one. To use all, start it with `groupgrad train --num-processes "
            "all` or `accelerate launch --num_processes %d`; to train on one without this message, show it one GPU "
            "(CUDA_VISIBLE_DEVICES=0)",
            config.n_gpu,
            config.n_gpu,
        )
    config._n_gpu = 1  # transformers would wrap the model into DataParallel


def resolve_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """The one of the two spellings that is given, or None; ValueError if both are."""
    if processing_class is not None and tokenizer is not None and processing_class is not tokenizer:
        raise ValueError("processing_class and tokenizer are given, two names of one argument; give only one of them")
    return tokenizer if processing_class is None else processing_class


def check_kinds(callbacks: Any, optimizers: Any) -> None:
    """TypeError for a callback or an optimizer in place of the list or the pair that the argument takes."""
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        raise TypeError(f"callbacks is a {type(callbacks).__name__}; give a list, callbacks=[...]")
    for item in callbacks or ():
        if not isinstance(item, TrainerCallback) and not (isinstance(item, type) and issubclass(item, TrainerCallback)):
            raise TypeError(
                f"callbacks contains {item!r}, which is no transformers.TrainerCallback; derive it from that"
            )
    if not isinstance(optimizers, (list, tuple)) or len(optimizers) != 2:
        raise TypeError(
            f"optimizers is {optimizers!r}; give a pair of an optimizer and a scheduler, either of which may be None: "
            "optimizers=(optimizer, None)"
        )
    for kind, item, has in (("optimizer", optimizers[0], "zero_grad"), ("scheduler", optimizers[1], "state_dict")):
        if isinstance(item, (DummyOptim, DummyScheduler, type(None))):  # DeepSpeed makes its own in place of dummies
            continue
        if isinstance(item, type) or not callable(getattr(item, has, None)):
            raise TypeError(
                f"optimizers has {item!r} as its {kind}, which is none; give one that is made already, such as "
                "torch.optim.AdamW(model.parameters()), or None"
            )


def check_optimizer(config: GRPOConfig, optimizers: tuple[Any, Any], model: Any) -> None:
    """ImportError if the optimizer that `config` names needs a package that is not installed, ValueError if it lacks
    another setting, or if stochastic rounding meets weights that are not bfloat16."""
    if config.stochastic_rounding:
        if optimizers[0] is not None:
            raise ValueError(
                "optimizers has an optimizer, and stochastic_rounding=True asks for another; take one of them out"
            )
        check_parameters(model)
        return
    if optimizers[0] is not None and uses_fsdp(config):
        raise ValueError(
            "optimizers has an optimizer, which was made from whole weights, and fsdp trains shards of them; leave it "
            "out, and set optim, learning_rate and optim_args"
        )
    if optimizers[0] is not None:
        _check_parameters_of(optimizers[0], model)
        return
    if uses_deepspeed(config):
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(config, model)
    except (ImportError, ValueError) as error:
        name = f"optim={config.optimizer_name!r}"
        if "bitsandbytes" in str(error):
            compat.require("bitsandbytes", name)
        raise type(error)(f"{name} cannot be used: {error}; or set optim='adamw_torch'") from error


def _check_parameters_of(optimizer: Any, model: Any) -> None:
    """ValueError if the optimizer holds parameters that are not the model's, or none that is trained."""
    of_model = {id(parameter): parameter for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if num_foreign := sum(id(parameter) not in of_model for parameter in held):
        raise ValueError(
            f"{num_foreign} of the optimizer's {len(held)} parameters are not the model's, so they would never get a "
            "gradient; make the optimizer from the parameters of the very model that is passed as `model`"
        )
    if not any(parameter.requires_grad for parameter in held):
        raise ValueError(
            f"none of the optimizer's {len(held)} parameters is trained; make it from the trainable parameters of the "
            "model, after the adapter has been added"
        )
