"""What a configuration must obey. Every broken rule is one sentence: the value seen, why it cannot work, what to set.

Rules are rows of tables: the values of single settings (`values.py`), parts that do not exist yet, combinations, and
settings without effect beside the others (`idle.py`), which only cause a warning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupgrad.config.engine_rules import ENGINE_RULES, uncorrected
from groupgrad.config.field_rules import CHOICES, DTYPES, RANGES, choice_problem, is_count, is_number, range_problem
from groupgrad.config.launcher import env_on, uses_deepspeed, zero_3_problem, zero_stage
from groupgrad.config.unused_settings import unused_settings

if TYPE_CHECKING:
    from groupgrad.config.grpo_config import GRPOConfig

Check = Callable[["GRPOConfig"], "str | None"]


@dataclass(slots=True, frozen=True)
class Unavailable:
    """A documented setting whose part of groupgrad does not exist in this version."""

    used: Callable[[GRPOConfig], bool]
    instead: str


DICT_FIELDS = (
    "model_init_kwargs",
    "reward_model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "transformers_continuous_batching_config",
)
"""Fields that hold a dict and also accept it as JSON text."""

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that `generation_kwargs` may override."""

OWNED_KEYS: dict[str, str] = {
    "max_length": "set max_completion_length, which does not count the prompt",
    "min_length": "set min_new_tokens, which does not count the prompt",
    "num_return_sequences": "set num_generations",
    "do_sample": "completions are always sampled; set a low temperature instead",
    "return_dict_in_generate": "the trainer decides what the sampler returns",
    "output_scores": "the trainer decides what the sampler returns",
    "output_logits": "the trainer decides what the sampler returns",
    "pad_token_id": "it is the tokenizer's",
    "input_ids": "the prompts come from the data set",
    "inputs": "the prompts come from the data set",
    "attention_mask": "the prompts come from the data set",
    "generation_config": "give its entries one by one",
    "streamer": "completions are read when they are finished",
    "guidance_scale": "completions are drawn from the distribution that is trained, not from a guided one",
    "prompt_lookup_num_tokens": "completions are sampled token by token",
    "assistant_model": "completions are sampled token by token from the policy alone",
}
"""Keys of generation_kwargs that the trainer sets itself, and what to do instead."""

UNAVAILABLE: dict[str, Unavailable] = {
    "use_transformers_continuous_batching": Unavailable(
        lambda c: bool(c.use_transformers_continuous_batching), "leave it False"
    ),
    "log_completions_hub_repo": Unavailable(
        lambda c: c.log_completions_hub_repo is not None,
        "leave it unset and upload the 'completions' folder of output_dir",
    ),
    "fsdp": Unavailable(lambda c: bool(c.fsdp) or env_on("ACCELERATE_USE_FSDP"), "use plain data parallelism"),
}

# --- Small helpers ---


def world_size(config: GRPOConfig) -> int:
    """Number of processes that train together."""
    state = getattr(config, "distributed_state", None)
    return state.num_processes if state is not None else int(os.environ.get("WORLD_SIZE", "1"))


def evaluates(config: GRPOConfig) -> bool:
    """True if the run evaluates while it trains."""
    strategy = getattr(config.eval_strategy, "value", config.eval_strategy)
    return strategy != "no" or bool(config.eval_on_start)


def divisors_near(total: int, wanted: int, least: int, most: int = 3) -> list[int]:
    """Up to `most` divisors of `total` that are at least `least`, those closest to `wanted`, ascending."""
    found = [d for d in range(least, total + 1) if total % d == 0]
    return sorted(sorted(found, key=lambda d: abs(d - wanted))[:most])


# --- Rules that look at several settings ---


def _json_dicts(c: GRPOConfig) -> str | None:

    bad = [f"{n}={getattr(c, n)!r}" for n in DICT_FIELDS if not isinstance(getattr(c, n), (dict, type(None)))]
    if not bad:
        return None
    return f"{', '.join(bad)} is not a dict. Give a dict, or one as JSON text such as '{{\"key\": 1}}'"


def _dtype(c: GRPOConfig) -> str | None:
    for name in ("model_init_kwargs", "reward_model_init_kwargs"):
        given = getattr(c, name) if isinstance(getattr(c, name), dict) else {}
        dtype = given.get("dtype", given.get("torch_dtype"))
        if dtype is not None and dtype not in DTYPES:
            return f"{name} has dtype={dtype!r}, which models are not loaded in. Set it to one of {', '.join(DTYPES)}"
    return None


