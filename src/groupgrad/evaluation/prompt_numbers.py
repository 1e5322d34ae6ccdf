"""The numbers of the prompts of an evaluation, their means with intervals, and two evaluations compared by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupgrad.evaluation.statistics import best_of_k, bootstrap_interval, majority_at_k, pass_at_k, sign_flip_p

ANSWERS = "answer_parsed"
"""Column that `accuracy_reward`, `reasoning_accuracy_reward` and `reasoning_gym_reward` log by `log_extra`."""
ROUNDING = 1e-9
"""Share of the threshold that a reward may miss: weighted sums are rounded."""


@dataclass(slots=True, frozen=True)
class PromptResult:
    """The G completions of one prompt and what they scored."""

    prompt: Any
    """As the data set has it, in plain values."""
    column: Any
    """The row's value in the column that results are split by; None without one."""
    rewards: list[float]
    """(G,) weighted sums of the rewards, NaN where nothing was scored."""
    functions: dict[str, list[float]]
    """(G,) rewards by function."""
    answers: list[str | None] | None
    """(G,) answers that vote, None where a completion has none; None without a column of answers."""
    completions: list[str]
    lengths: list[int]
    """Tokens that the model sampled."""
    finish_reasons: list[str]


@dataclass(slots=True, frozen=True)
class Measure:
    """The k of pass@k, and the reward from which a completion is right."""

    ks: tuple[int, ...] = (1,)
    threshold: float = 1.0


@dataclass(slots=True, frozen=True)
class Mean:
    """The mean of a number over prompts, with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    prompts: int
    """Prompts that have the number; others are left out."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """The mean of one number a prompt, NaN where it has none. All NaN if no prompt has one."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(math.fsum(known) / len(known), *bootstrap_interval(known), len(known))


@dataclass(slots=True, frozen=True)
class Difference:
    """A mean here less the mean there, over the prompts that have both."""

    here: float
    there: float
    difference: Mean
    p: float
    """Two-sided, by the sign-flip test of the prompts' differences."""


def numbers_of_prompts(prompts: Sequence[PromptResult], measure: Measure) -> dict[str, list[float]]:
    """(Q,) numbers by name, one a prompt: `reward`, `pass@k` and so on; NaN where a prompt has none.

    Completions without a reward are left out. `best@k`, the expected largest reward of k, is there unless all rewards
    are 0 or 1, for which it is pass@k. `maj@k` is there for k above 1 if completions have answers.
    """
    rows = [_numbers(prompt, measure) for prompt in prompts]
    rewards = {reward for prompt in prompts for reward in prompt.rewards if not math.isnan(reward)}
    names = [name for name in rows[0] if all(name in row for row in rows)]
    names = [name for name in names if not name.startswith("best@") or not rewards <= {0.0, 1.0}]
    return {name: [row[name] for row in rows] for name in names}


def _numbers(prompt: PromptResult, measure: Measure) -> dict[str, float]:
    scored = [place for place, reward in enumerate(prompt.rewards) if not math.isnan(reward)]
    rewards = [prompt.rewards[place] for place in scored]
    least = measure.threshold - ROUNDING * abs(measure.threshold)
    right = [reward >= least for reward in rewards]
    numbers = {"reward": _mean(rewards)}
    if len(prompt.functions) > 1:
        numbers |= {f"reward {name}": _mean(values) for name, values in prompt.functions.items()}
    numbers |= {f"pass@{k}": pass_at_k(len(right), sum(right), k) for k in measure.ks}
    numbers |= {f"best@{k}": best_of_k(rewards, k) for k in measure.ks if k > 1}
    if prompt.answers is not None:
        answers = [prompt.answers[place] for place in scored]
        numbers |= {f"maj@{k}": majority_at_k(answers, right, k) for k in measure.ks if k > 1}
    truncated = [reason != "eos" for reason in prompt.finish_reasons]
    return {**numbers, "length": _mean(prompt.lengths), "truncated": _mean(truncated)}


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def means(numbers: Mapping[str, Sequence[float]]) -> dict[str, Mean]:
    """The mean of each number over all prompts."""
    return {name: Mean.of(values) for name, values in numbers.items()}


def by_column(prompts: Sequence[PromptResult]) -> dict[str, list[int]]:
    """The places of the prompts that share a value of the column, by that value in words, in ascending order."""
    values = {str(prompt.column): prompt.column for prompt in prompts}
    return {
        text: [place for place, prompt in enumerate(prompts) if str(prompt.column) == text]
        for text in sorted(values, key=lambda text: _order(values[text]))
    }


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, before texts."""
    is_number = isinstance(value, (int, float))
    return not is_number, float(value) if is_number else 0.0, str(value)


def is_split(name: str) -> bool:
    """True for the numbers that are split by a column where there are many numbers."""
    return name.partition("@")[0] in ("reward", "pass", "maj")


def logged(prompts: Sequence[PromptResult], measure: Measure, by: str | None = None) -> dict[str, float]:
    """The metrics of an evaluation that follow from its prompts.

    They are the means of `pass@k` and `maj@k`; the 95 % intervals of these and of the reward, as `NAME_low` and
    `NAME_high`; and of all three the means over the prompts of each value of the column `by`, as `NAME/by=value`. What
    no prompt has is left out, and so are intervals over fewer than two prompts.
    """
    if not prompts:
        return {}
    numbers = {name: values for name, values in numbers_of_prompts(prompts, measure).items() if is_split(name)}
    found: dict[str, float] = {}
    for name, mean in means(numbers).items():
        if name != "reward":
            found[name] = mean.mean
        if mean.prompts > 1:
            found |= {f"{name}_low": mean.low, f"{name}_high": mean.high}
    for value, places in by_column(prompts).items() if by is not None else ():
        for name, values in numbers.items():
            found[f"{name}/{by}={value}"] = _mean([values[place] for place in places])
    return {name: number for name, number in found.items() if not math.isnan(number)}


def pairs(here: Mapping[str, Sequence[float]], there: Mapping[str, Sequence[float]]) -> dict[str, list[list[float]]]:
    """(2, q) numbers here and there, by the names that both have.

    Each evaluation has (Q,) numbers by name, one for each of the same prompts in the same order. A prompt that lacks a
    number in one of them is left out, and so is a number that no prompt has in both.
    """
    found = {}
    for name in (name for name in here if name in there):
        both = np.array([here[name], there[name]], dtype=np.float64)
        both = both[:, ~np.isnan(both).any(axis=0)]
        if both.shape[1]:
            found[name] = both.tolist()
    return found


def difference(here: Sequence[float], there: Sequence[float]) -> Difference:
    """The difference of a number, here less there, of which `pairs` has one a prompt."""
    differences = [one - other for one, other in zip(here, there)]
    size = len(differences)
    return Difference(math.fsum(here) / size, math.fsum(there) / size, Mean.of(differences), sign_flip_p(differences))
