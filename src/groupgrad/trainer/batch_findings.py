"""Judges sampled completions: `groupgrad check` prints the findings, and training warns of those of its first step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from groupgrad.run_folder.advice import Finding, Status, advice_on_step
from groupgrad.run_folder.metric_store import MetricStore

logger = logging.getLogger(__name__)

LEAST_GROUPS = 4
"""Groups of a generation batch from which training warns of equal rewards; fewer often are equal by chance."""

TRUNCATED, NO_VARIANCE = "completions/clipped_ratio", "frac_reward_zero_std"


def ending(trainer: Any, metrics: Mapping[str, Any]) -> Finding:
    """Returns a finding about the share of truncated completions and the lengths of all."""
    advised = advice_on_step(metrics).get(TRUNCATED)
    truncated, longest = float(metrics[TRUNCATED]), float(metrics["completions/max_length"])
    lengths = f"they are {metrics['completions/min_length']:,.0f} to {longest:,.0f} tokens long"
    if advised is None:
        others = ", the others were truncated" if truncated else ""
        return Finding("ended", f"{percent(1 - truncated)} of completions ended by themselves{others}; {lengths}")
    status: Status = "error" if truncated == 1 else "warning"
    share = "all" if truncated == 1 else f"{percent(truncated)} of"
    masked = trainer.args.mask_truncated_completions
    follows = "they teach nothing (mask_truncated_completions=True)" if masked else "unfinished answers are rewarded"
    seen = f"{share} completions were truncated, so {follows}; {lengths}."
    limit, context = trainer.args.max_completion_length, trainer.prompt_maker.max_context
    mend = f"max_completion_length is {limit:,}."
    parts = trainer.rollout_components  # results of tools count against the limit, but not in `longest`
    is_short = longest < limit and parts.chat is None and parts.function is None
    if context is not None and (limit >= context or is_short):
        choices = ["Take a model with a longer context", "shorten prompts", "reward short answers"]
        if not masked:
            choices.append("set mask_truncated_completions=True")
        mend = (
            f"{mend[:-1]}, but prompt and completion have a context of {context:,} positions together, which truncates "
            f"them. {', '.join(choices[:-1])}, or {choices[-1]}."
        )
    else:
        mend = f"{mend} {'Raise it, or reward short answers.' if masked else advised.setting}"
    return Finding("ended", seen, status, mend)


def variance(metrics: Mapping[str, Any]) -> Finding:
    """Returns a finding about the share of groups whose rewards differ."""
    advised = advice_on_step(metrics).get(NO_VARIANCE)
    if advised is None:
        return Finding("variance", f"{percent(1 - float(metrics[NO_VARIANCE]))} of groups have rewards that differ")
    return Finding("variance", advised.text, "warning", advised.setting)


class FirstBatch(TrainerCallback):
    """Warns, after the first optimizer step of a run, of what is wrong with its completions and rewards."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective in the first step: merges its metrics over all ranks. The main process warns."""
        if state.global_step != 1:
            return
        store = MetricStore()
        for experience in self._trainer._step_log.experiences:
            store.add(experience.metrics)
        metrics = store.flush()
        has_rewards = math.isfinite(metrics.get("reward", math.nan))  # without any there is a warning of its own
        if not state.is_world_process_zero or not has_rewards:
            return
        found = [ending(self._trainer, metrics)] if TRUNCATED in metrics else []
        if NO_VARIANCE in metrics and self._trainer.plan.prompts_per_generation >= LEAST_GROUPS:
            found.append(variance(metrics))
        for finding in found:
            if finding.status != "ok":
                logger.warning("step 1: %s %s", finding.text, finding.setting)


def percent(share: float) -> str:
    """Returns a share as a whole percentage, such as `25 %`."""
    return f"{100 * share:.0f} %"
