"""The plan of a sweep, as read from its YAML file or from arguments."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groupgrad.apps.sweep.store import Arm, Store
from groupgrad.spelling import did_you_mean

if TYPE_CHECKING:
    from groupgrad.apps.sweep.factory import ArmFactory

_RANGE_KEYS = ("range", "num", "scale")


@dataclass(slots=True, frozen=True)
class Values:
    """Values that are tried as they are."""

    values: tuple[Any, ...]

    def grid(self) -> tuple[Any, ...]:
        """All values."""
        return self.values

    def draw(self, rng: random.Random) -> Any:
        """One of the values."""
        return rng.choice(self.values)


@dataclass(slots=True, frozen=True)
class Range:
    """Numbers between two bounds, both included; a random sample draws them evenly, or evenly in their logarithm."""

    low: float
    high: float
    is_log: bool
    is_whole: bool

    def grid(self) -> tuple[Any, ...]:
        """ValueError: a grid needs single values."""
        raise ValueError(
            f"the range from {self.low:g} to {self.high:g} has no single values to make a grid of; add num (how "
            "many), or set sample to random"
        )

    def draw(self, rng: random.Random) -> Any:
        """A number from the range, rounded to four digits so that it can be read and written."""
        if self.is_whole and not self.is_log:
            return rng.randint(int(self.low), int(self.high))
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        drawn = rng.uniform(low, high)
        value = math.exp(drawn) if self.is_log else drawn
        return round(value) if self.is_whole else rounded(value)


Choices = Values | Range


def rounded(value: float) -> float:
    """A number with four significant digits."""
    return float(f"{value:.4g}")


def read_choices(field: str, given: Any) -> Choices:
    """Reads the entry of a field in `vary`. ValueError if it names no values."""
    if isinstance(given, Mapping) and "range" in given:
        return _read_range(field, given)
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ValueError(
            f"vary: {field}={given!r} is one value, which nothing is compared with; give a list of values or "
            "{range: [low, high]}"
        )
    values = tuple(given)
    if len(values) < 1:
        raise ValueError(f"vary: {field} is an empty list; give the values to try")
    return Values(values)


def _read_range(field: str, given: Mapping[str, Any]) -> Choices:
    _check_names(f"vary: {field}", given, _RANGE_KEYS)
    bounds, scale = given["range"], given.get("scale", "linear")
    ends = list(bounds) if isinstance(bounds, (list, tuple)) else []
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends) or not ends[0] < ends[1]:
        raise ValueError(f"vary: {field} has range={bounds!r}; give two numbers, the lower one first")
    if scale not in ("linear", "log"):
        raise ValueError(f"vary: {field} has scale={scale!r}; set it to linear or log")
    low, high = ends
    if scale == "log" and low <= 0:
        raise ValueError(f"vary: {field} has scale=log and begins at {low:g}; a logarithm needs numbers above 0")
    num = given.get("num")
    is_whole = all(isinstance(end, int) for end in ends)
    if num is not None:
        return Values(_evenly_spaced(field, low, high, num, scale == "log", is_whole))
    return Range(low, high, scale == "log", is_whole)


def _evenly_spaced(field: str, low: float, high: float, num: Any, is_log: bool, is_whole: bool) -> tuple[Any, ...]:
    if not isinstance(num, int) or num < 2:
        raise ValueError(f"vary: {field} has num={num!r}; a range with both ends has at least 2 values")
    shares = [index / (num - 1) for index in range(num)]
    values = [low * (high / low) ** share if is_log else low + (high - low) * share for share in shares]
    return tuple(dict.fromkeys(round(value) if is_whole else rounded(value) for value in values))


KEYS = ("base", "output_dir", "vary", "arms", "sample", "halving", "metric", "turn_steps", "devices")
SAMPLES = ("grid", "random")
MAX_ARMS = 1000


@dataclass(slots=True, frozen=True)
class ArmSampling:
    """The way in which arms are taken from the varied fields."""

    kind: str = "grid"
    num: int = 0
    """Arms of a random sample."""
    seed: int = 0


@dataclass(slots=True, frozen=True)
class Halving:
    """Successive halving: at each rung only the best of the arms that reached it go on (arXiv:1502.07943)."""

    factor: int = 2
    """One arm of this many goes on."""
    first: float = 0.125
    """The first rung, as a share of the steps of a run; each further one is `factor` times as far."""
    confidence: float = 0.95
    """Confidence with which an arm must be worse than the best one to count as clearly worse."""
    undecided: str = "drop"
    """Arms behind that are not clearly worse: "drop" drops them and keeps the compute fixed, "keep" trains them on."""

    def rungs(self, max_steps: int) -> list[int]:
        """The steps of the rungs of a run of `max_steps` steps."""
        steps, share = [], self.first
        while share < 1:
            steps.append(max(1, math.ceil(round(share * max_steps, 6))))  # 0.1 * 3 * 10 is a little above 3
            share *= self.factor
        return sorted({step for step in steps if step < max_steps})


@dataclass(slots=True, frozen=True)
class SweepPlan:
    """A sweep: a configuration, what is varied in it, and how arms are compared."""

    base: dict[str, Any]
    """Settings that all arms begin with, as in the YAML file of `groupgrad train`."""
    vary: dict[str, Choices] = field(default_factory=dict)
    arms: tuple[dict[str, Any], ...] = ()
    """Arms that are named one by one: their changes of the base."""
    sample: ArmSampling = ArmSampling()
    halving: Halving | None = None
    metric: str = "reward"
    """The number by which arms are compared: the weighted reward, or the name of one reward."""
    turn_steps: int | None = None
    """Steps of an arm's turn; None for as many as keep the cost of switching under 5 %."""
    devices: Any = None
    """The devices that arms are spread over, see `find_devices`; None to train all arms in this process."""

    def rungs(self, max_steps: int) -> list[int]:
        """The steps of the rungs of a run of `max_steps` steps; none without halving."""
        return [] if self.halving is None else self.halving.rungs(max_steps)

    def is_at_rung(self, arm: Arm) -> bool:
        """True if the arm waits for the others of its cohort at a rung."""
        rungs = self.rungs(arm.max_steps) if arm.max_steps else []
        return arm.rung < len(rungs) and arm.step >= rungs[arm.rung]

    def name_of(self, number: int, changes: Mapping[str, Any]) -> str:
        """The name of an arm: its number and what it changes, without what all arms have (a single value in `vary`)."""
        vary = {} if self.arms else self.vary  # arms that are named one by one have the base's values instead
        common = {name: choices.values for name, choices in vary.items() if isinstance(choices, Values)}
        distinguishing = {name: value for name, value in changes.items() if common.get(name) != (value,)}
        return arm_name(number, distinguishing or changes)

    def first_arms(self) -> list[dict[str, Any]]:
        """The changes of each arm that is known at the start. ValueError if there are none, or too many."""
        changes = [dict(arm) for arm in self.arms]
        if self.vary and self.sample.kind == "grid":
            changes += self._grid()
        elif self.vary and self.sample.kind == "random":
            changes += self._random()
        if not changes:
            raise ValueError("vary and arms are empty, so there is nothing to compare; name a field and its values")
        if len(changes) > MAX_ARMS:
            raise ValueError(
                f"the sweep has more than {MAX_ARMS:,} arms, which are too many to train in turns; vary less, or set "
                "sample to {random: NUMBER}"
            )
        return changes

    def _grid(self) -> list[dict[str, Any]]:
        values = []
        for name, choices in self.vary.items():
            try:
                values.append(choices.grid())
            except ValueError as error:
                raise ValueError(f"vary: {name}: {error}") from None
        combinations = itertools.islice(itertools.product(*values), MAX_ARMS + 1)
        return [dict(zip(self.vary, combination)) for combination in combinations]

    def _random(self) -> list[dict[str, Any]]:
        rng, found = random.Random(self.sample.seed), []
        for _ in range(100 * self.sample.num):  # a space of few values has fewer arms than were asked for
            drawn = {name: choices.draw(rng) for name, choices in self.vary.items()}
            if drawn not in found:
                found.append(drawn)
            if len(found) == self.sample.num:
                break
        return found


