"""Reward functions: inspection of a callable's signature, and validation of its returned rewards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from groupgrad.concurrency.callables import bound_keywords, function_name, is_async
from groupgrad.data.values import real_number, short_repr
from groupgrad.errors import RewardError
from groupgrad.rewards.call_inputs import ALIASES, GROUND_TRUTH_COLUMNS, HIDDEN_COLUMNS, CallInputs, CallLog

LARGEST_REWARD = float(torch.finfo(torch.float32).max)
"""A batch holds advantages in float32."""


@dataclass(slots=True)
class RewardFunction:
    """A callable and the keyword arguments that it accepts."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    takes_all: bool = True
    """True if the callable has `**kwargs`, or if its signature is unknown."""
    takes: frozenset[str] = frozenset()
    """Keywords in the signature."""
    requires: tuple[str, ...] = ()
    """Keywords in the signature without a default."""
    bound: frozenset[str] = frozenset()
    """Keywords that a `functools.partial` has set; they are not passed again."""

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Required keywords that rows with these data-set columns do not provide."""
        inputs = CallInputs([], {name: [] for name in columns if name not in HIDDEN_COLUMNS})
        return [name for name in self.requires if name not in (*inputs.names, *inputs.aliases)]

    def columns_named(self, columns: Iterable[str]) -> list[str]:
        """Data-set columns that are keywords in the signature, and the one that `ground_truths` stands for."""
        inputs = CallInputs([], {name: [] for name in columns if name not in HIDDEN_COLUMNS})
        stands_for = {inputs.ground_truth_column} if "ground_truths" in self.takes else set()
        return [name for name in inputs.columns if name in (self.takes - self.bound) | stands_for]

    def arguments(self, inputs: CallInputs, log: CallLog) -> dict[str, Any]:
        """Returns copies of the keyword arguments for one call. RewardError if a required one does not exist."""
        names = [name for name in inputs.names if self.takes_all or name in self.takes]
        if not self.takes.isdisjoint(ALIASES):
            names += [name for name in inputs.aliases if name in self.takes]
        if not set(self.requires).issubset(names):
            raise self._lacks([name for name in self.requires if name not in names], inputs)
        loggers = {"log_extra": log.log_extra, "log_metric": log.log_metric}
        return {name: loggers.get(name) or inputs.value(name) for name in names if name not in self.bound}

    def _lacks(self, missing: list[str], inputs: CallInputs) -> RewardError:
        hint = ""
        if "ground_truths" in missing:
            columns = ", ".join(GROUND_TRUTH_COLUMNS)
            hint = f"; 'ground_truths' stands for the first column of {columns}, and none exists"
        return RewardError(
            f"reward function '{self.name}', step {inputs.step}: it requires the argument"
            f"{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}, which the data set does not provide"
            f"{hint}; available: {', '.join(inputs.names)}. Add the column, or give the argument a default"
        )


def inspect_function(function: Callable[..., Any]) -> RewardFunction:
    """Reads a callable's signature. ValueError if a required argument cannot be passed by keyword."""
    name = function_name(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return RewardFunction(name, function, is_async(function))
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(
                f"reward function '{name}' takes '{parameter.name}' by position only, but reward functions are called "
                "with keywords; remove the '/' from its signature"
            )
    bound = frozenset(bound_keywords(function))
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return RewardFunction(
        name=name,
        call=function,
        is_async=is_async(function),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        takes=frozenset(p.name for p in keywords),
        # `functools.update_wrapper` gives a partial the signature of its function.
        requires=tuple(p.name for p in keywords if p.default is p.empty and p.name not in bound),
        bound=bound,
    )


def read_rewards(returned: Any, name: str, inputs: CallInputs, *, largest: float = LARGEST_REWARD) -> list[float]:
    """Converts the return value of a reward function to one float a row; None and NaN become NaN.

    Accepts a list, tuple, array or tensor of real numbers, booleans and None. RewardError, with the function, step and
    row, for anything else, a wrong number of rewards, and one beyond `largest`.
    """
    values = returned.tolist() if callable(getattr(returned, "tolist", None)) else returned
    is_list = isinstance(values, (list, tuple)) and len(values) == len(inputs.rollouts)
    rewards = [_as_float(value) for value in values] if is_list else []
    usable = [reward for reward in rewards if reward is not None and not abs(reward) > largest]
    if not is_list or len(usable) < len(rewards):
        problem = _problem(returned, values, inputs, largest)
        raise RewardError(f"reward function '{name}', step {inputs.step}: it returned {problem}")
    return usable


def _problem(returned: Any, values: Any, inputs: CallInputs, largest: float) -> str:
    """Why a return value, whose `tolist()` are the values, is no list of one reward a row."""
    num_rows = len(inputs.rollouts)
    if isinstance(returned, (torch.Tensor, np.ndarray)) and returned.ndim != 1:
        return f"an array of shape {tuple(returned.shape)}; return shape ({num_rows},)"
    if not isinstance(values, (list, tuple)):
        return f"{short_repr(returned)}; return a list with one number or None a completion"
    if len(values) != num_rows:
        return (
            f"{len(values)} rewards for {num_rows} completions (the first is {inputs.describe(0)}); return one number "
            "or None a completion, in their order"
        )
    rewards = [_as_float(value) for value in values]
    row = next(row for row, reward in enumerate(rewards) if reward is None or abs(reward) > largest)
    if rewards[row] is None:
        what = f"{short_repr(values[row])} for {inputs.describe(row)}"
        return f"{what}; return a number, or None where the function does not apply"
    return (
        f"{values[row]!r} for {inputs.describe(row)}; an infinite reward, or one beyond {largest:.2g}, makes "
        "the advantages of its whole group meaningless: return a smaller number, or None where the function does not "
        "apply. One that is only to be logged gets the weight 0 in reward_weights"
    )


def _as_float(value: Any) -> float | None:
    """Converts a real number (inf if it exceeds a float's range) and None (NaN); returns None for anything else."""
    return math.nan if value is None else real_number(value)


def call_error(error: BaseException, name: str, inputs: CallInputs, row: int | None = None) -> RewardError:
    """Builds the error that replaces an exception of a reward function; `row` is the row that caused it, if known."""
    where = f"a batch of {len(inputs.rollouts)} rows" if row is None else inputs.describe(row)
    return RewardError(
        f"reward function '{name}' failed at step {inputs.step} on {where}: {type(error).__name__}: {error}"
    )
