"""Parsing of turns: malformed calls and their problems, reasoning, response parsers."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from groupgrad.chat import ChatFormat, ToolCall
from groupgrad.chat.call_syntax import FAMILIES

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "description": "x"}}, "required": ["n"]}
SCHEMAS = [{"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": PARAMETERS}}]
F = ToolCall("f", {"n": 1})
F_CALL = ("f", {"n": 1}, None)


def chat_of(families: Any, byte_tokenizer: Any, name: str, **kwargs: Any) -> ChatFormat:
    family = families[name]
    return ChatFormat(byte_tokenizer(family.template, family.special, family.added), schemas=SCHEMAS, **kwargs)


def parse(chat: ChatFormat, text: str) -> Any:
    ids = chat._tokenizer(text, add_special_tokens=False)["input_ids"]
    return chat.parse(ids, SCHEMAS)


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>',
        '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "abcdefgh1"}]',
        '[TOOL_CALLS]f[ARGS]{"n": 1}',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 1}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<|tool_call>call:f{n:1}<tool_call|>",
        "<start_function_call>call:f{n:1}<end_function_call>",
        "<|tool_call_start|>[f(n=1)]<|tool_call_end|>",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}}]<|END_ACTION|>',
        '<TOOLCALL>[{"name": "f", "arguments": {"n": 1}}]</TOOLCALL>',
        '<|tool_call|>[{"name": "f", "arguments": {"n": 1}}]',
        '{"name": "f", "parameters": {"n": 1}}',
    ],
)
def test_one_syntax_of_the_table_reads_a_call_of_its_family(text: str) -> None:
    found = [syntax.read(text, {"f": PARAMETERS["properties"]}) for syntax in FAMILIES]
    read = [spans for spans in found if [(c.name, c.arguments, c.problem) for s in spans for c in s.calls] == [F_CALL]]
    assert len(read) == 1
    ((span,),) = read
    assert text[: span.start] + text[span.end :] in ("", "<|call|>")


BROKEN = [
    ("json", '<tool_call>\n{"name": "f", "arguments": {"n": 1', "ends too early"),
    ("json", "<tool_call>", "ends too early"),
    ("json", '<tool_call>\n{"name": "f", "arguments": {"n": x}}\n</tool_call>', "Expecting value"),
    ("json", '<tool_call>\n{"arguments": {"n": 1}}\n</tool_call>', "no name"),
    ("json", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', "must be a JSON object"),
    ("json", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}', "</tool_call> is missing"),
    ("json", "<tool_call>\nf(1)\n</tool_call>", "no valid JSON"),
    ("json, special tags", '<tool_call>{"name": "f"</tool_call>', "no valid JSON"),
    ("xml", "<tool_call>\n<function=f>\n<parameter=n>\n1", "'n' of f is not closed"),
    ("xml", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n", "call of f is not closed"),
    ("xml", "<tool_call>\n<function=>\n</function>\n</tool_call>", "no name"),
    ("pairs", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</tool_call>", "'n' of f is not closed"),
    ("pairs", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n", "call of f is not closed"),
    ("bare", '{"name": "f", "parameters": {"n": 1', "ends too early"),
    ("bare", '{"name": "f", "parameters": 5}', "must be a JSON object"),
    ("list", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}', "no valid JSON"),
    ("list", "[TOOL_CALLS]f", "no valid JSON"),
    ("args", "[TOOL_CALLS]f", "not of the form"),
    ("args", '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"n": ', "ends too early"),
    ("channels", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": ', "ends too early"),
    ("channels", "<|channel|>commentary to=functions.f<|message|>n=1<|call|>", "no valid JSON"),
    ("braces", "<|tool_call>call:f{n:1", "ends too early"),
    ("braces", "<|tool_call>call:f{n:1}", "<tool_call|> is missing"),
    ("braces", '<|tool_call>call:f{n:<|"|>1}<tool_call|>', "a text is not closed"),
    ("braces", "<|tool_call>call:f<tool_call|>", "no name with braces"),
    ("python", "<|tool_call_start|>[f(n=", "<|tool_call_end|> is missing"),
    ("python", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "given by name"),
    ("python", "<|tool_call_start|>[f(n=g())]<|tool_call_end|>", "plain values"),
    ("python", "<|tool_call_start|>[f(n={[1]: 2})]<|tool_call_end|>", "plain values"),
    ("python", "<|tool_call_start|>[1]<|tool_call_end|>", "no call of the form"),
    ("python", "<|tool_call_start|>f of one<|tool_call_end|>", "no list of the form"),
    (
        "fenced",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 1}',
        "is not closed",
    ),
]


@pytest.mark.parametrize(("name", "text", "problem"), BROKEN)
def test_a_broken_call_is_a_call_with_a_problem(
    families: Any, byte_tokenizer: Any, name: str, text: str, problem: str
) -> None:
    turn = parse(chat_of(families, byte_tokenizer, name), text)
    assert [call.arguments for call in turn.calls] == [{}]
    assert problem in (turn.calls[0].problem or "")
    assert "tool_calls" not in turn.message


def test_white_space_takes_no_more_than_its_length_in_time(families: Any, byte_tokenizer: Any) -> None:
    """40,000 spaces at any place of a call. Its square would be seconds at each."""
    for name, text, _ in [*BROKEN, ("python", "<|tool_call_start|>[f(n=1)] x", "")]:
        syntax = chat_of(families, byte_tokenizer, name)._syntax
        for place in sorted({match.end() for match in re.finditer(r"\w+|\W", text)}):
            spaced = text[:place] + 40_000 * " " + text[place:]
            began = time.process_time()
            syntax.read(spaced, {})
            assert time.process_time() - began < 0.5, (name, spaced.replace(40_000 * " ", "<spaces>"))


def test_good_calls_beside_broken_ones_are_kept_in_order(families: Any, byte_tokenizer: Any) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    turn = parse(chat_of(families, byte_tokenizer, "json"), f"a\n{good}\n<tool_call>\nx\n</tool_call>\n{good}\nb")
    assert [call.problem is None for call in turn.calls] == [True, False, True]
    assert turn.message["content"] == "a\n<tool_call>\nx\n</tool_call>\nb"
    assert len(turn.message["tool_calls"]) == 2


def test_no_text_makes_reading_fail(family: Any, byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(family.template, family.special, family.added)
    chat = ChatFormat(tokenizer, schemas=SCHEMAS)
    pieces = [*re.split(r"(\W)", chat._probes.one_call), *family.special, *'{}[]():,="\\\n', "f", "1", "é"]
    rng = random.Random(11)
    for _ in range(150):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 60)))
        turn = parse(chat, text)
        assert isinstance(turn.message["content"], str)
        assert all((call.problem is None) <= bool(call.name) for call in turn.calls)
        assert all(call.problem is None or call.arguments == {} for call in turn.calls)


def test_the_number_of_calls_in_a_turn_is_limited(families: Any, byte_tokenizer: Any) -> None:
    chat = chat_of(families, byte_tokenizer, "json")
    listed = parse(chat, "<tool_call>[" + ", ".join(['{"name": "f"}'] * 70) + "]</tool_call>")
    assert len(listed.calls) == 65 and "more than 64 calls" in (listed.calls[64].problem or "")
    turn = parse(chat, '<tool_call>{"name": "f"}</tool_call>' * 500)
    assert [call.problem for call in turn.calls[:64]] == [None] * 64
    assert len(turn.calls) == 65 and "more than 64 calls" in (turn.calls[64].problem or "")
    assert len(turn.message["tool_calls"]) == 64


def test_spaces_in_arguments_are_not_cleaned_up(families: Any, byte_tokenizer: Any) -> None:
    family = families["json"]
    tokenizer = byte_tokenizer(family.template, family.special)
    tokenizer.clean_up_tokenization_spaces = True
    chat = ChatFormat(tokenizer, schemas=SCHEMAS)
    turn = parse(chat, '<tool_call>{"name": "f", "arguments": {"n": "a , b ?"}}</tool_call>')
    assert turn.calls[0].arguments == {"n": "a , b ?"}
    ids = tokenizer("a , b ?")["input_ids"]
    assert chat.parse(ids, SCHEMAS).message["content"] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'),
        ("json", '<tool_call>\n\n {"arguments": {"n": 1}, "name": "f"} </tool_call>'),
        ("json", '<tool_call>\n{"name": "f", "arguments": "{\\"n\\": 1}"}\n</tool_call>'),
        ("json", '<tool_call>\n{"function": {"name": "f", "arguments": {"n": 1}}}\n</tool_call>'),
        ("json", '<tool_call>\n{"id": 7, "function": "f", "arguments": {"n": 1}}\n</tool_call>'),
        ("json", '<tool_call>\n[{"name": "f", "arguments": {"n": 1}}]\n</tool_call>'),
        ("xml", "<tool_call><function=f><parameter=n>1</parameter></function></tool_call>"),
        ("pairs", "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"),
        ("bare", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}'),
        ("bare", '\n{"type": "function", "name": "f", "parameters": {"n": 1}}'),
        ("list", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}}]'),
        ("list", '[TOOL_CALLS]{"name": "f", "arguments": {"n": 1}}'),
        ("channels", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>'),
        ("channels", ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>'),
        ("braces", "<|tool_call>call:f{n: 1}<tool_call|>"),
        ("python", "<|tool_call_start|>f(n=1)<|tool_call_end|>"),
    ],
)
def test_small_differences_in_writing_do_not_matter(families: Any, byte_tokenizer: Any, name: str, text: str) -> None:
    turn = parse(chat_of(families, byte_tokenizer, name), text)
    assert turn.calls == [F]
    assert turn.message["content"] == ""


def test_bare_calls_may_follow_each_other_and_other_objects_are_text(families: Any, byte_tokenizer: Any) -> None:
    chat = chat_of(families, byte_tokenizer, "bare")
    call = '{"name": "f", "parameters": {"n": 1}}'
    assert parse(chat, f"{call}; {call}\n{call}").calls == [F, F, F]
    for text in ('{"name": "Ada"}', '{"answer": [1]}', "[1, 2]", "{", f"I could say {call}"):
        turn = parse(chat, text)
        assert (turn.calls, turn.message["content"]) == ([], text)


@pytest.mark.parametrize("name", ["json", "json, thinking", "xml"])
def test_reasoning_is_split_off(families: Any, byte_tokenizer: Any, name: str) -> None:
    chat = chat_of(families, byte_tokenizer, name)
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    if name == "xml":
        call = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
    # The generation prompt of the XML template opens the block.
    opening = "" if name == "xml" else "<think>\n"
    turn = parse(chat, f"{opening}one {call} no\n</think>\n\nSo:\n{call}<|im_end|>")
    assert turn.message["reasoning_content"] == f"one {call} no"
    assert turn.message["content"] == "So:"
    assert turn.calls == [F]
    assert parse(chat, f"{opening}a\n</think>\n\nb").message == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "a",
    }


def test_a_block_that_is_not_closed_is_text(families: Any, byte_tokenizer: Any) -> None:
    for name in ("json, thinking", "xml"):
        turn = parse(chat_of(families, byte_tokenizer, name), "<think>\nhm")
        assert turn.message == {"role": "assistant", "content": "<think>\nhm"}


def test_channels_are_taken_apart(families: Any, byte_tokenizer: Any) -> None:
    chat = chat_of(families, byte_tokenizer, "channels")
    start = "<|start|>assistant"
    turn = parse(
        chat,
        f"<|channel|>analysis<|message|>one<|end|>{start}<|channel|>analysis<|message|>two<|end|>"
        f"{start}<|channel|>commentary<|message|>I look.<|end|>"
        f'{start}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"n": 1}}<|call|>',
    )
    assert turn.message["reasoning_content"] == "one\ntwo"
    assert turn.message["content"] == "I look."
    assert turn.calls == [F]
    final = parse(chat, f"<|channel|>analysis<|message|>hm<|end|>{start}<|channel|>final<|message|>4<|return|>")
    assert final.message == {"role": "assistant", "content": "4", "reasoning_content": "hm"}


def test_a_parser_given_by_the_user_wins(families: Any, byte_tokenizer: Any) -> None:
    seen: list[Any] = []

    def parser(text: str, ids: list[int]) -> dict[str, Any]:
        seen.append((text, ids))
        return {"content": "c", "thinking": "t", "tool_calls": [{"name": "f", "arguments": '{"n": 1}'}, {"name": 3}]}

    chat = chat_of(families, byte_tokenizer, "json", response_parser=parser)
    ids = chat._tokenizer("<|im_start|>call f<|im_end|>", add_special_tokens=False)["input_ids"]
    turn = chat.parse(ids, SCHEMAS)
    assert seen == [("<|im_start|>call f", ids)]
    assert turn.calls[0] == F and "no name" in (turn.calls[1].problem or "")
    assert turn.message == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "t",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}],
    }
    assert chat.name == "the response_parser given"


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (ValueError("no idea"), "ValueError: no idea"),
        ("text", "it returned a str"),
        (None, "it returned a NoneType"),
        ({"content": 5}, "its content is a int"),
    ],
)
def test_a_parser_that_fails_leaves_a_turn_of_text(
    families: Any, byte_tokenizer: Any, result: Any, problem: str
) -> None:
    def parser(text: str, ids: list[int]) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    turn = parse(chat_of(families, byte_tokenizer, "json", response_parser=parser), "hi<|im_end|>")
    assert turn.calls == []
    assert turn.message == {"role": "assistant", "content": "hi"}
    assert problem in (turn.problem or "")


def test_a_response_template_reads_calls_that_no_known_family_writes(families: Any, byte_tokenizer: Any) -> None:
    family = families["json"]
    template = family.template.replace("<tool_call>", "<act>").replace("</tool_call>", "</act>")
    tokenizer = byte_tokenizer(template, family.special)
    function = {"open_pattern": r"\s*<act>", "close": "</act>", "repeats": True, "content": "json"}
    function["transform"] = {"type": "function", "function": "{content}"}
    content = {"close": ["<|im_end|>"], "content": "text"}
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {"tool_calls": function, "content": content},
    }
    chat = ChatFormat(tokenizer, schemas=SCHEMAS)
    assert chat.name == "the tokenizer's response template"
    turn = parse(chat, 'So:\n<act>\n{"name": "f", "arguments": {"n": 1}}\n</act>')
    assert (turn.calls, turn.message["content"]) == ([F], "So:")
    assert parse(chat, " plain ").message == {"role": "assistant", "content": " plain "}
    broken = parse(chat, "<act>\n{x}\n</act>")
    assert broken.message["content"] == "<act>\n{x}\n</act>" and len(broken.calls) == 1
    assert "the tokenizer's response template failed: " in (broken.calls[0].problem or "")

    function["close"] = "]"
    with pytest.raises(ValueError, match=r"(?s)unknown syntax.*<act>.*response_parser=.*tokenizer.response_template"):
        ChatFormat(tokenizer, schemas=SCHEMAS)


def test_the_real_qwen3_template(qwen3: Any) -> None:
    tokenizer = qwen3
    chat = ChatFormat(tokenizer, schemas=SCHEMAS)
    assert chat.name == "JSON objects in <tool_call> tags"
    assert tokenizer.convert_ids_to_tokens(list(chat.end_ids)) == ["<|im_end|>"]
    assert chat.shows_tools
    user = {"role": "user", "content": "Add."}
    text = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call><|im_end|>'
    ids = tokenizer(text)["input_ids"]
    turn = chat.parse(ids, SCHEMAS)
    assert turn.calls == [F]
    assert (turn.message["content"], turn.message["reasoning_content"]) == ("I look.", "hm")
    reply = {"role": "tool", "name": "f", "content": "2", "tool_call_id": None}
    appended = chat.prompt_ids([user], SCHEMAS) + ids + chat.reply_ids(ids, [reply, reply])
    # The template keeps a turn with reasoning, and rewrites one without it once messages follow.
    assert appended == chat.prompt_ids([user, turn.message, reply, reply], SCHEMAS)
    answer = {"role": "assistant", "content": "4"}
    last, followed = (tokenizer.apply_chat_template([user, answer, *more], tokenize=False) for more in ([], [user]))
    assert "<think>" in last and "<think>" not in followed
    assert chat.reply_ids(ids[:-1], [reply])[0] == chat.end_ids[0]

    # Without thinking, the generation prompt closes the block.
    chat = ChatFormat(tokenizer, schemas=SCHEMAS, chat_template_kwargs={"enable_thinking": False})
    ids = tokenizer('<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call><|im_end|>')["input_ids"]
    reply = {"role": "tool", "name": "f", "content": "2", "tool_call_id": None}
    text = tokenizer.decode(chat.reply_ids(ids, [reply]))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert chat.parse(ids, SCHEMAS).message["content"] == ""
