"""The parts of an advantage estimator: the rewards that it gets, its options, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch

from groupgrad.objectives.options import one_of
from groupgrad.objectives.registry import make_settings

ScaleRewards = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

STD_FLOOR = 1e-4
"""Added to every standard deviation before dividing by it."""
ZERO_STD = 1e-8
"""A standard deviation up to this is none."""


@dataclass(slots=True, frozen=True)
class ScoredTurns:
    """The T turns of a completion; none for one that no function scored."""

    rewards: torch.Tensor
    """(T,) float64, weighted sums of the rewards; 0 where no function gave one."""
    lengths: torch.Tensor
    """(T,) float64, tokens that the policy sampled."""
    states: list[str]
    """Equal for turns that begin in equal states."""

    def returns(self, discount: float) -> torch.Tensor:
        """(T,) the sum of a turn's reward and the later ones, a reward n turns later times discount^n."""
        total, found = 0.0, list[float]()
        for reward in reversed(numbers_of(self.rewards)):
            total = reward + discount * total
            found.append(total)
        return torch.tensor(found[::-1], dtype=torch.float64)


@dataclass(slots=True, frozen=True)
class ScoredGroups:
    """The rewards of a generation batch, all ranks' rows, by group. NaN is "not scored"."""

    rewards: torch.Tensor
    """(groups, G) float64, weighted sums of the rewards."""
    by_function: torch.Tensor
    """(groups, G, R) float64, the rewards of the functions of non-zero weight."""
    weights: torch.Tensor
    """(R,) float64, their weights."""
    lengths: torch.Tensor | None
    """(groups, G) float64, the tokens of each completion that the policy sampled; None if they were not given."""
    turns: list[ScoredTurns] | None
    """The turns of each of the N rows; None unless the estimator `uses_turns`."""

    def of_turns(self, what: str) -> list[ScoredTurns]:
        """The turns. ValueError if there are none; `what` needs them."""
        if self.turns is None:
            raise ValueError(
                f"advantage_estimator={what!r} needs the turns of completions, but got turns=None. Give them for each "
                "row; a subclass's compute_advantages gets them as its argument turns"
            )
        return self.turns

    def counted(self, what: str) -> torch.Tensor:
        """The lengths. ValueError if there are none; `what` needs them."""
        if self.lengths is None:
            raise ValueError(
                f"advantage_estimator={what!r} needs the lengths of completions, but got lengths=None. Give one for "
                "each row; a subclass's compute_advantages gets them as its third argument, lengths"
            )
        return self.lengths


@dataclass(slots=True, frozen=True)
class AdvantageOptions:
    """Everything that advantages depend on besides rewards and lengths. Raises ValueError for unknown names."""

    scale_rewards: ScaleRewards = "group"
    aggregation: Aggregation = "sum_then_normalize"
    settings: Any = None
    """The estimator's own settings (`Estimator.settings`), if it has any."""

    def __post_init__(self) -> None:
        one_of("scale_rewards", self.scale_rewards, get_args(ScaleRewards))
        one_of("multi_objective_aggregation", self.aggregation, get_args(Aggregation))


@dataclass(slots=True, frozen=True)
class Estimate:
    """Output of an estimator."""

    advantages: torch.Tensor
    """(groups, G) float64; NaN is taken for 0."""
    has_signal: torch.Tensor | None = None
    """(groups,) bool, groups that teach something; None: those whose rewards vary."""
    by_turn: list[torch.Tensor] | None = None
    """(T,) float64 of the turns of each row; None: all turns have their row's."""

    @classmethod
    def of_turns(cls, groups: ScoredGroups, by_turn: list[torch.Tensor]) -> Estimate:
        """Advantages (T,) of the turns of each row; a row's is their mean over its tokens."""
        turns = groups.turns or []
        rows = [
            float((of_turns * (one.lengths / one.lengths.sum().clamp(min=1))).sum())
            for one, of_turns in zip(turns, by_turn)
        ]
        has_signal = torch.tensor([bool((of_turns != 0).any()) for of_turns in by_turn], dtype=torch.bool)
        shape = groups.rewards.shape
        return cls(torch.tensor(rows, dtype=torch.float64).view(shape), has_signal.view(shape).any(dim=1), by_turn)


