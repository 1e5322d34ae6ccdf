"""What reward functions are called with, and what they log while they run."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from groupgrad.errors import RewardError
from groupgrad.rewards.text import completion_text, conversation_text
from groupgrad.types import Rollout

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 200
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
GROUND_TRUTH_COLUMNS = ("ground_truths", "ground_truth", "answer", "solution")
TABLE_COLUMNS = ("step", "prompt", "completion", "advantage", "finish_reason", "num_tokens")
"""Columns that the completions table has of its own."""
OWN_METRICS = frozenset(
    {
        *("loss", "policy_loss", "aux_loss", "kl", "entropy", "entropy_coef", "cispo_clip_ratio"),
        *("reward", "reward_std", "frac_reward_zero_std", "num_tokens", "num_input_tokens_seen"),
        *("grad_norm", "learning_rate", "epoch", "step_time", "runtime"),
    }
)
OWN_METRIC_FOLDERS = ("completions/", "rewards/", "clip_ratio/", "sampling/", "vespo/", "time/", "tools/", "rollouts/")
"""Names of metrics that the trainer logs, and the beginnings of further ones."""


@dataclass(slots=True, frozen=True)
class CallInputs:
    """The rollouts of one scoring call, seen as keyword arguments."""

    rollouts: Sequence[Rollout]
    columns: dict[str, list[Any]]
    """Data-set columns and extra values by name, one value a row, None where a row has none."""
    trainer_state: Any = None
    step: int = 0
    """Optimizer step, for messages."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], trainer_state: Any, step: int) -> CallInputs:
        """Gather the columns; where a rollout's extra value and a data-set column share a name, the former wins."""
        sources = [{**rollout.prompt.row, **rollout.extra} for rollout in rollouts]
        names = dict.fromkeys(name for source in sources for name in source)
        columns = {
            name: [source.get(name) for source in sources]
            for name in names
            if name not in NOT_COLUMNS and name not in PROVIDED
        }
        return cls(rollouts, columns, trainer_state, step)

    def only(self, row: int) -> CallInputs:
        """The same call with a single row."""
        return dataclasses.replace(
            self,
            rollouts=[self.rollouts[row]],
            columns={name: values[row : row + 1] for name, values in self.columns.items()},
        )

    @property
    def names(self) -> list[str]:
        """Every argument there is, without the spellings of `sugar`."""
        return [*PROVIDED, *self.columns]

    def sugar(self) -> dict[str, str]:
        """Further argument names that a function may spell out, each with what it stands for.

        `responses` are the completions as texts; `ground_truths` is the first column there is of
        `GROUND_TRUTH_COLUMNS`. A column of the same name goes first.
        """
        found = {} if "responses" in self.columns else {"responses": "responses"}
        truths = next((name for name in GROUND_TRUTH_COLUMNS if name in self.columns), None)
        if truths is not None and "ground_truths" not in self.columns:
            found["ground_truths"] = truths
        return found

    def value(self, name: str) -> Any:
        """A fresh value for one argument: lists and messages that the function may change at will."""
        if name == "prompts":
            return [copy_containers(rollout.prompt.row["prompt"]) for rollout in self.rollouts]
        if name == "completions":
            return [copy_containers(rollout.completion) for rollout in self.rollouts]
        if name == "completion_ids":
            return [list(rollout.completion_ids) for rollout in self.rollouts]
        if name == "trainer_state":
            return self.trainer_state
        if name in self.columns:
            return [copy_containers(value) for value in self.columns[name]]
        if name == "responses":
            return [completion_text(rollout.completion) for rollout in self.rollouts]
        return self.value(self.sugar()[name])

    def describe(self, row: int) -> str:
        """A row for a message to a person: its number in the round, its prompt's end and its completion's start."""
        rollout = self.rollouts[row]
        prompt = conversation_text(rollout.prompt.row["prompt"])
        completion = conversation_text(rollout.completion)
        tail = prompt if len(prompt) <= MAX_SHOWN_CHARS else "..." + prompt[-MAX_SHOWN_CHARS:]
        head = completion if len(completion) <= MAX_SHOWN_CHARS else completion[:MAX_SHOWN_CHARS] + "..."
        return f"row {rollout.index} (prompt {tail!r}, completion {head!r})"


def copy_containers(value: Any) -> Any:
    """A copy of the lists, tuples and dicts that a value is built of; what they hold (images, tensors) is shared."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value


@dataclass(slots=True)
class CallLog:
    """What one reward function logs during one call. Thread-safe; what comes after the function's return is dropped."""

    function: str
    num_rows: int
    step: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and count of what was logged under each name."""
    muted: bool = False
    """True if whatever is logged is dropped without a look."""
    error: RewardError | None = None
    """The last misuse that was reported to the function."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False
    _warned: bool = False

    def log_extra(self, column: str, values: Any) -> None:
        """Add a column to this call's completions; a second time, replace it. RewardError unless one value a row."""
        if self.muted:
            return
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            self._refuse(f"log_extra({column!r}, ...) got a {type(values).__name__}; give a list with one value a row")
        if len(values) != self.num_rows:
            self._refuse(
                f"log_extra({column!r}, ...) got {len(values)} values for {self.num_rows} completions; give one a row "
                "(None where there is nothing to show)"
            )
        with self._lock:
            if self._is_open(f"log_extra({column!r}, ...)"):
                self.columns[str(column)] = list(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Add a number to a metric, which averages what is added; NaN adds nothing. RewardError for a non-number,
        and for a name of the trainer's own, whose number would be lost.
        """
        if self.muted:
            return
        if str(name) in OWN_METRICS or str(name).startswith(OWN_METRIC_FOLDERS):
            self._refuse(f"log_metric({name!r}, ...) takes a name that the trainer logs itself; choose another name")
        try:
            if isinstance(value, str):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._refuse(f"log_metric({name!r}, ...) got {short_repr(value)}; give a number")
        with self._lock:
            if self._is_open(f"log_metric({name!r}, ...)") and number == number:
                total, count = self.metrics.get(str(name), (0.0, 0))
                self.metrics[str(name)] = (total + number, count + 1)

    def close(self) -> None:
        """Take nothing more."""
        with self._lock:
            self._closed = True

    def _refuse(self, problem: str) -> NoReturn:
        self.error = RewardError(f"reward function '{self.function}', step {self.step}: {problem}")
        raise self.error

    def _is_open(self, call: str) -> bool:
        if self._closed and not self._warned:
            self._warned = True
            logger.warning(
                "reward function '%s' called %s after it had returned; this and later calls are ignored",
                self.function,
                call,
            )
        return not self._closed


def short_repr(value: Any) -> str:
    """A value for a message to a person, cut short, with its type."""
    text = repr(value)
    if len(text) > MAX_SHOWN_CHARS:
        text = text[:MAX_SHOWN_CHARS] + "..."
    return f"{text} ({type(value).__name__})"
