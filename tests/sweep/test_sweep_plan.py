"""Reading of a sweep: values, samples, arms, and refusals that say what to set."""

from __future__ import annotations

import random
from typing import Any

import pytest

from groupgrad.apps.sweep.sweep_plan import Halving, Range, Values, arm_name, merged, read_choices, read_plan


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1e-4, 3e-4], (1e-4, 3e-4)),
        (["grpo", "dapo"], ("grpo", "dapo")),
        ([[1.0, 0.5], [1.0, 0.0]], ([1.0, 0.5], [1.0, 0.0])),
        ({"range": [0.0, 0.1], "num": 3}, (0.0, 0.05, 0.1)),
        ({"range": [1e-5, 1e-3], "num": 3, "scale": "log"}, (1e-5, 1e-4, 1e-3)),
        ({"range": [1, 8], "num": 4, "scale": "log"}, (1, 2, 4, 8)),
    ],
)
def test_lists_and_ranges_give_values(given, expected):
    choices = read_choices("field", given)
    assert isinstance(choices, Values)
    assert choices.grid() == expected


def test_a_range_draws_numbers_between_its_ends():
    choices = read_choices("learning_rate", {"range": [1e-6, 1e-2], "scale": "log"})
    assert isinstance(choices, Range)
    rng = random.Random(0)
    drawn = [choices.draw(rng) for _ in range(400)]
    assert all(1e-6 <= value <= 1e-2 for value in drawn)
    below = sum(value < 1e-4 for value in drawn) / len(drawn)
    assert 0.4 < below < 0.6  # even in the logarithm
    whole = read_choices("lora_r", {"range": [1, 4]})
    assert {whole.draw(rng) for _ in range(100)} == {1, 2, 3, 4}


def plan(**content: Any) -> Any:
    return read_plan(content, {"max_steps": 4, "generation_kwargs": {"top_k": 5}})


def test_a_grid_has_all_combinations_and_single_arms_come_before_it():
    found = plan(vary={"learning_rate": [1e-4, 1e-3], "beta": [0.0, 0.1]}, arms=[{"loss_type": "gspo"}]).first_arms()
    grid = [{"learning_rate": rate, "beta": beta} for rate in (1e-4, 1e-3) for beta in (0.0, 0.1)]
    assert found == [{"loss_type": "gspo"}, *grid]


def test_a_random_sample_has_distinct_arms_and_is_the_same_for_its_seed():
    vary = {"learning_rate": {"range": [1e-6, 1e-3], "scale": "log"}, "loss_type": ["grpo", "dapo"]}
    first, again = (plan(vary=vary, sample={"random": 6, "seed": 3}).first_arms() for _ in range(2))
    other = plan(vary=vary, sample={"random": 6, "seed": 4}).first_arms()
    assert first == again != other
    assert len({tuple(arm.items()) for arm in first}) == 6
    assert len(plan(vary={"loss_type": ["grpo", "dapo"]}, sample={"random": 6}).first_arms()) == 2


def test_changes_reach_keys_of_mappings_and_leave_the_base_alone():
    base = {"generation_kwargs": {"top_k": 5}, "beta": None}
    assert merged(base, {"generation_kwargs.top_p": 0.9, "beta.x": 1}) == {
        "generation_kwargs": {"top_k": 5, "top_p": 0.9},
        "beta": {"x": 1},
    }
    assert base == {"generation_kwargs": {"top_k": 5}, "beta": None}
    with pytest.raises(ValueError, match="max_steps=4 is not a mapping"):
        merged({"max_steps": 4}, {"max_steps.x": 1})


def test_rungs_and_names():
    assert Halving().rungs(40) == [5, 10, 20]
    assert Halving(factor=3, first=0.1).rungs(10) == [1, 3, 9]
    assert Halving().rungs(1) == []
    assert arm_name(3, {"learning_rate": 1e-4, "reward_weights": [1.0, 0.5]}) == (
        "03-learning_rate=0.0001-reward_weights=_1.0_0.5"
    )


def test_names_leave_out_what_all_arms_have():
    made = plan(vary={"use_peft": [True], "beta": [0.1, 0.2]})
    assert [made.name_of(1, arm) for arm in made.first_arms()] == ["01-beta=0.1", "01-beta=0.2"]
    assert made.name_of(3, {"use_peft": False, "beta": 0.1}) == "03-use_peft=False-beta=0.1"
    assert plan(vary={"beta": [0.1]}).name_of(1, {"beta": 0.1}) == "01-beta=0.1"
    named = plan(vary={"use_peft": [True]}, arms=[{"beta": 0.1}])
    assert [named.name_of(1, arm) for arm in named.first_arms()] == ["01-beta=0.1", "01-use_peft=True"]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"vray": {}}, "unknown key 'vray'; did you mean 'vary'"),
    ({}, "vary and arms are empty"),
    ({"vary": ["learning_rate"]}, "is not a mapping of fields"),
    ({"vary": {"beta": 0.1}}, "is one value"),
    ({"vary": {"beta": []}}, "empty list"),
    ({"vary": {"beta": {"range": [1.0, 0.1]}}}, "the lower one first"),
    ({"vary": {"beta": {"range": [0.0, 0.1]}}}, "vary: beta: the range from 0 to 0.1 has no single values"),
    ({"vary": {"beta": {"range": [0.0, 0.1], "scale": "log"}}}, "numbers above 0"),
    ({"vary": {"beta": {"range": [0.0, 0.1], "nmu": 3}}}, "unknown key 'nmu'"),
    ({"vary": {"beta": [0.0, 0.1]}, "sample": "gird"}, "unknown key 'gird'; did you mean 'grid'"),
    ({"vary": {"beta": [0.0, 0.1]}, "sample": "random"}, "random=None is no number of arms"),
    ({"arms": [{"beta": 0.1}], "sample": {"random": 4}}, "vary is empty"),
    ({"vary": {"beta": [0.0, 0.1]}, "halving": {"confidnece": 0.9}}, "did you mean 'confidence'"),
    ({"vary": {"beta": [0.0, 0.1]}, "halving": {"factor": 1}}, "factor=1"),
    ({"vary": {"beta": [0.0, 0.1]}, "halving": {"undecided": "wait"}}, "set it to drop or keep"),
    ({"vary": {"beta": [0.0, 0.1]}, "turn_steps": 0}, "turn_steps=0 is no turn"),
    ({"vary": {"beta": list(range(1001))}}, "the sweep has more than 1,000 arms"),
    ({"vary": {"reward_weights": [[1.0], [2.0]]}}, "rewards cannot be compared; set metric"),
]


@pytest.mark.parametrize(("content", "text"), REFUSALS, ids=[text for _, text in REFUSALS])
def test_what_cannot_work_is_refused_with_what_to_set(content, text):
    with pytest.raises(ValueError) as error:
        plan(**content)
    assert text in str(error.value)
