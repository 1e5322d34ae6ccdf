"""The papers' formulas of losses, masks and advantage estimators in NumPy, dense: one row a completion, padded right.

They share no code with `groupgrad.objectives`. Each name that is registered there needs its formula here:
`tests/objectives/test_dense.py` compares the two on random steps, under each of the twin's `settings`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray

from groupgrad.objectives import PolicyOptions


@dataclass
class Step:
    """A whole optimizer step, dense: (N, T) arrays, `there` marks the tokens that exist, `mask` the loss tokens."""

    there: ndarray
    mask: ndarray
    adv: ndarray
    lp: ndarray
    old: ndarray | None
    ref: ndarray
    samp: ndarray | None
    ent: ndarray
    threshold: float | None
    turns: ndarray | None = None
    """(N, T) advantages of tokens, where turns have their own; `adv` has a row's mean then."""
    selected: ndarray | None = None
    """(N, T) the tokens that the loss selected among those of the step."""

    @property
    def token_adv(self) -> ndarray:
        return np.broadcast_to(self.adv[:, None], self.lp.shape) if self.turns is None else self.turns

    @property
    def behaviour(self) -> ndarray | None:
        return self.old if self.samp is None else self.samp


@dataclass
class Terms:
    """Arrays from which the token losses of a step are computed, (N, T) each but for `log_rho`."""

    step: Step
    options: PolicyOptions
    log_ratio: ndarray
    ratio: ndarray
    """At the level that the options ask for."""
    kept: ndarray
    """Loss tokens that no mask takes out of the policy term."""
    log_rho: ndarray
    """(N, 1) log of the mismatch ratio of the whole completion."""
    adv: ndarray = field(init=False)
    lp: ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.adv, self.lp = self.step.token_adv, self.step.lp


Settings = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LossTwin:
    term: Callable[[Terms], ndarray]
    """(N, T) token losses."""
    reduce: Callable[[ndarray, Step, PolicyOptions], float]
    settings: Settings = ({},)
    folds_mismatch: bool = False
    """Its own weight has the mismatch ratio."""
    leaves_out_selected: bool = False
    has_constant_weight: bool = False
    """Its gradient flows through log pi alone, so it is not the slope of its value."""
    select: Callable[[ndarray, ndarray, Any], tuple[ndarray, int]] | None = None
    """(N,) log-probs and advantages of all loss tokens, settings -> (N,) bool, those that may be selected, and how many
    of them are."""


@dataclass(frozen=True)
class MaskTwin:
    keep: Callable[[ndarray, ndarray, Any], ndarray]
    """(N, T) log-ratios to the sampler, 0 outside the loss tokens; these; settings -> (N, T) or (N, 1) bool."""
    settings: Settings = ({},)


@dataclass(frozen=True)
class Scored:
    """Rewards of a generation batch: Q groups of G completions."""

    by_function: ndarray
    """(Q, G, R)"""
    weights: ndarray
    lengths: ndarray
    """(Q, G) sampled tokens."""
    turns: list[list[ndarray]]
    """(T, R) the rewards of each completion's turns."""
    states: list[list[list[str]]]
    scale: str
    aggregation: str
    settings: Any

    @property
    def rewards(self) -> ndarray:
        return self.by_function @ self.weights


@dataclass(frozen=True)
class EstimatorTwin:
    advantages: Callable[[Scored], Any]
    """(Q, G), or (T,) of the turns of each completion."""
    settings: Settings = ({},)


# ------------------------------------------------------------------------------------------------------ reductions


def masked_mean(values: ndarray, mask: ndarray, axis: int | None = None) -> Any:
    return np.where(mask, values, 0.0).sum(axis=axis) / np.maximum(1, mask.sum(axis=axis))


def by_row(loss: ndarray, step: Step, _: PolicyOptions) -> float:
    return masked_mean(loss, step.mask, 1).mean()


def by_token(loss: ndarray, step: Step, _: PolicyOptions) -> float:
    return loss.sum() / max(1, step.mask.sum())


