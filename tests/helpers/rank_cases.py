"""The runs that ranks make: the options of each, by name. Every loss, estimator and mask has one."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

from groupgrad.objectives import ESTIMATORS, LOSSES, MASKS


def few_vary(completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
    """Gives equal rewards within a group, except for every fifth prompt."""
    return [float(len(ids) + ids[0] % 3) if number % 5 == 0 else 0.5 for ids, number in zip(completion_ids, row)]


TWO_STEPS = {"generation_batch_size": 32, "max_steps": 4}

SETTINGS_OF_LOSSES: dict[str, dict[str, Any]] = {
    "cispo": {"epsilon_high": 5.0},
    "dr_grpo": {"mask_truncated_completions": True},
    "clip_cov": {
        "loss_settings": {"share": 0.2, "low": 0.0},
        "off_policy_mask": "m2po",
        "off_policy_mask_settings": {"tau": 1e-2},
    },
    "kl_cov": {"loss_settings": {"share": 0.2}},
    "dppo_tv": {"loss_settings": {"threshold": 1e-3}},
    "dppo_kl": {"loss_settings": {"threshold": 1e-3}},
}
"""Settings with which a loss acts on the few tokens of a small step; its defaults hardly would."""


def loss_settings(name: str) -> dict[str, Any]:
    """The settings of two passes over a generation batch, of which the second is off policy."""
    level = {} if LOSSES[name].level is None else {"importance_sampling_level": LOSSES[name].level}
    return {"loss_type": name, **level, **SETTINGS_OF_LOSSES.get(name, {}), "num_iterations": 2, "max_steps": 4}


SETTINGS_OF_MASKS: dict[str, dict[str, Any]] = {
    "geometric": {"low": 0.9, "high": 1.1},
    "k1": {"low": 0.8, "high": 1.25},
    "k2": {"level": "token", "threshold": 0.02},
}
"""The same for masks."""


def success(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards of 0 and 1, which all estimators are for."""
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def with_mask(estimator: str, mask: str) -> dict[str, Any]:
    """The settings of two passes over a generation batch, of which the mask acts on the second."""
    return {
        "advantage_estimator": estimator,
        "advantage_settings": {"k": 2} if estimator == "pass_at_k" else None,
        "off_policy_mask": mask,
        "off_policy_mask_settings": SETTINGS_OF_MASKS.get(mask),
        "num_iterations": 2,
        "max_steps": 4,
    }


NUM_PAIRS = max(len(ESTIMATORS), len(MASKS))
PAIRS = {
    f"{estimator} {mask}": with_mask(estimator, mask)
    for estimator, mask in islice(zip(cycle(ESTIMATORS), cycle(MASKS)), NUM_PAIRS)
}
"""Each estimator and each mask in a run."""

# AdamW blows up rounding in gradients that are almost zero, relatively to weights that have hardly moved: 1.03e-5 for
# dr_grpo, 2e-7 with adam_epsilon=1e-6.
LARGE = {"optim": "sgd", "learning_rate": 0.3}

CASES: dict[str, dict[str, Any]] = {
    **{name: {**loss_settings(name), **LARGE} for name in LOSSES},
    **{name: {**settings, **LARGE, "reward": success} for name, settings in PAIRS.items()},
    "dapo": {
        **TWO_STEPS,
        "eval": "sets",
        "eval_steps": 2,
        "log_completions": True,
        "num_completions_to_print": 0,
    },
    "grpo": {
        **TWO_STEPS,
        "loss_type": "grpo",
        "beta": 0.1,
        "gradient_checkpointing": True,
    },
    "entropy": {
        "top_entropy_quantile": 0.4,
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.05,
    },
    # Few groups have a signal, so that often one rank alone has work, and in some steps none.
    "flat_groups": {
        **TWO_STEPS,
        "shuffle_rows": "groups",
        "reward": few_vary,
    },
    # Flat groups of both ranks give place to others, in rounds in which one rank may have no rows.
    "dynamic_sampling": {
        **TWO_STEPS,
        "reward": few_vary,
        "dynamic_sampling_rounds": 2,
        "max_steps": 2,
    },
    "rows_stay": {
        **TWO_STEPS,
        "shuffle_rows": "groups",
        "reward": few_vary,
        "balance_ranks": False,
    },
    # Some texts are longer than the 8 tokens that it reads.
    "reward_model": {"reward": "model", "reward_model_batch_tokens": 20, "max_steps": 2},
    "cut_groups": {"step_rows": 4, "micro_batches": 1, "max_steps": 4},
    # Turns are short and read as calls by their first token, so that ranks have rollouts of different numbers of turns.
    "agents": {"agents": True, "max_completion_length": 80, "max_tool_calling_iterations": 3, "max_steps": 2},
    # The same, with an advantage for each turn, among turns of the group that read the same.
    "turns": {
        "agents": True,
        "max_completion_length": 80,
        "max_tool_calling_iterations": 3,
        "max_steps": 2,
        "advantage_estimator": "gigpo",
    },
    # An adapter on the head too, and a reference that follows it: the parameters that train change places.
    "lora": {"peft": True, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3},
    # Most prompts have no image, so that often one rank alone passes through the vision tower.
    "images": {"images": True, "gradient_checkpointing": True, "optim": "sgd", "learning_rate": 0.1},
    "hybrid": {"hybrid": "qwen3_5", "beta": 0.1, "optim": "sgd", "learning_rate": 0.1, "max_steps": 2},
    # Resumed within a generation batch.
    "resumed": {
        **TWO_STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 3,
        "resume_from": 1,
    },
}
QUICK = ("dapo", "clip_cov", "flat_groups", "rows_stay", "turns", "lora", "resumed")
"""Cases of the quick tests."""
