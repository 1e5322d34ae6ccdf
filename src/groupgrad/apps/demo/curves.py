"""Plots the reward curve of a log history."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

_INK, _MUTED, _GRID = "#222222", "#6b6b6b", "#e4e4e4"
_REWARD, _LENGTH = "#2563a8", "#b4552d"

# From this many log events on, a running average is drawn over the single values.
_SMOOTH_FROM = 40


def plot_rewards(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Plots reward, with its standard deviation, and completion length over optimizer steps as a PNG at `path`.

    `log_history` is the trainer state's list of log events. Evaluations (`eval_reward`, `eval_<name>_reward`) are drawn
    as points. ValueError for a history without rewards; ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reward = series(log_history, "reward")
    keys = dict.fromkeys(key for event in log_history for key in event)
    evaluations = {key: series(log_history, key) for key in keys if re.fullmatch(r"eval(_[^/]+)?_reward", key)}
    if reward.empty and not evaluations:
        raise ValueError(
            f"the log history has {len(log_history)} events and no `reward` in any of them; train for at least "
            f"`logging_steps` steps before drawing the curve"
        )
    length = series(log_history, "completions/mean_length")

    # Not pyplot, which has global state, may open windows and is not thread-safe.
    figure = Figure(figsize=(8.0, 3.6 if length.empty else 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [1] if length.empty else [5, 3]
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_reward(axes[0], reward, series(log_history, "reward_std"), evaluations)
    if not length.empty:
        _draw_curve(axes[1], length, _LENGTH, "tokens per completion")
        axes[1].set_title("Completion length", loc="left", fontsize=10, color=_INK, fontweight="bold")
        axes[1].set_ylabel("tokens", color=_MUTED)
        axes[1].set_ylim(0, max(1.15 * np.nanmax(length.to_numpy(), initial=0.0), 1.0))
    for axis in axes:
        _tidy(axis)
    if len({*reward.index, *(step for points in evaluations.values() for step in points.index)}) == 1:
        axes[-1].set_xlim(axes[-1].get_xlim()[0] - 1, axes[-1].get_xlim()[1] + 1)
    axes[-1].set_xlabel("optimizer step", color=_MUTED)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")
    return path


def series(log_history: Sequence[Mapping[str, Any]], key: str) -> pd.Series:
    """Returns the float64 numbers logged under `key`, indexed by ascending step; the last number of a step counts."""
    events = pd.DataFrame(log_history, columns=["step", key]).apply(pd.to_numeric, errors="coerce").dropna()
    return events.groupby("step")[key].last().astype(np.float64)


def running_average(values: pd.Series, span: int) -> pd.Series:
    """Returns the exponentially weighted mean over about `span` values, unbiased at the start; skips NaN and inf."""
    return values.where(np.isfinite(values)).ewm(span=span, ignore_na=True).mean()


def _draw_reward(axis: Any, reward: pd.Series, std: pd.Series, evaluations: Mapping[str, pd.Series]) -> None:
    axis.set_title("Reward", loc="left", fontsize=10, color=_INK, fontweight="bold")
    axis.set_ylabel("mean reward", color=_MUTED)
    if not reward.empty:
        if not std.empty:
            center, width = _smoothed(reward), np.interp(reward.index, std.index, std)
            label = "± standard deviation"
            shade = {"color": _REWARD, "alpha": 0.13, "linewidth": 0}
            axis.fill_between(reward.index, center - width, center + width, label=label, **shade)
        _draw_curve(axis, reward, _REWARD, "training")
    for number, (key, points) in enumerate(evaluations.items(), start=1):
        label = "evaluation " + key.removeprefix("eval_").removesuffix("reward").removesuffix("_")
        axis.plot(points.index, points, f"C{number}o--", linewidth=1, markersize=5, label=label.strip(), zorder=4)
    axis.legend(frameon=False, fontsize=8, labelcolor=_MUTED, loc="best", ncols=2)


def _draw_curve(axis: Any, curve: pd.Series, color: str, label: str) -> None:
    if len(curve) >= _SMOOTH_FROM:
        axis.plot(curve.index, curve, color=color, linewidth=0.7, alpha=0.35)
        label += " (running average)"
    marker = "o" if len(curve) < 3 else None
    axis.plot(curve.index, _smoothed(curve), color=color, linewidth=1.8, marker=marker, label=label, zorder=3)


def _smoothed(curve: pd.Series) -> pd.Series:
    return curve if len(curve) < _SMOOTH_FROM else running_average(curve, span=max(len(curve) // 20, 5))


def _tidy(axis: Any) -> None:
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)
    axis.margins(x=0.01)
    axis.xaxis.get_major_locator().set_params(integer=True)
