"""Scores finished rollouts with reward functions and reward models.

A call has all rows of a rank that are to be scored. What becomes of one that fails (`RewardRunner._failed`):

    on_reward_failure    rows of the call            the step
    error (default)      -                           ends with an error that names function and row, on all ranks
    a number             that reward                 trains
    none                 no reward by this function  trains; a row without any reward has advantage 0, takes no pass, is
                                                     in no group's mean, and counts in the loss's denominator
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch

from groupgrad.activity import doing
from groupgrad.concurrency.callables import innermost, qualified_name
from groupgrad.concurrency.worker_process import WorkerDied
from groupgrad.concurrency.workers import NoAnswer
from groupgrad.data.completions import CompletionTexts
from groupgrad.metrics import merge_all
from groupgrad.models.model_names import folder_as_text, model_source
from groupgrad.rewards import REWARD_FUNCTIONS
from groupgrad.rewards.call_inputs import HIDDEN_COLUMNS, CallInputs, CallLog, LogMisuse
from groupgrad.rewards.function_calls import (
    BegunCall,
    CallStatistics,
    FunctionCalls,
    SupervisionOptions,
    torch_settings_kept,
)
from groupgrad.rewards.functions import LARGEST_REWARD, RewardFunction, call_error, inspect_function, read_rewards
from groupgrad.rewards.model_loading import RewardModelOptions
from groupgrad.rewards.models import RewardModel
from groupgrad.run_folder.completions import TABLE_COLUMNS, distinct_names
from groupgrad.types import Reward, RewardTable, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

RewardFunc = Union[str, "PreTrainedModel", Callable[..., Any]]

RewardsOfRows = Sequence[float | list[float]]
"""The rewards of the rows by one function: one number each, or one for each turn; NaN for no reward."""


class RewardRunner:
    """Calls all reward functions and reward models on rollouts and collects their rewards, columns and metrics.

    `reward_funcs` are callables, plain or async, sequence-classification models, and names or folders of such models,
    which are loaded with the options of `models`. `processing_classes` are the models' tokenizers: None, one for a
    single item, or a list as long as the items, in which entries of callables are ignored. `environment_names` names
    the rewards that rollouts bring along (`Rollout.environment_rewards`): they become further columns of the table, and
    with them `reward_funcs` may be empty. `supervision` has deadlines, worker processes, retries, and what a failure
    means; whether the names in it exist is for `check_failure_names`, since another runner may have some of them.
    ValueError or TypeError for arguments that cannot work.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | list[RewardFunc],
        processing_classes: Any = None,
        *,
        models: RewardModelOptions | None = None,
        environment_names: Sequence[str] = (),
        supervision: SupervisionOptions | None = None,
    ):
        given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        items: list[Any] = [folder_as_text(item) for item in given]
        options = models or RewardModelOptions()
        if not items and not environment_names:
            raise ValueError(f"{options.argument}=[]: completions need a reward; give at least one function")
        tokenizers = _align(processing_classes, len(items))
        for item in items:  # all of them before the first model is loaded
            _check(item, options.argument)
        self._scorers = [_scorer(item, tokenizer, options) for item, tokenizer in zip(items, tokenizers)]
        self._environment_names = tuple(environment_names)
        self.names: list[str] = distinct_names([*(scorer.name for scorer in self._scorers), *environment_names])
        for scorer, name in zip(self._scorers, self.names):
            scorer.name = name
        self.weights: tuple[float, ...] = (1.0,) * len(self.names)
        """The weight of each reward; what has the weight 0 is only logged, and may be any number."""
        self.texts: CompletionTexts | None = None
        """Decodes turns for the argument `raw_completions`."""
        self.supervision = supervision or SupervisionOptions()
        self._functions = [scorer for scorer in self._scorers if isinstance(scorer, RewardFunction)]
        self._calls = FunctionCalls(self._functions, self.supervision)
        self._statistics = {function.name: CallStatistics() for function in self._functions}
        self._logs_calls = self.supervision.is_active
        self._warned_unscored = False
        self._warned_failed: set[str] = set()

    @property
    def functions(self) -> list[Any]:
        """The reward functions and models as they are called."""
        return [scorer.model if isinstance(scorer, RewardModel) else scorer.call for scorer in self._scorers]

    @property
    def function_names(self) -> list[str]:
        """The names of the reward functions, without those of models and environments."""
        return [function.name for function in self._functions]

    @property
    def origins(self) -> list[str]:
        """The origin of each reward: `module.function`, the name or folder of a model, or the name in rollouts."""
        found = [
            model_source(scorer.model) or scorer.name
            if isinstance(scorer, RewardModel)
            else qualified_name(scorer.call)
            for scorer in self._scorers
        ]
        return [*found, *self._environment_names]

    def missing_arguments(self, columns: Sequence[str]) -> dict[str, list[str]]:
        """The required arguments of each function that rows with these data-set columns do not provide."""
        missing = {function.name: function.missing(columns) for function in self._functions}
        return {name: arguments for name, arguments in missing.items() if arguments}

    def columns_read(self, columns: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the data-set columns that functions name, and the others that one of them gets by `**kwargs`."""
        named = {name for function in self._functions for name in function.columns_named(columns)}
        gets_all = any(function.takes_all for function in self._functions)
        others = [name for name in columns if gets_all and name not in (*named, *HIDDEN_COLUMNS)]
        return [name for name in columns if name in named], others

    @property
    def _counting(self) -> list[int]:
        """Places of the rewards that are not only logged."""
        return [place for place, weight in enumerate(self.weights) if weight != 0.0]

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self._calls.num_workers

    @property
    def processing_classes(self) -> list[Any]:
        """The tokenizers of the reward models; None for functions."""
        return [scorer.processing_class if isinstance(scorer, RewardModel) else None for scorer in self._scorers]

    @property
    def has_functions(self) -> bool:
        """True if any of the rewards is a function, which may compare the rows of a call."""
        return bool(self._functions)

    @property
    def models(self) -> list[RewardModel]:
        """The reward models, in the order of `reward_funcs`."""
        return [scorer for scorer in self._scorers if isinstance(scorer, RewardModel)]

    def score(self, rollouts: Sequence[Rollout], *, trainer_state: Any = None, step: int = 0) -> RewardTable:
        """Returns the rewards of rollouts, (B, R) in their order, NaN for None and NaN. Local, no collective.

        Functions that are async or have a worker process start first and run concurrently, while other functions and
        models run in order. Failed rollouts get NaN and are not passed to any function. RewardError, from the original,
        if a function returns unusable rewards, or if it raises, passes its deadline or ends its process and
        `supervision` has no other answer to that; SystemExit is such an error, KeyboardInterrupt is raised as it is.
        """
        table = RewardTable(torch.full((len(rollouts), len(self.names)), torch.nan, dtype=torch.float64), self.names[:])
        rows = [row for row, rollout in enumerate(rollouts) if rollout.is_scorable]
        if not rows:
            return table
        inputs = CallInputs.of([rollouts[row] for row in rows], trainer_state, step, self.texts)
        logs = [CallLog(scorer.name, len(rows), step) for scorer in self._scorers]
        rewards = self._call_all(inputs, logs, table.seconds)
        for name in self._environment_names:
            rewards.append([_or_nan(rollout.environment_rewards.get(name)) for rollout in inputs.rollouts])
        for row, given in zip(rows, zip(*rewards)):
            table.rewards[row] = torch.tensor([_total(value) for value in given], dtype=torch.float64)
            if any(isinstance(value, list) for value in given):
                num_turns = len(rollouts[row].turns)
                columns = [_of_turns(value, num_turns) for value in given]
                table.by_turn[row] = torch.tensor(columns, dtype=torch.float64).T
        for log in logs:
            for column, values in log.columns.items():
                # Another column may have this name; names of functions differ.
                is_taken = column in {*TABLE_COLUMNS, *self.names, *table.columns}
                name = f"{log.function}/{column}" if is_taken else column
                by_row = dict(zip(rows, values))
                table.columns[name] = [by_row.get(row) for row in range(len(rollouts))]
        table.metrics = merge_all(log.metrics for log in logs)
        unscored = table.rewards[rows][:, self._counting].isnan().all(dim=1)
        if bool(unscored.any()) and not any(statistics.failures for statistics in self._statistics.values()):
            self._warn_unscored(unscored.nonzero().flatten().tolist(), inputs)
        if self._logs_calls:
            for name, statistics in self._statistics.items():
                table.metrics |= statistics.take(name)
        return table

    def close_workers(self) -> None:
        """Ends the worker processes of reward functions; the next call starts them again."""
        self._calls.close_workers()

    def _call_all(self, inputs: CallInputs, logs: list[CallLog], seconds: dict[str, float]) -> list[RewardsOfRows]:
        """Returns the rewards of all functions and models, in order, and notes the seconds of each.

        A failure cancels the pending calls.
        """
        begun: dict[int, BegunCall] = {}
        rewards: dict[int, RewardsOfRows] = {}
        try:
            for i, scorer in enumerate(self._scorers):
                if isinstance(scorer, RewardFunction):
                    begun[i] = self._calls.begin(scorer, inputs, logs[i])
            # What runs elsewhere is waited for last.
            for i in sorted(range(len(logs)), key=lambda i: i in begun and begun[i].runs_elsewhere):
                scorer = self._scorers[i]
                if isinstance(scorer, RewardFunction):
                    rewards[i] = self._score(i, scorer, inputs, logs, begun)
                    seconds[scorer.name] = self._statistics[scorer.name].times[-1]
                else:
                    started = time.perf_counter()
                    with doing(f"the reward model {scorer.name!r}", inputs.describe_all):
                        rewards[i] = scorer.score(inputs, logs[i], may_be_infinite=self.weights[i] == 0.0)
                    seconds[scorer.name] = time.perf_counter() - started
            return [rewards[i] for i in range(len(logs))]
        finally:
            for call in begun.values():
                call.cancel()

    def _score(
        self, index: int, function: RewardFunction, inputs: CallInputs, logs: list[CallLog], begun: dict[int, BegunCall]
    ) -> RewardsOfRows:
        """Waits for a function's call, begins it anew after transient errors, and returns one reward a row."""
        seconds = 0.0
        for attempt in itertools.count(1):
            with doing(f"the reward function {function.name!r}", inputs.describe_all):
                if index not in begun:
                    begun[index] = self._calls.begin(function, inputs, logs[index])
                with torch_settings_kept():
                    outcome = begun[index].finish()
                seconds += outcome.seconds
                error = outcome.error
                if error is None or (pause := self.supervision.pause_s(error, attempt)) is None:
                    break
                logger.warning("%s; called again in %g s", call_error(error, function.name, inputs), pause)
                time.sleep(pause)
            logs[index] = CallLog(function.name, len(inputs.rollouts), inputs.step)
            del begun[index]
        self._statistics[function.name].times.append(seconds)
        if outcome.error is not None:
            return self._failed(function, outcome.error, inputs)
        largest = LARGEST_REWARD if self.weights[index] != 0.0 else math.inf
        return read_rewards(outcome.value, function.name, inputs, largest=largest)

    def _failed(self, function: RewardFunction, error: BaseException, inputs: CallInputs) -> RewardsOfRows:
        """The rewards of a call that failed for good, or its error."""
        self._statistics[function.name].failures += 1
        self._statistics[function.name].timeouts += isinstance(error, NoAnswer)
        if isinstance(error, (LogMisuse, KeyboardInterrupt)):
            raise error
        action = self.supervision.action(function.name)
        row = self._failing_row(function, inputs, error) if action == "error" else None
        described = call_error(error, function.name, inputs, row=row, timeout_s=self.supervision.timeout_s)
        if action == "error":
            raise described from error
        if function.name not in self._warned_failed:
            self._warned_failed.add(function.name)
            logger.warning(
                "%s. These rows get %s, as on_reward_failure says; said once for each function, "
                "rewards/%s/failures counts the calls",
                described,
                "no reward" if action is None else f"the reward {action:g}",
                function.name,
            )
        return [torch.nan if action is None else action] * len(inputs.rollouts)

    def _failing_row(self, function: RewardFunction, inputs: CallInputs, error: BaseException) -> int | None:
        """Finds the row that raises `error` by calling a plain function on one row at a time."""
        if not isinstance(error, Exception) or isinstance(error, (NoAnswer, WorkerDied)):
            return None
        if len(inputs.rollouts) == 1:
            return 0
        gives_up_at = time.monotonic() + (self.supervision.timeout_s or math.inf)
        for row in range(0 if function.is_async else len(inputs.rollouts)):
            log = CallLog(function.name, 1, inputs.step)
            single = self._calls.begin(function, inputs.only(row), log).finish()
            # Another exception may come from the size of the batch, such as a statistic over too few rows.
            if type(single.error) is type(error):
                return row
            if time.monotonic() > gives_up_at:
                break
        return None

    def _warn_unscored(self, unscored: Sequence[int], inputs: CallInputs) -> None:
        """Warns once of completions without any reward; they do not contribute to training."""
        if not self._warned_unscored:
            self._warned_unscored = True
            logger.warning(
                "step %d: %d of %d completions got no reward, since %s returned None or NaN, and teach nothing; the "
                "first is %s. Return a number for completions that are to be trained; said once",
                inputs.step,
                len(unscored),
                len(inputs.rollouts),
                " and ".join(repr(self.names[place]) for place in self._counting) or "nothing of non-zero weight",
                inputs.describe(unscored[0]),
            )


def _align(processing_classes: Any, count: int) -> list[Any]:
    if processing_classes is None:
        return [None] * count
    classes = list(processing_classes) if isinstance(processing_classes, (list, tuple)) else [processing_classes]
    if len(classes) != count:
        raise ValueError(
            f"{len(classes)} reward_processing_classes for {count} reward_funcs: they are matched by position; give a "
            "list of the same length, with None for functions and for models whose tokenizer is to be loaded"
        )
    return classes


def _check(item: Any, argument: str) -> None:
    """ValueError or TypeError for an item of `argument` that is neither callable nor the name of a model."""
    if isinstance(item, str):
        if item in REWARD_FUNCTIONS:
            raise ValueError(
                f"{argument}={item!r}: a text is the name of a reward model, but this is a function of "
                "groupgrad.rewards; give the function itself"
            )
    elif isinstance(item, type) or not callable(item):
        raise TypeError(
            f"{argument} contains {item!r} ({type(item).__name__}), which cannot be called with completions; give "
            "functions, callable objects, sequence-classification models or the names of such models"
        )


def check_failure_names(supervision: SupervisionOptions, names: Sequence[str]) -> None:
    """ValueError if what a failure means is said of a function that is none of these."""
    named = supervision.on_failure if isinstance(supervision.on_failure, Mapping) else {}
    if unknown := [name for name in named if name not in names]:
        raise ValueError(
            f"on_reward_failure names {', '.join(map(repr, unknown))}, and the reward functions are "
            f"{', '.join(map(repr, names)) or 'none'}; use their names"
        )


def _scorer(item: Any, processing_class: Any, options: RewardModelOptions) -> RewardFunction | RewardModel:
    if isinstance(item, (str, torch.nn.Module)):
        return RewardModel(item, processing_class, options)
    check_ready = getattr(innermost(item), "check_ready", None)
    if check_ready is not None:
        check_ready()
    return inspect_function(item)


def _or_nan(value: Reward) -> float | list[float]:
    if isinstance(value, list):
        return [torch.nan if turn is None else turn for turn in value]
    return torch.nan if value is None else value


def _total(value: float | list[float]) -> float:
    """The sum of the rewards of turns, without those that are NaN; NaN if all of them are."""
    if not isinstance(value, list):
        return value
    given = [turn for turn in value if not math.isnan(turn)]
    return sum(given) if given else torch.nan


def _of_turns(value: float | list[float], num_turns: int) -> list[float]:
    """A reward by turn; one of the whole rollout stands at the last."""
    return value if isinstance(value, list) else [torch.nan] * (num_turns - 1) + [value]
