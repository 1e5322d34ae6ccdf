"""Rules about the optimizer, precision, devices and processes of a run; `rules.py` says what a rule is."""

from __future__ import annotations

import torch
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from groupgrad import compat
from groupgrad.compat import env_flag
from groupgrad.config import conditions
from groupgrad.config.launcher import uses_deepspeed, zero_stage
from groupgrad.config.rule import Rule

RUN_RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.max_steps <= 0 and not c.num_train_epochs > 0,
        "num_train_epochs={c.num_train_epochs} and max_steps={c.max_steps} make a run without a step. Set one of them "
        "above 0",
    ),
    Rule(
        lambda c: c.max_grad_norm is None or not c.max_grad_norm >= 0,
        "max_grad_norm={c.max_grad_norm} cannot work: it is a length; 0 clips nothing. Set it to 0 or more",
    ),
    Rule(
        lambda c: conditions.strategy(c.save_strategy) == "steps" and not c.save_steps > 0,
        "save_steps={c.save_steps} with save_strategy='steps' never comes to a save. Set it to 1 or more, or "
        "save_strategy='no'",
    ),
    Rule(
        lambda c: conditions.strategy(c.logging_strategy) == "steps" and not c.logging_steps > 0,
        "logging_steps={c.logging_steps} with logging_strategy='steps' never comes to a log. Set it to 1 or more, or "
        "logging_strategy='no'",
    ),
    Rule(
        lambda c: conditions.strategy(c.eval_strategy) == "steps" and c.eval_steps is not None and not c.eval_steps > 0,
        "eval_steps={c.eval_steps} with eval_strategy='steps' never comes to an evaluation. Set it to 1 or more, or "
        "eval_strategy='no'",
    ),
    Rule(conditions.unknown_scheduler_kwargs, "lr_scheduler_kwargs has {found}"),
    Rule(
        lambda c: (
            c.cache_implementation not in (None, *ALL_CACHE_IMPLEMENTATIONS) and ", ".join(ALL_CACHE_IMPLEMENTATIONS)
        ),
        "cache_implementation={c.cache_implementation!r} is no cache of transformers. Set it to one of {found}",
    ),
    Rule(
        conditions.unknown_trackers,
        "report_to={c.report_to!r} has {found}, which transformers does not know. Set it to 'none', 'all' or "
        + ", ".join(INTEGRATION_TO_CALLBACK),
    ),
    Rule(
        lambda c: c.max_steps > 0 and c.warmup_steps >= c.max_steps and c.warmup_steps >= 1,
        "warmup_steps={c.warmup_steps} of max_steps={c.max_steps}: the run ends before it trains at learning_rate",
        warns=True,
    ),
    Rule(
        lambda c: c.load_best_model_at_end and conditions.strategy(c.eval_strategy) == "no",
        "load_best_model_at_end=True compares evaluations, and eval_strategy='no' makes none. Set eval_strategy to "
        "'steps' or 'epoch', or load_best_model_at_end=False",
    ),
    Rule(
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
        conditions.chosen_by_loss,
        "{found} chooses by the loss of evaluations (metric_for_best_model={c.metric_for_best_model!r}, the default), "
        "which does not fall as the model learns: it weighs completions against others of their prompt. Set "
        "metric_for_best_model='reward'",
        warns=True,
    ),
    Rule(
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
        lambda c: (
            conditions.strategy(c.eval_strategy) == "no"
            and (name := conditions.strategy(c.lr_scheduler_type)) in ("reduce_lr_on_plateau", "greedy")
            and name
        ),
        "lr_scheduler_type={found!r} follows evaluations, and eval_strategy='no' makes none. Set "
        "eval_strategy to 'steps' or 'epoch', or another lr_scheduler_type",
    ),
    Rule(
        lambda c: c.bf16 and not c.use_cpu and not env_flag("ACCELERATE_USE_CPU") and not compat.has_bf16_accelerator(),
        "bf16=True, and the accelerator of this machine does not compute in bfloat16. Set bf16=False, or use_cpu=True",
    ),
    Rule(
        lambda c: str(c.reward_model_device).startswith("cuda") and not torch.cuda.is_available(),
        "reward_model_device={c.reward_model_device!r}, and this machine has no CUDA device. Set it to 'cpu'",
    ),
    Rule(
        conditions.unknown_checkpointing_keys,
        "gradient_checkpointing_kwargs has {found}. Set it to arguments of torch.utils.checkpoint.checkpoint",
    ),
    Rule(
        conditions.unusable_folder,
        "output_dir={c.output_dir!r} cannot be written to: {found}. Set it to a folder that exists or can be made",
    ),
    Rule(
        lambda c: c.stochastic_rounding and conditions.beside_stochastic_rounding(c),
        "stochastic_rounding=True is an AdamW of its own over bfloat16 weights, which {found} excludes. Set "
        "stochastic_rounding=False, or take the other out (optim='adamw_torch')",
    ),
    Rule(
        lambda c: c.gradient_dtype != "auto" and uses_deepspeed(c),
        "gradient_dtype={c.gradient_dtype!r}: DeepSpeed sums gradients itself. Leave gradient_dtype at 'auto', and set "
        "the type in DeepSpeed's configuration: {{'data_types': {{'grad_accum_dtype': 'fp32'}}}}",
    ),
    Rule(
        lambda c: c.gradient_dtype == "float32" and conditions.steps_in_backward(c),
        "gradient_dtype='float32' with optim={c.optimizer_name!r}, which changes weights while gradients are made and "
        "sums none. Leave gradient_dtype at 'auto', or set optim='adamw_torch'",
    ),
    Rule(
        lambda c: c.optimizer_name == "adamw_torch_8bit" and c.adam_epsilon < 1e-6,
        "optim='adamw_torch_8bit' with adam_epsilon={c.adam_epsilon}: second moments that are small beside others of "
        "their block are kept as 0, and an update divides by little else than adam_epsilon, so that such weights may "
        "move by hundreds of learning rates. Set adam_epsilon=1e-5, or optim='adamw_8bit'",
        warns=True,
    ),
    Rule(
        lambda c: conditions.steps_in_backward(c) and c.world_size > 1 and not uses_deepspeed(c),
        "optim={c.optimizer_name!r} changes weights while gradients are made, before those of the {c.world_size} "
        "processes are joined, so that each would train a model of its own. Set optim='adamw_torch', or train in one "
        "process",
    ),
    Rule(
        lambda c: zero_stage(c) == 3 and not (c.ds3_gather_for_generation or c.use_vllm),
        "ds3_gather_for_generation=False with DeepSpeed ZeRO-3: sampling in this process needs whole weights. Set it "
        "to True, or use_vllm to True where they do not fit on one device",
    ),
    Rule(
        lambda c: zero_stage(c) == 3 and c.cast_lm_head_to_fp32,
        "cast_lm_head_to_fp32=True does not go with DeepSpeed ZeRO-3. Set it to False, or use ZeRO stage 1 or 2",
    ),
    Rule(
        lambda c: zero_stage(c) == 3 and c.sync_ref_model,
        "sync_ref_model=True does not go with DeepSpeed ZeRO-3. Set it to False, or use ZeRO stage 1 or 2",
    ),
    Rule(
        lambda c: c.save_in_background and uses_deepspeed(c),
        "save_in_background=True does not go with DeepSpeed, which writes its files itself. Set it to False",
    ),
    Rule(
        conditions.parallel_sizes,
        "parallelism_config with {found} splits sequences or weights over processes in accelerate's way, which is not "
        "part of this version. Set those sizes to 1; context_parallel_size and fsdp split sequences and weights here",
    ),
    Rule(
        lambda c: c.world_size % c.context_parallel_size,
        "context_parallel_size={c.context_parallel_size} cuts each row over so many processes, and the run has "
        "{c.world_size}. Set it to a divisor of {c.world_size} (1 turns it off), or start a multiple of it (groupgrad "
        "train --num-processes {c.context_parallel_size})",
    ),
    Rule(
        lambda c: c.context_parallel_size > 1 and conditions.beside_context_parallel(c),
        "context_parallel_size={c.context_parallel_size} does not go with {found}. Change that, or set "
        "context_parallel_size=1",
    ),
    Rule(
        lambda c: [name for name in ("split_batches", "dispatch_batches") if getattr(c.accelerator_config, name, None)],
        "accelerator_config has {found[0]}=True: the trainer deals out the groups itself. Set {found[0]} to False",
    ),
    Rule(
        lambda c: (steps := conditions.accumulation_kwargs(c).get("num_steps", 1)) != 1 and str(steps),
        "accelerator_config has num_steps={found}, which would change the step behind the batch arithmetic. Take it "
        "out and set gradient_accumulation_steps",
    ),
    Rule(
        conditions.loading_options,
        "accelerator_config has {found}, without effect: the trainer reads its data itself",
        warns=True,
    ),
    Rule(
        lambda c: conditions.accumulation_kwargs(c).get("sync_each_batch", False),
        "accelerator_config has sync_each_batch=True, without effect: processes join their gradients once a step",
        warns=True,
    ),
)
