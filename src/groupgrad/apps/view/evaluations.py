"""Compares evaluations by prompt: the last of a run with its first, or with the last of another run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.evaluation.prompt_numbers import (
    ANSWERS,
    Mean,
    Measure,
    PromptResult,
    by_column,
    difference,
    is_split,
    numbers_of_prompts,
    pairs,
)
from groupgrad.run_folder.rollout_table import REWARD


class _Evaluation(NamedTuple):
    """An evaluation by its files; it is another one once a file has changed."""

    run: RunFolder
    phase: str
    step: int
    files: tuple[tuple[str, int, int], ...]


def compared(run: RunFolder, other: RunFolder | None = None) -> list[dict[str, Any]]:
    """The last evaluation of each set that a run has, less its first, or less the last of `other`.

    Each has the set (`phase`), the steps `here` and `there`, the number of prompts that both have, whether the
    reward functions differ, and `rows`: a number's name, its means `here` and `there` and their `difference`, each with
    a 95 % interval over these prompts, and the two-sided p of the sign-flip test. pass@k and maj@k are for the k of
    `eval_k`. `by` has the column of `eval_by` and, for each of its values, the number of prompts and their rows of the
    reward, pass@k and maj@k; None without such a column.
    """
    settings = [one.config().get("settings", {}) for one in (run, other or run)]
    ks = tuple(sorted({k for one in settings for k in one.get("eval_k") or ()}))
    by = next((one["eval_by"] for one in settings if one.get("eval_by")), None)
    base, found = other or run, []
    for phase, steps in run.evaluations().items():
        steps_there = base.evaluations().get(phase, ())
        if not steps_there or (other is None and len(steps) < 2):
            continue
        step_there = steps_there[-1] if other is not None else steps_there[0]
        here, there = (
            _Evaluation(one, phase, step, one.evaluation_files(phase, step))
            for one, step in ((run, steps[-1]), (base, step_there))
        )
        found.append(_difference(here, there, ks, by))
    return found


@lru_cache(maxsize=256)
def _difference(here: _Evaluation, there: _Evaluation, ks: tuple[int, ...], by: str | None) -> dict[str, Any]:
    first, second = _prompts(here, by), _prompts(there, by)
    shared = [key for key in first if key in second]
    rows, values = [], []
    if shared:
        both = [[prompts[key] for key in shared] for prompts in (first, second)]
        numbers = [numbers_of_prompts(prompts, Measure(ks)) for prompts in both]
        rows = _rows(*numbers)
        is_known = any(prompt.column is not None for prompt in both[0])
        of_values = [{name: column for name, column in part.items() if is_split(name)} for part in numbers]
        for value, places in by_column(both[0]).items() if is_known else ():
            parts = [{name: [column[at] for at in places] for name, column in part.items()} for part in of_values]
            values.append({"value": value, "prompts": len(places), "rows": _rows(*parts)})
    names = [{name for prompt in prompts.values() for name in prompt.functions} for prompts in (first, second)]
    return {
        "phase": here.phase,
        "here": here.step,
        "there": there.step,
        "prompts": len(shared),
        "rewards_differ": names[0] != names[1],
        "rows": rows,
        "by": {"column": by, "values": values} if values else None,
    }


def _rows(here: Mapping[str, Sequence[float]], there: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The numbers that both have, compared."""
    rows = []
    for name, (one, other) in pairs(here, there).items():
        found = difference(one, other)
        means = {"here": Mean.of(one), "there": Mean.of(other), "difference": found.difference}
        rows.append({"name": name, **{side: dataclasses.asdict(mean) for side, mean in means.items()}, "p": found.p})
    return rows


def _prompts(evaluation: _Evaluation, by: str | None) -> dict[tuple[str, int], PromptResult]:
    """The prompts of an evaluation by their digest and a number, since two may be equal."""
    rows_of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in evaluation.run.scores([name for name, _, _ in evaluation.files]):
        rows_of.setdefault((row["prompt_id"], row["group"]), []).append(row)
    found: dict[tuple[str, int], PromptResult] = {}
    seen: dict[str, int] = {}
    for (prompt, _), rows in rows_of.items():
        found[prompt, seen.get(prompt, 0)] = _result(prompt, rows, by)
        seen[prompt] = seen.get(prompt, 0) + 1
    return found


def _result(prompt: str, rows: Sequence[dict[str, Any]], by: str | None) -> PromptResult:
    def numbers(name: str) -> list[float]:
        return [math.nan if row[name] is None else row[name] for row in rows]

    functions = {name.removeprefix(REWARD): numbers(name) for name in rows[0] if name.startswith(REWARD)}
    logged = [json.loads(row["extra"] or "{}") for row in rows]
    answers = None
    if all(ANSWERS in one for one in logged):
        answers = [None if one[ANSWERS] is None else str(one[ANSWERS]) for one in logged]
    return PromptResult(
        prompt=prompt,
        column=json.loads(rows[0]["data"] or "{}").get(by),
        rewards=numbers("reward"),
        functions=functions,
        answers=answers,
        completions=[],
        lengths=[row["num_tokens"] for row in rows],
        finish_reasons=[row["finish_reason"] for row in rows],
    )
