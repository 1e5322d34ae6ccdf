"""Formats of all template families: what is recognised, round trips of calls, and replies that continue a turn."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from groupgrad.chat import ChatFormat

USER = {"role": "user", "content": "How many?"}
TYPES = {"count": "integer", "ratio": "number", "note": "string", "flag": "boolean", "items": "array", "more": "object"}


def schema(name: str, types: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": "a value"} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


SCHEMAS = [schema("add_all", TYPES), schema("look_up", {"note": "string"})]


def assistant(tokenizer: Any, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> dict[str, Any]:
    """An assistant message with calls; arguments are JSON text if the template requires it."""
    as_text = "+ c.function.arguments + " in tokenizer.chat_template
    entries = []
    for number, (name, arguments) in enumerate(calls):
        value = json.dumps(arguments) if as_text else arguments
        entries.append({"type": "function", "id": f"abcdefgh{number}", "function": {"name": name, "arguments": value}})
    return {"role": "assistant", "content": content, "tool_calls": entries}


def turn_ids(tokenizer: Any, message: dict[str, Any], end: str) -> list[int]:
    """Ids that a model would sample for the message, end token included."""
    kwargs = {"tools": SCHEMAS, "tokenize": False}
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **kwargs)
    whole = tokenizer.apply_chat_template([USER, message], **kwargs)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :]
    text = text[: text.rindex(end) + len(end)] if end in text else text + end
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def random_value(rng: random.Random, kind: str) -> Any:
    texts = [
        "",
        "two words",
        'a "quoted" one',
        "line\nbreak",
        "  padded ",
        "5",
        "true",
        "{not json",
        "é 漢 🙂",
        "a<b>c",
    ]
    if kind == "integer":
        return rng.randint(-999, 10**12)
    if kind == "number":
        return rng.choice([rng.uniform(-5, 5), -3.0, 1e-7])
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [random_value(rng, rng.choice(["integer", "string", "boolean"])) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        return {
            f"k{i}": random_value(rng, rng.choice(["integer", "string", "array"])) for i in range(rng.randint(0, 3))
        }
    return rng.choice(texts)


def random_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.4:
        return "look_up", {"note": random_value(rng, "string")}
    chosen = rng.sample(sorted(TYPES), rng.randint(0, len(TYPES)))
    return "add_all", {key: random_value(rng, TYPES[key]) for key in chosen}


def same_types(first: Any, second: Any) -> bool:
    """True if equal values have equal types at every level, as 1 == True == 1.0 in Python."""
    if isinstance(first, dict):
        return isinstance(second, dict) and all(same_types(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return isinstance(second, list) and all(map(same_types, first, second))
    return type(first) is type(second)


@pytest.fixture(scope="module")
def format_of(byte_tokenizer: Any) -> Callable[[Any], tuple[Any, ChatFormat]]:
    """Tokenizer and format of a family, made once."""

    @functools.cache
    def make(family: Any) -> tuple[Any, ChatFormat]:
        tokenizer = byte_tokenizer(family.template, family.special, family.added)
        return tokenizer, ChatFormat(tokenizer, schemas=SCHEMAS)

    return make


def test_a_format_is_recognised_by_its_template(family: Any, format_of: Any) -> None:
    tokenizer, chat = format_of(family)
    assert family.name in chat.name
    assert tokenizer.convert_ids_to_tokens(list(chat.end_ids)) == list(family.ends)
    assert chat.shows_tools
    expected = tokenizer.apply_chat_template([USER], tools=SCHEMAS, add_generation_prompt=True)["input_ids"]
    assert chat.prompt_ids([USER], SCHEMAS) == expected


def test_rendered_calls_are_read_back(family: Any, format_of: Any) -> None:
    tokenizer, chat = format_of(family)
    rng = random.Random(7)
    for _ in range(40):
        calls = [random_call(rng) for _ in range(rng.randint(1, 3 if family.several else 1))]
        content = rng.choice(["", "Let me see."]) if family.content else ""
        ids = turn_ids(tokenizer, assistant(tokenizer, calls, content), family.ends[0])
        turn = chat.parse(ids, SCHEMAS)
        assert [(call.name, call.arguments, call.problem) for call in turn.calls] == [(*call, None) for call in calls]
        assert same_types([call.arguments for call in turn.calls], [arguments for _, arguments in calls])
        assert turn.message["content"] == content
        functions = [entry["function"] for entry in turn.message["tool_calls"]]
        assert functions == [{"name": name, "arguments": arguments} for name, arguments in calls]


def test_ids_of_calls_are_kept_where_the_syntax_has_them(families: Any, format_of: Any) -> None:
    for name in ("list", "args"):
        tokenizer, chat = format_of(families[name])
        message = assistant(tokenizer, [("look_up", {"note": "x"}), ("look_up", {"note": "y"})])
        turn = chat.parse(turn_ids(tokenizer, message, "</s>"), SCHEMAS)
        assert [call.id for call in turn.calls] == ["abcdefgh0", "abcdefgh1"]
        assert [entry["id"] for entry in turn.message["tool_calls"]] == ["abcdefgh0", "abcdefgh1"]


def test_a_reply_continues_a_turn(family: Any, format_of: Any) -> None:
    tokenizer, chat = format_of(family)
    ids = turn_ids(tokenizer, assistant(tokenizer, [("look_up", {"note": "x"})]), family.ends[0])
    reply = {"role": "tool", "name": "look_up", "content": "OK", "tool_call_id": "abcdefgh1"}
    assert tokenizer.decode(chat.reply_ids(ids, [reply])) == family.reply
    assert tokenizer.decode(chat.reply_ids(ids[:-1], [reply])) == family.ends[0] + family.reply  # its end was missing
    for name, call_id in (('a"} b', None), ("", "x"), ("</tool_call>", "much too long an id")):
        strange = {"role": "tool", "name": name, "content": "OK7", "tool_call_id": call_id}
        assert "OK7" in tokenizer.decode(chat.reply_ids([], [strange]))


def test_appended_ids_are_the_rendered_conversation(family: Any, format_of: Any) -> None:
    """Prompt + turn + reply equals one rendering, unless the template rewrites earlier turns."""
    tokenizer, chat = format_of(family)
    rng = random.Random(3)
    contents = ["5", "é\n\nx", "<tool_call>"]
    for _ in range(10):
        calls = [random_call(rng) for _ in range(rng.randint(1, 2 if family.several else 1))]
        message = assistant(tokenizer, calls)
        replies = [
            {
                "role": "tool",
                "name": name,
                "content": rng.choice(contents),
                "tool_call_id": f"abcdefgh{i}",
            }
            for i, (name, _) in enumerate(calls)
        ]
        ids = turn_ids(tokenizer, message, family.ends[0])
        appended = chat.prompt_ids([USER], SCHEMAS) + ids + chat.reply_ids(ids, replies)
        rendered = chat.prompt_ids([USER, message, *replies], SCHEMAS)
        assert (appended == rendered) == family.keeps_history


def test_text_without_calls_is_the_decoded_text(family: Any, format_of: Any) -> None:
    tokenizer, chat = format_of(family)
    for text in ("  4 \n", "", "a {x: 1} [b] <b>bold</b>", '{"answer": 4}', "<think> no end"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [chat.end_ids[-1]]
        turn = chat.parse(ids, SCHEMAS)
        assert turn.calls == []
        assert turn.message == {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    eos, ids = [tokenizer.eos_token_id], tokenizer("one", add_special_tokens=False)["input_ids"]
    assert chat.parse(ids + eos + ids + eos + eos, SCHEMAS).message["content"] == "oneone"


def test_another_end_of_turn_token_ends_a_turn_too(families: Any, format_of: Any) -> None:
    tokenizer, chat = format_of(families["bare"])
    reply = {"role": "tool", "name": "look_up", "content": "OK", "tool_call_id": None}
    ended = [5, tokenizer.convert_tokens_to_ids("<|eom_id|>")]
    assert tokenizer.decode(chat.reply_ids(ended, [reply])) == families["bare"].reply
