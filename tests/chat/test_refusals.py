"""Errors of unusable templates: each shows the renderings and the remedy."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from groupgrad.chat import ChatFormat

SCHEMAS = [{"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": {}}}]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<|end|>",)
REPLY = {"role": "tool", "name": "f", "content": "OK", "tool_call_id": None}


def test_no_template(byte_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        ChatFormat(byte_tokenizer(None), schemas=SCHEMAS)


def test_a_template_without_calls_needs_a_parser(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(PLAIN, SPECIAL)
    with pytest.raises(ValueError, match=r"shows no tool calls.*response_parser="):
        ChatFormat(tokenizer, schemas=SCHEMAS)


def test_with_a_parser_replies_are_rendered_all_the_same(byte_tokenizer: Any, caplog: Any) -> None:
    tokenizer = byte_tokenizer(PLAIN, SPECIAL)

    def parser(text: str, ids: list[int]) -> dict[str, Any]:
        return {"content": "", "tool_calls": [{"name": text}]}

    with caplog.at_level(logging.WARNING):
        chat = ChatFormat(tokenizer, schemas=SCHEMAS, response_parser=parser)
    assert not chat.shows_tools and "does not show tools" in caplog.text
    assert tokenizer.decode(chat.reply_ids([5], [REPLY, REPLY])) == ("<|end|><tool>OK<|end|><tool>OK<|end|><assistant>")
    assert tokenizer.decode(chat.reply_ids([5, *chat.end_ids], [REPLY])) == "<tool>OK<|end|><assistant>"
    assert chat.parse(tokenizer("f<|end|>")["input_ids"], SCHEMAS).calls[0].name == "f"


def test_with_a_parser_replies_become_user_messages_where_there_is_no_role_for_tools(
    byte_tokenizer: Any, caplog: Any
) -> None:
    """Gemma 3 is such a template: it accepts turns of the user and the model only."""
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
        "{% endif %}{{ '<start>' + m.role + '\\n' + m.content + '<end>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start>assistant\\n' }}{% endif %}"
    )
    tokenizer = byte_tokenizer(template, ("<start>", "<end>"))

    def parser(text: str, ids: list[int]) -> dict[str, Any]:
        return {"content": text}

    with caplog.at_level(logging.WARNING):
        chat = ChatFormat(tokenizer, schemas=SCHEMAS, response_parser=parser)
    assert "rendered as messages of the user" in caplog.text
    assert tokenizer.decode(chat.reply_ids([5, *chat.end_ids], [REPLY, {**REPLY, "content": "7"}])) == (
        "\n<start>user\nOK\n7<end>\n<start>assistant\n"
    )


def test_a_template_without_any_token_of_its_own(byte_tokenizer: Any) -> None:
    template = (
        "{{ tools | tojson if tools }}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
        "{{ '\\n' }}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}"
    )
    tokenizer = byte_tokenizer(template)
    chat = ChatFormat(tokenizer, schemas=SCHEMAS)
    assert (chat.name, chat.end_ids) == ("JSON objects in <tool_call> tags", ())
    turn = chat.parse(
        tokenizer('<tool_call>{"name": "f"}</tool_call>')["input_ids"] + [tokenizer.eos_token_id], SCHEMAS
    )
    assert [call.name for call in turn.calls] == ["f"]
    assert tokenizer.decode(chat.reply_ids([1], [REPLY])) == "\ntool: OK\nassistant: "


def test_an_unknown_syntax_is_shown(byte_tokenizer: Any) -> None:
    template = PLAIN.replace(
        "<|end|>",
        "{% for c in m.tool_calls or [] %}please run {{ c.function.name }} with {{ c.function.arguments }}{% endfor %}"
        "<|end|>",
        1,
    )
    with pytest.raises(ValueError, match=r"(?s)unknown syntax.*please run probe_tool_one with.*response_parser="):
        ChatFormat(byte_tokenizer(template, SPECIAL), schemas=SCHEMAS)


def test_a_template_that_refuses_tool_messages(families: Any, byte_tokenizer: Any) -> None:
    refusing = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('who is tool?') }}{% endfor %}"
    tokenizer = byte_tokenizer(refusing + families["json"].template, families["json"].special)
    with pytest.raises(ValueError, match=r"(?s)no way to continue a turn that calls a tool.*who is tool\?"):
        ChatFormat(tokenizer, schemas=SCHEMAS)


def test_a_template_that_drops_calls_once_they_are_answered(families: Any, byte_tokenizer: Any) -> None:
    template = families["json"].template.replace(
        "in m.tool_calls or []", "in (m.tool_calls if loop.last else none) or []"
    )
    with pytest.raises(ValueError, match=r"(?s)no way to continue.*<tool_call>.*with the\s+reply as"):
        ChatFormat(byte_tokenizer(template, families["json"].special), schemas=SCHEMAS)


def test_a_template_that_drops_the_tools_answer(families: Any, byte_tokenizer: Any) -> None:
    template = families["json"].template.replace("<tool_response>\\n' + m.content", "<tool_response>\\n'")
    assert template != families["json"].template
    with pytest.raises(ValueError, match="no way to continue"):
        ChatFormat(byte_tokenizer(template, families["json"].special), schemas=SCHEMAS)
