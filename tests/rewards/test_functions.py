from __future__ import annotations

import dataclasses
import functools
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from groupgrad.concurrency.callables import qualified_name
from groupgrad.data.values import copy_containers
from groupgrad.errors import RewardError
from groupgrad.rewards.call_inputs import CallInputs
from groupgrad.rewards.functions import read_rewards
from groupgrad.run_folder.completions import distinct_names


class Judge:
    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)

    def method(self, completions, **kwargs):
        return [0.0] * len(completions)


def plain(completions, **kwargs):
    return [0.0] * len(completions)


def test_the_module_tells_functions_of_one_name_apart(monkeypatch, tmp_path):
    named = {plain: "plain", functools.partial(plain, threshold=3): "plain", Judge(): "Judge"}
    for function, name in {**named, Judge().method: "Judge.method"}.items():
        assert qualified_name(function) == f"{__name__}.{name}"
    # The script that runs is the module of its functions.
    monkeypatch.setattr(plain, "__module__", "__main__")
    monkeypatch.setattr(Judge, "__module__", "__main__")
    (tmp_path / "digits.py").touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "digits.py"), raising=False)
    assert (qualified_name(plain), qualified_name(Judge())) == ("test_functions.plain", "digits.Judge")
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert (qualified_name(plain), qualified_name(Judge())) == ("test_functions.plain", "__main__.Judge")
    cell = {"__name__": "__main__"}
    exec(compile("def of_a_cell(): pass", "/tmp/ipykernel_1/2.py", "exec"), cell)
    assert qualified_name(cell["of_a_cell"]) == "__main__.of_a_cell"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["reward_func"] * 3, ["reward_func", "reward_func_2", "reward_func_3"]),
        (["f", "f", "f_2"], ["f", "f_3", "f_2"]),
        (["f_2", "f", "f"], ["f_2", "f", "f_3"]),
        (["prompt", "step"], ["prompt_2", "step_2"]),  # columns of the completions table
    ],
)
def test_distinct_names(names, expected):
    assert distinct_names(names) == expected


def inputs_of(make_rollouts, count=3, step=7):
    return CallInputs.of(make_rollouts(["abc" * 200, "y", "z"][:count]), None, step)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5, True],
        (1.0, 2.5, np.bool_(True)),
        np.array([1.0, 2.5, 1.0]),
        torch.tensor([1.0, 2.5, 1.0]),
        [torch.tensor(1.0), np.float32(2.5), Fraction(1)],
    ],
)
def test_numbers_of_every_type_are_accepted(make_rollouts, returned):
    assert read_rewards(returned, "f", inputs_of(make_rollouts)) == [1.0, 2.5, 1.0]
    rewards = read_rewards([None, float("nan"), 0], "f", inputs_of(make_rollouts))
    assert math.isnan(rewards[0]) and math.isnan(rewards[1]) and rewards[2] == 0.0


def test_a_row_may_have_a_reward_for_each_turn(make_rollouts):
    rollouts = make_rollouts(["abcd", "y", ""])
    rollouts[0] = dataclasses.replace(
        rollouts[0], completion_ids=[5, 6, 7, 8, 9], sampled=[True, True, False, True, False]
    )
    inputs = CallInputs.of(rollouts, None, 0)
    assert [rollout.turns for rollout in rollouts[:2]] == [[(0, 2), (3, 4)], [(0, len(rollouts[1].completion_ids))]]
    first, second, third = read_rewards([(1, None), [np.float32(2.5)], 0], "f", inputs)
    only_logged = read_rewards([(math.inf, -math.inf), 1e308, 0], "f", inputs, largest=math.inf)
    assert only_logged[0] == [math.inf, -math.inf], "one of weight 0 may return any number"
    with pytest.raises(RewardError, match=r"for row 0 .*beyond 3\.4e\+38"):
        read_rewards([(3e38, 3e38), 0, 0], "f", inputs)
    assert first[0] == 1.0 and math.isnan(first[1]) and second == [2.5] and third == 0.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 2.0], r"'f', step 7: it returned 2 rewards for 3 completions.*row 0"),
        ([], r"returned 0 rewards for 3"),
        ([1.0, float("inf"), 0.0], r"'f', step 7: it returned inf for row 1 \(prompt 'p1', completion 'y'\)"),
        ([1.0, 0.0, -float("inf")], r"returned -inf for row 2"),
        ([10**400, 0, 0], r"for row 0 .*infinite"),
        ([0.0, 1e39, 0.0], r"returned 1e\+39 for row 1 .*beyond 3\.4e\+38"),
        (["1.0", 0.0, 0.0], r"returned '1.0' \(str\) for row 0"),
        ([1j, 0.0, 0.0], r"\(complex\) for row 0"),
        ([1.0, [2.0, 3.0], 0.0], r"2 rewards by turn for row 1 .*, which has 1; return a number"),
        ([1.0, ["a"], 0.0], r"\['a'\] \(list\) for row 1"),
        ([1.0, [1e39], 0.0], r"\[1e\+39\] for row 1 .*beyond 3\.4e\+38"),
        (torch.zeros(3, 1), r"array of shape \(3, 1\); return shape \(3,\)"),
        (1.0, r"it returned 1.0 \(float\); return a list"),
        (None, r"it returned None \(NoneType\)"),
        ("abc", r"it returned 'abc' \(str\)"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, r"\(dict\); return a list"),
    ],
)
def test_unusable_rewards_are_errors(make_rollouts, returned, message):
    with pytest.raises(RewardError, match=message):
        read_rewards(returned, "f", inputs_of(make_rollouts))


def test_the_description_of_a_row(make_rollouts):
    rollouts = make_rollouts(["c" * 1000], [{"prompt": "start " + "p" * 1000 + " end"}])
    text = CallInputs.of(rollouts, None, 0).describe(0)
    assert "start" not in text and " end'" in text and len(text) < 500
    prompt, completion = [{"role": "user", "content": "2+2?"}], [{"role": "assistant", "content": "four"}]
    inputs = CallInputs.of(make_rollouts([completion], [{"prompt": prompt}]), None, 0)
    assert inputs.describe(0) == "row 0 (prompt 'user: 2+2?', completion 'assistant: four')"


def test_copies_have_new_containers_and_shared_leaves():
    image = object()
    value = [{"role": "user", "content": [{"type": "image", "image": image}]}, (1, [2])]
    copy = copy_containers(value)
    assert copy == value
    copy[0]["content"].append(1)
    copy[1][1].append(3)
    assert len(value[0]["content"]) == 1 and value[1] == (1, [2])  # pyright: ignore
    assert copy[0]["content"][0]["image"] is image