def row_sums(loss: ndarray, step: Step, _: PolicyOptions) -> float:
    return loss.sum() / len(step.adv)


def over_a_constant(loss: ndarray, step: Step, options: PolicyOptions) -> float:
    return loss.sum() / (len(step.adv) * options.max_completion_length)


# ---------------------------------------------------------------------------------------------------------- losses


def clipped(t: Terms) -> ndarray:
    inside = np.clip(t.ratio, 1 - t.options.epsilon, 1 + t.options.epsilon_high)
    return -np.minimum(np.minimum(t.ratio, t.options.delta or math.inf) * t.adv, inside * t.adv)


def cispo(t: Terms) -> ndarray:
    return -np.minimum(t.ratio, t.options.epsilon_high) * t.adv * t.lp


def sapo(t: Terms) -> ndarray:
    tau = np.where(t.adv > 0, t.options.sapo_temperature_pos, t.options.sapo_temperature_neg)
    return -4 / tau / (1 + np.exp(-tau * (t.ratio - 1))) * t.adv


def vespo(t: Terms) -> ndarray:
    total = (np.clip(t.log_ratio, -20, 20) * t.step.mask).sum(axis=1, keepdims=True) + t.log_rho
    weight, o = np.exp(np.clip(total, math.log(1e-8), 20)), t.options
    k = np.where(t.adv >= 0, o.vespo_k_pos, o.vespo_k_neg)
    decay = np.where(t.adv >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg)
    return -(weight**k) * np.exp(decay * (1 - weight)) * t.adv * t.lp


def dppo(divergence: Callable[[ndarray, ndarray], ndarray]) -> Callable[[Terms], ndarray]:
    def term(t: Terms) -> ndarray:
        old = t.lp - t.log_ratio
        mu = old if t.step.samp is None else np.where(np.isnan(t.step.samp), old, t.step.samp)
        p, m = np.exp(t.lp), np.exp(mu)
        left_out = (divergence(p, m) > t.options.settings.threshold) & (np.sign(p - m) == np.sign(t.adv))
        return np.where(left_out, 0.0, -np.minimum(p / m, t.options.settings.ceiling) * t.adv * t.lp)

    return term


def binary_kl(p: ndarray, m: ndarray) -> ndarray:
    a, b = (np.clip(x, 2.0**-52, 1 - 2.0**-52) for x in (m, p))
    return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))


def gmpo(t: Terms) -> ndarray:
    clip = t.options.settings.clip
    bounded = np.where(t.adv > 0, np.minimum(t.log_ratio, clip), np.maximum(t.log_ratio, -clip))
    return -np.exp(masked_mean(bounded, t.kept & (t.adv != 0), 1))[:, None] * t.adv * np.ones_like(t.lp)


def kl_cov(t: Terms) -> ndarray:
    return -t.ratio * t.adv + t.options.settings.coef * np.abs(t.log_ratio) * t.step.selected


def covariance(lp: ndarray, adv: ndarray) -> ndarray:
    return (lp - lp.mean()) * (adv - adv.mean())


def of_highest_covariance(lp: ndarray, adv: ndarray, settings: Any) -> tuple[ndarray, int]:
    found = covariance(lp, adv)
    highest = found >= np.sort(found)[-max(1, int(settings.share * len(found)))] - 1e-9
    return highest, int(highest.sum())


def of_covariance_between(lp: ndarray, adv: ndarray, settings: Any) -> tuple[ndarray, int]:
    eligible = (covariance(lp, adv) >= settings.low) & (covariance(lp, adv) <= settings.high)
    return eligible, min(int(eligible.sum()), max(1, int(settings.share * len(lp))))