def _reward_model_place(c: GRPOConfig) -> str | None:
    given = c.reward_model_init_kwargs if isinstance(c.reward_model_init_kwargs, dict) else {}
    if given.get("device_map") is None or (c.reward_model_device is None and not c.reward_model_offload):
        return None
    other = "reward_model_offload=True" if c.reward_model_offload else f"reward_model_device={c.reward_model_device!r}"
    return (
        f"reward_model_init_kwargs has device_map={given['device_map']!r}, by which models stay where it puts them, "
        f"and {other} puts them elsewhere. Set one of the two"
    )


def _owned_generation_keys(c: GRPOConfig) -> str | None:
    given = c.generation_kwargs if isinstance(c.generation_kwargs, dict) else {}
    bad = [f"{key}={given[key]!r} ({OWNED_KEYS[key]})" for key in given if key in OWNED_KEYS]
    return f"generation_kwargs has {', '.join(bad)}: the trainer sets that itself. Take it out" if bad else None


def _overridden_sampling(c: GRPOConfig) -> str | None:
    given = c.generation_kwargs if isinstance(c.generation_kwargs, dict) else {}
    ranges = {key: key for key in SAMPLING_FIELDS}
    ranges["max_new_tokens"] = "max_completion_length"
    found = [range_problem(ranges[key], given[key]) for key in given if key in ranges]
    texts = [text for text in found if text]
    return f"in generation_kwargs, {'; '.join(texts)}" if texts else None


def _two_batch_settings(c: GRPOConfig) -> str | None:
    if c.generation_batch_size is None or c.steps_per_generation is None:
        return None
    return (
        f"generation_batch_size={c.generation_batch_size} and steps_per_generation={c.steps_per_generation} both say "
        f"how much one round samples. Set one of them to None"
    )


