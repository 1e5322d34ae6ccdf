"""Compares evaluations by prompt: the last of a run with its first, or with the last of another run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.evaluation.prompt_numbers import Mean, Measure, PromptResult, difference, numbers_of_prompts, pairs
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
    a 95 % interval over these prompts, and the two-sided p of the sign-flip test. pass@k is for the k of `eval_k`.
    """
    ks = tuple(sorted({k for one in (run, other or run) for k in one.config().get("settings", {}).get("eval_k") or ()}))
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
        found.append(_difference(here, there, ks))
    return found


@lru_cache(maxsize=256)
def _difference(here: _Evaluation, there: _Evaluation, ks: tuple[int, ...]) -> dict[str, Any]:
    first, second = _prompts(here), _prompts(there)
    shared = [key for key in first if key in second]
    rows = []
    if shared:
        measure = Measure(ks)
        numbers = (numbers_of_prompts([prompts[key] for key in shared], measure) for prompts in (first, second))
        for name, (one, other) in pairs(*numbers).items():
            found = difference(one, other)
            means = {"here": Mean.of(one), "there": Mean.of(other), "difference": found.difference}
            shown = {side: dataclasses.asdict(mean) for side, mean in means.items()}
            rows.append({"name": name, **shown, "p": found.p})
    names = [{name for prompt in prompts.values() for name in prompt.functions} for prompts in (first, second)]
    return {
        "phase": here.phase,
        "here": here.step,
        "there": there.step,
        "prompts": len(shared),
        "rewards_differ": names[0] != names[1],
        "rows": rows,
    }


def _prompts(evaluation: _Evaluation) -> dict[tuple[str, int], PromptResult]:
    """The prompts of an evaluation by their digest and a number, since two may be equal."""
    rows_of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in evaluation.run.scores([name for name, _, _ in evaluation.files]):
        rows_of.setdefault((row["prompt_id"], row["group"]), []).append(row)
    found: dict[tuple[str, int], PromptResult] = {}
    seen: dict[str, int] = {}
    for (prompt, _), rows in rows_of.items():
        found[prompt, seen.get(prompt, 0)] = _result(prompt, rows)
        seen[prompt] = seen.get(prompt, 0) + 1
    return found


def _result(prompt: str, rows: Sequence[dict[str, Any]]) -> PromptResult:
    def numbers(name: str) -> list[float]:
        return [math.nan if row[name] is None else row[name] for row in rows]

    functions = {name.removeprefix(REWARD): numbers(name) for name in rows[0] if name.startswith(REWARD)}
    return PromptResult(
        prompt=prompt,
        column=None,
        rewards=numbers("reward"),
        functions=functions,
        answers=None,
        completions=[],
        lengths=[row["num_tokens"] for row in rows],
        finish_reasons=[row["finish_reason"] for row in rows],
    )
