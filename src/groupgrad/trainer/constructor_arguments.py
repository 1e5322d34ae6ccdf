"""Checks the trainer's constructor arguments, and joins the spellings that one argument may have."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from groupgrad.config import GRPOConfig
from groupgrad.models.liger import check_liger
from groupgrad.models.model_names import model_source
from groupgrad.trainer.stochastic_adamw import check_parameters

logger = logging.getLogger(__name__)


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


def check_optimizer(config: GRPOConfig, optimizer: Any, model: Any) -> None:
    """ValueError if stochastic rounding meets another optimizer or weights that are not bfloat16, or if `optimizer`
    holds parameters that are not the model's, or none that is trained."""
    if config.stochastic_rounding:
        if optimizer is not None:
            raise ValueError(
                "optimizers has an optimizer, and stochastic_rounding=True asks for another; take one of them out"
            )
        check_parameters(model)
        return
    if not hasattr(optimizer, "param_groups"):  # none is given, or DeepSpeed makes its own in place of a dummy
        return
    of_model = {id(parameter): parameter for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if num_foreign := sum(id(parameter) not in of_model for parameter in held):
        raise ValueError(
            f"{num_foreign} of the optimizer's {len(held)} parameters are not the model's, so they would never get a "
            "gradient; make the optimizer from the parameters of the very model that is passed as `model`, or, with "
            "fsdp, which shards them, leave it out and set optim"
        )
    if not any(parameter.requires_grad for parameter in held):
        raise ValueError(
            f"none of the optimizer's {len(held)} parameters is trained; make it from the trainable parameters of the "
            "model, after the adapter has been added"
        )