def _batch_arithmetic(c: GRPOConfig) -> str | None:
    counts = (c.per_device_train_batch_size, c.gradient_accumulation_steps, c.num_generations)
    if not all(is_count(x) for x in counts) or (c.generation_batch_size and c.steps_per_generation):
        return None
    rows, group = c.per_device_train_batch_size * world_size(c), int(c.num_generations or 0)
    total, steps = c.generation_batch_size, c.steps_per_generation
    if total is not None and (not is_count(total) or total % rows):
        low = max(rows, total // rows * rows) if is_count(total) else rows
        return (
            f"generation_batch_size={total} is not a multiple of the {rows} completions of one micro-batch over all "
            f"processes (per_device_train_batch_size={c.per_device_train_batch_size} x {world_size(c)}). "
            f"Set it to {low} or {low + rows}"
        )
    if steps is not None and not is_count(steps):
        return None
    size = total or rows * (steps or c.gradient_accumulation_steps)
    if size % group == 0:
        return None
    need = group // math.gcd(rows, group)
    near = divisors_near(size, group, least=2)
    either = f"num_generations to {' or '.join(map(str, near))}, or " if near else ""
    have = size // rows
    few = max(need, have // need * need)
    more = sorted({few, few + need} - {have})
    return (
        f"num_generations={group} does not divide the {size} completions of a generation round "
        f"(per_device_train_batch_size={rows // world_size(c)} x {world_size(c)} ranks x {have} micro-batches), so "
        f"a group would be cut. Set {either}steps_per_generation (or gradient_accumulation_steps) to "
        f"{' or '.join(map(str, more))}, or generation_batch_size to {' or '.join(str(m * rows) for m in more)}"
    )


def _evaluation_batch(c: GRPOConfig) -> str | None:
    group = c.num_generations if c.num_generations_eval is None else c.num_generations_eval
    if not evaluates(c) or not is_count(c.per_device_eval_batch_size) or not is_count(group):
        return None
    ranks, group = world_size(c), int(group or 1)
    rows = c.per_device_eval_batch_size * ranks
    if rows % group == 0:
        return None
    need = group // math.gcd(ranks, group)
    low = max(need, c.per_device_eval_batch_size // need * need)
    near = divisors_near(rows, group, least=1)
    return (
        f"per_device_eval_batch_size={c.per_device_eval_batch_size} x {ranks} processes gives {rows} completions, "
        f"which groups of {group} do not divide. Set per_device_eval_batch_size to {low} or {low + need}, or "
        f"num_generations_eval to {' or '.join(map(str, near))}"
    )


def _reference_sync(c: GRPOConfig) -> str | None:
    if not c.sync_ref_model or c.beta != 0:
        return None
    return "sync_ref_model=True moves a reference, but beta=0.0 keeps none. Set beta above 0, or sync_ref_model=False"


def _reward_weights(c: GRPOConfig) -> str | None:
    weights: Any = c.reward_weights
    if weights is None or (isinstance(weights, (list, tuple)) and weights and all(is_number(w) for w in weights)):
        return None
    return f"reward_weights={weights!r} is not a list of finite numbers. Give one for each reward function, or None"


def _cispo_ceiling(c: GRPOConfig) -> str | None:
    if c.loss_type != "cispo" or c.epsilon_high is None or c.epsilon_high != 0:
        return None
    return "epsilon_high=0 with loss_type='cispo' is a ceiling that makes every weight 0. Set epsilon_high to 5.0"


def _entropy_bounds(c: GRPOConfig) -> str | None:
    low, high = c.entropy_coef_min, c.entropy_coef_max
    if not c.use_adaptive_entropy or not (is_number(low) and is_number(high) and is_number(c.entropy_coef)):
        return None
    if low > high:
        return f"entropy_coef_min={low} is above entropy_coef_max={high}. Set entropy_coef_min to at most {high}"
    if not low <= c.entropy_coef <= high:
        return f"entropy_coef={c.entropy_coef} is outside {low} to {high}, its adaptive bounds. Set it between them"
    return None


def _stochastic_rounding(c: GRPOConfig) -> str | None:
    optim, plain = getattr(c.optim, "value", c.optim), ("adamw_torch", "adamw_torch_fused")
    others = {f"optim={optim!r}": optim not in plain, f"optim_args={c.optim_args!r}": bool(c.optim_args)}
    bad = [
        text for text, given in {**others, "fp16=True": c.fp16, "deepspeed": zero_stage(c) is not None}.items() if given
    ]
    if not c.stochastic_rounding or not bad:
        return None
    return (
        f"stochastic_rounding=True is an AdamW of its own over bfloat16 weights, which {', '.join(bad)} excludes. Set "
        "stochastic_rounding=False, or take the other out (optim='adamw_torch')"
    )


def _update_in_backward(c: GRPOConfig) -> str | None:
    optim = str(getattr(c.optim, "value", c.optim))
    if world_size(c) == 1 or uses_deepspeed(c) or not ("lomo" in optim or "layerwise" in optim):
        return None
    return (
        f"optim={optim!r} changes weights while gradients are made, before those of the {world_size(c)} processes are "
        "joined, so that each would train a model of its own. Set optim='adamw_torch', or train in one process"
    )


def _hub_repo(c: GRPOConfig) -> str | None:
    if c.log_completions_hub_repo is None or c.log_completions:
        return None
    return f"log_completions_hub_repo={c.log_completions_hub_repo!r} has nothing to receive. Set log_completions=True"


def _auto_batch(c: GRPOConfig) -> str | None:
    if not c.auto_find_batch_size:
        return None
    return "auto_find_batch_size=True would change the batch, and with it the groups. Set it to False"


def _parallelism(c: GRPOConfig) -> str | None:
    names = ("cp_size", "sp_size", "tp_size", "dp_shard_size")
    used = [f"{n}={getattr(c.parallelism_config, n)}" for n in names if (getattr(c.parallelism_config, n, 1) or 1) > 1]
    if not used:
        return None
    return (
        f"parallelism_config with {', '.join(used)} splits sequences or weights over processes, which is not part of "
        f"this version. Set those sizes to 1"
    )


def _accelerator(c: GRPOConfig) -> str | None:
    bad = [n for n in ("split_batches", "dispatch_batches") if getattr(c.accelerator_config, n, None)]
    if not bad:
        return None
    return f"accelerator_config has {bad[0]}=True: the trainer deals out the groups itself. Set {bad[0]} to False"


def _accumulation(c: GRPOConfig) -> str | None:
    given = getattr(c.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if given.get("num_steps", 1) == 1:
        return None
    return (
        f"accelerator_config has num_steps={given['num_steps']}, which would change the step behind the batch "
        f"arithmetic. Take it out and set gradient_accumulation_steps"
    )


def _full_precision_evaluation(c: GRPOConfig) -> str | None:
    bad = [n for n in ("bf16_full_eval", "fp16_full_eval") if getattr(c, n, False)]
    if not bad:
        return None
    return (
        f"{bad[0]}=True would convert the weights themselves, those that train, to evaluate. Set {bad[0]} to False: "
        f"evaluation computes in the precision of training (bf16, fp16)"
    )


def _labels(c: GRPOConfig) -> str | None:
    if c.label_smoothing_factor == 0:
        return None
    return f"label_smoothing_factor={c.label_smoothing_factor} smooths labels, and GRPO has none. Set it to 0"


def _sampling_order(c: GRPOConfig) -> str | None:
    strategy = getattr(c, "train_sampling_strategy", "random")
    if strategy == "random":
        return None
    return (
        f"train_sampling_strategy={strategy!r} would break up the groups. Leave it at 'random'; "
        f"shuffle_dataset=False keeps the order of the data set"
    )


def checkpointing_options(c: GRPOConfig) -> str | None:
    """What is wrong with the two names that the options of gradient checkpointing have, or None."""
    old, new = c.gradient_checkpointing_kwargs, getattr(c, "activation_checkpointing_kwargs", None)
    if not (isinstance(old, dict) and isinstance(new, dict)) or old == new:
        return None
    return (
        f"gradient_checkpointing_kwargs={old} and activation_checkpointing_kwargs={new} are one setting with two "
        f"names. Set both to the same"
    )


RULES: tuple[Check, ...] = (
    _json_dicts,
    _dtype,
    _reward_model_place,
    _owned_generation_keys,
    _overridden_sampling,
    _two_batch_settings,
    _batch_arithmetic,
    _evaluation_batch,
    _reference_sync,
    _reward_weights,
    _cispo_ceiling,
    _entropy_bounds,
    _stochastic_rounding,
    _update_in_backward,
    zero_3_problem,
    _hub_repo,
    _auto_batch,
    _parallelism,
    _accelerator,
    _accumulation,
    _full_precision_evaluation,
    _labels,
    _sampling_order,
    *ENGINE_RULES,
)


# --- Remarks: it works, but the user should know ---


def _cispo_default(c: GRPOConfig) -> str | None:
    if c.loss_type != "cispo" or c.epsilon_high is not None:
        return None
    return (
        f"loss_type='cispo' without epsilon_high uses {c.epsilon_high_resolved} as the ceiling of the importance "
        f"weight (arXiv:2510.13786); set epsilon_high to say so"
    )


def _ratio_level(c: GRPOConfig) -> str | None:
    level, loss = c.importance_sampling_level, c.loss_type
    if loss == "luspo" and level != "sequence":
        return "loss_type='luspo' is defined for importance_sampling_level='sequence', and the level is 'token'"
    if loss == "vespo" and level != "token":
        return "loss_type='vespo' weighs whole sequences itself; importance_sampling_level='sequence' does so twice"
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        return (
            f"importance_sampling_level='sequence' with loss_type={loss!r}, which sums over tokens, makes long "
            f"completions count more; loss_type='grpo' counts each completion once"
        )
    return None


def _low_delta(c: GRPOConfig) -> str | None:
    if c.delta is None or c.loss_type in ("cispo", "sapo", "vespo") or c.delta > 1 + c.epsilon:
        return None
    return f"delta={c.delta} is not above 1 + epsilon={1 + c.epsilon:g} and cuts ratios inside the trust region"


def _accelerator_loading(c: GRPOConfig) -> str | None:
    usual = {"even_batches": True, "use_seedable_sampler": True, "non_blocking": False}
    found = {n: getattr(c.accelerator_config, n, value) for n, value in usual.items()}
    changed = [f"{n}={value!r}" for n, value in found.items() if value != usual[n]]
    if not changed:
        return None
    return f"accelerator_config has {', '.join(changed)}, without effect: the trainer reads its data itself"


def _accelerator_syncs(c: GRPOConfig) -> str | None:
    given = getattr(c.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if not given.get("sync_each_batch", False):
        return None
    return "accelerator_config has sync_each_batch=True, without effect: processes join their gradients once a step"


REMARKS: tuple[Check, ...] = (
    _cispo_default,
    _ratio_level,
    _low_delta,
    _accelerator_loading,
    _accelerator_syncs,
    uncorrected,
)


# --- What the config calls ---


def problems(config: GRPOConfig) -> list[str]:
    """Every broken rule in one sentence each; empty if the config can work."""
    found = [choice_problem(name, getattr(config, name)) for name in CHOICES]
    found += [range_problem(name, getattr(config, name)) for name in RANGES]
    found += [rule(config) for rule in RULES]
    for name, row in UNAVAILABLE.items():
        if row.used(config):
            value = getattr(config, name)
            shown = f"{name}={value!r}" if value else f"{name}, which the launcher turned on,"
            found.append(f"{shown} is not part of this version of groupgrad; {row.instead}")
    return [text for text in found if text]


def warnings_for(config: GRPOConfig) -> list[str]:
    """What is worth a warning in a config that can work: choices that are filled in or unusual, settings that do
    nothing."""
    found = [remark(config) for remark in REMARKS]
    idle = unused_settings(config)
    if idle:
        found.append(f"these settings have no effect here: {'; '.join(idle)}")
    return [text for text in found if text]
