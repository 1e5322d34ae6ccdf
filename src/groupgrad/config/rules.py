"""Combinations of settings that cannot work, and those that work but deserve a warning.

A new rule is one row in `RULES`: when it is broken, and a sentence with the values seen, the reason and the remedy. A
rule that reads a setting whose own value is wrong is skipped. Rules about one setting alone are rows of
`field_rules.py`. Settings without effect beside the others are rows of `unused_settings.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from groupgrad.byte_sizes import parse_bytes
from groupgrad.config import conditions
from groupgrad.config.conditions import FSDP_OPTIMIZERS, Rule
from groupgrad.config.field_rules import field_problems, is_number
from groupgrad.config.launcher import fsdp_settings, uses_deepspeed, uses_fsdp, zero_stage
from groupgrad.config.settings import GRPOSettings, mapping
from groupgrad.config.unused_settings import unused_settings
from groupgrad.objectives import find_method

RULES: tuple[Rule, ...] = (
    # --- models ---
    Rule(conditions.switch_text, "{found}, a text, which would count as true. Set it to True or False"),
    Rule(
        lambda c: c.sync_ref_model and c.beta == 0,
        "sync_ref_model=True moves a reference, but beta=0.0 keeps none. Set beta above 0, or sync_ref_model=False",
    ),
    # --- sampling ---
    Rule(conditions.owned_keys, "generation_kwargs has {found}: the trainer sets that itself. Take it out"),
    Rule(
        conditions.unknown_sampling_options,
        "generation_kwargs has {found}, which neither an engine nor transformers' GenerationConfig knows. Take it out",
    ),
    Rule(conditions.overridden_sampling, "in generation_kwargs, {found}"),
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
        conditions.missing_from_continuous_batching,
        "use_transformers_continuous_batching=True samples without {found}, which it lacks. Take that out, or set "
        "use_transformers_continuous_batching=False",
    ),
    Rule(
        lambda c: conditions.entries(c.chat_template_kwargs, conditions.TEMPLATE_KEYS),
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
    Rule(conditions.cut_group, "{found}"),
    Rule(conditions.cut_evaluation_group, "{found}"),
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
    Rule(conditions.settings_problem, "{found}"),
    Rule(
        conditions.smallest_group,
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
                conditions.strategy(getattr(c, f"{kind}_strategy")) == "steps"
                and (steps := getattr(c, f"{kind}_steps")) is not None
                and not steps > 0
            ),
            f"{kind}_steps={{c.{kind}_steps}} with {kind}_strategy='steps' never comes to {event}. Set it to 1 or "
            f"more, or {kind}_strategy='no'",
        )
        for kind, event in (("save", "a save"), ("logging", "a log"), ("eval", "an evaluation"))
    ),
    Rule(
        lambda c: conditions.strategy(c.save_strategy) == "best" and conditions.strategy(c.eval_strategy) == "no",
        "save_strategy='best' with eval_strategy='no' never knows a best model. Set eval_strategy='steps' and "
        "metric_for_best_model='reward', or save_strategy='steps'",
    ),
    Rule(
        conditions.chosen_by_loss,
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
        conditions.beside_zero_3,
        "DeepSpeed ZeRO-3, whose weights are in parts, does not go with {found}. Set that to False, or use ZeRO stage "
        "1 or 2",
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
        lambda c: (steps := conditions.accumulation_kwargs(c).get("num_steps", 1)) != 1 and str(steps),
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
    Rule(lambda c: uses_fsdp(c) and conditions.beside_fsdp(c), "fsdp does not go with {found}"),
    Rule(
        conditions.unread_fsdp_keys,
        "fsdp_config has settings without effect under FSDP 2: {found}",
        warns=True,
    ),
    # --- rewards ---
    Rule(
        conditions.unknown_failure_action,
        "on_reward_failure={found} is not known. Set it to 'error', 'none' or a reward, or to one of these by function",
    ),
    Rule(conditions.rewards_beyond_watchdog, "{found}"),
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
    Rule(lambda c: c.use_vllm and conditions.fields_of_rows(c), "{found}"),
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
    Rule(conditions.uncorrected, "{found}", warns=True),
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
