"""Combinations of settings that cannot work, and those that work but deserve a warning.

A new rule is one row in `RULES`: when it is broken, and a sentence with the values seen, the reason and the remedy. A
rule that reads a setting whose own value is wrong is skipped. Rules about one setting alone are rows of
`field_rules.py`. Settings without effect beside the others are rows of `unused_settings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from groupgrad.byte_sizes import parse_bytes
from groupgrad.config.field_rules import DICTS, field_problem, field_problems, is_number
from groupgrad.config.launcher import fsdp_settings, uses_deepspeed, uses_fsdp, zero_stage
from groupgrad.config.sampling import has_comparable_logprobs, sampling_options, shaping_fields, vllm_fields
from groupgrad.config.settings import SAMPLING_FIELDS, GRPOSettings, mapping
from groupgrad.config.unused_settings import unused_settings
from groupgrad.engines.generation_options import INTERNAL, MOVED, missing_from_paged
from groupgrad.objectives import find_estimator, find_mask, find_method
from groupgrad.spelling import with_nearest


@dataclass(slots=True, frozen=True)
class Rule:
    """A combination of settings that must not occur, or that deserves a warning."""

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


OWNED_KEYS: dict[str, str] = {
    "max_length": "set max_completion_length, which does not count the prompt",
    "min_length": "set min_new_tokens, which does not count the prompt",
    "num_return_sequences": "set num_generations",
    "do_sample": "completions are always sampled; set a low temperature instead",
    **dict.fromkeys(
        (
            *("pad_token_id", "generation_config", "streamer", "guidance_scale", "continuous_batching_config"),
            *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions"),
            *("output_hidden_states", "input_ids", "inputs", "attention_mask", "bos_token_id"),
            *("forced_bos_token_id", "decoder_start_token_id", "token_healing", "assistant_model", "is_assistant"),
            *("use_mtp", "speculation_type", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
            *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
            *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind"),
        ),
        "the trainer decides it",
    ),
}
"""Keys of generation_kwargs that the trainer sets itself, and what to do instead."""


def owned_keys(c: GRPOSettings) -> str:
    """Lists the entries of `generation_kwargs` that the trainer sets itself."""
    kwargs = mapping(c.generation_kwargs)
    owned = [key for key in kwargs if key in OWNED_KEYS and (key != "do_sample" or not kwargs[key])]
    return ", ".join(f"{key}={kwargs[key]!r} ({OWNED_KEYS[key]})" for key in owned)


def unknown_sampling_options(c: GRPOSettings) -> str:
    """Lists the entries of `generation_kwargs` that neither an engine nor `generate` knows, with the most similar."""
    if c.use_vllm:  # vLLM has names of its own, which `vllm_params.py` checks
        return ""
    options = {*vars(GenerationConfig()), "stop_strings"} - INTERNAL - MOVED
    unknown = [key for key in mapping(c.generation_kwargs) if key not in options | OWNED_KEYS.keys()]
    return with_nearest(unknown, options - OWNED_KEYS.keys())


def chosen_by_loss(c: GRPOSettings) -> str:
    """The setting that looks for the evaluation with the lowest loss; empty if none does."""
    if c.metric_for_best_model not in ("loss", "eval_loss"):
        return ""
    if c.load_best_model_at_end:
        return "load_best_model_at_end=True"
    scheduler = strategy(c.lr_scheduler_type)
    return f"lr_scheduler_type={scheduler!r}" if scheduler == "reduce_lr_on_plateau" else ""


def entries(kwargs: Any, keys: Collection[str]) -> str:
    """Lists the entries of a dict that have one of these keys."""
    return ", ".join(f"{key}={value!r}" for key, value in mapping(kwargs).items() if key in keys)


def settings_problem(c: GRPOSettings) -> str:
    """Says what the loss, the advantage estimator and the off-policy mask cannot do with their settings."""
    named = [
        (find_method, c.loss_type, c.loss_settings),
        (find_estimator, c.advantage_estimator, c.advantage_settings),
        (find_mask, c.off_policy_mask, c.off_policy_mask_settings),
    ]
    problems = []
    for find, name, settings in named:
        try:
            if name is not None:
                find(name).make_settings(mapping(settings))
        except (TypeError, ValueError) as error:  # such as a text where it compares numbers
            problems.append(str(error))
    return "; ".join(problems)


def smallest_group(c: GRPOSettings) -> int | None:
    """The completions of a prompt that the advantage estimator needs, if there are fewer."""
    estimator = find_estimator(c.advantage_estimator)
    if estimator.smallest_group is None or settings_problem(c):
        return None
    needed = estimator.smallest_group(estimator.make_settings(mapping(c.advantage_settings)))
    return needed if needed > (c.num_generations or 0) else None


def missing_from_continuous_batching(c: GRPOSettings) -> str:
    """Lists sampling options that transformers' continuous batching lacks, if it is to sample."""
    if not c.use_transformers_continuous_batching or c.use_vllm or overridden_sampling(c):
        return ""
    return ", ".join(missing_from_paged(sampling_options(c, eos_ids=[], pad_id=0)))


