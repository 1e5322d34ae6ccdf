"""The completions of an evaluation, the numbers of each prompt, and their means with intervals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupgrad.apps.eval.statistics import bootstrap_interval, majority_at_k, sign_flip_p
from groupgrad.objectives.pass_at_k import best_of_k, pass_at_k
from groupgrad.run_folder.run_files import finite, replace_file

ROUNDING = 1e-9
"""Share of the threshold that a reward may miss: weighted sums are rounded."""


@dataclass(slots=True, frozen=True)
class PromptResult:
    """The G completions of one prompt and what they scored."""

    prompt: Any
    """As the data set has it, in plain values."""
    column: Any
    """The row's value in the column that results are split by; None without one."""
    rewards: list[float]
    """(G,) weighted sums of the rewards, NaN where nothing was scored."""
    functions: dict[str, list[float]]
    """(G,) rewards by function."""
    answers: list[str | None] | None
    """(G,) answers that vote, None where a completion has none; None without a column of answers."""
    completions: list[str]
    lengths: list[int]
    """Tokens that the model sampled."""
    finish_reasons: list[str]


@dataclass(slots=True, frozen=True)
class Evaluation:
    """All prompts of an evaluation, in the order of the data set."""

    model: str
    settings: dict[str, Any]
    """Data, sampling and rewards, by the names of the command's options."""
    prompts: list[PromptResult]
    seconds: float


@dataclass(slots=True, frozen=True)
class Measure:
    """The k of pass@k, and the reward from which a completion is right."""

    ks: tuple[int, ...] = (1,)
    threshold: float = 1.0


@dataclass(slots=True, frozen=True)
class Mean:
    """The mean of a number over prompts, with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    prompts: int
    """Prompts that have the number; others are left out."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """The mean of one number a prompt, NaN where it has none. All NaN if no prompt has one."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(math.fsum(known) / len(known), *bootstrap_interval(known), len(known))


@dataclass(slots=True, frozen=True)
class Difference:
    """A mean here less the mean there, over the prompts that have both."""

    here: float
    there: float
    difference: Mean
    p: float
    """Two-sided, by the sign-flip test of the prompts' differences."""


def numbers_of_prompts(evaluation: Evaluation, measure: Measure) -> dict[str, list[float]]:
    """(Q,) numbers by name, one a prompt: `reward`, `pass@k` and so on; NaN where a prompt has none.

    Completions without a reward are left out. `best@k`, the expected largest reward of k, is there unless all rewards
    are 0 or 1, for which it is pass@k. `maj@k` is there for k above 1 if completions have answers.
    """
    rows = [_numbers(prompt, measure) for prompt in evaluation.prompts]
    rewards = {reward for prompt in evaluation.prompts for reward in prompt.rewards if not math.isnan(reward)}
    names = [name for name in rows[0] if all(name in row for row in rows)]
    names = [name for name in names if not name.startswith("best@") or not rewards <= {0.0, 1.0}]
    return {name: [row[name] for row in rows] for name in names}


def _numbers(prompt: PromptResult, measure: Measure) -> dict[str, float]:
    scored = [place for place, reward in enumerate(prompt.rewards) if not math.isnan(reward)]
    rewards = [prompt.rewards[place] for place in scored]
    least = measure.threshold - ROUNDING * abs(measure.threshold)
    right = [reward >= least for reward in rewards]
    numbers = {"reward": _mean(rewards)}
    if len(prompt.functions) > 1:
        numbers |= {f"reward {name}": _mean(values) for name, values in prompt.functions.items()}
    numbers |= {f"pass@{k}": pass_at_k(len(right), sum(right), k) for k in measure.ks}
    numbers |= {f"best@{k}": best_of_k(rewards, k) for k in measure.ks if k > 1}
    if prompt.answers is not None:
        answers = [prompt.answers[place] for place in scored]
        numbers |= {f"maj@{k}": majority_at_k(answers, right, k) for k in measure.ks if k > 1}
    truncated = [reason != "eos" for reason in prompt.finish_reasons]
    return {**numbers, "length": _mean(prompt.lengths), "truncated": _mean(truncated)}


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def means(numbers: Mapping[str, Sequence[float]]) -> dict[str, Mean]:
    """The mean of each number over all prompts."""
    return {name: Mean.of(values) for name, values in numbers.items()}