def read_plan(content: Mapping[str, Any], base: Mapping[str, Any]) -> SweepPlan:
    """Reads a sweep's plan from a mapping of `KEYS`; `base` holds the settings that its key `base` names.

    ValueError, with what to set, if the plan cannot work.
    """
    _check_names("the sweep", content, KEYS)
    vary = content.get("vary") or {}
    if not isinstance(vary, Mapping):
        raise ValueError(f"vary={vary!r} is not a mapping of fields to their values")
    arms = content.get("arms") or []
    if not isinstance(arms, (list, tuple)) or not all(isinstance(arm, Mapping) and arm for arm in arms):
        raise ValueError(f"arms={arms!r} is not a list of mappings, each with the fields that an arm changes")
    turn_steps = content.get("turn_steps")
    if turn_steps == "auto":
        turn_steps = None
    if turn_steps is not None and (not isinstance(turn_steps, int) or turn_steps < 1):
        raise ValueError(f"turn_steps={turn_steps!r} is no turn; set it to a number of steps from 1 on, or to auto")
    plan = SweepPlan(
        base=dict(base),
        vary={str(name): read_choices(str(name), given) for name, given in vary.items()},
        arms=tuple({str(key): value for key, value in arm.items()} for arm in arms),
        sample=_read_sample(content.get("sample", "grid"), bool(vary)),
        halving=_read_halving(content.get("halving")),
        metric=str(content.get("metric") or "reward"),
        turn_steps=turn_steps,
        devices=content.get("devices"),
    )
    changed = {key.split(".")[0] for arm in plan.arms for key in arm} | {key.split(".")[0] for key in plan.vary}
    rewards = sorted(changed & {"reward_funcs", "reward_weights", "reward_model_name_or_path"})
    if rewards and plan.metric == "reward":
        raise ValueError(
            f"{' and '.join(rewards)} differ between arms, so their rewards cannot be compared; set metric to the name "
            "of one reward function that all arms have"
        )
    plan.first_arms()
    return plan


