"""Progress bar of a training run, and one readable line for each log event."""

from __future__ import annotations

import atexit
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import has_length
from transformers.utils import logging as hf_logging

from groupgrad.run_folder.render import duration
from groupgrad.run_folder.terminal import output_may_fail, write_line

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {desc}"
_BAR_UNSIZED = "{n_fmt} [{elapsed}] {desc}"

_REFRESH_S = 0.5
"""Least time between two drawings of the bar."""


class ProgressCallback(TrainerCallback, AbstractContextManager):
    """Shows a bar over optimizer steps with the latest reward, completion length, speed and phase of the trainer.

    The bar is drawn at most twice a second.

    On a terminal the bar is drawn on standard error and log lines go above it, on standard output. Without a terminal,
    or with `disable_tqdm`, there is no bar and each log event is one line. Ranks other than the first show nothing. Use
    the callback as a context manager around training, so that an exception or an interrupt leaves no unfinished line on
    the terminal, and transformers draws no bars into files.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bar: Any = None
        self._evaluation_bar: Any = None
        self.name = ""
        """Name of the run at the beginning of its lines, where a process trains several."""
        self.phase = "idle"
        """Current phase of the trainer."""
        self._numbers: dict[str, float] = {}
        self._refreshed_at = float("-inf")
        self._timer: threading.Timer | None = None
        self._drawing = threading.RLock()  # a signal's handler may draw while its thread does
        self._has_sampled = False
        self._logged_at: float | None = None
        self._logged_step = 0
        self.first_step = 0
        """Optimizer step that training started or resumed from."""
        self._others_bars: Any = None

    def __enter__(self) -> ProgressCallback:
        self._others_bars = bars_on_terminals_only()
        self._others_bars.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._others_bars.__exit__(*exception)

    def set_phase(self, name: str) -> None:
        """Sets the current phase. A first step is not shown as training before it has sampled."""
        self._has_sampled |= name == "sampling"
        if name != self.phase and (self._has_sampled or name != "training"):
            self.phase = name
            if self._bar is not None:
                self._refresh()

    def set_numbers(
        self, *, reward: float | None = None, length: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Sets the latest mean reward, mean completion length (tokens) and speed; None keeps the last number."""
        numbers = {"reward": reward, "len": length, "tok/s": tokens_per_second}
        self._numbers.update({key: float(value) for key, value in numbers.items() if value is not None})
        self._refresh()

    def close(self) -> None:
        """Stops the bars where they are and ends their lines. May be called at any time and any number of times."""
        atexit.unregister(self.close)
        self._close_evaluation()
        bar, self._bar = self._bar, None
        if (timer := self._timer) is not None:
            timer.cancel()
            timer.join()
            self._timer = None
        if bar is not None:
            self.phase = "idle"
            bar.set_description_str(self._description(), refresh=False)
            bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar at the step that training starts or resumes from."""
        self.close()
        self.phase, self._numbers, self._has_sampled = "idle", {}, False
        self._logged_at, self._logged_step = self._clock(), state.global_step
        self.first_step = state.global_step
        if state.is_world_process_zero and _wants_bar(args):
            self._bar = self._new_bar(total=state.max_steps, initial=state.global_step, bar_format=_BAR)
            self._refresh()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar to the current step."""
        if self._bar is not None:
            self._bar.n = state.global_step
            self._refresh()

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Moves the evaluation bar, which opens with the first batch."""
        if not state.is_world_process_zero or not _wants_bar(args):
            return
        if self._evaluation_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            bar_format = _BAR if total else _BAR_UNSIZED
            self._evaluation_bar = self._new_bar(total=total, bar_format=bar_format, desc="evaluation", leave=False)
        self._evaluation_bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the evaluation bar."""
        self._close_evaluation()

    on_predict = on_evaluate  # pyright: ignore[reportAssignmentType]

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Writes the log event as one line above the bar."""
        if not state.is_world_process_zero or not logs:
            return
        name = f"{self.name}  " if self.name else ""
        columns = shutil.get_terminal_size().columns - len(name) if _is_terminal(sys.stdout) else None
        line = name + format_log(
            logs,
            step=state.global_step,
            max_steps=state.max_steps,
            seconds_per_step=self._seconds_per_step(state.global_step, logs),
            width=columns,
        )
        if self._bar is None and self._evaluation_bar is None:
            with output_may_fail():
                print(line, flush=True)
        else:
            write_line(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar."""
        self.close()

    def _seconds_per_step(self, step: int, logs: Mapping[str, Any]) -> float | None:
        """Returns the wall-clock seconds a step since the last training log; None for other log events."""
        if "loss" not in logs:
            return None
        now, last_logged, steps = self._clock(), self._logged_at, step - self._logged_step
        self._logged_at, self._logged_step = now, step
        return None if last_logged is None or steps <= 0 else (now - last_logged) / steps

    def _refresh(self) -> None:
        """Draws the bar now, or by a timer as soon as it may be drawn again."""
        with self._drawing:
            wait_s = _REFRESH_S - (self._clock() - self._refreshed_at)
            if self._bar is None:
                return
            if wait_s <= 0:
                self._draw()
            elif self._timer is None:
                self._timer = threading.Timer(wait_s, self._draw_pending)
                self._timer.daemon = True
                self._timer.start()

    def _draw_pending(self) -> None:
        with self._drawing:
            if self._timer is threading.current_thread():  # else it was drawn meanwhile
                self._draw()

    def _draw(self) -> None:
        bar, self._timer, self._refreshed_at = self._bar, None, self._clock()
        if bar is not None:
            bar.set_description_str(self._description(), refresh=False)
            bar.refresh()

    def _description(self) -> str:
        """Formats `reward=... len=... tok/s=... | phase`, without the phase `idle`."""
        numbers = [f"{key}={_short(key, value)}" for key, value in self._numbers.items()]
        phase = "" if self.phase == "idle" else self.phase
        return " | ".join(part for part in (" ".join(numbers), phase) if part)

    def _close_evaluation(self) -> None:
        bar, self._evaluation_bar = self._evaluation_bar, None
        if bar is not None:
            bar.close()

    def _new_bar(self, **options: Any) -> Any:
        # transformers does not notify callbacks of an exception, so the last bar would stay half drawn when the
        # interpreter exits.
        atexit.unregister(self.close)
        atexit.register(self.close)
        return tqdm(dynamic_ncols=True, file=sys.stderr, mininterval=_REFRESH_S, **options)


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Inside, transformers draws no bars (of loading and saving weights) unless standard error is a terminal."""
    if _is_terminal(sys.stderr) or not hf_logging.is_progress_bar_enabled():
        yield
        return
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()


def _wants_bar(args: Any) -> bool:
    return not args.disable_tqdm and _is_terminal(sys.stderr)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and hasattr(stream, "isatty") and not getattr(stream, "closed", False) and stream.isatty()


def _short(key: str, value: float) -> str:
    if key == "reward":
        return f"{value:.3f}"
    return f"{value:.0f}" if abs(value) < 10_000 else f"{value / 1000:.0f}k"


@dataclass(slots=True, frozen=True)
class _Field:
    label: str
    key: str
    spec: str
    width: int
    """Characters that the number is padded to, which aligns the lines of a run."""
    scale: float = 1.0
    unit: str = ""


ROUNDING = 1e-7
"""Numbers below it are those of float32's rounding, such as the loss of a policy that has not moved."""