def means_by_column(evaluation: Evaluation, numbers: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Mean]]:
    """The means over the prompts that share a value of the column, by that value in words, in ascending order."""
    values = {str(prompt.column): prompt.column for prompt in evaluation.prompts}
    found = {}
    for text in sorted(values, key=lambda text: _order(values[text])):
        places = [place for place, prompt in enumerate(evaluation.prompts) if str(prompt.column) == text]
        found[text] = means({name: [column[place] for place in places] for name, column in numbers.items()})
    return found


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, before texts."""
    is_number = isinstance(value, (int, float))
    return not is_number, float(value) if is_number else 0.0, str(value)


def compare(here: Evaluation, there: Evaluation, measure: Measure) -> dict[str, Difference]:
    """The differences of two evaluations on the same prompts, by the names of numbers that both have.

    ValueError if the prompts are not the same.
    """
    check_same_prompts([prompt.prompt for prompt in here.prompts], there)
    first, second = numbers_of_prompts(here, measure), numbers_of_prompts(there, measure)
    found = {}
    for name in first.keys() & second.keys():
        pairs = np.array([first[name], second[name]], dtype=np.float64)
        pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
        if pairs.shape[1]:
            differences = (pairs[0] - pairs[1]).tolist()
            here_mean, there_mean = pairs.mean(axis=1).tolist()
            found[name] = Difference(here_mean, there_mean, Mean.of(differences), sign_flip_p(differences))
    return {name: found[name] for name in first if name in found}


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


def write(path: Path, evaluation: Evaluation, measure: Measure, differences: Mapping[str, Difference] | None) -> None:
    """Writes an evaluation as JSON: means, the numbers of each prompt, and a comparison; NaN as null."""
    numbers = numbers_of_prompts(evaluation, measure)
    record = dataclasses.asdict(evaluation)
    for place, prompt in enumerate(record["prompts"]):
        prompt["numbers"] = {name: values[place] for name, values in numbers.items()}
    content: dict[str, Any] = {
        **{name: value for name, value in record.items() if name != "prompts"},
        "measure": dataclasses.asdict(measure),
        "means": {name: dataclasses.asdict(mean) for name, mean in means(numbers).items()},
    }
    if evaluation.settings["by"] is not None:
        content["by"] = {
            value: {name: dataclasses.asdict(mean) for name, mean in found.items()}
            for value, found in means_by_column(evaluation, numbers).items()
        }
    if differences is not None:
        content["differences"] = {name: dataclasses.asdict(found) for name, found in differences.items()}
    text = json.dumps(finite({**content, "prompts": record["prompts"]}), ensure_ascii=False, indent=1, default=str)
    replace_file(path, lambda aside: aside.write_text(text + "\n", encoding="utf-8", errors="replace"))


def read(path: Path) -> Evaluation:
    """Reads an evaluation that `write` has written. ValueError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(PromptResult)]
        prompts = [PromptResult(**{name: prompt[name] for name in names}) for prompt in content["prompts"]]
        known = [_with_nan(prompt) for prompt in prompts]
        return Evaluation(content["model"], content["settings"], known, content["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file that `groupgrad eval --output` has written: {error!r}") from error


def _with_nan(prompt: PromptResult) -> PromptResult:
    """The rewards with NaN for null, which JSON has in its place."""
    functions = {name: _nan_for_null(values) for name, values in prompt.functions.items()}
    return dataclasses.replace(prompt, rewards=_nan_for_null(prompt.rewards), functions=functions)


def _nan_for_null(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
