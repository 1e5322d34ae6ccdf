"""Rewards for format, length and repetition, and the texts of completions that they read."""

from __future__ import annotations

import math

import pytest

from groupgrad.rewards import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    shaping,
    think_format_reward,
)
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
