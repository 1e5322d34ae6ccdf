"""One reward function: its name, the arguments it takes, and the rewards read from what it returns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from groupgrad.concurrency.callables import function_name, is_async
from groupgrad.errors import RewardError
from groupgrad.rewards.inputs import GROUND_TRUTH_COLUMNS, TABLE_COLUMNS, CallInputs, CallLog, short_repr


@dataclass(slots=True, frozen=True)
class RewardFunction:
    """A callable, inspected once."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    takes_all: bool
    """True if it takes any keyword (`**kwargs`), or does not say what it takes."""
    takes: frozenset[str]
    """Keywords that it names."""
    requires: tuple[str, ...]
    """Keywords that it names and has no default for."""
    bound: frozenset[str]
    """Keywords that a `functools.partial` has already set; they stay as set."""

    def renamed(self, name: str) -> RewardFunction:
        """The same function under another name."""
        return dataclasses.replace(self, name=name)

    def arguments(self, inputs: CallInputs, log: CallLog) -> dict[str, Any]:
        """Keyword arguments for one call, all fresh. RewardError if the function requires one that does not exist."""
        sugar = [name for name in inputs.sugar() if name in self.takes]
        names = [name for name in inputs.names if self.takes_all or name in self.takes] + sugar
        missing = [name for name in self.requires if name not in names]
        if missing:
            self._refuse_signature(missing, inputs)
        loggers = {"log_extra": log.log_extra, "log_metric": log.log_metric}
        return {name: loggers.get(name) or inputs.value(name) for name in names if name not in self.bound}

    def _refuse_signature(self, missing: list[str], inputs: CallInputs) -> NoReturn:
        hint = ""
        if "ground_truths" in missing:
            hint = (
                f"; 'ground_truths' stands for the first column of {', '.join(GROUND_TRUTH_COLUMNS)}, and none exists"
            )
        raise RewardError(
            f"reward function '{self.name}', step {inputs.step}: it requires the argument"
            f"{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}, which the data set does not provide"
            f"{hint}; available: {', '.join(inputs.names)}. Add the column, or give the argument a default"
        )


def inspect_function(function: Callable[..., Any]) -> RewardFunction:
    """What is to be known of a callable before it is called.

    ValueError if it requires an argument that cannot be given by keyword.
    """
    name = function_name(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return RewardFunction(name, function, is_async(function), True, frozenset(), (), frozenset())
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(
                f"reward function '{name}' takes '{parameter.name}' by position only, but reward functions are called "
                "with keywords; remove the '/' from its signature"
            )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    bound: set[str] = set()
    layer = function
    while isinstance(layer, functools.partial):
        bound.update(layer.keywords)
        layer = layer.func
    return RewardFunction(
        name=name,
        call=function,
        is_async=is_async(function),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        takes=frozenset(p.name for p in named),
        requires=tuple(p.name for p in named if p.default is p.empty and p.name not in bound),
        bound=frozenset(bound),
    )


def distinct_names(names: list[str]) -> list[str]:
    """The same names, later ones of a kind numbered: `f`, `f_2`, `f_3`; so are those of the table's own columns."""
    taken: set[str] = set(TABLE_COLUMNS)
    result = []
    for name in names:
        unique, number = name, 1
        while unique in taken or (number > 1 and unique in names):
            number += 1
            unique = f"{name}_{number}"
        taken.add(unique)
        result.append(unique)
    return result


def read_rewards(returned: Any, name: str, inputs: CallInputs) -> list[float]:
    """One float a row from what a reward function returned: NaN for None and NaN.

    Takes a list, tuple, array or tensor of real numbers, booleans and None. RewardError that names the function, the
    step and the row for anything else, for a wrong number of them, and for an infinite one.
    """
    where = f"reward function '{name}', step {inputs.step}"
    expected = len(inputs.rollouts)
    values = returned
    if isinstance(returned, (torch.Tensor, np.ndarray)):
        if returned.ndim != 1:
            raise RewardError(
                f"{where}: it returned an array of shape {tuple(returned.shape)}; return shape ({expected},)"
            )
        values = returned.tolist()
    elif not isinstance(returned, (list, tuple)):
        if not callable(getattr(returned, "tolist", None)):
            raise RewardError(
                f"{where}: it returned {short_repr(returned)}; return a list with one number or None a completion"
            )
        values = returned.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != expected:
        count = len(values) if isinstance(values, (list, tuple)) else 1
        raise RewardError(
            f"{where}: it returned {count} rewards for {expected} completions (the first is {inputs.describe(0)}); "
            "return one number or None a completion, in their order"
        )
    rewards = []
    for row, value in enumerate(values):
        reward = _number(value)
        if reward is None:
            raise RewardError(
                f"{where}: it returned {short_repr(value)} for {inputs.describe(row)}; return a number, or None where "
                "the function does not apply"
            )
        if math.isinf(reward):
            raise RewardError(
                f"{where}: it returned {value!r} for {inputs.describe(row)}; an infinite reward makes the advantages "
                "of its whole group meaningless: return a finite number, or None where the function does not apply"
            )
        rewards.append(reward)
    return rewards


def _number(value: Any) -> float | None:
    """A real number as a float (inf if it is too large for one), None and NaN as NaN, anything else as None."""
    if value is None:
        return math.nan
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (numbers.Real, np.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def call_error(error: BaseException, name: str, inputs: CallInputs, row: int | None = None) -> RewardError:
    """The error to raise (from the original) when a reward function fails, with the row if it is known."""
    where = f"a batch of {len(inputs.rollouts)} rows" if row is None else inputs.describe(row)
    return RewardError(
        f"reward function '{name}' failed at step {inputs.step} on {where}: {type(error).__name__}: {error}"
    )
