"""Formats a log event as one readable line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupgrad.run_folder.render import duration


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
