"""Values of call arguments: JSON in several forms, and texts converted to the type in a schema."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.chat.values import decode_json, typed_value


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("7", {"type": "integer"}, 7),
        (" 7\n", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, "7.0"),
        ("7", {"type": "number"}, 7),
        ("-7.5e1", {"type": "number"}, -75.0),
        ("nan", {"type": "number"}, "nan"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("7", {"type": "string"}, "7"),
        (" a\n", {"type": "string"}, " a\n"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": [true]}', {"type": "object"}, {"a": [True]}),
        ('{"a": 1} x', {"type": "object"}, '{"a": 1} x'),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "string", "nullable": True}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {}, "2"),
        ("2", None, "2"),
    ],
)
def test_a_text_gets_the_type_of_its_parameter(text: str, schema: Any, expected: Any) -> None:
    got = typed_value(text, schema)
    assert got == expected and type(got) is type(expected)


def test_decoding_says_where_a_value_ends_and_what_is_wrong_with_it() -> None:
    assert decode_json('x {"a": "line\nbreak"} y', 1) == ({"a": "line\nbreak"}, 21)
    for text, problem in (('{"a": 1', "ends too early"), ('{"a": "b', "ends too early"), ("", "ends too early")):
        with pytest.raises(ValueError, match=problem):
            decode_json(text)
    with pytest.raises(ValueError, match=r"Expecting value at character 6 of '\{\"a\": x\}'"):
        decode_json('{"a": x}')
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_json("[" * 100_000)
