"""Rules about FSDP; `rules.py` says what a rule is."""

from __future__ import annotations

from typing import Any

from groupgrad.config import conditions
from groupgrad.config.conditions import Rule
from groupgrad.config.launcher import fsdp_settings, uses_deepspeed, uses_fsdp
from groupgrad.config.settings import GRPOSettings, mapping

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
"""Optimizers of torch, whose updates work number by number, so that a rank can update its shards alone."""

_KEYS = (
    *("version", "reshard_after_forward", "activation_checkpointing", "transformer_layer_cls_to_wrap"),
    *("auto_wrap_policy", "min_num_params", "cpu_offload", "offload_params"),
)


def _with_fsdp(find: Any) -> Any:
    """A condition that holds only under FSDP."""
    return lambda c: uses_fsdp(c) and find(c)


def _other_wrapping(c: GRPOSettings) -> str:
    settings = fsdp_settings(c)
    policy = settings.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if policy != "TRANSFORMER_BASED_WRAP":
        return f"auto_wrap_policy {policy!r}"
    return f"min_num_params {size}" if (size := settings.get("min_num_params")) else ""


def _unread_keys(c: GRPOSettings) -> str:
    unset = (False, None, {}, "SHARDED_STATE_DICT")  # the launcher's configuration has options that are off too
    unread = {key: value for key, value in fsdp_settings(c).items() if key not in _KEYS and value not in unset}
    return ", ".join(f"{key}={value!r}" for key, value in unread.items())


def _excluded(c: GRPOSettings) -> str:
    """Lists settings that a sharded model excludes, with the values to set instead."""
    conflicts = {
        "fp16=True (set bf16=True, or neither)": c.fp16,
        "stochastic_rounding=True (set it to False)": c.stochastic_rounding,
        "save_in_background=True (set it to False)": c.save_in_background,
        "sync_ref_model=True (set it to False)": c.sync_ref_model,
        "cast_lm_head_to_fp32=True (set it to False)": c.cast_lm_head_to_fp32,
        "torch_compile=True (set it to False)": c.torch_compile,
        "use_transformers_continuous_batching=True (set it to False)": c.use_transformers_continuous_batching,
        "gradient_checkpointing_kwargs with use_reentrant=True (set it to False)": mapping(
            c.gradient_checkpointing_kwargs
        ).get("use_reentrant"),
    }
    return ", ".join(text for text, is_set in conflicts.items() if is_set)


def _hybrid(c: GRPOSettings) -> str:
    """The option that shards within machines alone, if it is set; transformers may have parsed the options already."""
    options = c.fsdp.split() if isinstance(c.fsdp, str) else c.fsdp if isinstance(c.fsdp, list) else []
    names = [str(getattr(option, "value", option)) for option in options]
    return next((name for name in names if name.startswith("hybrid_shard")), "")


FSDP_RULES: tuple[Rule, ...] = (
    Rule(
        _with_fsdp(_hybrid),
        "fsdp={found!r} is an option of FSDP 1, and only FSDP 2 is supported, which shards over all processes. Set "
        "fsdp='full_shard'",
    ),
    Rule(
        _with_fsdp(lambda c: (version := str(fsdp_settings(c).get("version", 2))) != "2" and version),
        "fsdp is on with fsdp_version {found}, and only FSDP 2 is supported. Set fsdp_config={{'version': 2}}, or in "
        "the launcher's configuration fsdp_version: 2",
    ),
    Rule(
        _with_fsdp(lambda c: c.world_size < 2),
        "fsdp shards weights over several processes, and there is one. Start several (groupgrad train --num-processes "
        "2), or leave fsdp unset",
    ),
    Rule(_with_fsdp(uses_deepspeed), "fsdp is on and so is deepspeed, which shards too. Leave one of the two unset"),
    Rule(
        _with_fsdp(_other_wrapping),
        "fsdp_config has {found}: a layer of the model is sharded at a time. Take it out, or set "
        "transformer_layer_cls_to_wrap to the classes of the layers",
    ),
    Rule(
        _with_fsdp(lambda c: fsdp_settings(c).get("activation_checkpointing") and c.gradient_checkpointing is False),
        "fsdp_config has activation_checkpointing on and gradient_checkpointing=False says the opposite. Set both to "
        "the same",
    ),
    Rule(
        _with_fsdp(lambda c: c.optimizer_name not in OPTIMIZERS and ", ".join(OPTIMIZERS)),
        "optim={c.optimizer_name!r} does not go with fsdp: it is not known to update a shard as it would the whole "
        "weight. Set it to one of {found}",
    ),
    Rule(
        _with_fsdp(lambda c: c.use_vllm and c.vllm_mode == "colocate"),
        "vllm_mode='colocate' with fsdp is not part of this version. Set vllm_mode='server', or use_vllm=False",
    ),
    Rule(_with_fsdp(_excluded), "fsdp does not go with {found}"),
    Rule(
        lambda c: uses_fsdp(c) and not conditions.parallel_sizes(c) and c.parallelism_config is not None,
        "fsdp does not go with parallelism_config: FSDP shards over all processes. Leave parallelism_config unset",
    ),
    Rule(_with_fsdp(_unread_keys), "fsdp_config has settings without effect under FSDP 2: {found}", warns=True),
)
