"""Judges the metrics of the small round of sampling and training that a check makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from transformers.trainer_utils import IntervalStrategy

from groupgrad.apps.check.small_round import DIFFERENCE, Round
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.evaluation.statistics import student_quantile
from groupgrad.run_folder.advice import Advice, Finding, advice_on_step
from groupgrad.run_folder.render import duration
from groupgrad.trainer.sampler_logprobs import MISMATCH
from groupgrad.trainer.step_log import NO_VARIANCE, TRUNCATED, ending, percent, tolerance, variance

FULL = 0.9
"""Share of the memory from which on a round is warned of."""

_REWARD_SECONDS = "time/rewards"
_HAVE_ROWS = (TRUNCATED, NO_VARIANCE, _REWARD_SECONDS, DIFFERENCE)


def round_findings(
    trainer: Any, done: Round, plan: GenerationPlan, num_steps: int, num_evaluated: int = 0
) -> list[Finding]:
    """Returns what a small round shows of a run with this plan, number of steps and of completions in evaluations."""
    advices = advice_on_step(done.metrics)
    further = [found for metric, found in advices.items() if metric not in _HAVE_ROWS]
    return [
        Finding("round", _round_in_words(done, plan)),
        ending(trainer, done.metrics),
        *_rewards(done, advices, trainer.rewards.names),
        _agreement(trainer, done.metrics, advices),
        *(Finding("advice", found.text, "warning", found.setting) for found in further),
        _seconds(done, plan, num_steps, num_evaluated),
        _memory(done, plan),
    ]


def _round_in_words(done: Round, plan: GenerationPlan) -> str:
    groups = done.rows // plan.num_generations
    text = f"{done.rows} completions of {groups} prompt{'s' if groups > 1 else ''} were sampled, scored and trained on"
    return f"{text}; {done.sample}" if done.sample else text


def _rewards(done: Round, advices: Mapping[str, Advice], names: list[str]) -> list[Finding]:
    """Findings about the rewards, the groups with variance and the seconds of the reward functions."""
    metrics, found = done.metrics, []
    means = {name: metrics.get(f"rewards/{name}/mean") for name in names}
    silent = [name for name, mean in means.items() if mean is None or math.isnan(mean)]
    numbers = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items() if name not in silent)
    spread = f" ± {metrics['reward_std']:.3g}" if "reward_std" in metrics else ", of a single completion"
    counts = "reward" in metrics
    parts = [f"mean {metrics['reward']:.3g}{spread}"] if counts else []
    if len(names) > 1 and counts:
        parts[0] += f" ({numbers})"
    if counts and done.group_rewards:
        parts.append(before_training(done.group_rewards))
    if silent:
        text = "; ".join([*parts, f"{', '.join(silent)} gave no number for any completion."])
        mend = "Check the columns that the function reads, or take it out."
        found.append(Finding("rewards", text, "warning" if counts else "error", mend))
    else:
        found.append(Finding("rewards", "; ".join(parts)))
    found.append(_signal(metrics))
    took, slow = float(metrics[_REWARD_SECONDS]), advices.get(_REWARD_SECONDS)
    seconds = f"reward functions took {took:.2g} s"
    if slow is None:
        found.append(Finding("scoring", seconds))
    else:
        share = percent(took / metrics["step_time"])
        found.append(Finding("scoring", f"{seconds}, {share} of the round.", "warning", slow.setting))
    return found


def _signal(metrics: Mapping[str, Any]) -> Finding:
    """The finding about variance; where no group had any, with what ends such a run by itself."""
    seen = variance(metrics)
    if metrics[NO_VARIANCE] < 1:
        return seen
    mend = f"{seen.setting} A higher --prompts shows more of them; stop_without_signal=10 ends a run that stays so."
    return Finding(seen.topic, seen.text, seen.status, mend)


def before_training(group_rewards: Sequence[float]) -> str:
    """Says in words what a model scores by the mean reward of each group: Student's interval over the prompts.

    Completions of a prompt resemble each other, so a prompt counts once. Where all prompts have the same mean, the
    spread of others cannot be estimated: with 95 % confidence, less than `1 - 0.05 ** (1 / n)` of prompts have another.
    """
    number, mean = len(group_rewards), math.fsum(group_rewards) / len(group_rewards)
    if number == 1:
        return "a single prompt does not show what the model scores before training: raise generation_batch_size"
    squares = math.fsum((reward - mean) ** 2 for reward in group_rewards)
    if squares <= number * (1e-8 * max(1.0, abs(mean))) ** 2:
        return (
            f"each of {number} prompts has this mean; before training less than "
            f"{percent(1 - 0.05 ** (1 / number))} of prompts have another (95 % confidence)"
        )
    half = student_quantile(0.025, number - 1) * math.sqrt(squares / (number - 1) / number)
    return f"the model before training scores {mean - half:.3g} to {mean + half:.3g} (95 % interval, {number} prompts)"


def _agreement(trainer: Any, metrics: Mapping[str, Any], advices: Mapping[str, Advice]) -> Finding:
    gap, served = metrics.get(MISMATCH), advices.get(DIFFERENCE)
    if served is not None:
        native = "Set rollout_engine='native', whose log-probs are those of training."
        return Finding("agreement", served.text, "warning", served.setting if trainer.args.use_vllm else native)
    if DIFFERENCE in metrics:
        return Finding("agreement", f"sampler and trainer differ by {metrics[DIFFERENCE]:.2g} nats a token on average")
    if gap is None:
        text = "sampler and trainer were not compared: no token that is trained on has a log-prob of the sampler."
        mend = "Let some completions end, or let the sampler report log-probs: rollout_engine='native' does."
        return Finding("agreement", text, "warning", mend)
    most = tolerance(trainer.rounding, trainer.args.temperature)
    text = f"log-probs of sampler and trainer differ by {gap:.2g} nats at most; rounding explains {most:.1g}"
    if gap <= most:
        return Finding("agreement", text)
    return Finding("agreement", f"{text}.", "warning", "Set rollout_engine='transformers', which samples another way.")


def evaluated_completions(trainer: Any, num_steps: int) -> int:
    """Counts the completions that evaluations sample in a run of `num_steps`; 0 for sets without a length."""
    config, given = trainer.args, trainer.eval_dataset
    datasets = list(given.values()) if isinstance(given, dict) else [given]
    if not config.evaluates or not all(isinstance(dataset, Sized) for dataset in datasets):
        return 0
    times = int(bool(config.eval_on_start))
    if config.eval_strategy == IntervalStrategy.STEPS:
        every = config.eval_steps if config.eval_steps >= 1 else math.ceil(num_steps * config.eval_steps)
        times += int(num_steps // every)
    elif config.eval_strategy == IntervalStrategy.EPOCH:
        times += math.ceil(config.num_train_epochs) if config.max_steps <= 0 else 1
    return times * sum(map(len, datasets)) * config.num_generations_eval_resolved


def _seconds(done: Round, plan: GenerationPlan, num_steps: int, num_evaluated: int) -> Finding:
    metrics = done.metrics
    parts = ", ".join(
        f"{key.removeprefix('time/')} {value:.2g} s" for key, value in metrics.items() if key.startswith("time/")
    )
    step_rows = plan.micro_batch_rows * plan.accumulation * plan.world_size
    step = metrics["step_time"] * step_rows / done.rows
    text = f"the round took {metrics['step_time']:.2g} s ({parts})"
    text += f"; a step of {step_rows:,} completions takes about {duration(step)} at this rate"
    text += f", and {num_steps:,} steps {duration(step * num_steps)}"
    if num_evaluated:
        one = (metrics["step_time"] - metrics.get("time/training", 0.0)) / done.rows
        text += f"; {num_evaluated:,} completions in evaluations take {duration(one * num_evaluated)} more"
    return Finding("time", text)


def _memory(done: Round, plan: GenerationPlan) -> Finding:
    used = done.memory
    added, total = max(used.peak_bytes - used.before_bytes, 0), used.total_bytes / 2**30
    processes = "1 process" if used.num_ranks == 1 else f"{used.num_ranks} processes"
    who, kind = f"{processes} with libraries and model", "machine"
    if used.is_accelerator:
        who, kind = f"tensors of {processes}", "accelerator"
    place = f"the fullest of {done.num_places} {kind}s" if done.num_places > 1 else f"the {kind}"
    text = f"{who} took at most {used.peak_bytes / 2**30:.3g} GiB of the {total:.3g} of {place}"
    text += f", {added / 2**30:.2g} GiB more than before the round"
    if done.micro_batch_rows != plan.micro_batch_rows:
        text += f", with {done.micro_batch_rows} rows a micro-batch in place of {plan.micro_batch_rows}"
    if used.peak_bytes / used.total_bytes < FULL:
        return Finding("memory", text)
    mend = "Lower per_device_train_batch_size, set gradient_checkpointing=True, or train an adapter."
    return Finding("memory", f"{text}.", "warning", mend)
