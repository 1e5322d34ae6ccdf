"""Tasks of reasoning-gym are data sets whose rows are the same in every process, with the reward of their verifiers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: `make check` installs it")

from groupgrad.errors import RewardError
from groupgrad.integrations import reasoning_gym
from groupgrad.integrations.reasoning_gym import named_dataset, reasoning_gym_dataset, reasoning_gym_reward

COMPOSITE = {
    "datasets": [
        {"name": "chain_sum", "weight": 3, "config": {"max_terms": 3}},
        {"name": "leg_counting"},
        # Its metadata has strings where that of `chain_sum` has numbers, and its answer is None.
        {"name": "rush_hour"},
    ]
}


def scores(rows: Any, texts: list[Any], **kwargs: Any) -> list[float]:
    """The rewards of these completions of the first rows."""
    part = rows[: len(texts)]
    return reasoning_gym_reward(texts, part["question"], part["reasoning_gym"], **kwargs)


def tagged(answers: list[str]) -> list[str]:
    return [f"I think so.\n<answer>{answer}</answer>" for answer in answers]


def test_a_row_has_the_question_as_messages_and_the_fields_of_the_entry() -> None:
    row = reasoning_gym_dataset("chain_sum", size=3, seed=5, max_terms=2, max_digits=1)[2]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "<answer>answer here</answer>" in row["prompt"][0]["content"]
    assert row["prompt"][1]["content"] == row["question"]
    expression = row["question"].removesuffix(" =").rpartition(": ")[2]
    assert int(row["answer"]) == eval(expression)
    assert row["task"] == "chain_sum"
    assert json.loads(row["difficulty"]) == {"num_terms": [2, 2], "num_digits": [1, 1]}
    assert json.loads(row["metadata"])["expression"] == expression


def test_the_system_prompt_is_one_of_the_package_or_a_text() -> None:
    texts = [
        reasoning_gym_dataset("chain_sum", size=1, system_prompt=text)[0]["prompt"][0]["content"]
        for text in ("direct", "Be brief.")
    ]
    assert texts[0].startswith("Answer the question directly.") and texts[1] == "Be brief."


def test_right_answers_get_1_and_wrong_or_missing_ones_0() -> None:
    rows = reasoning_gym_dataset("chain_sum", size=4)
    answers = rows["answer"][:]
    assert scores(rows, tagged(answers)) == [1.0] * 4
    chats = [[{"role": "assistant", "content": text}] for text in tagged(answers)]
    assert scores(rows, chats) == [1.0] * 4
    # The last tags count, and the last line of a completion without tags.
    texts = [f"<answer>no</answer> <answer> {answers[0]} </answer>\n7", f"I think\n {answers[1]}\n ", "no", ""]
    assert scores(rows, texts) == [1.0, 1.0, 0.0, 0.0]
    # The verifier gives a part for the right number among other letters.
    assert scores(rows, [f"{answers[0]} or so"]) == [len(answers[0]) / len(f"{answers[0]} or so")]


def test_answers_and_the_share_of_completions_with_tags_are_logged() -> None:
    rows, columns, metrics = reasoning_gym_dataset("chain_sum", size=2), {}, {}
    texts = [tagged(rows["answer"][:])[0], "no tags"]
    scores(rows, texts, log_extra=columns.__setitem__, log_metric=metrics.__setitem__)
    assert columns == {"answer_parsed": [rows["answer"][0], "no tags"]}
    assert metrics == {"reasoning_gym/tagged": 0.5}


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        pytest.param("prime_factorization", "no number", id="the verifier raises"),
        pytest.param("boxnet", "[[1, 2]]", id="it expects another form"),
        pytest.param("spiral_matrix", "9**9**9**9", id="it computes without end"),
        pytest.param("chain_sum", "1" * 200_000, id="very long"),
    ],
)
def test_an_answer_that_a_verifier_cannot_read_gets_0(
    task: str, answer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reasoning_gym, "ROW_TIMEOUT_S", 2.0)
    rows, metrics = reasoning_gym_dataset(task, size=2), {}
    right = rows["answer"][1] or "none"
    assert scores(rows, tagged([answer, right]), log_metric=metrics.__setitem__)[0] == 0.0
    if task != "chain_sum":
        assert metrics["reasoning_gym/failed"] >= 0.5 and "the verifier failed for" in caplog.text
    # A process that was killed has been replaced.
    easy = reasoning_gym_dataset("chain_sum", size=1)
    assert scores(easy, tagged(easy["answer"][:])) == [1.0]


def test_held_out_rows_have_other_questions() -> None:
    settings = {"size": 60, "seed": 3, "max_terms": 2, "max_digits": 1}
    train = reasoning_gym_dataset("chain_sum", **settings)
    test = reasoning_gym_dataset("chain_sum", "test", test_size=60, **settings)
    assert not set(train["question"]) & set(test["question"])
    # A few questions of other seeds are asked in training too; they are left out.
    assert 30 < len(test) < 60
    assert scores(test, tagged(test["answer"][:])) == [1.0] * len(test)
    assert test["question"][:] == reasoning_gym_dataset("chain_sum", "test", test_size=60, **settings)["question"][:]


def test_a_composite_draws_by_weight_and_scores_each_row_by_its_task() -> None:
    rows, metrics = reasoning_gym_dataset("composite", size=60, **COMPOSITE), {}
    count = {name: rows["task"][:].count(name) for name in ("chain_sum", "leg_counting", "rush_hour")}
    assert sum(count.values()) == 60 and count["chain_sum"] > max(count["leg_counting"], count["rush_hour"]) > 0
    answers = [answer or "F+1" for answer in rows["answer"]]
    got = scores(rows, tagged(answers), log_metric=lambda name, value: metrics.setdefault(name, []).append(value))
    assert [score for score, task in zip(got, rows["task"]) if task != "rush_hour"] == [1.0] * (60 - count["rush_hour"])
    assert metrics["reasoning_gym/leg_counting"] == [1.0] * count["leg_counting"]
    test = reasoning_gym_dataset("composite", "test", size=60, test_size=30, **COMPOSITE)
    assert not set(rows["question"]) & set(test["question"])


def test_datasets_of_different_tasks_can_be_joined() -> None:
    import datasets

    rows = [reasoning_gym_dataset(task, size=2) for task in ("chain_sum", "rush_hour", "acre")]
    joined = datasets.concatenate_datasets(rows)
    assert joined.column_names == rows[0].column_names and joined["difficulty"][-1] is None


SCRIPT = """
import json, sys
from groupgrad.integrations.reasoning_gym import reasoning_gym_dataset
print(json.dumps({task: [*reasoning_gym_dataset(task, size=4)] for task in sys.argv[1:]}))
"""


def differ_in_another_process(tasks: list[str]) -> list[str]:
    """The tasks that make other rows in a process with another hash seed, and in the reverse order."""
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    command = [sys.executable, "-c", SCRIPT, *reversed(tasks)]
    there = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [task for task, rows in json.loads(there).items() if rows != [*reasoning_gym_dataset(task, size=4)]]


def test_every_process_makes_the_same_rows() -> None:
    """The others follow the hash order of texts, or draw from the random stream of the process."""
    assert differ_in_another_process(["chain_sum", "isomorphic_strings", "list_functions", "ransom_note"]) == []


@pytest.mark.parametrize(
    ("task", "settings", "text"),
    [
        ("chain_sums", {}, "'chain_sums' not registered"),
        ("chain_sum", {"max_term": 3}, "unexpected keyword argument 'max_term'.*; change the task or that setting"),
        (
            "chain_sum",
            {"max_terms": 1},
            "with max_terms=1, .*max_terms must be >= min_terms",
        ),
        ("chain_sum", {"seed": None}, "seed=None is no whole number from 0 on"),
        ("chain_sum", {"size": 0}, "size=0 is no whole number from 1 on"),
        ("chain_sum", {"test_size": 2.5}, "test_size=2.5 is no whole number"),
        ("chain_sum", {"split": "validation"}, "has no split 'validation'; set it to one of train, test"),
        (
            "coin_flip",
            {"split": "test", "size": 5000},
            "no held-out question that is not trained on too; lower size",
        ),
        ("composite", {}, "with seed=0.*Must specify at least one dataset"),
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 0}]}, "'weight': 0.*Weight must be positive"),
        ("composite", {"datasets": [{"name": "chain_sum"}] * 2}, "Duplicate dataset names"),
        ("composite", {"datasets": [{"name": "chain_sum", "wieght": 1}]}, "unexpected keyword argument 'wieght'"),
        ("composite", {"datasets": [{"name": "chain_sun"}]}, "'chain_sun' not registered"),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"x": 1}}]}, "unexpected keyword argument 'x'"),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"seed": 1}}]}, "the parts chain_sum have a seed"),
    ],
)
def test_what_there_is_not_is_named(task: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        reasoning_gym_dataset(task, **settings)


def test_a_name_has_its_settings_as_a_mapping_or_in_yaml() -> None:
    rows = named_dataset("reasoning_gym:chain_sum", "{size: 2, max_terms: 2}", "train", "Be brief.")
    assert len(rows) == 2 and rows[0]["prompt"][0]["content"] == "Be brief."
    assert rows["question"][:] == named_dataset("reasoning_gym:chain_sum", {"size": 2, "max_terms": 2})["question"][:]
    with pytest.raises(ValueError, match="dataset_config='main' is no mapping, but reasoning_gym:chain_sum takes"):
        named_dataset("reasoning_gym:chain_sum", "main")
    with pytest.raises(ValueError, match="has 'split', which is no setting of the task"):
        named_dataset("reasoning_gym:chain_sum", {"split": "test"})


def test_rows_of_another_release_are_refused() -> None:
    rows = reasoning_gym_dataset("chain_sum", size=1)
    with pytest.raises(RewardError, match=r"makes the question '.*' where the data set has '1 \+ 1'; make"):
        reasoning_gym_reward(["<answer>2</answer>"], ["1 + 1"], rows["reasoning_gym"][:])


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupgrad.compat.is_available", lambda name: name != "reasoning-gym")
    with pytest.raises(ImportError, match=r"needs 'reasoning-gym', which is not installed; run `pip install"):
        reasoning_gym_dataset("chain_sum", size=7)


@pytest.mark.slow
def test_every_task_makes_the_same_rows_in_every_process_and_scores_its_answers() -> None:
    from reasoning_gym.factory import DATASETS

    tasks = sorted(DATASETS.keys() - {"composite", "futoshiki", "knight_swap", "sokoban", "zebra_puzzles"})
    assert len(tasks) > 90 and differ_in_another_process(tasks) == []
    for task in tasks:
        rows = reasoning_gym_dataset(task, size=4).filter(lambda row: row["answer"] is not None)
        if len(rows):
            assert scores(rows, tagged(rows["answer"][:])) == [1.0] * len(rows), task
