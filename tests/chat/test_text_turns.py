"""What stands between two turns is what the template writes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from groupgrad.chat import ChatFormat
from groupgrad.chat.chat_template import ChatTemplate
from groupgrad.chat.replies import TextTurns

QUESTION = {"role": "user", "content": "First question"}
ANSWER = {"role": "assistant", "content": "An answer"}
NEXT = {"role": "user", "content": "Next"}


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_conversation_in_parts_has_the_ids_of_the_whole(
    family: Any, is_cut: bool, byte_tokenizer: Callable[..., Any]
) -> None:
    """Of a turn that is cut, by a stop string or its length, the end is put in."""
    template = ChatTemplate(byte_tokenizer(family.template, family.special, family.added))
    turns, prompt = TextTurns(template), template.render([QUESTION], prompt=True)
    for later in ([NEXT], [NEXT, {"role": "assistant", "content": "Sure"}, NEXT]):
        whole = template.render([QUESTION, ANSWER, *later], prompt=True)
        if not whole.startswith(prompt):
            pytest.skip("the template renders a turn otherwise once messages follow it")
        end = template.control_tokens(whole, whole.index("An answer"))[0]
        turn = whole[len(prompt) : end.end - len(end.text) if is_cut else end.end]
        turn_ids = template.encode(turn)
        between = turns.ids(turn_ids, later, template.encode)
        assert [*template.encode(prompt), *turn_ids, *between] == template.encode(whole)


def test_messages_behind_the_replies_of_tools(qwen3: Any) -> None:
    schema = {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
    chat = ChatFormat(qwen3, schemas=[schema])
    reply = {"role": "tool", "name": "look", "content": "7"}
    ids = chat.reply_ids([*qwen3.encode("x"), chat.end_ids[0]], [reply], None, [NEXT])
    assert qwen3.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>user\nNext<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_that_refuses_what_follows(byte_tokenizer: Callable[..., Any]) -> None:
    refusal = "{% if m.content == 'Next' %}{{ raise_exception('no') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}"
    with pytest.raises(Exception, match="no"):
        TextTurns(ChatTemplate(byte_tokenizer(template))).ids([1], [NEXT], list)