_FIELDS = (
    _Field("reward", "reward", ".3f", 6),
    _Field("±", "reward_std", ".3f", 5),
    _Field("loss", "loss", ".4f", 7),
    _Field("kl", "kl", ".4f", 6),
    _Field("len", "completions/mean_length", ".1f", 6),
    _Field("trunc", "completions/clipped_ratio", ".0f", 3, 100.0, "%"),
    _Field("entropy", "entropy", ".3f", 5),
    _Field("grad", "grad_norm", ".2f", 5),
    _Field("lr", "learning_rate", ".1e", 7),
)


def format_log(
    logs: Mapping[str, Any],
    *,
    step: int,
    max_steps: int = 0,
    seconds_per_step: float | None = None,
    width: int | None = None,
) -> str:
    """Formats a log event: reward, loss, length and so on for a training step or an evaluation, a summary at the end of
    training, and `key value` pairs for any other event.

    Without `seconds_per_step` (wall-clock) the event's `step_time` is shown. With `width` (terminal columns) the last
    numbers of a line are left out until it fits.
    """
    if "train_runtime" in logs:
        return _end_line(logs, step)
    counter = f"{step:>{len(str(max_steps))}}" if max_steps > 0 else str(step)
    prefix = _evaluation_prefix(logs)
    if prefix is not None:
        parts = _parts(logs, prefix + "_") + _passes(logs, prefix + "_")
        return _joined(f"{prefix:<4} {counter}", [*parts, f"{_number(logs[f'{prefix}_runtime'], '.1f')} s"], width)
    parts = _parts(logs, "")
    if not parts:
        rest = [f"{key} {_number(value, '.4g')}" for key, value in logs.items() if key not in ("epoch", "total_flos")]
        return _joined(f"step {counter}", rest, None)
    seconds = logs.get("step_time") if seconds_per_step is None else seconds_per_step
    if seconds is not None:
        parts.append(f"{_number(seconds, '.2f'):>6} s/step")
    return _joined(f"step {counter}", parts, width)


