"""Combinations of settings that cannot work, and those that work but deserve a warning.

A new rule is one row in `RULES`: the settings it compares, when it is broken, and a sentence with the values seen, the
reason and the remedy. Rules about one setting alone are rows of `field_rules.py`. Settings without effect beside the
others are rows of `unused_settings.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_all_start_methods

from transformers import training_args
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from groupgrad import compat
from groupgrad.compat import env_flag
from groupgrad.config import conditions
from groupgrad.config.field_rules import CHOICES, DICTS, DTYPES, FIXED, RANGES, field_problem, is_number, parse_bytes
from groupgrad.config.launcher import uses_deepspeed, zero_stage
from groupgrad.config.settings import SAMPLING_FIELDS, GRPOSettings
from groupgrad.config.unused_settings import unused_settings


@dataclass(slots=True, frozen=True)
class Rule:
    """A combination of settings that must not occur, or that deserves a warning."""

    fields: tuple[str, ...]
    """Settings that the rule compares. The rule is skipped if one of them breaks a rule of its own."""
    broken: Callable[[GRPOSettings], object]
    """Truthy if the rule is broken."""
    sentence: str
    """Message. `{c.NAME}` stands for the value of a setting, `{found}` for the result of `broken`."""
    warns: bool = False
    """The settings work, and the message is a warning."""

    def message(self, config: GRPOSettings) -> str | None:
        """Returns the rule's sentence if the config breaks it, else None."""
        found = self.broken(config)
        return self.sentence.format(c=config, found=found) if found else None