DPPO: dict[str, Any] = {"reduce": by_token, "folds_mismatch": True, "has_constant_weight": True}
LOSSES: dict[str, LossTwin] = {
    "grpo": LossTwin(clipped, by_row),
    "bnpo": LossTwin(clipped, by_token),
    "dapo": LossTwin(clipped, by_token),
    "luspo": LossTwin(clipped, row_sums),
    "dr_grpo": LossTwin(clipped, over_a_constant),
    "cispo": LossTwin(cispo, by_token, has_constant_weight=True),
    "sapo": LossTwin(sapo, by_row),
    "vespo": LossTwin(vespo, by_token, folds_mismatch=True, has_constant_weight=True),
    "dppo_tv": LossTwin(dppo(lambda p, m: np.abs(p - m)), settings=({}, {"threshold": 0.1, "ceiling": 1.2}), **DPPO),
    "dppo_kl": LossTwin(dppo(binary_kl), settings=({}, {"threshold": 0.02, "ceiling": 1.2}), **DPPO),
    "gmpo": LossTwin(gmpo, by_row, ({}, {"clip": 0.2})),
    "clip_cov": LossTwin(
        *(clipped, by_token, ({"share": 0.1, "low": -9.0}, {"share": 0.9, "low": 0.2, "high": 0.7})),
        leaves_out_selected=True,
        select=of_covariance_between,
    ),
    "kl_cov": LossTwin(kl_cov, by_token, ({}, {"share": 0.3, "coef": 0.7}), select=of_highest_covariance),
}


# ----------------------------------------------------------------------------------------------------------- masks


def at_level(values: ndarray, mask: ndarray, level: str) -> ndarray:
    return {
        "token": values,
        "sequence_mean": masked_mean(values, mask, 1)[:, None],
        "sequence_sum": (values * mask).sum(1, keepdims=True),
        "sequence_max": np.where(mask.any(1), np.where(mask, values, -np.inf).max(1), 0.0)[:, None],
    }[level]


def within(gap: ndarray, mask: ndarray, settings: Any) -> ndarray:
    ratio = np.exp(at_level(gap, mask, settings.level))
    return (ratio >= settings.low) & (ratio <= settings.high)


def geometric(gap: ndarray, mask: ndarray, settings: Any) -> ndarray:
    mean = np.exp(masked_mean(gap, mask, 1)[:, None])
    return (mean >= settings.low) & (mean <= settings.high)


def below(divergence: Callable[[ndarray], ndarray]) -> Callable[[ndarray, ndarray, Any], ndarray]:
    return lambda gap, mask, settings: at_level(divergence(gap), mask, settings.level) <= settings.threshold


def m2po(gap: ndarray, mask: ndarray, settings: Any) -> ndarray:
    squares = np.sort(gap[mask] ** 2)
    while len(squares) and squares.mean() > settings.tau:
        squares = squares[:-1]
    return gap**2 <= (squares[-1] if len(squares) else -1.0)


LEVELS = ("token", "sequence_mean", "sequence_sum", "sequence_max")
BY_DIVERGENCE = ({"threshold": 0.1}, *({"level": level, "threshold": 0.05} for level in LEVELS))
MASKS: dict[str, MaskTwin] = {
    "geometric": MaskTwin(geometric, ({}, {"low": 0.9}, {"high": 1.1})),
    "k1": MaskTwin(within, ({}, *({"level": level, "low": 0.8, "high": 1.3} for level in LEVELS[:-1]))),
    "k2": MaskTwin(below(lambda gap: gap**2 / 2), BY_DIVERGENCE),
    "k3": MaskTwin(below(lambda gap: np.exp(gap) - 1 - gap), BY_DIVERGENCE),
    "m2po": MaskTwin(m2po, ({}, {"tau": 0.15})),
}


# ------------------------------------------------------------------------------------------------------ estimators


def scaled(values: ndarray, scale: str, every: ndarray | None = None) -> ndarray:
    """Deviations of a set from its mean, over the deviation of the set, of `every` value, or neither; 0 for one."""
    if len(values) < 2:
        return np.zeros_like(values)
    chosen = {"group": values, "batch": every, "none": None}[scale]
    return (values - values.mean()) / (1.0 if chosen is None else chosen.std(ddof=1) + 1e-4)


