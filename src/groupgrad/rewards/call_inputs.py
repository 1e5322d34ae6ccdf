"""Keyword arguments of a reward function call, and the columns and metrics that the function logs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from groupgrad.data.completions import CompletionTexts
from groupgrad.data.values import MAX_SHOWN_CHARS, copy_containers, short_repr
from groupgrad.errors import RewardError
from groupgrad.metrics import Metric, mean_of, merge
from groupgrad.objectives import LOSSES
from groupgrad.rewards.text import completion_text, conversation_text, turn_text
from groupgrad.types import Rollout

HIDDEN_COLUMNS = ("prompt", "completion", "completion_ids")
"""Data-set columns that functions do not get, since `prompts`, `completions` and `completion_ids` take their place."""
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
ALIASES = ("responses", "ground_truths", "raw_completions")
"""Further arguments, for functions that name them."""
GROUND_TRUTH_COLUMNS = ("ground_truths", "ground_truth", "answer", "solution")
TRAINER_METRICS = frozenset(
    {
        *("loss", "policy_loss", "aux_loss", "kl", "entropy", "entropy_coef"),
        *("reward", "reward_std", "reward_low", "reward_high", "frac_reward_zero_std"),
        *("num_tokens", "num_input_tokens_seen"),
        *("grad_norm", "learning_rate", "epoch", "step_time", "runtime"),
    }
).union(*(method.metrics for method in LOSSES.values()))
"""Metrics that the trainer logs itself."""
TRAINER_METRIC_PREFIXES = (
    *("completions/", "rewards/", "dynamic_sampling/", "clip_ratio/", "sampling/"),
    *("time/", "tools/", "rollouts/"),
    *("reward/", "pass@", "maj@"),
)


class LogMisuse(RewardError):
    """A reward function called `log_extra` or `log_metric` with arguments that cannot be logged."""


@dataclass(slots=True, frozen=True)
class CallInputs:
    """The rollouts of one scoring call, readable as keyword arguments."""

    rollouts: Sequence[Rollout]
    columns: dict[str, list[Any]]
    """Data-set columns and extra values by name, one value a row, None where a row has none."""
    trainer_state: Any = None
    step: int = 0
    """Optimizer step, for messages."""
    texts: CompletionTexts | None = None
    """Decodes turns; None: messages are all there is."""

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], trainer_state: Any, step: int, texts: CompletionTexts | None = None
    ) -> CallInputs:
        """Collects the columns of all rollouts; a rollout's extra value replaces a data-set column of the same name."""
        sources = [{**rollout.prompt.row, **rollout.extra} for rollout in rollouts]
        names = dict.fromkeys(name for source in sources for name in source)
        columns = {
            name: [source.get(name) for source in sources]
            for name in names
            if name not in HIDDEN_COLUMNS and name not in STANDARD_ARGUMENTS
        }
        return cls(rollouts, columns, trainer_state, step, texts)

    def only(self, row: int) -> CallInputs:
        """Returns the same call with a single row."""
        return dataclasses.replace(
            self,
            rollouts=[self.rollouts[row]],
            columns={name: values[row : row + 1] for name, values in self.columns.items()},
        )

    @property
    def names(self) -> list[str]:
        """Arguments that a function with `**kwargs` gets."""
        return [*STANDARD_ARGUMENTS, *self.columns]

    @property
    def aliases(self) -> list[str]:
        """Further arguments, for functions that name them.

        `responses` are the completions as texts; `raw_completions` are the last turns as the model wrote them, with
        special tokens and reasoning, behind a tag that the prompt has opened; `ground_truths` is the first existing
        column of `GROUND_TRUTH_COLUMNS`. A column with the name of an alias replaces it.
        """
        return [name for name in ALIASES if name != "ground_truths" or self.ground_truth_column]

    def value(self, name: str) -> Any:
        """Returns one argument; its lists and messages are copies, so the function may change them."""
        if name == "prompts":
            return [copy_containers(rollout.prompt.row["prompt"]) for rollout in self.rollouts]
        if name == "completions":
            return [copy_containers(rollout.scored_completion) for rollout in self.rollouts]
        if name == "completion_ids":
            return [list(rollout.completion_ids) for rollout in self.rollouts]
        if name == "trainer_state":
            return self.trainer_state
        if name == "responses" and name not in self.columns:
            return [completion_text(rollout.completion) for rollout in self.rollouts]
        if name == "raw_completions" and name not in self.columns:
            if self.texts is None:
                return [turn_text(rollout.completion) for rollout in self.rollouts]
            return [self.texts.of_turn(rollout) for rollout in self.rollouts]
        if name == "ground_truths":
            name = self.ground_truth_column
        return [copy_containers(value) for value in self.columns[name]]

    def describe(self, row: int) -> str:
        """Describes a row for an error message: row number, end of the prompt, start of the completion."""
        rollout = self.rollouts[row]
        prompt = conversation_text(rollout.prompt.row["prompt"])
        completion = conversation_text(rollout.completion)
        tail = prompt if len(prompt) <= MAX_SHOWN_CHARS else "..." + prompt[-MAX_SHOWN_CHARS:]
        head = completion if len(completion) <= MAX_SHOWN_CHARS else completion[:MAX_SHOWN_CHARS] + "..."
        return f"row {rollout.index} (prompt {tail!r}, completion {head!r})"

    def describe_all(self) -> str:
        """The rows of the call, for messages: their numbers, and the first one's texts."""
        numbers = sorted(rollout.index for rollout in self.rollouts)
        if len(numbers) == 1:
            return self.describe(0)
        return f"rows {numbers[0]} to {numbers[-1]}, the first: {self.describe(0)}"

    @property
    def ground_truth_column(self) -> str:
        """The column that `ground_truths` stands for; empty without one."""
        return next((name for name in GROUND_TRUTH_COLUMNS if name in self.columns), "")


@dataclass(slots=True)
class CallLog:
    """Columns and metrics that one reward function logs during one call. Thread-safe."""

    function: str
    num_rows: int
    step: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def log_extra(self, column: str, values: Any) -> None:
        """Adds or replaces a column of the completions table. LogMisuse unless there is one value a row."""
        call = f"log_extra({column!r}, ...)"
        is_column = hasattr(values, "__len__") and not isinstance(values, (str, bytes))
        if not is_column or len(values) != self.num_rows:
            raise self._misuse(
                f"{call} got {short_repr(values)} for {self.num_rows} completions; give a list with one value a row "
                "(None where there is nothing to show)"
            )
        self.columns[str(column)] = list(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Adds a number to the average that is logged under `name`; NaN is ignored.

        LogMisuse if the value is not a number, or if the trainer logs a metric of that name, which would replace it.
        """
        call = f"log_metric({name!r}, ...)"
        if str(name) in TRAINER_METRICS or str(name).startswith(TRAINER_METRIC_PREFIXES):
            raise self._misuse(f"{call} takes a name that the trainer logs itself; choose another name")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise self._misuse(f"{call} got {short_repr(value)}; give a number") from None
        with self._lock:
            if number == number:
                metric = mean_of(number, 1)
                known = self.metrics.get(str(name))
                self.metrics[str(name)] = metric if known is None else merge(known, metric)

    def _misuse(self, problem: str) -> LogMisuse:
        return LogMisuse(f"reward function '{self.function}', step {self.step}: {problem}")