def _parts(logs: Mapping[str, Any], prefix: str) -> list[str]:
    parts = []
    for field in _FIELDS:
        value = logs.get(prefix + field.key)
        if value is None:
            continue
        scaled = value * field.scale if isinstance(value, (int, float)) else value
        parts.append(f"{field.label} {_significant(scaled, field.spec):>{field.width}}{field.unit}")
    return parts


def _passes(logs: Mapping[str, Any], prefix: str) -> list[str]:
    """pass@k and maj@k for each k that an evaluation has measured."""
    known = [name for name in logs if re.fullmatch(rf"{re.escape(prefix)}(pass|maj)@\d+", name)]
    return [f"{name.removeprefix(prefix)} {_number(logs[name], '.3f')}" for name in known]


def _joined(head: str, parts: list[str], width: int | None) -> str:
    line = "  ".join([head, *parts]).replace("  ± ", " ± ")
    return line if width is None or len(line) < width or len(parts) < 2 else _joined(head, parts[:-1], width)


def _evaluation_prefix(logs: Mapping[str, Any]) -> str | None:
    # Every evaluation has a run time. Other keys do not tell the prefix: `eval_policy_loss` is a metric of `eval`.
    matches = [re.fullmatch(r"((?:eval|test)(?:_[^/]+)?)_runtime", key) for key in logs]
    return next((match[1] for match in matches if match), None)


def _end_line(logs: Mapping[str, Any], step: int) -> str:
    line = f"done: {step} steps in {duration(logs['train_runtime'])}"
    if logs.get("train_loss") is not None:
        line += f", mean loss {_significant(logs['train_loss'], '.4f')}"
    return line


def _significant(value: Any, spec: str) -> str:
    """A number by its format, or with two significant digits where that has two decimals or more and shows fewer."""
    decimals = int(spec[1]) if spec.endswith("f") else 0
    if decimals > 1 and isinstance(value, (int, float)) and ROUNDING < abs(value) < 10 ** (1 - decimals):
        return _number(value, ".2g")
    return _number(value, spec)


def _number(value: Any, spec: str) -> str:
    try:
        return format(float(value), spec)
    except (TypeError, ValueError):
        return str(value)
