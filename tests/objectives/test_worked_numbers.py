"""The worked number in the docstring of each loss, estimator and mask is the one that the code gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from loss_batches import F64, loss_and_gradient, make_batch

from groupgrad.batch import StepTotals
from groupgrad.objectives import (
    ESTIMATORS,
    LOSSES,
    MASKS,
    PolicyOptions,
    StepTokens,
    compute_advantages,
    find_estimator,
    find_mask,
    find_method,
)
from groupgrad.objectives.covariance import covariances
from groupgrad.objectives.masks.m2po import largest_kept
from groupgrad.objectives.methods.dppo_kl import binary_kl
from groupgrad.types import Turns

DEFINITIONS = [("methods", name) for name in LOSSES]
DEFINITIONS += [("estimators", name) for name in ESTIMATORS] + [("masks", name) for name in MASKS]


def loss(loss_type: str, ratios: list[float], advantage: float, *, before: float = 0.5, **settings: Any) -> Any:
    """The loss of one completion whose tokens had the probability `before`, and its gradient."""
    old, trained = [[math.log(before)] * len(ratios)], [[True] * len(ratios)]
    options = {name: settings.pop(name) for name in ("epsilon_high", "max_completion_length") if name in settings}
    made = find_method(loss_type).make_settings(settings)
    batch = make_batch(trained, [advantage], old=old, sampling=old)
    logprobs = [[math.log(before * ratio) for ratio in ratios]]
    result, gradient = loss_and_gradient(logprobs, batch, PolicyOptions(loss_type=loss_type, settings=made, **options))
    return result.loss.item(), gradient


def averaged(loss_type: str, rows: list[list[float]], totals: StepTotals | None = None) -> float:
    """The loss of a step whose tokens have these losses. Under a ratio of 1 they are the advantages, negated."""
    batch = make_batch([[True] * len(row) for row in rows], [0.0] * len(rows), totals)
    batch = replace(batch, token_advantages=torch.tensor([-value for row in rows for value in row], dtype=F64))
    options = PolicyOptions(loss_type=loss_type, max_completion_length=5)
    return loss_and_gradient([[0.0] * len(row) for row in rows], batch, options)[0].loss.item()


def one_and_three(loss_type: str) -> float:
    return averaged(loss_type, [[1.0], [2.0, 3.0, 4.0]])


def in_two_micro_batches() -> float:
    totals = StepTotals(rows=2, tokens=4, micro_batches=2)
    return averaged("bnpo", [[1.0]], totals) + averaged("bnpo", [[2.0, 3.0, 4.0]], totals)


def advantages(name: str, rewards: list[float], lengths: list[int] | None = None, **settings: Any) -> list[float]:
    found = compute_advantages(
        *(torch.tensor(rewards, dtype=F64).unsqueeze(1), [1.0], len(rewards)),
        estimator=name,
        settings=find_estimator(name).make_settings(settings),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=F64),
    )
    return found.advantages.tolist()


def by_turn(name: str, rewards: list[list[float]], **settings: Any) -> list[list[float]]:
    """Advantages of turns, of which those of one number begin in one state, under `scale_rewards="none"`."""
    turns = [
        Turns([1] * len(row), torch.tensor(row, dtype=F64).unsqueeze(1), [f"turn {turn}" for turn in range(len(row))])
        for row in rewards
    ]
    sums = torch.tensor([[sum(row)] for row in rewards], dtype=F64)
    made = find_estimator(name).make_settings(settings)
    found = compute_advantages(sums, [1.0], len(rewards), "none", estimator=name, settings=made, turns=turns)
    return [values.tolist() for values in found.by_turn or []]


def kept(name: str, log_ratios: list[float], **settings: Any) -> bool:
    """True if the mask keeps the first token of a completion."""
    batch = make_batch([[True] * len(log_ratios)], [1.0])
    found = find_mask(name).keep(torch.tensor(log_ratios, dtype=F64), batch, find_mask(name).make_settings(settings))
    return bool(found.values[0])


def divergence(name: str, ratio: float) -> float:
    """The threshold from which on a token of this ratio is kept, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        is_kept = kept(name, [math.log(ratio)], level="token", threshold=middle)
        low, high = (low, middle) if is_kept else (middle, high)
    return high


def listed(values: list[float]) -> str:
    *first, last = [f"{value:.3g}" for value in values]
    return f"{', '.join(first)} and {last}"


def held_by_kl_cov() -> float:
    batch = replace(make_batch([[True]], [1.0], old=[[-1.0]]), selected=torch.tensor([True]))
    options = PolicyOptions(loss_type="kl_cov", settings=find_method("kl_cov").make_settings({}))
    return loss_and_gradient([[0.0]], batch, options)[0].loss.item()


def turns_of_gigpo() -> list[list[float]]:
    """Without the first term, which is the same here."""
    both, episode = by_turn("gigpo", [[1], [0]]), by_turn("gigpo", [[1], [0]], omega=0)
    return [[one[0] - other[0]] for one, other in zip(both, episode)]


