"""From completions to the numbers of a prompt, their means, a comparison and a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from groupgrad.apps.eval import results
from groupgrad.apps.eval.results import Evaluation
from groupgrad.evaluation.prompt_numbers import Measure, PromptResult, means, numbers_of_prompts

NAN = math.nan


def prompt(rewards: list[float], answers: list[str | None] | None = None, **changes: Any) -> PromptResult:
    size = len(rewards)
    fields: dict[str, Any] = {
        "prompt": "1+1=",
        "column": None,
        "rewards": rewards,
        "functions": {"one": rewards},
        "answers": answers,
        "completions": ["x"] * size,
        "lengths": [3] * size,
        "finish_reasons": ["eos"] * size,
    }
    return PromptResult(**{**fields, **changes})


def evaluation(*prompts: PromptResult, **settings: Any) -> Evaluation:
    known: dict[str, Any] = dict.fromkeys(results.SAMPLING)
    known |= {"dataset": "rows.jsonl", "seed": 42, "rewards": ["one"], "by": None, "num_generations": 4}
    return Evaluation("model", {**known, **settings}, list(prompts), 1.5)


def test_the_numbers_of_a_prompt_by_hand() -> None:
    given = prompt(
        [1.0, 0.0, 0.0, 1.0],
        ["2", "3", "3", "2"],
        lengths=[1, 2, 3, 6],
        finish_reasons=["eos", "length", "eos", "eos"],
    )
    numbers = numbers_of_prompts([given], Measure((1, 2, 4)))
    assert {name: values[0] for name, values in numbers.items()} == pytest.approx(
        # Of the six pairs one has no right completion; in votes four pairs are ties, one is right, one wrong.
        {"reward": 1 / 2, "pass@1": 1 / 2, "pass@2": 5 / 6, "pass@4": 1, "maj@2": 1 / 2, "maj@4": 1 / 2}
        | {"length": 3, "truncated": 1 / 4}
    )


def test_rewards_that_are_not_0_or_1_have_a_best_of_k_and_a_threshold() -> None:
    numbers = numbers_of_prompts([prompt([0.25, 0.5, 0.75])], Measure((1, 2), threshold=0.5))
    assert numbers["pass@1"] == [pytest.approx(2 / 3)] and numbers["pass@2"] == [1.0]
    assert numbers["best@2"] == [pytest.approx((0.5 + 0.75 + 0.75) / 3)]
    rounded = 0.6 + 0.3 + 0.1
    assert rounded < 1.0
    assert numbers_of_prompts([prompt([rounded, 0.9])], Measure())["pass@1"] == [0.5]


def test_completions_without_a_reward_are_left_out() -> None:
    both = evaluation(prompt([1.0, NAN, 0.0], ["2", "2", "3"]), prompt([NAN, NAN, NAN], [None, None, None]))
    numbers = numbers_of_prompts(both.prompts, Measure((1, 3)))
    assert numbers["reward"] == [0.5, pytest.approx(NAN, nan_ok=True)]
    assert numbers["pass@1"][0] == 0.5 and all(map(math.isnan, numbers["pass@3"]))
    found = means(numbers)
    assert (found["reward"].mean, found["reward"].prompts, found["pass@3"].prompts) == (0.5, 1, 0)
    shown = results.report(both, Measure((1, 3)))
    assert "reward: 1 prompts have too few scored completions and are left out" in shown
    assert "pass@3: 2 prompts have too few scored completions" in shown


def test_several_functions_have_means_of_their_own() -> None:
    given = prompt([0.7, 0.3], functions={"one": [1.0, 0.0], "two": [0.4, 0.6]})
    numbers = numbers_of_prompts([given], Measure())
    assert (numbers["reward"], numbers["reward one"], numbers["reward two"]) == ([0.5], [0.5], [0.5])


def test_means_by_a_column_are_in_the_order_of_its_values() -> None:
    given = [prompt([1.0], column=10), prompt([0.0], column=9), prompt([0.5], column=10), prompt([0.0], column="easy")]
    both = evaluation(*given, by="level")
    found = results.means_by_column(both, numbers_of_prompts(both.prompts, Measure()))
    assert {value: part["reward"].mean for value, part in found.items()} == {"9": 0.0, "10": 0.75, "easy": 0.0}
    assert list(found) == ["9", "10", "easy"]
    rows = [line.split()[:3] for line in results.report(both, Measure()).splitlines()[-4:]]
    assert rows == [["level", "prompts", "reward"], ["9", "1", "0"], ["10", "2", "0.75"], ["easy", "1", "0"]]


def test_a_comparison_by_hand() -> None:
    """Differences of 0.5, 0.5 and 0: of the four signs two are as far from 0, ++ and --."""
    here = evaluation(prompt([1.0, 1.0]), prompt([1.0, 0.0]), prompt([0.0, 0.0]))
    there = evaluation(prompt([1.0, 0.0]), prompt([0.0, 0.0]), prompt([0.0, 0.0]), temperature=0.5)
    found = results.compare(here, there, Measure())["reward"]
    assert (found.here, found.there, found.difference.mean) == pytest.approx((1 / 2, 1 / 6, 1 / 3))
    assert found.p == 0.5 and (found.difference.low, found.difference.high) == (0.0, 0.5)
    shown = results.comparison(here, there, results.compare(here, there, Measure()))
    assert "settings that differ, here and there: temperature None and 0.5" in shown
    row = next(line for line in shown.splitlines() if line.startswith("reward"))
    assert row.split() == ["reward", "0.5", "0.1667", "0.3333", "0", "to", "0.5", "0.5"]


def test_a_prompt_that_one_side_has_not_scored_is_in_no_pair() -> None:
    here = evaluation(prompt([1.0]), prompt([NAN]), prompt([1.0]))
    there = evaluation(prompt([0.0]), prompt([0.0]), prompt([1.0]))
    found = results.compare(here, there, Measure())["reward"]
    assert (found.here, found.there, found.difference.mean, found.difference.prompts) == (1.0, 0.5, 0.5, 2)


def test_other_prompts_are_not_compared() -> None:
    here = evaluation(prompt([1.0]), prompt([1.0], prompt="2+2="))
    with pytest.raises(ValueError, match="has 1 prompts, this one 2, and the first 1 have 1 in common"):
        results.compare(here, evaluation(prompt([1.0])), Measure())


def test_a_file_has_all_numbers_and_is_read_back(tmp_path: Path) -> None:
    given = evaluation(
        prompt([1.0, NAN], ["2", None], column="a", prompt=[{"role": "user", "content": "1+1="}]),
        prompt([0.0, 1.0], ["3", "2"], column="b"),
        by="level",
    )
    measure = Measure((1, 2))
    results.write(tmp_path / "a.json", [given], measure, [results.compare(given, given, measure)])
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["means"]["pass@1"] == {"mean": 0.75, "low": 0.5, "high": 1.0, "prompts": 2}
    assert content["by"]["b"]["reward"]["mean"] == 0.5
    assert content["prompts"][0]["numbers"]["pass@2"] is None and content["prompts"][1]["numbers"]["pass@2"] == 1.0
    assert content["differences"]["reward"]["p"] == 1.0
    assert repr(results.read(tmp_path / "a.json")) == repr([given])
    results.write(tmp_path / "two.json", [given, given], measure, None)
    assert json.loads((tmp_path / "two.json").read_text())["sets"][1]["means"] == content["means"]
    assert repr(results.read(tmp_path / "two.json")) == repr([given, given])
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json is no file that `groupgrad eval --output` has written"):
        results.read(tmp_path / "b.json")
