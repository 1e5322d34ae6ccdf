"""Scores finished rollouts with reward functions and reward models."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

import torch

from groupgrad.concurrency.callables import innermost
from groupgrad.concurrency.event_loop import LoopThread
from groupgrad.errors import RewardError
from groupgrad.metrics import Metric, merge_all
from groupgrad.rewards import REWARD_FUNCTIONS
from groupgrad.rewards.call_inputs import TABLE_COLUMNS, CallInputs, CallLog, LogMisuse
from groupgrad.rewards.functions import RewardFunction, call_error, distinct_names, inspect_function, read_rewards
from groupgrad.rewards.model_loading import RewardModelOptions
from groupgrad.rewards.models import RewardModel
from groupgrad.types import RewardTable, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

RewardFunc = Union[str, "PreTrainedModel", Callable[..., Any]]


@dataclass(slots=True)
class _Scores:
    """Rewards of one function or model for the rows of a call."""

    rewards: list[float]
    seconds: float
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(slots=True)
class _AsyncResult:
    """Return value or exception of an awaitable."""

    returned: Any
    error: BaseException | None
    """Carried as a value, since KeyboardInterrupt and SystemExit would end the event loop that they are raised in."""
    seconds: float


class RewardRunner:
    """Calls all reward functions and reward models on rollouts and collects their rewards, columns and metrics.

    `reward_funcs` are callables, plain or async, sequence-classification models, and names or folders of such models,
    which are loaded with the options of `models`. `processing_classes` are the models' tokenizers: None, one for a
    single item, or a list as long as the items, in which entries of callables are ignored. `own_names` names the
    rewards that rollouts bring along (`Rollout.own_rewards`): they become further columns of the table, and with them
    `reward_funcs` may be empty. ValueError or TypeError for arguments that cannot work.
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
        tokenizers = _align(processing_classes, len(items))
        options = models or RewardModelOptions()
        for item in items:  # all of them before the first model is loaded
            _check(item)
        self._scorers = [_scorer(item, tokenizer, options) for item, tokenizer in zip(items, tokenizers)]
        self._own_names = tuple(own_names)
        self.names: list[str] = distinct_names([*(scorer.name for scorer in self._scorers), *own_names])
        for scorer, name in zip(self._scorers, self.names):
            scorer.name = name
        self._loop = LoopThread()
        self._warned_unscored = False

    @property
    def functions(self) -> list[Any]:
        """The reward functions and models as they are called."""
        return [scorer.model if isinstance(scorer, RewardModel) else scorer.call for scorer in self._scorers]

    @property
    def processing_classes(self) -> list[Any]:
        """The tokenizers of the reward models; None for functions."""
        return [getattr(scorer, "processing_class", None) for scorer in self._scorers]

    @property
    def models(self) -> list[RewardModel]:
        """The reward models, in the order of `reward_funcs`."""
        return [scorer for scorer in self._scorers if isinstance(scorer, RewardModel)]

    def score(self, rollouts: Sequence[Rollout], *, trainer_state: Any = None, step: int = 0) -> RewardTable:
        """Returns the rewards of rollouts, (B, R) in their order, NaN for None and NaN. Local, no collective.

        Async functions start first and run concurrently while plain functions and models run in order. Failed rollouts
        get NaN and are not passed to any function. RewardError, from the original, if a function raises or returns
        unusable rewards; KeyboardInterrupt and SystemExit are raised as they are.
        """
        table = RewardTable(torch.full((len(rollouts), len(self.names)), torch.nan, dtype=torch.float64), self.names[:])
        rows = [row for row, rollout in enumerate(rollouts) if rollout.is_scorable]
        if not rows:
            return table
        inputs = CallInputs.of([rollouts[row] for row in rows], trainer_state, step)
        logs = [CallLog(scorer.name, len(rows), step) for scorer in self._scorers]
        scores = self._call_all(inputs, logs)
        own = [[rollout.own_rewards.get(name) for rollout in inputs.rollouts] for name in self._own_names]
        own = [[torch.nan if value is None else value for value in values] for values in own]
        table.rewards[rows] = torch.tensor([*(score.rewards for score in scores), *own], dtype=torch.float64).T
        for log in logs:
            for column, values in log.columns.items():
                name = _free_name(column, log.function, {*TABLE_COLUMNS, *self.names, *table.columns})
                by_row = dict(zip(rows, values))
                table.columns[name] = [by_row.get(row) for row in range(len(rollouts))]
        table.metrics = merge_all([*(score.metrics for score in scores), *(log.metrics for log in logs)])
        table.seconds = {name: score.seconds for name, score in zip(self.names, scores)}
        self._warn_unscored(table.rewards[rows], inputs)
        return table

    def close(self) -> None:
        """Ends the thread of the async functions. May be called any number of times."""
        self._loop.close()

    def _call_all(self, inputs: CallInputs, logs: list[CallLog]) -> list[_Scores]:
        """Returns the scores of all functions and models, in order. A failure cancels the pending async calls."""
        pending: dict[int, concurrent.futures.Future[_AsyncResult]] = {}
        scores: dict[int, _Scores] = {}
        try:
            for i, scorer in enumerate(self._scorers):
                if isinstance(scorer, RewardFunction) and scorer.is_async:
                    call = functools.partial(scorer.call, **scorer.arguments(inputs, logs[i]))
                    pending[i] = self._loop.submit(_await(call, logs[i]))
            for i, scorer in enumerate(self._scorers):
                if isinstance(scorer, RewardModel):
                    scores[i] = _call_model(scorer, inputs)
                elif i not in pending:
                    scores[i] = self._call_function(scorer, inputs, logs[i])
            for i, future in pending.items():
                scores[i] = _async_scores(future.result(), self.names[i], inputs)
            return [scores[i] for i in range(len(logs))]
        finally:
            for future in pending.values():
                future.cancel()
            for log in logs:
                log.close()

    def _call_function(self, function: RewardFunction, inputs: CallInputs, log: CallLog) -> _Scores:
        arguments = function.arguments(inputs, log)
        start = time.perf_counter()
        try:
            returned = self._call(function, arguments, log)
        except LogMisuse:
            raise
        except Exception as error:
            row = self._failing_row(function, inputs, error)
            raise call_error(error, function.name, inputs, row) from error
        finally:
            log.close()
        seconds = time.perf_counter() - start
        return _Scores(read_rewards(returned, function.name, inputs), seconds)

    def _call(self, function: RewardFunction, arguments: dict[str, Any], log: CallLog) -> Any:
        returned = function.call(**arguments)
        if inspect.isawaitable(returned):  # a plain function, such as a lambda, around an async one
            result = self._loop.submit(_await(lambda: returned, log)).result()
            if result.error is not None:
                raise result.error
            return result.returned
        return returned

    def _failing_row(self, function: RewardFunction, inputs: CallInputs, error: Exception) -> int | None:
        """Finds the row that raises `error` by calling the function on one row at a time."""
        if len(inputs.rollouts) == 1:
            return 0
        for row in range(len(inputs.rollouts)):
            single, log = inputs.only(row), CallLog(function.name, 1, inputs.step)
            try:
                self._call(function, function.arguments(single, log), log)
            except Exception as single_error:
                # Another exception may come from the size of the batch, such as a statistic over too few rows.
                if type(single_error) is type(error):
                    return row
        return None

    def _warn_unscored(self, rewards: torch.Tensor, inputs: CallInputs) -> None:
        """Warns once of completions without any reward; they do not contribute to training."""
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


