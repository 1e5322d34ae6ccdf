"""Reward functions: inspection of a callable's signature, and validation of its returned rewards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from groupgrad import dist
from groupgrad.concurrency.callables import bound_keywords, function_name, is_async
from groupgrad.concurrency.worker_process import WorkerDied
from groupgrad.concurrency.workers import NoAnswer, needs_main_thread
from groupgrad.data.values import real_number, short_repr
from groupgrad.errors import RewardError
from groupgrad.rewards.call_inputs import GROUND_TRUTH_COLUMNS, HIDDEN_COLUMNS, CallInputs, CallLog

LARGEST_REWARD = float(torch.finfo(torch.float32).max)
"""A batch holds advantages in float32."""


@dataclass(slots=True)
class RewardFunction:
    """A callable and the keyword arguments that it accepts."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    takes_all: bool = True
    """True if the callable has `**kwargs`."""
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
        names += [name for name in inputs.aliases if name in self.takes]
        if missing := [name for name in self.requires if name not in names]:
            raise self._lacks(missing, inputs)
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
    """Reads a callable's signature."""
    name = function_name(function)
    parameters = list(inspect.signature(function).parameters.values())
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


def read_rewards(
    returned: Any, name: str, inputs: CallInputs, *, largest: float = LARGEST_REWARD
) -> list[float | list[float]]:
    """Converts the return value of a reward function to one float a row, or one a turn; None and NaN become NaN.

    Accepts a list, tuple, array or tensor of real numbers, booleans and None; in the place of a number also a list with
    one for each turn of the rollout. RewardError, with the function, step and row, for anything else, a wrong number of
    rewards, and one beyond `largest`.
    """
    values = returned.tolist() if callable(getattr(returned, "tolist", None)) else returned
    num_rows, problem = len(inputs.rollouts), ""
    rewards: list[Any] = []
    if isinstance(returned, (torch.Tensor, np.ndarray)) and returned.ndim != 1:
        problem = f"an array of shape {tuple(returned.shape)}; return shape ({num_rows},)"
    elif not isinstance(values, (list, tuple)):
        problem = f"{short_repr(returned)}; return a list with one number or None a completion"
    elif len(values) != num_rows:
        problem = (
            f"{len(values)} rewards for {num_rows} completions (the first is {inputs.describe(0)}); return one number "
            "or None a completion, in their order"
        )
    else:
        values = [value.tolist() if getattr(value, "ndim", 0) == 1 else value for value in values]
        rewards = [
            [_number(turn) for turn in value] if isinstance(value, (list, tuple)) else _number(value)
            for value in values
        ]
    for row, reward in enumerate(rewards):
        parts = reward if isinstance(reward, list) else [reward]
        if isinstance(reward, list) and len(reward) != (num_turns := len(inputs.rollouts[row].turns)):
            problem = (
                f"{len(reward)} rewards by turn for {inputs.describe(row)}, which has {num_turns}; return a number or "
                "None for each time that the model was asked, or one number for the whole completion"
            )
        elif None in parts:
            what = f"{short_repr(values[row])} for {inputs.describe(row)}"
            problem = f"{what}; return a number, or None where the function does not apply"
        elif any(abs(part) > largest for part in [*parts, sum(part for part in parts if not math.isnan(part))]):
            problem = (
                f"{values[row]!r} for {inputs.describe(row)}; an infinite reward, or one beyond {largest:.2g}, makes "
                "the advantages of its whole group meaningless: return a smaller number, or None where the function "
                "does not apply. One that is only to be logged gets the weight 0 in reward_weights"
            )
        if problem:
            break
    if problem:
        raise RewardError(f"reward function '{name}', step {inputs.step}: it returned {problem}")
    return rewards


def _number(value: Any) -> float | None:
    """NaN for no reward; None for what is no number."""
    return math.nan if value is None else real_number(value)


def call_error(
    error: BaseException, name: str, inputs: CallInputs, *, row: int | None = None, timeout_s: float | None = None
) -> RewardError:
    """Builds the error that replaces an exception of a reward function, a missed deadline or the end of its process.

    `row` is the row that caused the exception, if known.
    """
    place = f"(step {inputs.step}, rank {dist.rank()}, {inputs.describe_all()})"
    if isinstance(error, NoAnswer):
        return RewardError(
            f"reward function '{name}' took longer than reward_timeout_s={timeout_s:g} {place}; make it faster, raise "
            "reward_timeout_s, or set on_reward_failure to 'none' or a reward"
        )
    if isinstance(error, WorkerDied):
        return RewardError(
            f"the worker process of reward function '{name}' {error} {place}; set on_reward_failure to 'none' or a "
            "reward to go on without these rows"
        )
    where = f"a batch of {len(inputs.rollouts)} rows" if row is None else inputs.describe(row)
    remedy = ""
    if needs_main_thread(str(error)):
        remedy = "; it works on the main thread alone; set reward_workers=1, to have that of a process"
    return RewardError(
        f"reward function '{name}' failed at step {inputs.step} on {where}: {type(error).__name__}: {error}{remedy}"
    )