def _read_sample(given: Any, has_choices: bool) -> ArmSampling:
    if isinstance(given, str):
        given = {given: None}
    if not isinstance(given, Mapping):
        raise ValueError(f"sample={given!r} is not known; set it to grid or {{random: NUMBER}}")
    kinds = [kind for kind in SAMPLES if kind in given]
    _check_names("sample", given, (*SAMPLES, "seed"))
    if len(kinds) != 1:
        raise ValueError(f"sample={dict(given)!r} names {len(kinds)} kinds; name one of {', '.join(SAMPLES)}")
    kind, num = kinds[0], given[kinds[0]]
    if kind == "grid":
        return ArmSampling()
    if not isinstance(num, int) or num < 1:
        raise ValueError(f"sample: {kind}={num!r} is no number of arms; set it to how many are to be trained")
    if not has_choices:
        raise ValueError(f"sample is {kind}, but vary is empty; name the fields to vary")
    seed = given.get("seed", 0)
    if not isinstance(seed, int):
        raise ValueError(f"sample: seed={seed!r} is no whole number")
    return ArmSampling(kind, num, seed)


def _read_halving(given: Any) -> Halving | None:
    if given in (None, False):
        return None
    given = {} if given is True else given
    if not isinstance(given, Mapping):
        raise ValueError(f"halving={given!r} is not a mapping; set it to true or to {{factor: 2, confidence: 0.95}}")
    _check_names("halving", given, ("factor", "first", "confidence", "undecided"))
    halving = Halving(**given)
    if not isinstance(halving.factor, int) or halving.factor < 2:
        raise ValueError(f"halving: factor={halving.factor!r}; one arm of at least 2 goes on")
    for name in ("first", "confidence"):
        value = getattr(halving, name)
        if not isinstance(value, (int, float)) or not 0 < value < 1:
            raise ValueError(f"halving: {name}={value!r}; set it to a share between 0 and 1")
    if halving.undecided not in ("drop", "keep"):
        raise ValueError(f"halving: undecided={halving.undecided!r}; set it to drop or keep")
    return halving


def _check_names(where: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for key in given:
        if key not in names:
            hint = did_you_mean(key, names, before="; ", otherwise=f"; there are {', '.join(names)}")
            raise ValueError(f"{where} has the unknown key {key!r}{hint}")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an arm: the base with its changes. `a.b` is a key of the mapping a; ValueError if a is none."""
    settings = deepcopy(dict(base))
    for path, value in changes.items():
        name, *keys = path.split(".")
        if not keys:
            settings[name] = deepcopy(value)
            continue
        inner = settings[name] = {} if settings.get(name) is None else settings[name]
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            raise ValueError(f"{path}={value!r}: {name}={settings[name]!r} is not a mapping with keys")
        inner[keys[-1]] = deepcopy(value)
    return settings


def arm_name(number: int, changes: Mapping[str, Any]) -> str:
    """A name for an arm and its folder: its number and what it changes."""
    text = "-".join(f"{name}={_short(value)}" for name, value in changes.items())
    return f"{number:02d}-{re.sub(r'[^A-Za-z0-9._=+-]+', '_', text)}"[:100].rstrip("-_")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def arm_settings(plan: SweepPlan, store: Store, factory: ArmFactory, arm: Arm) -> dict[str, Any]:
    """The settings of an arm's run, but for its folder."""
    settings = merged(plan.base, arm.changes)
    if arm.weights_step is not None:
        settings = factory.with_weights(settings, store.folder_of(arm) / "start")
    return settings