def group(s: Scored) -> ndarray:
    if s.aggregation == "normalize_then_sum":
        each = [[scaled(column, "group") for column in rewards.T] for rewards in s.by_function]
        return scaled(np.concatenate([s.weights @ np.array(one) for one in each]), "group").reshape(s.rewards.shape)
    return np.array([scaled(rewards, s.scale, s.rewards) for rewards in s.rewards])


def rloo(s: Scored) -> ndarray:
    others = s.rewards.sum(1, keepdims=True) - s.rewards
    return s.rewards - others / (s.rewards.shape[1] - 1)


def maxrl(s: Scored) -> ndarray:
    rate = s.rewards.mean(1, keepdims=True)
    return np.where(rate > 0, s.rewards / np.maximum(rate, 1e-9) - 1, 0.0)


def opo(s: Scored) -> ndarray:
    return s.rewards - (s.lengths * s.rewards).sum(1, keepdims=True) / s.lengths.sum(1, keepdims=True)


def whitened(s: Scored) -> ndarray:
    deviations = s.rewards - s.rewards.mean(1, keepdims=True)
    by_token = np.repeat(deviations.ravel(), s.lengths.ravel().astype(int))
    return (deviations - by_token.mean()) / np.sqrt(by_token.var(ddof=1) + 1e-8)


def pass_at_k(s: Scored) -> ndarray:
    """A row's advantage: the sum, over all sets of k rows that contain it, of what it adds to the best reward."""
    k, size = s.settings.k, s.rewards.shape[1]
    if k == 1:
        return rloo(s)
    found = np.zeros_like(s.rewards)
    for rewards, added in zip(s.rewards, found):
        for chosen in itertools.combinations(range(size), k):
            for row in chosen:
                best_of_rest = max(rewards[other] for other in chosen if other != row)
                added[row] += max(rewards[list(chosen)]) - best_of_rest
    return found * size / max(1, math.comb(size, k))


def returns(rewards: ndarray, discount: float) -> ndarray:
    return np.array([sum(r * discount**n for n, r in enumerate(rewards[turn:])) for turn in range(len(rewards))])


def among_equal(s: Scored, keys: list[list[list[Any]]]) -> list[list[ndarray]]:
    """The discounted returns of turns, scaled among those of their group with an equal key."""
    later = [[returns(one @ s.weights, s.settings.discount) for one in rows] for rows in s.turns]
    every, found = np.concatenate([one for rows in later for one in rows]), []
    for rows, names in zip(later, keys):
        flat, all_names = np.concatenate(rows), [name for row in names for name in row]
        values = np.zeros_like(flat)
        for name in set(all_names):
            equal = np.array([other == name for other in all_names])
            values[equal] = scaled(flat[equal], s.scale, every)
        found.append(np.split(values, np.cumsum([len(one) for one in rows])[:-1]))
    return found


def turn_returns(s: Scored) -> list[list[ndarray]]:
    return among_equal(s, [[list(range(len(one))) for one in rows] for rows in s.turns])


def gigpo(s: Scored) -> list[list[ndarray]]:
    of_states = among_equal(s, s.states)
    return [[first + s.settings.omega * second for first, second in zip(*rows)] for rows in zip(group(s), of_states)]


ESTIMATORS: dict[str, EstimatorTwin] = {
    "group": EstimatorTwin(group),
    "rloo": EstimatorTwin(rloo),
    "maxrl": EstimatorTwin(maxrl),
    "opo": EstimatorTwin(opo),
    "reinforce_plus_plus_baseline": EstimatorTwin(whitened),
    "pass_at_k": EstimatorTwin(pass_at_k, ({}, *({"k": k} for k in (1, 2, 3)))),
    "turn_returns": EstimatorTwin(turn_returns, ({}, {"discount": 0.5})),
    "gigpo": EstimatorTwin(gigpo, ({}, {"discount": 0.5, "omega": 2.0})),
}
