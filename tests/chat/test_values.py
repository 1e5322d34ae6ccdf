"""Values of call arguments: JSON in several forms, and texts converted to the type in a schema."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.chat.records import ToolCall
from groupgrad.chat.values import call_from_value, decode_json, parameter_schemas, typed_value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"name": "f", "arguments": {"a": 1}}, ToolCall("f", {"a": 1})),
        ({"name": "f", "parameters": {"a": 1}}, ToolCall("f", {"a": 1})),
        ({"name": "f", "arguments": '{"a": 1}'}, ToolCall("f", {"a": 1})),
        ({"name": "f", "arguments": None}, ToolCall("f")),
        ({"name": "f", "arguments": ""}, ToolCall("f")),
        ({"name": "f"}, ToolCall("f")),
        ({"type": "function", "id": "x1", "function": {"name": "f", "arguments": {}}}, ToolCall("f", {}, "x1")),
        ({"function": "f", "arguments": {"a": 1}, "id": 7}, ToolCall("f", {"a": 1})),
    ],
)
def test_a_call_may_be_written_in_several_ways(value: Any, expected: ToolCall) -> None:
    assert call_from_value(value) == expected


@pytest.mark.parametrize(
    ("value", "name", "problem"),
    [
        ({"arguments": {}}, "", "the call has no name: {'arguments': {}}"),
        ({"name": 5}, "", "the call has no name: {'name': 5}"),
        ("f", "", "a call must be a JSON object with a name and arguments, not 'f'"),
        ({"name": "f", "arguments": [1]}, "f", "the arguments of f must be a JSON object, not [1]"),
        ({"name": "f", "arguments": "{a}"}, "f", "the arguments of f are no valid JSON: "),
        ({"name": "f", "arguments": "5"}, "f", "the arguments of f must be a JSON object, not 5"),
    ],
)
def test_the_problem_of_a_malformed_call_is_named(value: Any, name: str, problem: str) -> None:
    call = call_from_value(value)
    assert (call.name, call.arguments) == (name, {})
    assert call.problem is not None and call.problem.startswith(problem)


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


def test_parameters_are_found_with_and_without_the_function_wrapper() -> None:
    inner = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    assert parameter_schemas([{"type": "function", "function": inner}]) == {"f": {"a": {"type": "integer"}}}
    assert parameter_schemas([inner, {"name": "g"}]) == {"f": {"a": {"type": "integer"}}, "g": {}}