@dataclass(slots=True, frozen=True)
class Estimator:
    """Definition of an `advantage_estimator`."""

    estimate: Callable[[ScoredGroups, AdvantageOptions], Estimate]
    reads: tuple[str, ...] = ()
    """Fields of the configuration that it reads; estimators that do not name them leave them without effect."""
    settings: type[Any] | None = None
    """A frozen dataclass of settings of its own, which `advantage_settings` fills. `registry.setting` gives one its
    range; a `__post_init__` raises ValueError, with what to set, for values that do not go together."""
    uses_turns: bool = False
    """It credits turns, and gets their rewards."""
    state: Callable[[Any], str | None] | None = None
    """Its settings -> the attribute of environments that is the state of a turn, or None."""
    binary: bool = False
    """It is for rewards of 0 and 1: of several functions those that count have the weight 1."""
    smallest_group: Callable[[Any], int] | None = None
    """Its settings -> the completions that a group must have at least; None: as many as any group has."""

    def make_settings(self, values: Mapping[str, Any]) -> Any:
        """The settings with these values; None for an estimator without any. ValueError for others than it has."""
        return make_settings(self.settings, values, option="advantage_settings", owner="advantage_estimator")


@dataclass(slots=True, frozen=True)
class Deviations:
    """Scores about the mean of their set (a group, or the whole batch); NaN is "not scored"."""

    deviations: torch.Tensor
    """(sets, members), NaN where not scored."""
    std: torch.Tensor
    """(sets, 1) sample standard deviation (ddof 1) of the scored members; NaN for fewer than two."""

    @property
    def vary(self) -> torch.Tensor:
        """(sets,) bool: sets with two scored members or more that are not all equal."""
        return (self.std > ZERO_STD).squeeze(1)


def about_mean(values: torch.Tensor, weights: torch.Tensor | None = None) -> Deviations:
    """Deviations and standard deviation of each line of (sets, members), NaN left out; `weights` weigh the mean."""
    scored = ~values.isnan()
    count = scored.sum(dim=1, keepdim=True)
    if values.shape[1] == 0:
        return Deviations(values, torch.full_like(values[:, :1], torch.nan))
    # Measured from a member of the set, so that equal rewards deviate by exactly 0, however large they are.
    origin = torch.where(scored, values, torch.full_like(values, torch.inf)).min(dim=1, keepdim=True).values
    distance = torch.where(scored, values - origin, torch.zeros_like(values))
    weight = scored if weights is None else torch.where(scored, weights, torch.zeros_like(weights))
    total = weight.sum(dim=1, keepdim=True).clamp(min=1)
    deviations = values - origin - (weight * distance).sum(dim=1, keepdim=True) / total
    square = torch.where(scored, deviations, torch.zeros_like(values)).square().sum(dim=1, keepdim=True)
    variance = square / (count - 1).clamp(min=1)
    return Deviations(deviations, torch.where(count >= 2, variance.sqrt(), torch.full_like(variance, torch.nan)))


def scaled(about: Deviations, every: torch.Tensor, scale: ScaleRewards) -> torch.Tensor:
    """(sets, members) deviations divided by the deviation of their set, of `every` value given, or by nothing."""
    if scale == "none":
        return about.deviations
    std = about.std if scale == "group" else about_mean(every.reshape(1, -1)).std
    return about.deviations / (std + STD_FLOOR)


def numbers_of(values: torch.Tensor) -> list[float]:
    """The numbers of a tensor of one dimension."""
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over the last dimension of (..., R), without what is NaN; NaN where all of it is."""
    total = (values.nan_to_num(nan=0.0) * weights).sum(dim=-1)
    return torch.where(values.isnan().all(dim=-1), torch.full_like(total, torch.nan), total)
