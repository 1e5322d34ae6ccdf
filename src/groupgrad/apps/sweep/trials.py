"""Arms that Optuna proposes from the results of earlier ones."""

from __future__ import annotations

import json
import math
from typing import Any

from groupgrad.apps.sweep import compare
from groupgrad.apps.sweep.choices import Choices, Range, rounded
from groupgrad.apps.sweep.store import FAILED, Arm, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan


def ask_trials(plan: SweepPlan, store: Store) -> list[dict[str, Any]]:
    """The changes of the next arms, made from all results so far; none once there are as many as asked for.

    The sampler (TPE) is seeded by the number of trials so far, so a sweep that was killed asks for the same ones.
    """
    if plan.sample.kind != "optuna":
        return []
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trials = [arm for arm in store.arms() if arm.cohort > 0 and arm.parent is None]
    num_new = min(plan.sample.parallel, plan.sample.num - len(trials))
    if num_new <= 0:
        return []
    sampler = optuna.samplers.TPESampler(seed=plan.sample.seed + len(trials), constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    spaces = {name: _distribution(choices) for name, choices in plan.vary.items()}
    for arm in trials:
        study.add_trial(_known_trial(arm, plan, store, spaces))
    asked = []
    for _ in range(num_new):
        values = study.ask(spaces).params
        asked.append({name: _value(choices, values[name]) for name, choices in plan.vary.items()})
    return asked


def _distribution(choices: Choices) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(choices, Range):
        kind = IntDistribution if choices.is_whole else FloatDistribution
        return kind(choices.low, choices.high, log=choices.is_log)  # pyright: ignore[reportArgumentType]
    return CategoricalDistribution([json.dumps(value) for value in choices.values])


def _value(choices: Choices, asked: Any) -> Any:
    """The value of a field that Optuna's parameter stands for."""
    if isinstance(choices, Range):
        return asked if choices.is_whole else min(choices.high, max(choices.low, rounded(asked)))
    return json.loads(asked)


def _known_trial(arm: Arm, plan: SweepPlan, store: Store, spaces: dict[str, Any]) -> Any:
    """An arm as a trial: its value is the mean reward of the last fifth of its steps."""
    from optuna.trial import TrialState, create_trial

    names = plan.vary
    params = {
        name: arm.changes[name] if isinstance(names[name], Range) else json.dumps(arm.changes[name]) for name in names
    }
    steps = store.rewards(arm.id, arm.step - max(1, arm.step // 5), arm.step)
    value = compare.mean(steps, plan.metric) if steps else math.nan
    if arm.state == FAILED or not math.isfinite(value):
        return create_trial(params=params, distributions=spaces, state=TrialState.FAIL)
    return create_trial(params=params, distributions=spaces, value=value)
