"""Scores finished rollouts with reward functions and reward models of every kind."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

import torch

from groupgrad.concurrency.callables import innermost
from groupgrad.concurrency.event_loop import LoopThread
from groupgrad.errors import RewardError
from groupgrad.metrics import Metric, mean_of, merge, merge_all
from groupgrad.rewards import REWARD_FUNCTIONS
from groupgrad.rewards.functions import (
    RewardFunction,
    call_error,
    distinct_names,
    inspect_function,
    read_rewards,
)
from groupgrad.rewards.inputs import TABLE_COLUMNS, CallInputs, CallLog
from groupgrad.rewards.model_loading import RewardModelOptions
from groupgrad.rewards.models import RewardModel
from groupgrad.types import RewardTable, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

RewardFunc = Union[str, "PreTrainedModel", Callable[..., Any]]


@dataclass(slots=True)
class _Outcome:
    """What became of one reward function's call."""

    rewards: list[float]
    seconds: float
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(slots=True)
class _Ended:
    """How an asynchronous call ended; an error is carried as a value so that it cannot end the loop it ran on."""

    returned: Any
    error: BaseException | None
    seconds: float


class RewardRunner:
    """Calls every reward function on rollouts and collects what they return and log.

    An item is the name or folder of a sequence-classification model (loaded with one label, by `models` alone and not
    as the policy is), such a model itself, or a callable, synchronous or not. `processing_classes` are the tokenizers
    of the models: None, one for a single item, or a list as long as the items, of which entries for callables are
    ignored. The lists given are not changed. `own_names` are the names of rewards that rollouts bring with them
    (`Rollout.own_rewards`), further columns of the table; with them there may be no function at all. ValueError or
    TypeError for what cannot work.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | list[RewardFunc],
        processing_classes: Any = None,
        *,
        models: RewardModelOptions | None = None,
        own_names: Sequence[str] = (),
    ):
        items: list[Any] = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not items and not own_names:
            raise ValueError("reward_funcs=[]: without a reward there is nothing to learn; give at least one function")
        classes = _align(processing_classes, len(items))
        options = models or RewardModelOptions()
        for item in items:
            _check(item)
        scorers = [_scorer(item, processing_class, options) for item, processing_class in zip(items, classes)]
        self._own_names = tuple(own_names)
        self.names: list[str] = distinct_names([*(scorer.name for scorer in scorers), *own_names])
        self._scorers = [scorer.renamed(name) for scorer, name in zip(scorers, self.names)]
        self._loop = LoopThread()
        self._warned_unscored = False

    @property
    def models(self) -> list[RewardModel]:
        """The reward models among the functions, in their order."""
        return [scorer for scorer in self._scorers if isinstance(scorer, RewardModel)]

    def score(self, rollouts: Sequence[Rollout], *, trainer_state: Any = None, step: int = 0) -> RewardTable:
        """The rewards of these rollouts, in their order. Local, no collective.

        Asynchronous functions start first and run, all at once, beside the synchronous ones, which are called in order.
        `rewards` is (B, R), NaN where a function gave None or NaN. RewardError (from the original) if a function
        fails or returns something that cannot be used; KeyboardInterrupt and the like pass through. No function is
        called for no rollouts, nor sees a rollout that failed, whose rewards are NaN.
        """
        rollouts = list(rollouts)
        scorable = [i for i, rollout in enumerate(rollouts) if rollout.is_scorable]
        table = RewardTable(torch.empty(0, len(self.names), dtype=torch.float64), list(self.names))
        if scorable:
            table = self._score(CallInputs.of([rollouts[i] for i in scorable], trainer_state, step))
        return table if len(scorable) == len(rollouts) else _spread(table, scorable, len(rollouts))

    def _score(self, inputs: CallInputs) -> RewardTable:
        logs = [CallLog(scorer.name, len(inputs.rollouts), inputs.step) for scorer in self._scorers]
        outcomes: list[_Outcome | None] = [None] * len(logs)
        pending: dict[int, concurrent.futures.Future[_Ended]] = {}
        try:
            for k, scorer in enumerate(self._scorers):
                if isinstance(scorer, RewardFunction) and scorer.is_async:
                    arguments = scorer.arguments(inputs, logs[k])
                    pending[k] = self._loop.submit(_await(scorer.call, arguments, logs[k]))
            for k, scorer in enumerate(self._scorers):
                if isinstance(scorer, RewardModel):
                    outcomes[k] = _run_model(scorer, inputs)
                elif k not in pending:
                    outcomes[k] = self._run_function(scorer, inputs, logs[k])
            for k, future in pending.items():
                outcomes[k] = _finish(future, inputs, logs[k])
        finally:
            for future in pending.values():
                future.cancel()
            for log in logs:
                log.close()
        return self._table([outcome for outcome in outcomes if outcome is not None], logs, inputs)

    def close(self) -> None:
        """End the thread of the asynchronous functions. May be called any number of times."""
        self._loop.close()

    def _run_function(self, function: RewardFunction, inputs: CallInputs, log: CallLog) -> _Outcome:
        arguments = function.arguments(inputs, log)
        started = time.perf_counter()
        try:
            returned = self._call(function, arguments, log)
        except Exception as error:
            if error is log.error:
                raise
            raise self._blame(function, inputs, error) from error
        finally:
            log.close()
        seconds = time.perf_counter() - started
        return _Outcome(read_rewards(returned, function.name, inputs), seconds)

    def _call(self, function: RewardFunction, arguments: dict[str, Any], log: CallLog) -> Any:
        returned = function.call(**arguments)
        if inspect.isawaitable(returned):  # a plain function, such as a lambda, around an asynchronous one
            ended = self._loop.submit(_await(lambda: returned, {}, log)).result()
            if ended.error is not None:
                raise ended.error
            return ended.returned
        return returned

    def _blame(self, function: RewardFunction, inputs: CallInputs, error: Exception) -> RewardError:
        """Find the row that makes a function fail by calling it once a row; what it logs then is dropped."""
        num_rows = len(inputs.rollouts)
        if num_rows == 1:
            return call_error(error, function.name, inputs, 0)
        for row in range(num_rows):
            single = inputs.only(row)
            muted = CallLog(function.name, 1, inputs.step, muted=True)
            try:
                self._call(function, function.arguments(single, muted), muted)
            except Exception as again:
                # A function that fails otherwise on a single row (too few for a statistic, say) tells nothing of it.
                if type(again) is type(error):
                    return call_error(error, function.name, inputs, row)
        return call_error(error, function.name, inputs)

    def _table(self, outcomes: list[_Outcome], logs: list[CallLog], inputs: CallInputs) -> RewardTable:
        own = [[rollout.own_rewards.get(name) for rollout in inputs.rollouts] for name in self._own_names]
        own = [[float("nan") if value is None else value for value in values] for values in own]
        rewards = torch.tensor([*(outcome.rewards for outcome in outcomes), *own], dtype=torch.float64).T.contiguous()
        unscored = rewards.isnan().all(dim=1).nonzero().flatten().tolist()
        if unscored and not self._warned_unscored:
            self._warned_unscored = True
            logger.warning(
                "step %d: %d of %d completions got no reward from any function and teach nothing; the first is %s",
                inputs.step,
                len(unscored),
                len(inputs.rollouts),
                inputs.describe(unscored[0]),
            )
        columns: dict[str, list[Any]] = {}
        metrics = merge_all(outcome.metrics for outcome in outcomes)
        for log in logs:
            for column, values in log.columns.items():
                columns[_free_name(column, log.function, {*TABLE_COLUMNS, *self.names, *columns})] = values
            for name, (total, count) in log.metrics.items():
                metric = mean_of(total, count)
                metrics[name] = merge(metrics[name], metric) if name in metrics else metric
        seconds = {name: outcome.seconds for name, outcome in zip(self.names, outcomes)}
        return RewardTable(rewards, list(self.names), columns, metrics, seconds)


def _spread(table: RewardTable, rows: list[int], num_rows: int) -> RewardTable:
    """The table of more rows, of which it holds those numbered `rows`; the others were not scored."""
    rewards = torch.full((num_rows, len(table.names)), float("nan"), dtype=torch.float64)
    rewards[rows] = table.rewards
    columns = {}
    for name, values in table.columns.items():
        known = dict(zip(rows, values))
        columns[name] = [known.get(row) for row in range(num_rows)]
    return replace(table, rewards=rewards, columns=columns)


def _run_model(model: RewardModel, inputs: CallInputs) -> _Outcome:
    started = time.perf_counter()
    try:
        scores = model.score(inputs)
        return _Outcome(scores.rewards, time.perf_counter() - started, model.metrics(scores))
    except RewardError:
        raise
    except Exception as error:
        raise call_error(error, model.name, inputs) from error


def _finish(future: concurrent.futures.Future[_Ended], inputs: CallInputs, log: CallLog) -> _Outcome:
    ended = future.result()
    if ended.error is None:
        return _Outcome(read_rewards(ended.returned, log.function, inputs), ended.seconds)
    if ended.error is log.error or not isinstance(ended.error, Exception):
        raise ended.error
    row = 0 if len(inputs.rollouts) == 1 else None
    raise call_error(ended.error, log.function, inputs, row) from ended.error


async def _await(call: Callable[..., Any], arguments: dict[str, Any], log: CallLog) -> _Ended:
    started = time.perf_counter()
    returned, error = None, None
    try:
        returned = await call(**arguments)
    except (Exception, KeyboardInterrupt, SystemExit) as caught:
        error = caught
    finally:
        log.close()
    return _Ended(returned, error, time.perf_counter() - started)


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


def _check(item: Any) -> None:
    """Refuse what is no reward function before any model is loaded."""
    if isinstance(item, str):
        if item in REWARD_FUNCTIONS:
            raise ValueError(
                f"reward_funcs={item!r}: a text is the name of a reward model, but this is a function of "
                "groupgrad.rewards; give the function itself"
            )
    elif not callable(item) or isinstance(item, type):
        raise TypeError(
            f"reward_funcs contains {item!r} ({type(item).__name__}), which cannot be called; give functions, callable "
            "objects, sequence-classification models or the names of such models"
        )


def _scorer(item: Any, processing_class: Any, options: RewardModelOptions) -> RewardFunction | RewardModel:
    if isinstance(item, (str, torch.nn.Module)):
        return RewardModel(item, processing_class, options)
    check_ready = getattr(innermost(item), "check_ready", None)
    if check_ready is not None:
        check_ready()
    return inspect_function(item)


def _free_name(column: str, function: str, taken: set[str]) -> str:
    name, number = column, 1
    while name in taken:
        name = f"{function}/{column}" if number == 1 else f"{function}/{column}_{number}"
        number += 1
    return name
