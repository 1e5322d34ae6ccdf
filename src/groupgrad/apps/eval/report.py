"""An evaluation in words and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad.apps.eval.results import Evaluation, means_by_column
from groupgrad.evaluation.prompt_numbers import Difference, Mean, Measure, means, numbers_of_prompts

SAMPLING = ("num_generations", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
"""Settings on which samples depend, beside the seed."""

_UNITS = {"length": "length (tokens)", "truncated": "truncated (share)"}


def report(evaluation: Evaluation, measure: Measure) -> str:
    """Names model, data and settings; then the means with their intervals, and those of each value of a column."""
    numbers, settings = numbers_of_prompts(evaluation.prompts, measure), evaluation.settings
    found, count = means(numbers), len(evaluation.prompts)
    sampled = ", ".join(f"{name} {settings[name]}" for name in SAMPLING if settings[name] is not None)
    lines = [
        f"{evaluation.model} on {count} prompts of {_set(settings)}, in {evaluation.seconds:.1f} s",
        f"{sampled}, seed {settings['seed']}; rewards: {', '.join(settings['rewards'])}",
        "",
        *_table([["", "mean", "95 % interval"], *([_name(name), *_cells(mean)] for name, mean in found.items())]),
    ]
    for name, mean in found.items():
        if mean.prompts < count:
            lines.append(f"{name}: {count - mean.prompts} prompts have too few scored completions and are left out")
    if settings["by"] is not None:
        by = means_by_column(evaluation, numbers)
        shown = [name for name in found if not name.startswith("reward ")]
        head = [settings["by"], "prompts", *shown]
        sizes = [sum(str(prompt.column) == value for prompt in evaluation.prompts) for value in by]
        rows = [
            [value, str(size), *(_number(part[name].mean) for name in shown)]
            for size, (value, part) in zip(sizes, by.items())
        ]
        lines += ["", *_table([head, *rows])]
    return "\n".join(lines) + "\n"


def comparison(here: Evaluation, there: Evaluation, differences: Mapping[str, Difference]) -> str:
    """The paired differences of two evaluations, and the settings in which they differ."""
    rows = [["", "here", "there", "difference", "95 % interval", "p"]]
    for name, found in differences.items():
        cells = _cells(found.difference)
        rows.append([_name(name), _number(found.here), _number(found.there), *cells, f"{found.p:.2g}"])
    of_set = f" of {_set(here.settings)}" if here.settings.get("set") else ""
    lines = [f"less {there.model}, on the same prompts{of_set}:", "", *_table(rows)]
    names = [name for name in (*SAMPLING, "seed", "rewards") if here.settings[name] != there.settings.get(name)]
    if names:
        differing = ", ".join(f"{name} {here.settings[name]} and {there.settings.get(name)}" for name in names)
        lines.append(f"settings that differ, here and there: {differing}")
    return "\n".join(lines) + "\n"


def _set(settings: Mapping[str, Any]) -> str:
    """The evaluation set as it was given, with its name."""
    return f"{settings['set']} ({settings['dataset']})" if settings.get("set") else str(settings["dataset"])


def _name(name: str) -> str:
    return _UNITS.get(name, name)


def _cells(mean: Mean) -> list[str]:
    return [_number(mean.mean), f"{_number(mean.low)} to {_number(mean.high)}" if mean.prompts > 1 else "-"]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))]
        ).rstrip()
        for row in rows
    ]
