"""`Rule`, a combination of settings that must not occur, and the conditions that are too long for a row of `rules.py`.

Each returns the text that its rule's sentence shows as `{found}`, empty or None if the rule holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from groupgrad.config.field_rules import DICTS, field_problem
from groupgrad.config.launcher import fsdp_settings, uses_deepspeed, uses_fsdp, zero_stage
from groupgrad.config.sampling import has_comparable_logprobs, sampling_options, shaping_fields, vllm_fields
from groupgrad.config.settings import SAMPLING_FIELDS, GRPOSettings, mapping
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
        "record_gradient_share=True (set it to False)": c.record_gradient_share,
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
