"""The progress bar of a training run, and one readable line a log event."""

from __future__ import annotations

import atexit
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from tqdm import tqdm
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import has_length

from groupgrad.telemetry.log_line import format_log

Phase = Literal["sampling", "rewards", "scoring", "training", "evaluating", "saving", "idle"]

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {desc}"
_BAR_UNSIZED = "{n_fmt} [{elapsed}] {desc}"

# What the bar keeps for itself: percentage, twelve cells, counts, elapsed and remaining time.
_BAR_RESERVE = 46
_REFRESH_S = 0.1


class ProgressCallback(TrainerCallback):
    """A bar over optimizer steps with the latest reward, length, speed and what the trainer is doing now.

    On a terminal the bar is drawn on standard error and log lines go above it, on standard output. Without a terminal,
    or with `disable_tqdm`, there is no bar and each log event is one line. Only the main process shows anything; on the
    others every method does nothing. Use the callback as a context manager around training, or call `close` in a
    `finally`, so that the terminal is left in order after an exception or an interrupt.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bar: Any = None
        self._evaluation_bar: Any = None
        self._phase = "idle"
        self._numbers: dict[str, float] = {}
        self._shown_at = float("-inf")
        self._logged_at: float | None = None
        self._logged_step = 0
        self._closes_at_exit = False

    def __enter__(self) -> ProgressCallback:
        """Itself; `close` is called at the end of the block."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def phase(self) -> str:
        """What the trainer was last said to be doing."""
        return self._phase

    def set_phase(self, name: Phase | str) -> None:
        """Say what the trainer is doing now; shown at once if it is something new."""
        if name == self._phase:
            return
        self._phase = name
        self._show()

    def set_numbers(
        self, *, reward: float | None = None, length: float | None = None, tokens_per_second: float | None = None
    ) -> None:
        """Give the latest mean reward, mean completion length (tokens) and speed; None leaves the number as it was.

        Shown at most ten times a second.
        """
        given = {"reward": reward, "len": length, "tok/s": tokens_per_second}
        self._numbers.update({key: float(value) for key, value in given.items() if value is not None})
        if self._clock() - self._shown_at >= _REFRESH_S:
            self._show()

    def close(self) -> None:
        """Finish the bars where they are and end their lines; may be called at any time and more than once."""
        self._close_evaluation()
        bar, self._bar = self._bar, None
        if bar is not None:
            self._phase = "idle"
            bar.set_description_str(self._description(), refresh=False)
            bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar at the step that training starts or resumes from."""
        self.close()
        self._phase, self._numbers = "idle", {}
        self._logged_at, self._logged_step = self._clock(), state.global_step
        if state.is_world_process_zero and _wants_bar(args):
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                bar_format=_BAR,
                dynamic_ncols=True,
                file=sys.stderr,
                mininterval=_REFRESH_S,
            )
            self._close_at_exit()
            self._show()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar to the step just finished."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the evaluation bar, which opens with the first batch."""
        if not state.is_world_process_zero or not _wants_bar(args):
            return
        if self._evaluation_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._evaluation_bar = tqdm(
                total=total,
                bar_format=_BAR if total else _BAR_UNSIZED,
                desc="evaluation",
                leave=False,
                dynamic_ncols=True,
                file=sys.stderr,
                mininterval=_REFRESH_S,
            )
            self._close_at_exit()
        self._evaluation_bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the evaluation bar away."""
        self._close_evaluation()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Take the evaluation bar away."""
        self._close_evaluation()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the log event as one line above the bar."""
        if not state.is_world_process_zero or not logs:
            return
        columns = shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None
        line = format_log(
            logs,
            step=state.global_step,
            max_steps=state.max_steps,
            seconds_per_step=self._seconds_per_step(state.global_step, logs),
            width=columns,
        )
        if self._bar is None and self._evaluation_bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the bar."""
        self.close()

    def _seconds_per_step(self, step: int, logs: Mapping[str, Any]) -> float | None:
        """Wall-clock seconds a step since the last training log; None for other log events."""
        if "loss" not in logs:
            return None
        now, last, steps = self._clock(), self._logged_at, step - self._logged_step
        self._logged_at, self._logged_step = now, step
        return None if last is None or steps <= 0 else (now - last) / steps

    def _show(self) -> None:
        if self._bar is None:
            return
        self._shown_at = self._clock()
        self._bar.set_description_str(self._description(), refresh=False)
        self._bar.refresh()

    def _description(self) -> str:
        """`reward=... len=... tok/s=... | phase`; idle is blank.

        On a narrow terminal the last numbers go first, the phase never.
        """
        written = [f"{key}={_short(key, value)}" for key, value in self._numbers.items()]
        room = shutil.get_terminal_size().columns - _BAR_RESERVE - len(self._phase)
        while written and len(" ".join(written)) + 3 > room:
            written.pop()
        doing = [] if self._phase == "idle" else [self._phase]
        return " ".join([*written, "|", *doing] if written and doing else written or doing)

    def _close_evaluation(self) -> None:
        bar, self._evaluation_bar = self._evaluation_bar, None
        if bar is not None:
            bar.close()

    def _close_at_exit(self) -> None:
        # transformers tells callbacks nothing when training ends in an exception; without this the last bar would stay
        # half drawn when the interpreter leaves. The weak reference lets a callback that is done with go.
        if self._closes_at_exit:
            return
        self._closes_at_exit = True
        reference = weakref.ref(self)

        def close() -> None:
            alive = reference()
            if alive is not None:
                alive.close()

        atexit.register(close)


def _wants_bar(args: Any) -> bool:
    return not args.disable_tqdm and _is_terminal(sys.stderr)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and hasattr(stream, "isatty") and stream.isatty()


def _short(key: str, value: float) -> str:
    if key == "reward":
        return f"{value:.3f}"
    return f"{value:.0f}" if abs(value) < 10_000 else f"{value / 1000:.0f}k"