def _call_model(model: RewardModel, inputs: CallInputs) -> _Scores:
    start = time.perf_counter()
    try:
        rewards, metrics = model.score(inputs)
    except RewardError:
        raise
    except Exception as error:
        raise call_error(error, model.name, inputs) from error
    return _Scores(rewards, time.perf_counter() - start, metrics)


async def _await(call: Callable[[], Any], log: CallLog) -> _AsyncResult:
    start = time.perf_counter()
    returned, error = None, None
    try:
        returned = await call()
    except (Exception, KeyboardInterrupt, SystemExit) as caught:
        error = caught
    finally:
        log.close()
    return _AsyncResult(returned, error, time.perf_counter() - start)


def _async_scores(result: _AsyncResult, name: str, inputs: CallInputs) -> _Scores:
    if result.error is None:
        return _Scores(read_rewards(result.returned, name, inputs), result.seconds)
    if isinstance(result.error, LogMisuse) or not isinstance(result.error, Exception):
        raise result.error
    row = 0 if len(inputs.rollouts) == 1 else None
    raise call_error(result.error, name, inputs, row) from result.error


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
    """ValueError or TypeError for an item that is neither callable nor the name of a model."""
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
    """Prefixes a column with its function's name, and numbers it, until it is not taken."""
    name, number = column, 1
    while name in taken:
        name = f"{function}/{column}" if number == 1 else f"{function}/{column}_{number}"
        number += 1
    return name
