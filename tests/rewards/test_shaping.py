"""Rewards for format, length and repetition, and the texts of completions that they read."""

from __future__ import annotations

import math
import pickle

import pytest

from groupgrad.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_length_penalized_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    shaping,
    think_format_reward,
)
from groupgrad.rewards.functions import inspect_function
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rewards.text import completion_text, conversation_text


def ids(*lengths):
    return [list(range(length)) for length in lengths]


def test_soft_overlong_punishment():
    reward = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert reward.__name__ == "soft_overlong_punishment_reward"
    assert reward(completion_ids=ids(0, 80, 81, 90, 100, 101), prompts=None) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]
    assert get_soft_overlong_punishment(10, 0)(completion_ids=ids(10, 11)) == [0.0, -1.0]  # without a ramp


def test_cosine_scaled_reward(monkeypatch):
    reward = get_cosine_scaled_reward(max_len=4, min_value_wrong=-3, max_value_wrong=-1)
    answers, expected = [r"\boxed{2}", r"\boxed{3}", r"\boxed{3}"], [pytest.approx(0.5), pytest.approx(-2.0), None]
    assert reward(completions=answers, solution=["2", "2", "?"], completion_ids=ids(4, 2, 2)) == expected

    monkeypatch.setattr(shaping, "accuracy_reward", lambda completions, solution, **kwargs: list(solution))
    reward = get_cosine_scaled_reward(max_len=100)
    assert reward.__name__ == "cosine_scaled_reward"
    # right: 1 + half of the way down to 0.5; a quarter of the way is (1 + cos(pi/4)) / 2 = 0.853553...
    rewards = reward(
        completions=[""] * 8,
        solution=[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None],
        completion_ids=ids(0, 50, 100, 400, 0, 25, 100, 5),
    )
    wrong = -0.5 - 0.5 * (1 + math.sqrt(0.5)) / 2
    assert rewards[:7] == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, wrong, -0.5])
    assert rewards[7] is None


def test_repetition_penalty():
    reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    assert reward.__name__ == "repetition_penalty_reward"
    # 1 2 1 2 1: pairs 12 21 12 21, two distinct of four
    rows = [[], [1], [1, 2], [1, 2, 1, 2, 1], [7, 7, 7, 7, 7], [1, 2, 3, 4]]
    assert reward(completion_ids=rows) == pytest.approx([0.0, 0.0, 0.0, -1.0, -1.5, 0.0])


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        (get_soft_overlong_punishment, (10, -1), "soft_punish_cache=-1"),
        (get_soft_overlong_punishment, (10, 11), "soft_punish_cache=11"),
        (get_cosine_scaled_reward, (5, 0.0), "min_value_wrong=0.0 is above max_value_wrong=-0.5"),
        (get_cosine_scaled_reward, (5, -1.0, -0.5, 0.5, 0.0), "min_value_correct=0.5 is above"),
        (get_repetition_penalty_reward, (3, 0.5), "max_penalty=0.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(factory, arguments, message):
    with pytest.raises(ValueError, match=message):
        factory(*arguments)


def test_think_format():
    for text, expected in (
        ("<think>why</think>42", 1.0),
        ("<think>\nline\nline\n</think>\n\n42\nmore", 1.0),
        ("<think></think>", 1.0),
        ("<think>a</think>b</think>c", 1.0),
        (" <think>why</think>42", 0.0),
        ("text\n<think>why</think>42", 0.0),
        ("<think>why<think></think>42", 0.0),
        ("<think>why</think>42<think>", 0.0),
        ("<think>why 42", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ):
        assert think_format_reward([text], prompts=["p"]) == [expected]
        assert think_format_reward([[{"role": "assistant", "content": text}]]) == [expected]
    call = {"role": "assistant", "content": "<think>tool</think>", "tool_calls": []}
    tool = {"role": "tool", "content": "4"}
    # the last assistant message counts
    assert think_format_reward([[call, tool, {"role": "assistant", "content": "done"}], [call, tool]]) == [0.0, 1.0]


def test_texts_of_completions_and_conversations():
    for completion, expected in (
        ("plain", "plain"),
        ([], ""),
        ([{"role": "tool", "content": "x"}], ""),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant"}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}], "ab"),
    ):
        assert completion_text(completion) == expected
    assert conversation_text([{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]) == (
        "user: q | assistant: "
    )


def right(completions, answer, **kwargs):
    """1 where a completion is the row's answer; None for an answer of None."""
    return [None if want is None else float(text == want) for text, want in zip(completions, answer)]


def test_length_is_penalized_among_the_right_answers_of_a_group():
    reward = get_length_penalized_reward(right, penalty=0.4)
    assert reward.__name__ == "length_penalized_right"
    prompts, texts = ["p"] * 4 + ["q"] * 3, ["4", "4", "4", "5", "6", "7", "6"]
    answers, lengths = ["4"] * 4 + ["6", "6", None], [10, 30, 20, 5, 80, 2, 1]
    found = reward(prompts=prompts, completions=texts, answer=answers, completion_ids=ids(*lengths))
    assert found == pytest.approx([1.0, 0.6, 0.8, 0.0, 1.0, 0.0, None]), "alone, a right answer loses nothing"
    equal = reward(prompts=["p"] * 2, completions=["4"] * 2, answer=["4"] * 2, completion_ids=ids(7, 7))
    assert equal == [1.0, 1.0]


def test_a_penalized_reward_asks_for_what_its_function_needs(make_rollouts):
    function = inspect_function(get_length_penalized_reward(right))
    assert set(function.requires) == {"completions", "answer", "prompts", "completion_ids"}
    assert function.missing(["prompt"]) == ["answer"] and function.missing(["prompt", "answer"]) == []
    copied = pickle.loads(pickle.dumps(get_length_penalized_reward(right, 0.4)))
    assert copied(prompts=["p"], completions=["4"], answer=["4"], completion_ids=ids(3)) == [1.0]
    table = RewardRunner(get_length_penalized_reward(right)).score(
        make_rollouts(["a", "b"], [{"prompt": "p", "answer": "a"}] * 2)
    )
    assert table.names == ["length_penalized_right"] and table.rewards.flatten().tolist() == [1.0, 0.0]


def test_a_penalized_accuracy_starts_its_processes_as_the_accuracy_does():
    penalized = get_length_penalized_reward(accuracy_reward)
    assert getattr(penalized, "starts_processes", False) and not hasattr(
        get_length_penalized_reward(right), "check_ready"
    )


def test_a_penalty_that_cannot_work_is_refused():
    async def later(completions, **kwargs):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match="later is async"):
        get_length_penalized_reward(later)
    for penalty in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"penalty={penalty} is not between 0 and 1"):
            get_length_penalized_reward(right, penalty)