TEMPLATE_KEYS = (
    *("conversation", "messages", "tokenize", "add_generation_prompt", "return_dict", "tools", "chat_template"),
    *("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
)


def strategy(value: Any) -> str:
    """The name of a strategy or scheduler, which is an enumeration or a text."""
    return str(getattr(value, "value", value))


def overridden_sampling(c: GRPOSettings) -> str:
    """Lists the entries of `generation_kwargs` whose values the overridden fields may not have."""
    names = {"max_new_tokens": "max_completion_length", **{name: name for name in SAMPLING_FIELDS}}
    kwargs = mapping(c.generation_kwargs)
    problems = {key: field_problem(names[key], kwargs[key]) for key in kwargs if key in names}
    return "; ".join(key + text.removeprefix(names[key]) for key, text in problems.items() if text)


def cut_group(c: GRPOSettings) -> str | None:
    """Checks that whole micro-batches and whole groups make up a generation batch."""
    if c.generation_batch_size and c.steps_per_generation:
        return None
    rows, size, group = c.global_micro_batch_size, c.generation_batch_size_resolved, int(c.num_generations or 0)
    micro_batch = f"per_device_train_batch_size={c.per_device_train_batch_size} x {c.world_size} processes"
    if size % rows:
        return (
            f"generation_batch_size={size} is not a multiple of the {rows} completions of one micro-batch over all "
            f"processes ({micro_batch}). Set it to a multiple of {rows}"
        )
    if size % group == 0:
        return None
    steps = math.lcm(rows, group) // rows
    first = "per_device_train_batch_size, " if size == 1 else f"num_generations to a divisor of {size}, or "
    return (
        f"num_generations={group} does not divide the {size} completions of a generation batch ({micro_batch} x "
        f"{size // rows} micro-batches), so a group would be cut. Set {first}steps_per_generation (or "
        f"gradient_accumulation_steps) to a multiple of {steps}"
    )


def cut_evaluation_group(c: GRPOSettings) -> str | None:
    """Checks that whole groups make up an evaluation batch."""
    batch, ranks, group = c.per_device_eval_batch_size, c.world_size, c.num_generations_eval_resolved
    if not c.evaluates or batch * ranks % group == 0:
        return None
    return (
        f"per_device_eval_batch_size={batch} x {ranks} processes gives {batch * ranks} completions, which groups of "
        f"{group} do not divide. Set per_device_eval_batch_size to a multiple of {group // math.gcd(ranks, group)}, or "
        f"num_generations_eval to a divisor of {batch * ranks}"
    )


def beside_stochastic_rounding(c: GRPOSettings) -> str:
    """Lists settings that exclude an AdamW with stochastic rounding."""
    conflicts = {
        f"optim={c.optimizer_name!r}": c.optimizer_name not in ("adamw_torch", "adamw_torch_fused"),
        f"optim_args={c.optim_args!r}": c.optim_args,
        "fp16=True": c.fp16,
        "deepspeed": zero_stage(c) is not None,
    }
    return ", ".join(text for text, is_set in conflicts.items() if is_set)


def beside_zero_3(c: GRPOSettings) -> str:
    """Lists settings that need whole weights, under DeepSpeed ZeRO-3."""
    names = ("use_transformers_continuous_batching", "cast_lm_head_to_fp32", "sync_ref_model")
    return ", ".join(f"{name}=True" for name in names if zero_stage(c) == 3 and getattr(c, name))


def steps_in_backward(c: GRPOSettings) -> bool:
    """True for an optimizer that changes weights while gradients are made."""
    return any(name in c.optimizer_name for name in ("lomo", "layerwise"))


def beside_context_parallel(c: GRPOSettings) -> str:
    """Lists settings that exclude processes which train each row together, with the values to set instead."""
    conflicts = {
        "fsdp (leave it unset)": uses_fsdp(c),
        "deepspeed (leave it unset)": uses_deepspeed(c),
        "torch_compile=True (set it to False)": c.torch_compile,
    }
    return ", ".join(text for text, is_set in conflicts.items() if is_set)


def parallel_sizes(c: GRPOSettings) -> str:
    """Lists sizes above 1 of parallelism that is not supported."""
    names = ("cp_size", "sp_size", "tp_size", "dp_shard_size")
    return entries({name: size for name in names if (size := getattr(c.parallelism_config, name, 1) or 1) > 1}, names)


def accumulation_kwargs(c: GRPOSettings) -> dict[str, Any]:
    """Accelerate's options of gradient accumulation."""
    return mapping(getattr(c.accelerator_config, "gradient_accumulation_kwargs", None))


def fields_of_rows(c: GRPOSettings) -> str | None:
    """Finds entries of `generation_kwargs` that groupgrad sets for each row of vLLM's requests."""
    if overridden_sampling(c):
        return None
    try:
        vllm_fields(c)
    except ValueError as error:
        return str(error)
    return None


def uncorrected(c: GRPOSettings) -> str | None:
    """Checks that vLLM's log-probs can be compared with those of training.

    vLLM returns log-probs before cuts, penalties and temperature, or after them; a regex cuts before both.
    """
    if not c.use_vllm or not c.vllm_importance_sampling_correction or has_comparable_logprobs(c):
        return None
    temperature = vllm_fields(c)["temperature"]
    shown = [f"{name}={value!r}" for name, value in shaping_fields(c).items()]
    return (
        f"{', '.join(shown)} beside {temperature=} with use_vllm=True: vLLM returns a token's "
        "log-prob among the tokens that were left, and training does not know which were, so that the difference "
        "between the two is not corrected for. With temperature=1.0 and without a structure it is"
    )


def unknown_failure_action(config: GRPOSettings) -> str | None:
    """Something that `on_reward_failure` cannot mean."""
    try:
        _ = config.on_reward_failure_resolved
    except (TypeError, ValueError):
        return f"{config.on_reward_failure!r}"
    return None


def rewards_beyond_watchdog(config: GRPOSettings) -> str | None:
    """Calls of reward functions that are in time and yet end the run as hanging."""
    timeout_s, longest_s = config.reward_timeout_s, config.hang_timeout_s
    if timeout_s is None or longest_s is None or timeout_s * (1 + config.reward_retries) < longest_s:
        return None
    retries = f" and reward_retries={config.reward_retries}" if config.reward_retries else ""
    return (
        f"reward_timeout_s={timeout_s:g}{retries} let a call take as long as hang_timeout_s={longest_s:g} lets the run "
        "be silent. Raise hang_timeout_s above that, or lower reward_timeout_s"
    )


def switch_text(c: GRPOSettings) -> str | None:
    """Finds a text in a dict that was meant to be True or False, since every text counts as true."""
    for name in DICTS:
        for key, value in mapping(getattr(c, name)).items():
            if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
                return f"{name} has {key}={value!r}"
    return None


FSDP_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
"""Optimizers of torch, whose updates work number by number, so that a rank can update its shards alone."""

_FSDP_KEYS = (
    *("version", "reshard_after_forward", "activation_checkpointing", "transformer_layer_cls_to_wrap"),
    *("cpu_offload", "offload_params"),
)

_FSDP_FILLED_IN = (
    *("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "activation_checkpointing_offload"),
    "min_num_params",
)
"""Options that transformers and the launcher add where they are off."""


def unread_fsdp_keys(c: GRPOSettings) -> str:
    """Lists the keys of `fsdp_config` that FSDP 2 does not have here."""
    unread = {key: value for key, value in fsdp_settings(c).items() if key not in _FSDP_KEYS}
    if unread.get("auto_wrap_policy") == "TRANSFORMER_BASED_WRAP":  # layer by layer, as here
        del unread["auto_wrap_policy"]
    return ", ".join(f"{key}={value!r}" for key, value in unread.items() if value or key not in _FSDP_FILLED_IN)


def beside_fsdp(c: GRPOSettings) -> str:
    """Lists settings that a model that FSDP shards excludes, with the values to set instead."""
    conflicts = {
        "fp16=True (set bf16=True, or neither)": c.fp16,
        "stochastic_rounding=True (set it to False)": c.stochastic_rounding,
        "sync_ref_model=True (set it to False)": c.sync_ref_model,
        "cast_lm_head_to_fp32=True (set it to False)": c.cast_lm_head_to_fp32,
        "torch_compile=True (set it to False)": c.torch_compile,
        "use_transformers_continuous_batching=True (set it to False)": c.use_transformers_continuous_batching,
        "gradient_checkpointing_kwargs with use_reentrant=True (set it to False)": mapping(
            c.gradient_checkpointing_kwargs
        ).get("use_reentrant"),
    }
    return ", ".join(text for text, is_set in conflicts.items() if is_set)


RULES: tuple[Rule, ...] = (
    # --- models ---
    Rule(switch_text, "{found}, a text, which would count as true. Set it to True or False"),
    Rule(
        lambda c: c.sync_ref_model and c.beta == 0,
        "sync_ref_model=True moves a reference, but beta=0.0 keeps none. Set beta above 0, or sync_ref_model=False",
    ),
    # --- sampling ---
    Rule(owned_keys, "generation_kwargs has {found}: the trainer sets that itself. Take it out"),
    Rule(
        unknown_sampling_options,
        "generation_kwargs has {found}, which neither an engine nor transformers' GenerationConfig knows. Take it out",
    ),
    Rule(overridden_sampling, "in generation_kwargs, {found}"),
    Rule(
        lambda c: (
            is_number(fewest := mapping(c.generation_kwargs).get("min_new_tokens", 0))
            and fewest > c.max_completion_length
            and not c.use_vllm
            and str(fewest)
        ),
        "generation_kwargs has min_new_tokens={found}, above max_completion_length={c.max_completion_length}, so no "
        "completion could end. Set it to less",
    ),
    Rule(
        lambda c: c.use_transformers_continuous_batching and c.rollout_engine != "auto",
        "use_transformers_continuous_batching=True and rollout_engine={c.rollout_engine!r} name two engines. Set "
        "one of them",
    ),
    Rule(
        missing_from_continuous_batching,
        "use_transformers_continuous_batching=True samples without {found}, which it lacks. Take that out, or set "
        "use_transformers_continuous_batching=False",
    ),
    Rule(
        lambda c: entries(c.chat_template_kwargs, TEMPLATE_KEYS),
        "chat_template_kwargs has {found}, which the trainer sets itself when it renders a prompt. Take it out",
    ),
    *(
        Rule(
            lambda c, name=name, none=none: (
                getattr(c, name) not in (None, *none) and parse_bytes(getattr(c, name)) is None
            ),
            f"{name}={{c.{name}!r}} is no amount of bytes. Set it to one with a unit ('4GiB') or leave it unset",
        )
        for name, none in (("engine_kv_memory", ()), ("rollouts_keep", ("0", 0)))
    ),
    # --- groups and batches ---
    Rule(
        lambda c: c.generation_batch_size is not None and c.steps_per_generation is not None,
        "generation_batch_size={c.generation_batch_size} and steps_per_generation={c.steps_per_generation} both say "
        "how many completions are sampled at a time. Set one of them to None",
    ),
    Rule(cut_group, "{found}"),
    Rule(cut_evaluation_group, "{found}"),
    Rule(
        lambda c: (
            None not in (sizes := (c.num_generations_eval, mapping(c.eval_sampling).get("num_generations")))
            and sizes[0] != sizes[1]
            and sizes[1]
        ),
        "num_generations_eval={c.num_generations_eval}, and eval_sampling has num_generations={found}. Set one of them",
    ),
    Rule(
        lambda c: (most := max(c.eval_k or [0])) > c.num_generations_eval_resolved and most,
        "eval_k has {found}, and an evaluation samples {c.num_generations_eval_resolved} completions of a prompt. Set "
        "num_generations_eval to {found} or more",
    ),
    # --- objective ---
    Rule(
        lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
        "loss_type='cispo' without epsilon_high uses {c.epsilon_high_resolved} as the ceiling of the importance weight "
        "(arXiv:2510.13786); set epsilon_high to say so",
        warns=True,
    ),
    Rule(settings_problem, "{found}"),
    Rule(
        smallest_group,
        "advantage_estimator={c.advantage_estimator!r} with advantage_settings={c.advantage_settings} needs groups of "
        "{found}, but num_generations is {c.num_generations}. Set num_generations to {found} or more, or other "
        "advantage_settings",
    ),
    Rule(
        lambda c: (level := find_method(c.loss_type).level) not in (None, c.importance_sampling_level) and level,
        "loss_type={c.loss_type!r} is defined for importance_sampling_level={found!r}, and the level is "
        "{c.importance_sampling_level!r}",
        warns=True,
    ),
    Rule(
        lambda c: c.use_adaptive_entropy and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
        "entropy_coef={c.entropy_coef} is outside {c.entropy_coef_min} to {c.entropy_coef_max}, its adaptive bounds. "
        "Set it between them",
    ),
    # --- rewards and logs ---
    Rule(
        lambda c: (
            (weights := c.reward_weights) is not None
            and not (isinstance(weights, (list, tuple)) and weights and all(map(is_number, weights)))
        ),
        "reward_weights={c.reward_weights!r} is not a list of finite numbers. Give one for each reward function, or "
        "None",
    ),
    # --- optimizer, precision, processes ---
    Rule(
        lambda c: c.max_steps <= 0 and not c.num_train_epochs > 0,
        "num_train_epochs={c.num_train_epochs} and max_steps={c.max_steps} make a run without a step. Set one of them "
        "above 0",
    ),
    *(
        Rule(
            lambda c, kind=kind: (
                strategy(getattr(c, f"{kind}_strategy")) == "steps"
                and (steps := getattr(c, f"{kind}_steps")) is not None
                and not steps > 0
            ),
            f"{kind}_steps={{c.{kind}_steps}} with {kind}_strategy='steps' never comes to {event}. Set it to 1 or "
            f"more, or {kind}_strategy='no'",
        )
        for kind, event in (("save", "a save"), ("logging", "a log"), ("eval", "an evaluation"))
    ),
    Rule(
        lambda c: strategy(c.save_strategy) == "best" and strategy(c.eval_strategy) == "no",
        "save_strategy='best' with eval_strategy='no' never knows a best model. Set eval_strategy='steps' and "
        "metric_for_best_model='reward', or save_strategy='steps'",
    ),
    Rule(
        chosen_by_loss,
        "{found} chooses by the loss of evaluations (metric_for_best_model={c.metric_for_best_model!r}, the default), "
        "which does not fall as the model learns: it weighs completions against others of their prompt. Set "
        "metric_for_best_model='reward'",
        warns=True,
    ),
    Rule(
        lambda c: c.greater_is_better is False and "reward" in str(c.metric_for_best_model),
        "greater_is_better=False with metric_for_best_model={c.metric_for_best_model!r} keeps the model with the "
        "lowest reward. Set greater_is_better=True",
        warns=True,
    ),
    Rule(
        lambda c: c.stochastic_rounding and beside_stochastic_rounding(c),
        "stochastic_rounding=True is an AdamW of its own over bfloat16 weights, which {found} excludes. Set "
        "stochastic_rounding=False, or take the other out (optim='adamw_torch')",
    ),
    Rule(
        lambda c: c.gradient_dtype != "auto" and uses_deepspeed(c),
        "gradient_dtype={c.gradient_dtype!r}: DeepSpeed sums gradients itself. Leave gradient_dtype at 'auto', and set "
        "the type in DeepSpeed's configuration: {{'data_types': {{'grad_accum_dtype': 'fp32'}}}}",
    ),
    Rule(
        lambda c: c.optimizer_name == "adamw_torch_8bit" and c.adam_epsilon < 1e-6,
        "optim='adamw_torch_8bit' with adam_epsilon={c.adam_epsilon}: second moments that are small beside others of "
        "their block are kept as 0, and an update divides by little else than adam_epsilon, so that such weights may "
        "move by hundreds of learning rates. Set adam_epsilon=1e-5, or optim='adamw_8bit'",
        warns=True,
    ),
    Rule(
        lambda c: steps_in_backward(c) and c.world_size > 1 and not uses_deepspeed(c),
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
        beside_zero_3,
        "DeepSpeed ZeRO-3, whose weights are in parts, does not go with {found}. Set that to False, or use ZeRO stage "
        "1 or 2",
    ),
    Rule(
        parallel_sizes,
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
        lambda c: c.context_parallel_size > 1 and beside_context_parallel(c),
        "context_parallel_size={c.context_parallel_size} does not go with {found}. Change that, or set "
        "context_parallel_size=1",
    ),
    Rule(
        lambda c: (steps := accumulation_kwargs(c).get("num_steps", 1)) != 1 and str(steps),
        "accelerator_config has num_steps={found}, which would change the step behind the batch arithmetic. Take it "
        "out and set gradient_accumulation_steps",
    ),
    # --- FSDP ---
    Rule(
        lambda c: (version := str(fsdp_settings(c).get("version", 2))) != "2" and version,
        "fsdp is on with fsdp_version {found}, and only FSDP 2 is supported. Set fsdp_config={{'version': 2}}, or in "
        "the launcher's configuration fsdp_version: 2",
    ),
    Rule(
        lambda c: uses_fsdp(c) and c.world_size < 2,
        "fsdp shards weights over several processes, and there is one. Start several (groupgrad train --num-processes "
        "2), or leave fsdp unset",
    ),
    Rule(
        lambda c: uses_fsdp(c) and c.optimizer_name not in FSDP_OPTIMIZERS and ", ".join(FSDP_OPTIMIZERS),
        "optim={c.optimizer_name!r} does not go with fsdp: it is not known to update a shard as it would the whole "
        "weight. Set it to one of {found}",
    ),
    Rule(
        lambda c: uses_fsdp(c) and c.use_vllm and c.vllm_mode == "colocate",
        "vllm_mode='colocate' with fsdp is not part of this version. Set vllm_mode='server', or use_vllm=False",
    ),
    Rule(lambda c: uses_fsdp(c) and beside_fsdp(c), "fsdp does not go with {found}"),
    Rule(
        unread_fsdp_keys,
        "fsdp_config has settings without effect under FSDP 2: {found}",
        warns=True,
    ),
    # --- rewards ---
    Rule(
        unknown_failure_action,
        "on_reward_failure={found} is not known. Set it to 'error', 'none' or a reward, or to one of these by function",
    ),
    Rule(rewards_beyond_watchdog, "{found}"),
    # --- vLLM ---
    Rule(
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
        lambda c: (
            find_method(c.loss_type).needs_token_correction
            and c.use_vllm
            and c.vllm_importance_sampling_correction
            and c.vllm_importance_sampling_mode.startswith("sequence")
        ),
        "loss_type={c.loss_type!r} needs the correction of each token, but vllm_importance_sampling_mode="
        "{c.vllm_importance_sampling_mode!r} gives one for the sequence. Set vllm_importance_sampling_mode to "
        "'token_truncate' or 'token_mask'",
    ),
    Rule(lambda c: c.use_vllm and fields_of_rows(c), "{found}"),
    Rule(
        lambda c: (
            c.rollout_ahead
            and not (c.use_vllm and c.vllm_mode == "server")
            and (f"vllm_mode={c.vllm_mode!r}" if c.use_vllm else "use_vllm=False")
        ),
        "rollout_ahead={c.rollout_ahead} samples while the model trains, but with {found} both would use the same "
        "device at once. Set use_vllm=True and vllm_mode='server', or rollout_ahead=0",
    ),
    Rule(
        lambda c: (
            c.vllm_in_flight_updates
            and (
                (not c.use_vllm and "use_vllm=False")
                or (c.vllm_mode != "server" and f"vllm_mode={c.vllm_mode!r}")
                or (c.rollout_ahead < 2 and f"rollout_ahead={c.rollout_ahead}")
            )
        ),
        "vllm_in_flight_updates=True sends weights to a vLLM server while it samples, but with {found} nothing samples "
        "when weights are sent. Set use_vllm=True, vllm_mode='server' and rollout_ahead=2 or more, or "
        "vllm_in_flight_updates=False",
    ),
    Rule(
        lambda c: c.vllm_in_flight_updates and c.vllm_lora_updates == "adapter",
        "vllm_in_flight_updates=True gives new weights to rows under way, but with vllm_lora_updates='adapter' a row "
        "keeps the adapter that it began with. Set vllm_lora_updates to 'merge' or 'auto'",
    ),
    Rule(uncorrected, "{found}", warns=True),
)


class _WrongSetting(Exception):
    """A rule has read a setting that has a problem of its own."""


def problems(config: GRPOSettings) -> list[str]:
    """Returns one sentence for each broken rule; empty if the config can work."""
    wrong = field_problems(config)
    texts = [*wrong.values()]
    checked = _without(config, wrong)
    for rule in RULES:
        with suppress(_WrongSetting):
            if not rule.warns and (text := rule.message(checked)):
                texts.append(text)
    return texts


def _without(config: GRPOSettings, wrong: Collection[str]) -> GRPOSettings:
    """The config, but reading one of the settings `wrong` raises _WrongSetting."""

    class Checked(type(config)):
        def __getattribute__(self, name: str) -> Any:
            if name in wrong:
                raise _WrongSetting(name)
            return super().__getattribute__(name)

    checked = object.__new__(Checked)
    checked.__dict__ = config.__dict__
    return checked


def warnings_for(config: GRPOSettings) -> list[str]:
    """Returns the warnings about a config that can work: surprising combinations, and settings without effect."""
    texts = [text for rule in RULES if rule.warns and (text := rule.message(config))]
    if unused := unused_settings(config):
        texts.append(f"these settings have no effect here: {'; '.join(unused)}")
    return texts
