"""Compares arms on the prompts that they were trained on at the same steps.

All arms of a seed meet the same prompts in the same order, and their samples use the same random streams. The
difference of two arms is therefore taken prompt by prompt, which removes the prompts' own difficulty from it. With
differences d_1 ... d_n of mean d and sample standard deviation s, t = d / (s / sqrt(n)) is compared with Student's
distribution of n - 1 degrees of freedom (Student, Biometrika 6(1), 1908). Arms that met other prompts are compared by
Welch's test (Biometrika 34, 1947).

At a rung with k arms the best is compared with k - 1 others, at each of R rungs. An arm counts as clearly worse only if
its p-value is at most (1 - confidence) / ((k - 1) R), Bonferroni's bound. The arm that is truly best in the compared
steps is then called clearly worse at any rung with a probability of at most 1 - confidence. That says nothing about
steps that are still to come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupgrad.apps.sweep.store import PromptRewards
from groupgrad.apps.sweep.sweep_plan import Halving
from groupgrad.evaluation.statistics import student_tail

COMBINED = "reward"
"""Name of the weighted sum of all rewards."""


@dataclass(slots=True, frozen=True)
class MeanDifference:
    """The difference of two arms, with its uncertainty."""

    mean: float
    error: float
    """Standard error of the mean."""
    p_value: float
    """Probability of such a difference, or a larger one, if the arms were equally good."""
    num: int
    """Prompts that were compared."""
    is_paired: bool

    @property
    def text(self) -> str:
        """The size of the difference in words; its p-value is that of a lead of the arm that has the larger mean."""
        kind = "paired" if self.is_paired else "unpaired"
        p_value = 1 - self.p_value if self.mean < 0 and self.num > 1 else self.p_value
        return f"{abs(self.mean):.3f} ± {self.error:.3f} on {self.num} {kind} prompts (p = {p_value:.2g})"


@dataclass(slots=True, frozen=True)
class Verdict:
    """The verdict on an arm at a rung."""

    arm: int
    mean: float
    """Its mean reward in the compared steps."""
    goes_on: bool
    is_clear: bool
    """True if it is worse than the best arm with the confidence that was asked for."""
    behind: MeanDifference | None
    """The best arm's lead over it; None for the best arm itself."""

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.behind is None:
            return f"mean {self.mean:.3f}, the best"
        clear = "clearly worse" if self.is_clear else "not clearly worse"
        place = "ahead of" if self.behind.mean < 0 else "behind"
        return (
            f"mean {self.mean:.3f}, {place} the best by {self.behind.text}, {clear}, "
            f"{'goes on' if self.goes_on else 'dropped'}"
        )


def values(steps: Mapping[int, PromptRewards], metric: str) -> np.ndarray:
    """The prompts' means of some steps, in their order."""
    return np.array([mean for rewards in steps.values() for mean in rewards.means[metric]], dtype=np.float64)


def mean(steps: Mapping[int, PromptRewards], metric: str) -> float:
    """The mean reward of some steps; NaN if nothing was scored."""
    found = values(steps, metric)
    return float(np.nanmean(found)) if np.isfinite(found).any() else math.nan


def difference(better: Mapping[int, PromptRewards], worse: Mapping[int, PromptRewards], metric: str) -> MeanDifference:
    """The lead of the first arm over the second one in some steps of theirs."""
    first, second = values(better, metric), values(worse, metric)
    prompts = [[key for rewards in steps.values() for key in rewards.prompts] for steps in (better, worse)]
    if prompts[0] == prompts[1]:
        apart = first - second
        apart = apart[np.isfinite(apart)]
        return _difference(float(apart.mean()) if len(apart) else math.nan, _error(apart), len(apart), len(apart) - 1)
    first, second = first[np.isfinite(first)], second[np.isfinite(second)]
    errors = [_error(found) for found in (first, second)]
    error, num = math.hypot(*errors), min(len(first), len(second))
    if num < 2:
        return MeanDifference(math.nan, math.inf, 1.0, num, False)
    parts = [e**4 / (len(found) - 1) for e, found in zip(errors, (first, second))]
    freedom = error**4 / sum(parts) if sum(parts) else num - 1
    return _difference(float(first.mean() - second.mean()), error, num, freedom, is_paired=False)


def _error(sample: np.ndarray) -> float:
    return float(sample.std(ddof=1) / math.sqrt(len(sample))) if len(sample) > 1 else math.inf


def _difference(mean: float, error: float, num: int, freedom: float, *, is_paired: bool = True) -> MeanDifference:
    if num < 2:
        return MeanDifference(mean, math.inf, 1.0, num, is_paired)
    if error == 0.0:
        return MeanDifference(mean, 0.0, 0.0 if mean > 0 else 1.0, num, is_paired)
    return MeanDifference(mean, error, student_tail(mean / error, freedom), num, is_paired)


def judge(
    arms: Mapping[int, Mapping[int, PromptRewards]], metric: str, halving: Halving, num_rungs: int
) -> list[Verdict]:
    """The verdicts of a rung on arms, given by their compared steps, the best arm first."""
    means = {arm: mean(steps, metric) for arm, steps in arms.items()}
    order = sorted(means, key=lambda arm: (-means[arm] if math.isfinite(means[arm]) else math.inf, arm))
    best, num_kept = order[0], math.ceil(len(order) / halving.factor)
    level = (1 - halving.confidence) / (max(1, len(order) - 1) * num_rungs)
    verdicts = []
    for place, arm in enumerate(order):
        behind = None if arm == best else difference(arms[best], arms[arm], metric)
        is_clear = behind is not None and behind.p_value <= level
        goes_on = place < num_kept or (halving.undecided == "keep" and not is_clear)
        verdicts.append(Verdict(arm, means[arm], goes_on, is_clear, behind))
    return verdicts


def compared_steps(rung_step: int, steps: Sequence[int]) -> int:
    """The step after which rewards are compared at a rung: half of the way from the rung before, if there is one."""
    before = max((step for step in steps if step < rung_step), default=0)
    return (before + rung_step) // 2
