"""The comparison of recipes spends equal tokens, goes on where it was interrupted, and says what is true."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: `make check` installs it")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "recipes")
    import compare

    yield compare
    for name in ("compare", "arms"):
        del sys.modules[name]


def made_up(compare: Any, after: dict[str, float]) -> dict[Any, dict[str, Any]]:
    """Results of three seeds in which a recipe ends at `after`, or 0.5, and a little elsewhere with each seed."""
    results = {}
    for arm in compare.arms(3):
        last = after.get(arm.recipe, 0.5) + 0.01 * arm.seed + 0.001 * (arm.recipe == "sapo") * (arm.seed - 1)
        results[arm] = {"tokens": [0, 900, 2000], "seconds": [0.0, 5.0, 9.5], "accuracy": [0.1, 0.3, last]}
    return results


@pytest.mark.quick("dapo")
@pytest.mark.parametrize("recipe", ["grpo", "dapo", "gspo"])
def test_an_arm_ends_with_its_tokens(
    recipe: str, compare: Any, make_model: Any, make_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(messages[0]["content"]) % 2) for messages in completions]

    monkeypatch.setattr(compare, "HELD_OUT", 4)
    monkeypatch.setattr(compare, "right", right)
    model, spent = make_model(max_position_embeddings=4096), 2500
    before = model.model.embed_tokens.weight.clone()
    arm = compare.Arm("products", recipe, 1)
    result = compare.train(arm, model, make_tokenizer(), spent, tmp_path, 2)
    tokens = result["tokens"]
    assert result["arm"] == arm and len(tokens) == len(result["seconds"]) == len(result["accuracy"])
    assert tokens[0] == 0 and tokens == sorted(tokens) and len(tokens) in (2, 3)
    assert spent <= tokens[-1]
    assert all(0 <= value <= 1 for value in result["accuracy"])
    assert not model.model.embed_tokens.weight.equal(before)


def test_right_is_the_whole_score_alone(compare: Any) -> None:
    rows = compare.reasoning_gym_dataset("chain_sum", size=1, max_terms=2, max_digits=1)[:1]
    texts = [rows["answer"][0], f"It is {rows['answer'][0]}.", "no"]
    inputs = {name: rows[name] * 3 for name in ("question", "reasoning_gym")}
    scores = compare.reasoning_gym_reward(texts, **inputs)
    assert scores[0] == 1 and 0 < scores[1] < 1 and scores[2] == 0
    assert compare.right(texts, **inputs) == [1.0, 0.0, 0.0]


def test_finished_arms_are_those_of_the_same_plan(compare: Any, tmp_path: Path) -> None:
    path, plan = tmp_path / "results.jsonl", {"tokens": 5}
    assert compare.finished(path, plan, compare.Arm) == {}
    arms = compare.arms(1)[:2]
    lines = [{"arm": arms[0], "plan": plan}, {"arm": arms[1], "plan": {"tokens": 6}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(compare.finished(path, plan, compare.Arm)) == [arms[0]]


def test_the_sentence_names_those_that_differ(compare: Any) -> None:
    assert "No recipe can be told from `grpo`" in compare.verdict(made_up(compare, {}), 3)
    said = compare.verdict(made_up(compare, {"sapo": 0.75}), 3)
    assert "`sapo` ends 25.0% above `grpo` on `products`" in said and "dapo" not in said


def test_the_page_and_the_picture(compare: Any, tmp_path: Path) -> None:
    results = made_up(compare, {"sapo": 0.7})
    text = compare.render(results, Namespace(seeds=3, tokens=2000))
    # Student's quantile of two degrees of freedom, 4.303, times 0.01 / sqrt(3).
    assert "| products | `grpo` | 10.0% | 51.0% ± 2.5% | 2,000 | 10 |" in text
    assert text.startswith(compare.START) and text.endswith(compare.END)
    assert (ROOT / "recipes" / "README.md").read_text(encoding="utf-8").count(compare.START) == 1
    pytest.importorskip("matplotlib")
    compare.draw(results, 3, tmp_path / "recipes.png")
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")