RULES: tuple[Rule, ...] = (
    # --- models ---
    Rule(
        ("model_init_kwargs", "reward_model_init_kwargs"),
        conditions.unknown_dtype,
        f"{{found}}, which models are not loaded in. Set it to one of {', '.join(DTYPES)}",
    ),
    Rule(
        ("reward_model_init_kwargs", "reward_model_device", "reward_model_offload"),
        conditions.device_beside_map,
        "reward_model_init_kwargs has device_map={c.reward_model_init_kwargs[device_map]!r}, by which models stay "
        "where it puts them, and {found} puts them elsewhere. Set one of the two",
    ),
    Rule(
        ("sync_ref_model", "beta"),
        lambda c: c.sync_ref_model and c.beta == 0,
        "sync_ref_model=True moves a reference, but beta=0.0 keeps none. Set beta above 0, or sync_ref_model=False",
    ),
    # --- sampling ---
    Rule(
        ("generation_kwargs",),
        conditions.owned_keys,
        "generation_kwargs has {found}: the trainer sets that itself. Take it out",
    ),
    Rule(
        ("generation_kwargs", "use_vllm"),
        conditions.unknown_sampling_options,
        "generation_kwargs has {found}, which neither an engine nor transformers' GenerationConfig knows. Take it out",
    ),
    Rule(
        ("generation_kwargs", "use_vllm"),
        conditions.moved_options,
        "generation_kwargs has {found}, which transformers 5 moved from generate to code on the Hub. Take it out",
    ),
    Rule(
        ("generation_kwargs", "use_vllm", "cache_implementation"),
        conditions.options_without_effect,
        "in generation_kwargs, no effect: {found}",
        warns=True,
    ),
    Rule(("generation_kwargs",), conditions.overridden_sampling, "in generation_kwargs, {found}"),
    Rule(
        ("use_transformers_continuous_batching", "rollout_engine"),
        lambda c: c.use_transformers_continuous_batching and c.rollout_engine != "auto",
        "use_transformers_continuous_batching=True and rollout_engine={c.rollout_engine!r} name two engines. Set "
        "one of them",
    ),
    Rule(
        ("use_transformers_continuous_batching", "generation_kwargs", "cache_implementation", *SAMPLING_FIELDS),
        conditions.missing_from_continuous_batching,
        "use_transformers_continuous_batching=True samples without {found}, which it lacks. Take that out, or set "
        "use_transformers_continuous_batching=False",
    ),
    Rule(
        ("transformers_continuous_batching_config",),
        conditions.continuous_batching_problem,
        "transformers_continuous_batching_config {found}",
    ),
    Rule(
        ("deepspeed", "use_transformers_continuous_batching"),
        lambda c: zero_stage(c) == 3 and c.use_transformers_continuous_batching,
        "use_transformers_continuous_batching=True does not go with DeepSpeed ZeRO-3, whose weights are in parts. Set "
        "it to False, or use ZeRO stage 1 or 2",
    ),
    Rule(
        ("chat_template_kwargs",),
        conditions.owned_template_keys,
        "chat_template_kwargs has {found}, which the trainer sets itself when it renders a prompt. Take it out",
    ),
    Rule(
        ("image_root",),
        lambda c: c.image_root is not None and not os.path.isdir(c.image_root),
        "image_root={c.image_root!r} is no folder here. Set it to the folder of the images, or leave it unset",
    ),
    Rule(
        ("engine_kv_memory",),
        lambda c: c.engine_kv_memory is not None and parse_bytes(c.engine_kv_memory) is None,
        "engine_kv_memory={c.engine_kv_memory!r} is no amount of memory. Set it to bytes with a unit, such as '4GiB' "
        "or '512MB', or leave it unset",
    ),
    # --- groups and batches ---
    Rule(
        ("generation_batch_size", "steps_per_generation"),
        lambda c: c.generation_batch_size is not None and c.steps_per_generation is not None,
        "generation_batch_size={c.generation_batch_size} and steps_per_generation={c.steps_per_generation} both say "
        "how many completions are sampled at a time. Set one of them to None",
    ),
    Rule(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"),
            *("generation_batch_size", "steps_per_generation"),
        ),
        conditions.cut_group,
        "{found}",
    ),
    Rule(
        ("per_device_eval_batch_size", "num_generations", "num_generations_eval"),
        conditions.cut_evaluation_group,
        "{found}",
    ),
    # --- objective ---
    Rule(
        ("loss_type", "epsilon_high"),
        lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
        "loss_type='cispo' without epsilon_high uses {c.epsilon_high_resolved} as the ceiling of the importance weight "
        "(arXiv:2510.13786); set epsilon_high to say so",
        warns=True,
    ),
    Rule(
        ("loss_type", "importance_sampling_level"),
        lambda c: c.loss_type == "luspo" and c.importance_sampling_level != "sequence",
        "loss_type='luspo' is defined for importance_sampling_level='sequence', and the level is 'token'",
        warns=True,
    ),
    Rule(
        ("loss_type", "importance_sampling_level"),
        lambda c: c.loss_type == "vespo" and c.importance_sampling_level != "token",
        "loss_type='vespo' weighs whole sequences itself; importance_sampling_level='sequence' does so twice",
        warns=True,
    ),
    Rule(
        ("loss_type", "importance_sampling_level"),
        lambda c: c.importance_sampling_level == "sequence" and c.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"),
        "importance_sampling_level='sequence' with loss_type={c.loss_type!r}, which sums over tokens, makes long "
        "completions count more; loss_type='grpo' counts each completion once",
        warns=True,
    ),
    Rule(
        ("loss_type", "delta", "epsilon"),
        lambda c: (
            c.loss_type not in ("cispo", "sapo", "vespo")
            and c.delta is not None
            and c.delta <= 1 + c.epsilon
            and f"{1 + c.epsilon:g}"
        ),
        "delta={c.delta} is not above 1 + epsilon={found} and cuts ratios inside the trust region",
        warns=True,
    ),
    Rule(
        ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max"),
        lambda c: c.use_adaptive_entropy and c.entropy_coef_min > c.entropy_coef_max,
        "entropy_coef_min={c.entropy_coef_min} is above entropy_coef_max={c.entropy_coef_max}. Set entropy_coef_min to "
        "at most {c.entropy_coef_max}",
    ),
    Rule(
        ("use_adaptive_entropy", "entropy_coef", "entropy_coef_min", "entropy_coef_max"),
        lambda c: (
            c.use_adaptive_entropy
            and c.entropy_coef_min <= c.entropy_coef_max
            and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max
        ),
        "entropy_coef={c.entropy_coef} is outside {c.entropy_coef_min} to {c.entropy_coef_max}, its adaptive bounds. "
        "Set it between them",
    ),
    # --- rewards and logs ---
    Rule(
        ("reward_weights",),
        lambda c: (
            (weights := c.reward_weights) is not None
            and not (isinstance(weights, (list, tuple)) and weights and all(map(is_number, weights)))
        ),
        "reward_weights={c.reward_weights!r} is not a list of finite numbers. Give one for each reward function, or "
        "None",
    ),
    Rule(
        ("log_completions", "log_completions_hub_repo"),
        lambda c: c.log_completions_hub_repo is not None and not c.log_completions,
        "log_completions_hub_repo={c.log_completions_hub_repo!r} receives the completions that log_completions stores, "
        "and it is False. Set log_completions=True, or leave log_completions_hub_repo unset",
    ),
    # --- optimizer, precision and processes ---
    Rule(
        ("num_train_epochs", "max_steps"),
        lambda c: c.max_steps <= 0 and not c.num_train_epochs > 0,
        "num_train_epochs={c.num_train_epochs} and max_steps={c.max_steps} make a run without a step. Set one of them "
        "above 0",
    ),
    Rule(
        ("max_grad_norm",),
        lambda c: c.max_grad_norm is None or not c.max_grad_norm >= 0,
        "max_grad_norm={c.max_grad_norm} cannot work: it is a length; 0 clips nothing. Set it to 0 or more",
    ),
    Rule(
        ("save_strategy", "save_steps"),
        lambda c: conditions.strategy(c.save_strategy) == "steps" and not c.save_steps > 0,
        "save_steps={c.save_steps} with save_strategy='steps' never comes to a save. Set it to 1 or more, or "
        "save_strategy='no'",
    ),
    Rule(
        ("logging_strategy", "logging_steps"),
        lambda c: conditions.strategy(c.logging_strategy) == "steps" and not c.logging_steps > 0,
        "logging_steps={c.logging_steps} with logging_strategy='steps' never comes to a log. Set it to 1 or more, or "
        "logging_strategy='no'",
    ),
    Rule(
        ("eval_strategy", "eval_steps"),
        lambda c: conditions.strategy(c.eval_strategy) == "steps" and c.eval_steps is not None and not c.eval_steps > 0,
        "eval_steps={c.eval_steps} with eval_strategy='steps' never comes to an evaluation. Set it to 1 or more, or "
        "eval_strategy='no'",
    ),
    Rule(
        ("lr_scheduler_type", "lr_scheduler_kwargs"),
        conditions.unknown_scheduler_kwargs,
        "lr_scheduler_kwargs has {found}",
    ),
    Rule(
        ("cache_implementation",),
        lambda c: (
            c.cache_implementation not in (None, *ALL_CACHE_IMPLEMENTATIONS) and ", ".join(ALL_CACHE_IMPLEMENTATIONS)
        ),
        "cache_implementation={c.cache_implementation!r} is no cache of transformers. Set it to one of {found}",
    ),
    Rule(
        ("dataloader_multiprocessing_context",),
        lambda c: (
            getattr(c, "dataloader_multiprocessing_context", None) not in (None, *(ways := get_all_start_methods()))
            and ", ".join(ways)
        ),
        "dataloader_multiprocessing_context={c.dataloader_multiprocessing_context!r} is no way to start a process "
        "here. Set it to one of {found}, or leave it unset",
    ),
    Rule(
        ("ddp_backend",),
        lambda c: c.ddp_backend not in (None, "nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl", "xccl"),
        "ddp_backend={c.ddp_backend!r} is no backend of torch.distributed. Set it to nccl or gloo, or leave it unset",
    ),
    Rule(
        ("load_best_model_at_end", "eval_strategy"),
        lambda c: c.load_best_model_at_end and conditions.strategy(c.eval_strategy) == "no",
        "load_best_model_at_end=True compares evaluations, and eval_strategy='no' makes none. Set eval_strategy to "
        "'steps' or 'epoch', or load_best_model_at_end=False",
    ),
    Rule(
        ("load_best_model_at_end", "save_strategy", "eval_strategy"),
        lambda c: (
            c.load_best_model_at_end
            and (save := conditions.strategy(c.save_strategy)) != "best"
            and save != (evaluation := conditions.strategy(c.eval_strategy)) != "no"
            and f"save_strategy={save!r} and eval_strategy={evaluation!r}"
        ),
        "load_best_model_at_end=True can load only models that were saved when they were evaluated, and {found} "
        "differ. Set both to the same",
    ),
    Rule(
        ("save_strategy", "eval_strategy", "metric_for_best_model"),
        lambda c: (
            conditions.strategy(c.save_strategy) == "best"
            and (
                (conditions.strategy(c.eval_strategy) == "no" and "eval_strategy='no'")
                or (c.metric_for_best_model is None and "metric_for_best_model=None")
            )
        ),
        "save_strategy='best' with {found} never knows a best model. Set eval_strategy='steps' and "
        "metric_for_best_model='reward', or save_strategy='steps'",
    ),
    Rule(
        ("lr_scheduler_type", "eval_strategy"),
        lambda c: (
            conditions.strategy(c.lr_scheduler_type) == "reduce_lr_on_plateau"
            and conditions.strategy(c.eval_strategy) == "no"
        ),
        "lr_scheduler_type='reduce_lr_on_plateau' follows evaluations, and eval_strategy='no' makes none. Set "
        "eval_strategy to 'steps' or 'epoch', or another lr_scheduler_type",
    ),
    Rule(
        ("bf16", "use_cpu"),
        lambda c: c.bf16 and not c.use_cpu and not env_flag("ACCELERATE_USE_CPU") and not compat.has_bf16_accelerator(),
        "bf16=True, and the accelerator of this machine does not compute in bfloat16. Set bf16=False, or use_cpu=True",
    ),
    Rule(
        ("tf32",),
        lambda c: c.tf32 and not training_args.is_torch_tf32_available(),
        "tf32=True is a mode of CUDA devices from Ampere on, and there is none. Leave tf32 unset",
    ),
    Rule(
        ("model_init_kwargs", "reward_model_init_kwargs", "reward_model_device"),
        conditions.missing_device,
        "{found}, and this machine has no CUDA device. Take it out, or set it to 'cpu'",
    ),
    Rule(
        ("gradient_checkpointing_kwargs",),
        conditions.unknown_checkpointing_keys,
        "gradient_checkpointing_kwargs has {found}. Set it to arguments of torch.utils.checkpoint.checkpoint",
    ),
    Rule(
        ("torch_compile", "torch_compile_mode"),
        lambda c: c.torch_compile_mode not in (None, *conditions.COMPILE_MODES),
        "torch_compile_mode={c.torch_compile_mode!r} is no mode of torch.compile. Set it to one of "
        + ", ".join(conditions.COMPILE_MODES),
    ),
    Rule(
        ("torch_compile", "torch_compile_backend"),
        conditions.unknown_backend,
        "torch_compile_backend={c.torch_compile_backend!r} is no backend of torch.compile. Set it to one of {found}",
    ),
    Rule(
        ("output_dir",),
        conditions.unusable_folder,
        "output_dir={c.output_dir!r} cannot be written to: {found}. Set it to a folder that exists or can be made",
    ),
    Rule(
        ("stochastic_rounding", "optim", "optim_args", "fp16", "deepspeed"),
        lambda c: c.stochastic_rounding and conditions.beside_stochastic_rounding(c),
        "stochastic_rounding=True is an AdamW of its own over bfloat16 weights, which {found} excludes. Set "
        "stochastic_rounding=False, or take the other out (optim='adamw_torch')",
    ),
    Rule(
        ("optim",),
        lambda c: (
            any(name in c.optimizer_name for name in ("lomo", "layerwise"))
            and c.world_size > 1
            and not uses_deepspeed(c)
        ),
        "optim={c.optimizer_name!r} changes weights while gradients are made, before those of the {c.world_size} "
        "processes are joined, so that each would train a model of its own. Set optim='adamw_torch', or train in one "
        "process",
    ),
    Rule(
        ("deepspeed", "ds3_gather_for_generation", "use_vllm"),
        lambda c: zero_stage(c) == 3 and not (c.ds3_gather_for_generation or c.use_vllm),
        "ds3_gather_for_generation=False with DeepSpeed ZeRO-3: sampling in this process needs whole weights. Set it "
        "to True, or use_vllm to True where they do not fit on one device",
    ),
    Rule(
        ("deepspeed", "cast_lm_head_to_fp32"),
        lambda c: zero_stage(c) == 3 and c.cast_lm_head_to_fp32,
        "cast_lm_head_to_fp32=True does not go with DeepSpeed ZeRO-3. Set it to False, or use ZeRO stage 1 or 2",
    ),
    Rule(
        ("deepspeed", "sync_ref_model"),
        lambda c: zero_stage(c) == 3 and c.sync_ref_model,
        "sync_ref_model=True does not go with DeepSpeed ZeRO-3. Set it to False, or use ZeRO stage 1 or 2",
    ),
    Rule(
        ("fsdp",),
        lambda c: (
            (c.fsdp and f"fsdp={c.fsdp!r}")
            or (env_flag("ACCELERATE_USE_FSDP") and "fsdp, which the launcher turned on,")
        ),
        "{found} is not part of this version of groupgrad; use plain data parallelism",
    ),
    Rule(
        ("parallelism_config",),
        conditions.parallel_sizes,
        "parallelism_config with {found} splits sequences or weights over processes, which is not part of this "
        "version. Set those sizes to 1",
    ),
    Rule(
        ("accelerator_config",),
        lambda c: [name for name in ("split_batches", "dispatch_batches") if getattr(c.accelerator_config, name, None)],
        "accelerator_config has {found[0]}=True: the trainer deals out the groups itself. Set {found[0]} to False",
    ),
    Rule(
        ("accelerator_config",),
        lambda c: (steps := conditions.accumulation_kwargs(c).get("num_steps", 1)) != 1 and str(steps),
        "accelerator_config has num_steps={found}, which would change the step behind the batch arithmetic. Take it "
        "out and set gradient_accumulation_steps",
    ),
    Rule(
        ("accelerator_config",),
        conditions.loading_options,
        "accelerator_config has {found}, without effect: the trainer reads its data itself",
        warns=True,
    ),
    Rule(
        ("accelerator_config",),
        lambda c: conditions.accumulation_kwargs(c).get("sync_each_batch", False),
        "accelerator_config has sync_each_batch=True, without effect: processes join their gradients once a step",
        warns=True,
    ),
    # --- vLLM ---
    Rule(
        ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
        lambda c: (
            (low := c.vllm_importance_sampling_clip_min) is not None
            and (high := c.vllm_importance_sampling_clip_max) is not None
            and low >= high
        ),
        "vllm_importance_sampling_clip_min={c.vllm_importance_sampling_clip_min} is not below "
        "vllm_importance_sampling_clip_max={c.vllm_importance_sampling_clip_max}. Set "
        "vllm_importance_sampling_clip_min below {c.vllm_importance_sampling_clip_max}",
    ),
    Rule(
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
        lambda c: (
            c.vllm_importance_sampling_mode.endswith("_truncate")
            and c.vllm_importance_sampling_clip_min is None
            and c.vllm_importance_sampling_clip_max is None
        ),
        "vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r} cuts ratios, but both bounds are None. Set "
        "vllm_importance_sampling_clip_max, for example to 3.0",
    ),
    Rule(
        ("loss_type", "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        lambda c: (
            c.loss_type == "vespo"
            and c.use_vllm
            and c.vllm_importance_sampling_correction
            and c.vllm_importance_sampling_mode.startswith("sequence")
        ),
        "loss_type='vespo' needs the correction of each token, but vllm_importance_sampling_mode="
        "{c.vllm_importance_sampling_mode!r} gives one for the sequence. Set vllm_importance_sampling_mode to "
        "'token_truncate' or 'token_mask'",
    ),
    Rule(
        ("use_vllm", "generation_kwargs", "max_completion_length", *SAMPLING_FIELDS),
        lambda c: c.use_vllm and conditions.fields_of_rows(c),
        "{found}",
    ),
    Rule(
        ("use_vllm", "vllm_mode", "vllm_max_model_length", "max_completion_length"),
        lambda c: (
            c.use_vllm
            and c.vllm_mode == "colocate"
            and c.vllm_max_model_length is not None
            and c.vllm_max_model_length <= (c.max_completion_length or 0)
        ),
        "vllm_max_model_length={c.vllm_max_model_length} holds prompt and completion together, and completions alone "
        "may have max_completion_length={c.max_completion_length} tokens. Set vllm_max_model_length above that, or "
        "lower max_completion_length",
    ),
    Rule(
        ("rollout_ahead", "use_vllm", "vllm_mode"),
        lambda c: (
            c.rollout_ahead
            and not (c.use_vllm and c.vllm_mode == "server")
            and (f"vllm_mode={c.vllm_mode!r}" if c.use_vllm else "use_vllm=False")
        ),
        "rollout_ahead={c.rollout_ahead} samples while the model trains, but with {found} both would use the same "
        "device at once. Set use_vllm=True and vllm_mode='server', or rollout_ahead=0",
    ),
    Rule(("use_vllm", "vllm_importance_sampling_correction"), conditions.uncorrected, "{found}", warns=True),
)


def problems(config: GRPOSettings) -> list[str]:
    """Returns one sentence for each broken rule; empty if the config can work."""
    names = [name for name in (*CHOICES, *RANGES, *FIXED, *DICTS) if hasattr(config, name)]
    wrong = {name: text for name in names if (text := field_problem(name, getattr(config, name)))}
    messages = (rule.message(config) for rule in RULES if not rule.warns and wrong.keys().isdisjoint(rule.fields))
    return [*wrong.values(), *filter(None, messages)]


def warnings_for(config: GRPOSettings) -> list[str]:
    """Returns the warnings about a config that can work: surprising combinations, and settings without effect."""
    texts = [text for rule in RULES if rule.warns and (text := rule.message(config))]
    if unused := unused_settings(config):
        texts.append(f"these settings have no effect here: {'; '.join(unused)}")
    return texts
