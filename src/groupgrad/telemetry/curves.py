"""What a run leaves behind of its log: a picture of its curves and a file of its numbers."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_INK, _MUTED, _GRID = "#222222", "#6b6b6b", "#e4e4e4"
_REWARD, _LENGTH = "#2563a8", "#b4552d"
_EVALUATION = ("#c2185b", "#2e7d32", "#6a1b9a", "#ef6c00")

# From this many log events on, single steps are drawn faint under a running average.
_SMOOTH_FROM = 40


@dataclass(slots=True, frozen=True)
class Series:
    """One curve."""

    steps: np.ndarray
    """(n,) optimizer steps, ascending."""
    values: np.ndarray
    """(n,) float64; NaN where the event had no number."""


def plot_rewards(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw reward (with its standard deviation) and completion length over optimizer steps as a PNG at `path`.

    `log_history` is the trainer state's list of log events. Evaluations (`eval_reward`, `eval_<name>_reward`) are drawn
    as points where there are any. No reward in the history is a ValueError; without matplotlib an ImportError says what
    to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing the reward curve needs matplotlib; run `pip install matplotlib`") from error
    reward = series(log_history, "reward")
    evaluations = {key: series(log_history, key) for key in _evaluation_keys(log_history)}
    if not len(reward.steps) and not evaluations:
        raise ValueError(
            f"the log history has {len(log_history)} events and no `reward` in any of them; train for at least "
            f"`logging_steps` steps before drawing the curve"
        )
    length = series(log_history, "completions/mean_length")

    # The object interface, not pyplot: no global state, no window, safe in any thread.
    figure = Figure(figsize=(8.0, 5.6 if len(length.steps) else 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [5, 3] if len(length.steps) else [1]
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_reward(axes[0], reward, series(log_history, "reward_std"), evaluations)
    if len(length.steps):
        _draw_curve(axes[1], length, _LENGTH, "tokens per completion")
        axes[1].set_title("Completion length", loc="left", fontsize=10, color=_INK, fontweight="bold")
        axes[1].set_ylabel("tokens", color=_MUTED)
        axes[1].set_ylim(0, max(1.15 * np.nanmax(length.values, initial=0.0), 1.0))
    for axis in axes:
        _tidy(axis)
    if len({*reward.steps, *(step for points in evaluations.values() for step in points.steps)}) == 1:
        axes[-1].set_xlim(axes[-1].get_xlim()[0] - 1, axes[-1].get_xlim()[1] + 1)
    axes[-1].set_xlabel("optimizer step", color=_MUTED)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")
    return path


def write_metrics(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write the log events as JSON lines, one a line, replacing a file that exists as a whole.

    Strict JSON: NaN and infinities become null, values of other types their text.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_strict(event), ensure_ascii=False, default=str) for event in log_history]
    draft = path.with_name(path.name + ".part")
    draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(draft, path)
    return path


def series(log_history: Sequence[Mapping[str, Any]], key: str) -> Series:
    """The events that have a number under `key`, by step; of several at one step the last counts."""
    found: dict[float, float] = {}
    for event in log_history:
        value, step = event.get(key), event.get("step")
        if isinstance(value, (int, float)) and isinstance(step, (int, float)):
            found[float(step)] = float(value)
    steps = sorted(found)
    return Series(np.array(steps), np.array([found[step] for step in steps], dtype=np.float64))


def running_average(values: np.ndarray, span: int) -> np.ndarray:
    """(n,) exponentially weighted mean over about `span` values, unbiased at the start; NaN values are passed over."""
    decay, total, weight = 1 - 2 / (span + 1), 0.0, 0.0
    smooth = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1.0
        if weight:
            smooth[i] = total / weight
    return smooth


def _evaluation_keys(log_history: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for event in log_history for key in event)
    return [key for key in keys if re.fullmatch(r"eval(_[^/]+)?_reward", key) and len(series(log_history, key).steps)]


def _draw_reward(axis: Any, reward: Series, std: Series, evaluations: Mapping[str, Series]) -> None:
    axis.set_title("Reward", loc="left", fontsize=10, color=_INK, fontweight="bold")
    axis.set_ylabel("mean reward", color=_MUTED)
    if len(reward.steps):
        spread = np.interp(reward.steps, std.steps, std.values) if len(std.steps) else None
        if spread is not None:
            middle = _middle(reward)
            axis.fill_between(
                reward.steps,
                middle - spread,
                middle + spread,
                color=_REWARD,
                alpha=0.13,
                linewidth=0,
                label="± standard deviation",
            )
        _draw_curve(axis, reward, _REWARD, "training")
    for number, (key, points) in enumerate(evaluations.items()):
        name = key[len("eval_") : -len("_reward")] if key != "eval_reward" else ""
        axis.plot(
            points.steps,
            points.values,
            color=_EVALUATION[number % len(_EVALUATION)],
            marker="o",
            markersize=5,
            linewidth=1,
            linestyle=(0, (2, 2)),
            markeredgecolor="white",
            label=f"evaluation {name}".strip(),
            zorder=4,
        )
    axis.legend(frameon=False, fontsize=8, labelcolor=_MUTED, loc="best", ncols=2)


def _draw_curve(axis: Any, curve: Series, color: str, label: str) -> None:
    if len(curve.steps) >= _SMOOTH_FROM:
        axis.plot(curve.steps, curve.values, color=color, linewidth=0.7, alpha=0.35)
        label += " (running average)"
    marker = "o" if len(curve.steps) < 3 else None
    axis.plot(curve.steps, _middle(curve), color=color, linewidth=1.8, marker=marker, label=label, zorder=3)


def _middle(curve: Series) -> np.ndarray:
    if len(curve.values) < _SMOOTH_FROM:
        return curve.values
    return running_average(curve.values, span=max(len(curve.values) // 20, 5))


def _tidy(axis: Any) -> None:
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)
    axis.margins(x=0.01)
    axis.xaxis.get_major_locator().set_params(integer=True)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
