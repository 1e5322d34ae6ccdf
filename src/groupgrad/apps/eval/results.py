"""An evaluation of a model: its prompts, its comparison with another one, its file, and both in words and tables."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupgrad.evaluation.prompt_numbers import (
    Difference,
    Mean,
    Measure,
    PromptResult,
    by_column,
    difference,
    means,
    numbers_of_prompts,
    pairs,
)
from groupgrad.run_folder.run_files import finite, replace_file


@dataclass(slots=True, frozen=True)
class Evaluation:
    """All prompts of an evaluation, in the order of the data set."""

    model: str
    settings: dict[str, Any]
    """Data, sampling and rewards, by the names of the command's options."""
    prompts: list[PromptResult]
    seconds: float


def means_by_column(evaluation: Evaluation, numbers: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Mean]]:
    """The means over the prompts that share a value of the column, by that value in words, in ascending order."""
    return {
        value: means({name: [column[place] for place in places] for name, column in numbers.items()})
        for value, places in by_column(evaluation.prompts).items()
    }


def compare(here: Evaluation, there: Evaluation, measure: Measure) -> dict[str, Difference]:
    """The differences of two evaluations on the same prompts, by the names of numbers that both have.

    ValueError if the prompts are not the same.
    """
    check_same_prompts([prompt.prompt for prompt in here.prompts], there)
    found = pairs(*(numbers_of_prompts(one.prompts, measure) for one in (here, there)))
    return {name: difference(*both) for name, both in found.items()}


def check_same_prompts(prompts: Sequence[Any], there: Evaluation) -> None:
    """ValueError unless an evaluation has these prompts, in this order."""
    others = [prompt.prompt for prompt in there.prompts]
    if len(prompts) == len(others) and all(one == other for one, other in zip(prompts, others)):
        return
    same = sum(one == other for one, other in zip(prompts, others))
    raise ValueError(
        f"the evaluation of {there.model} has {len(others)} prompts, this one {len(prompts)}, and the first "
        f"{min(len(prompts), len(others))} have {same} in common; a paired comparison needs the same prompts in the "
        "same order: evaluate both on the same data set with the same --limit"
    )


def write(
    path: Path,
    evaluations: Sequence[Evaluation],
    measure: Measure,
    differences: Sequence[Mapping[str, Difference]] | None,
) -> None:
    """Writes evaluations as JSON: means, the numbers of each prompt, and the comparison of each; NaN as null.

    A single one is the content; of several sets the content has a list, `sets`.
    """
    contents = [_content(one, measure) for one in evaluations]
    for content, found in zip(contents, differences or ()):
        content["differences"] = {name: dataclasses.asdict(difference) for name, difference in found.items()}
    content = contents[0] if len(contents) == 1 else {"sets": contents}
    text = json.dumps(finite(content), ensure_ascii=False, indent=1, default=str)
    replace_file(path, lambda aside: aside.write_text(text + "\n", encoding="utf-8", errors="replace"))


def _content(evaluation: Evaluation, measure: Measure) -> dict[str, Any]:
    numbers = numbers_of_prompts(evaluation.prompts, measure)
    content: dict[str, Any] = {
        **dataclasses.asdict(evaluation),
        "measure": dataclasses.asdict(measure),
        "means": {name: dataclasses.asdict(mean) for name, mean in means(numbers).items()},
    }
    if evaluation.settings["by"] is not None:
        content["by"] = {
            value: {name: dataclasses.asdict(mean) for name, mean in found.items()}
            for value, found in means_by_column(evaluation, numbers).items()
        }
    for place, prompt in enumerate(content["prompts"]):
        prompt["numbers"] = {name: values[place] for name, values in numbers.items()}
    content["prompts"] = content.pop("prompts")  # the longest part stands last
    return content


def read(path: Path) -> list[Evaluation]:
    """Reads the evaluations that `write` has written. ValueError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [_evaluation(one) for one in content.get("sets", [content])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file that `groupgrad eval --output` has written: {error!r}") from error


def _evaluation(content: Mapping[str, Any]) -> Evaluation:
    names = [field.name for field in dataclasses.fields(PromptResult)]
    prompts = [PromptResult(**{name: prompt[name] for name in names}) for prompt in content["prompts"]]
    return Evaluation(content["model"], content["settings"], list(map(_with_nan, prompts)), content["seconds"])


def _with_nan(prompt: PromptResult) -> PromptResult:
    """The rewards with NaN for null, which JSON has in its place."""
    functions = {name: _nan_for_null(values) for name, values in prompt.functions.items()}
    return dataclasses.replace(prompt, rewards=_nan_for_null(prompt.rewards), functions=functions)


def _nan_for_null(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


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
