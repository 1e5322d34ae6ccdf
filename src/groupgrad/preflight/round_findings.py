"""Judges the numbers of a small round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.cockpit.advice import advice
from groupgrad.preflight.findings import Finding, Status
from groupgrad.preflight.small_round import Round
from groupgrad.trainer.mismatch_watch import MISMATCH, computing_types, tolerance

FULL = 0.9
"""Share of the memory from which on a round is warned of."""

_TRUNCATED, _NO_VARIANCE, _REWARD_SECONDS = "completions/clipped_ratio", "frac_reward_zero_std", "time/rewards"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"
_HAVE_ROWS = (_TRUNCATED, _NO_VARIANCE, _REWARD_SECONDS, _DIFFERENCE)


def round_findings(trainer: Any, done: Round, plan: GenerationPlan, num_steps: int) -> list[Finding]:
    """Returns what a small round shows of a run with this plan and number of steps."""
    advices = {found["metric"]: found for found in advice([done.metrics])}
    further = [found for metric, found in advices.items() if metric not in _HAVE_ROWS]
    return [
        Finding("round", _round_in_words(done, plan)),
        _ending(trainer, done.metrics, advices),
        *_rewards(done.metrics, advices, trainer.rewards.names),
        _agreement(trainer, done.metrics, advices),
        *(Finding("advice", found["text"], "warning", found["setting"]) for found in further),
        _seconds(done, plan, num_steps),
        _memory(done, plan),
    ]


def _round_in_words(done: Round, plan: GenerationPlan) -> str:
    groups = done.rows // plan.num_generations
    text = f"{done.rows} completions of {groups} prompt{'s' if groups > 1 else ''} were sampled, scored and trained on"
    return f"{text}; {done.sample}" if done.sample else text


def _ending(trainer: Any, metrics: Mapping[str, Any], advices: Mapping[str, Mapping[str, str]]) -> Finding:
    truncated, longest = float(metrics[_TRUNCATED]), float(metrics["completions/max_length"])
    lengths = f"they are {metrics['completions/min_length']:,.0f} to {longest:,.0f} tokens long"
    if _TRUNCATED not in advices:
        others = ", the others were truncated" if truncated else ""
        return Finding("ended", f"{_percent(1 - truncated)} of completions ended by themselves{others}; {lengths}")
    status: Status = "error" if truncated == 1 else "warning"
    share = "all" if truncated == 1 else f"{_percent(truncated)} of"
    seen = f"{share} completions were truncated, so unfinished answers would be rewarded; {lengths}."
    limit, context = trainer.args.max_completion_length, trainer.prompt_maker.max_context
    mend = f"max_completion_length is {limit:,}."
    if context is not None and (limit >= context or longest < limit):
        mend = (
            f"{mend[:-1]}, but prompt and completion have a context of {context:,} positions together, which truncates "
            "them. Take a model with a longer context, shorten prompts, reward short answers, or set "
            "mask_truncated_completions=True."
        )
    else:
        mend = f"{mend} {advices[_TRUNCATED]['setting']}"
    return Finding("ended", seen, status, mend)


def _rewards(metrics: Mapping[str, Any], advices: Mapping[str, Mapping[str, str]], names: list[str]) -> list[Finding]:
    """Findings about the rewards, the groups with variance and the seconds of the reward functions."""
    found = []
    means = {name: metrics.get(f"rewards/{name}/mean") for name in names}
    silent = [name for name, mean in means.items() if mean is None or math.isnan(mean)]
    text = f"mean {metrics['reward']:.3g} ± {metrics['reward_std']:.3g}"
    if len(names) > 1:
        text += " (" + ", ".join(f"{name} {mean:.3g}" for name, mean in means.items() if name not in silent) + ")"
    if silent:
        text += f"; {', '.join(silent)} gave no number for any completion."
        mend = "Check the columns that the function reads, or take it out."
        found.append(Finding("rewards", text, "error" if len(silent) == len(names) else "warning", mend))
    else:
        found.append(Finding("rewards", text))
    flat = float(metrics[_NO_VARIANCE])
    advised = advices.get(_NO_VARIANCE)
    if advised is None:
        found.append(Finding("variance", f"{_percent(1 - flat)} of groups have rewards that differ"))
    else:
        found.append(Finding("variance", advised["text"], "warning", advised["setting"]))
    took, slow = float(metrics[_REWARD_SECONDS]), advices.get(_REWARD_SECONDS)
    seconds = f"reward functions took {took:.2g} s"
    if slow is None:
        found.append(Finding("scoring", seconds))
    else:
        share = _percent(took / metrics["step_time"])
        found.append(Finding("scoring", f"{seconds}, {share} of the round.", "warning", slow["setting"]))
    return found


def _agreement(trainer: Any, metrics: Mapping[str, Any], advices: Mapping[str, Mapping[str, str]]) -> Finding:
    gap, served = metrics.get(MISMATCH), advices.get(_DIFFERENCE)
    if served is not None:
        return Finding("agreement", served["text"], "warning", served["setting"])
    if gap is None:
        mean = metrics.get(_DIFFERENCE)
        known = "was not measured" if mean is None else f"is {mean:.2g} nats a token on average"
        return Finding("agreement", f"the difference of sampler and trainer {known}")
    types = computing_types(trainer.model, trainer.accelerator.mixed_precision)
    most = tolerance(types, trainer.accelerator.device)
    text = f"log-probs of sampler and trainer differ by {gap:.2g} nats at most; rounding explains {most:.1g}"
    if gap <= most:
        return Finding("agreement", text)
    return Finding("agreement", f"{text}.", "warning", "Set rollout_engine='transformers', which samples another way.")


def _seconds(done: Round, plan: GenerationPlan, num_steps: int) -> Finding:
    metrics = done.metrics
    parts = ", ".join(
        f"{key.removeprefix('time/')} {value:.2g} s" for key, value in metrics.items() if key.startswith("time/")
    )
    step_rows = plan.micro_batch_rows * plan.accumulation * plan.world_size
    step = metrics["step_time"] * step_rows / done.rows
    text = f"the round took {metrics['step_time']:.2g} s ({parts})"
    text += f"; a step of {step_rows:,} completions takes about {_duration(step)} at this rate"
    return Finding("time", f"{text}, and {num_steps:,} steps {_duration(step * num_steps)}")


def _memory(done: Round, plan: GenerationPlan) -> Finding:
    share = done.peak_bytes / done.total_bytes
    text = f"at most {done.peak_bytes / 2**30:.3g} GiB of {done.total_bytes / 2**30:.3g} were used"
    if done.micro_batch_rows != plan.micro_batch_rows:
        text += f", with {done.micro_batch_rows} rows a micro-batch in place of {plan.micro_batch_rows}"
    if share < FULL:
        return Finding("memory", text)
    mend = "Lower per_device_train_batch_size, set gradient_checkpointing=True, or train an adapter."
    return Finding("memory", f"{text}.", "warning", mend)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s"
