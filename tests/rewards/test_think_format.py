from __future__ import annotations

import pytest

from groupgrad.rewards import think_format_reward
from groupgrad.rewards.text import completion_text, conversation_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>why</think>42", 1.0),
        ("<think>\nline\nline\n</think>\n\n42\nmore", 1.0),
        ("<think></think>", 1.0),
        ("<think>a</think>b</think>c", 1.0),
        (" <think>why</think>42", 0.0),
        ("text\n<think>why</think>42", 0.0),
        ("<think>why<think></think>42", 0.0),
        ("<think>why</think>42<think>", 0.0),
        ("<think>why 42", 0.0),
        ("</think><think>", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text, expected):
    assert think_format_reward([text], prompts=["p"]) == [expected]
    assert think_format_reward([[{"role": "assistant", "content": text}]]) == [expected]


def test_the_last_assistant_message_counts():
    call = {"role": "assistant", "content": "<think>tool</think>", "tool_calls": []}
    tool = {"role": "tool", "content": "4"}
    assert think_format_reward([[call, tool, {"role": "assistant", "content": "done"}], [call, tool]]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("plain", "plain"),
        ([], ""),
        ([{"role": "tool", "content": "x"}], ""),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant"}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}], "ab"),
    ],
)
def test_completion_text(completion, expected):
    assert completion_text(completion) == expected


def test_conversation_text():
    assert conversation_text([{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]) == (
        "user: q | assistant: "
    )
