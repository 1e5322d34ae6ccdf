"""The worked numbers in the docstring of each loss, estimator and mask are those that the code gives.

`Worked:` begins a paragraph of pairs, "`INPUTS` gives `OUTPUTS`". Rows are completions, names that are no input below
are settings. Numbers are rounded to three places.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from loss_batches import F64, flat, loss_and_gradient, make_batch

from groupgrad.batch import StepTotals
from groupgrad.metrics import merge_all
from groupgrad.objectives import (
    ESTIMATORS,
    LOSSES,
    MASKS,
    PolicyOptions,
    StepTokens,
    compute_advantages,
)
from groupgrad.objectives.clipping import CLIP_METRICS
from groupgrad.types import Turns

ROUNDED = {"rel": 0, "abs": 5.01e-4}


def loss(name: str, advantages: list[float], ratios: Any = None, probs: Any = None, **inputs: Any) -> dict[str, Any]:
    """Loss, gradient in the log-probs and metrics of a step, of tokens of these ratios and these present probabilities.

    `ratios` are 1 and `probs` 0.1 if they are not given; `micro_batches` divides the step.
    """
    method, num_parts = LOSSES[name], inputs.pop("micro_batches", 1)
    ratios = ratios or [[1.0] * len(row) for row in probs]
    probs = probs or [[0.1] * len(row) for row in ratios]
    common = {field.name: inputs.pop(field.name) for field in fields(PolicyOptions) if field.name in inputs}
    options = PolicyOptions(loss_type=name, settings=method.make_settings(inputs), **common)
    now = [np.log(row).tolist() for row in probs]
    old = [np.log(np.divide(row, ratio)).tolist() for row, ratio in zip(probs, ratios)]
    by_token = [float(value) for value, row in zip(advantages, ratios) for _ in row]
    tokens = StepTokens(flat(now), torch.tensor(by_token, dtype=F64))
    selected = None if method.select is None else method.select(tokens, options, torch.Generator())
    totals, done = StepTotals(float(len(ratios)), float(len(by_token)), num_parts), 0
    total, gradient, metrics = 0.0, [], []
    for rows in np.array_split(np.arange(len(ratios)), num_parts):
        part = slice(rows[0], rows[-1] + 1)
        marks = [[True] * len(row) for row in ratios[part]]
        batch = make_batch(marks, advantages[part], totals, old=old[part], sampling=old[part])
        batch = replace(batch, selected=None if selected is None else selected[done : done + batch.num_tokens])
        result, slopes = loss_and_gradient(now[part], batch, options)
        total, done = total + result.loss.item(), done + batch.num_tokens
        gradient += [slopes[start:end] for start, end in zip(batch.offsets, batch.offsets[1:])]
        metrics.append(result.metrics)
    return {"loss": total, "gradient": gradient, "metrics": {key: m.read() for key, m in merge_all(metrics).items()}}


def advantages(
    name: str, rewards: list[Any], lengths: Any = None, scale_rewards: Any = "group", **settings: Any
) -> Any:
    """The advantages of one group; rewards of lists are those of turns, of which the n-th begin in one state."""
    turns = None
    if ESTIMATORS[name].uses_turns:
        turns = [
            Turns([1] * len(row), torch.tensor(row, dtype=F64).unsqueeze(1), [str(turn) for turn in range(len(row))])
            for row in rewards
        ]
    found = compute_advantages(
        *(torch.tensor([[np.sum(row)] for row in rewards], dtype=F64), [1.0], len(rewards), scale_rewards),
        estimator=name,
        settings=ESTIMATORS[name].make_settings(settings),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=F64),
        turns=turns,
    )
    return found.advantages.tolist() if found.by_turn is None else [values.tolist() for values in found.by_turn]


def kept(name: str, ratios: list[list[float]], **settings: Any) -> list[list[bool]]:
    """The tokens that a mask keeps, of a step of tokens of these ratios to the sampler."""
    marks, sampling = [[True] * len(row) for row in ratios], [(-np.log(row)).tolist() for row in ratios]
    made = MASKS[name].make_settings(settings)
    cutoff = None if MASKS[name].cutoff is None else MASKS[name].cutoff(-flat(sampling), made)
    totals = StepTotals(float(len(ratios)), float(sum(map(len, ratios))), drift_cutoff=cutoff)
    batch = make_batch(marks, [1.0] * len(ratios), totals, sampling=sampling)
    options = PolicyOptions(off_policy_mask=name, mask_settings=made)
    slopes = loss_and_gradient([[0.0] * len(row) for row in ratios], batch, options)[1]
    return [[slope != 0 for slope in slopes[start:end]] for start, end in zip(batch.offsets, batch.offsets[1:])]


KINDS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "methods": (LOSSES, loss),
    "estimators": (ESTIMATORS, advantages),
    "masks": (MASKS, kept),
}


def near(expected: Any) -> Any:
    """The numbers in lists and dictionaries, but for rounding."""
    if isinstance(expected, dict):
        return {key: near(value) for key, value in expected.items()}
    return [near(one) for one in expected] if isinstance(expected, list) else pytest.approx(expected, **ROUNDED)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (known, _) in KINDS.items() for name in known])
def test_the_docstring_has_the_numbers_that_the_code_gives(kind: str, name: str) -> None:
    text = " ".join((import_module(f"groupgrad.objectives.{kind}.{name}").__doc__ or "").split())
    worked = re.findall(r"`([^`]+)` gives `([^`]+)`", text.partition(" Worked: ")[2])
    assert worked, f"objectives/{kind}/{name}.py needs a paragraph 'Worked: `INPUTS` gives `OUTPUTS`.' in its docstring"
    measured = set[str]()
    for inputs, outputs in worked:
        found = KINDS[kind][1](name, **eval(f"dict({inputs})"))
        if kind == "methods":
            expected = eval(f"dict({outputs})")
            measured |= set(expected.get("metrics", {}))
            found["metrics"] = {key: found["metrics"][key] for key in expected.get("metrics", {})}
            assert {key: found[key] for key in expected} == near(expected), inputs
        else:
            assert found == near(eval(outputs)), inputs
    own = set() if kind != "methods" else set(LOSSES[name].metrics) - set(CLIP_METRICS)
    assert own <= measured, "its own metrics need a worked number too"