def covariance_of_two() -> list[float]:
    return covariances(StepTokens(torch.tensor([0.0, -4.0]), torch.tensor([1.0, -1.0]))).tolist()


def squares_up_to() -> float:
    return largest_kept(torch.tensor([0.01, 0.02, 0.09, 1.0], dtype=F64).sqrt(), find_mask("m2po").make_settings({}))


EXAMPLES: dict[str, Callable[[], str]] = {
    "bnpo": lambda: (
        f"give (1 + 3) / 2 = {in_two_micro_batches():g}; in one micro-batch they give {one_and_three('bnpo'):g}"
    ),
    "cispo": lambda: f"has the gradient of {loss('cispo', [7.0], 1.0, before=0.1, epsilon_high=5.0)[1][0]:g} log pi",
    "clip_cov": lambda: f"have covariances of {listed(covariance_of_two())}",
    "dapo": lambda: f"give 10 / 4 = {one_and_three('dapo'):g}",
    "dppo_kl": lambda: f"that is {binary_kl(*torch.tensor([0.8, 0.5]).double()).item():.3f}",
    "dppo_tv": lambda: (
        f"the weight is {-loss('dppo_tv', [1.2], 1.0)[1][0]:g}, for pi = 0.8 the loss is "
        f"{loss('dppo_tv', [1.6], 1.0)[0]:g}"
    ),
    "dr_grpo": lambda: f"give 10 / (2 * 5) = {one_and_three('dr_grpo'):g}",
    "gmpo": lambda: f"-exp((0.4 - 1) / 2) = {loss('gmpo', [math.e, 1 / math.e], 1.0, before=0.1)[0]:.3f}",
    "grpo": lambda: (
        f"gives {loss('grpo', [1.5], 1.0)[0]:g} without a gradient; under A = -1 it gives "
        f"{loss('grpo', [1.5], -1.0)[0]:g}"
    ),
    "kl_cov": lambda: f"gives -e + {held_by_kl_cov() + math.e:g}",
    "luspo": lambda: f"give (1 + 9) / 2 = {one_and_three('luspo'):g}",
    "sapo": lambda: "a ratio of 1 gives {:g} with a slope of {:g}, and one of 3 {:.3f}".format(
        *(loss("sapo", [1.0], 1.0)[0], loss("sapo", [1.0], 1.0)[1][0], loss("sapo", [3.0], 1.0, before=0.1)[0])
    ),
    "vespo": lambda: "weight of 4 exp(-3) = {:.3f} under A = 1, and of 8 exp(-2) = {:.3f} under A = -1".format(
        *(loss("vespo", [2.0], sign)[1][0] * -sign for sign in (1.0, -1.0))
    ),
    "gigpo": lambda: f"a second term of {listed([row[0] for row in turns_of_gigpo()])} there",
    "group": lambda: f"give {listed(advantages('group', [1, 0, 0, 1]))}",
    "maxrl": lambda: f"give {listed(advantages('maxrl', [1, 0, 0, 0]))}",
    "opo": lambda: f"advantages of {listed(advantages('opo', [1, 0], [30, 10]))}",
    "pass_at_k": lambda: f"give {listed(advantages('pass_at_k', [0, 0, 0, 1], k=2))}",
    "reinforce_plus_plus_baseline": lambda: (
        f"advantages of {listed(advantages('reinforce_plus_plus_baseline', [1, 0], [3, 1]))}"
    ),
    "rloo": lambda: f"give {listed(advantages('rloo', [1, 0, 0, 0]))}".replace("0.333", "1/3"),
    "turn_returns": lambda: "advantages of ({:g}, {:g}) and ({:g}, {:g})".format(
        *(value for row in by_turn("turn_returns", [[0, 1], [1, 0]]) for value in row)
    ),
    "geometric": lambda: "have a geometric mean of {:.2f}, {}side 0.99 to 1.01".format(
        *(math.exp(0.02), "in" if kept("geometric", [0.03, 0.01]) else "out")
    ),
    "k1": lambda: (
        f"A ratio of 2.5 under a band from 0.5 to 2 is {'kept' if kept('k1', [math.log(2.5)]) else 'left out'}"
    ),
    "k2": lambda: f"A ratio of 2 has {divergence('k2', 2.0):.3f}, and so has one of 1/2",
    "k3": lambda: f"A ratio of 2 has 1 - log 2 = {divergence('k3', 2.0):.3f}",
    "m2po": lambda: f"Squares of 0.01, 0.02, {squares_up_to():g} and 1 under `tau` = 0.04 keep the first three",
}
"""Name of a loss, an estimator or a mask -> a part of its docstring, with numbers that the code gives."""


@pytest.mark.parametrize(("package", "name"), DEFINITIONS)
def test_the_docstring_has_the_number_that_the_code_gives(package: str, name: str) -> None:
    assert name in EXAMPLES, "give the new file a worked number"
    text = import_module(f"groupgrad.objectives.{package}.{name}").__doc__ or ""
    assert EXAMPLES[name]() in " ".join(text.split())
