"""Functions that can be tools, their schemas, and the errors for those that cannot."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from example_tools import Shop, async_add, call_tool, multiply
from transformers.utils import get_json_schema

from groupgrad.chat import ToolCall
from groupgrad.concurrency.workers import Workers
from groupgrad.envs.tools import ToolBox, make_tools


def test_schemas_are_those_of_transformers():
    tools = make_tools([multiply, async_add])
    assert [tool.name for tool in tools] == ["multiply", "async_add"]
    assert [tool.schema for tool in tools] == [get_json_schema(multiply), get_json_schema(async_add)]
    assert tools[0].schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first integer."},
            "b": {"type": "integer", "description": "The second integer."},
        },
        "required": ["a", "b"],
    }
    assert ToolBox(tools).schemas == [tool.schema for tool in tools]


class Later:
    async def __call__(self, a: int) -> int:
        """Gives it later.

        Args:
            a: What is given.
        """
        return a


@pytest.mark.parametrize(
    "function, name, arguments, content",
    [
        (multiply, "multiply", {"a": 6, "b": 7}, "42"),
        (async_add, "async_add", {"a": 6, "b": 7}, "13"),
        (Shop().price, "price", {"item": "tea"}, "1.5"),
        (Shop().price, "price", {"item": "tea", "count": 2}, "3.0"),
        (Shop.hours, "hours", {}, "always"),
        (Shop(), "Shop", {"item": "tea"}, "bought tea"),
        (Later(), "Later", {"a": 3}, "3"),
        (functools.partial(multiply, b=7), "multiply", {"a": 6}, "42"),
        (functools.partial(multiply, 7), "multiply", {"b": 6}, "42"),
        (functools.partial(async_add, b=7), "async_add", {"a": 6}, "13"),
        (functools.lru_cache(multiply), "multiply", {"a": 6, "b": 7}, "42"),
    ],
)
def test_callables_of_all_kinds_can_be_called(workers: Workers, function: Any, name: str, arguments: Any, content: str):
    (tool,) = make_tools([function])
    assert tool.name == tool.schema["function"]["name"] == name
    assert set(tool.schema["function"]["parameters"]["properties"]) >= set(arguments)
    reply = call_tool(workers, [function], ToolCall(name, arguments))
    assert (reply.name, reply.content, reply.failed, reply.timed_out) == (name, content, False, False)
    if isinstance(function, functools.partial) and "b" in function.keywords:  # which the model cannot choose
        reply = call_tool(workers, [function], ToolCall(name, {**arguments, "b": 1}))
        assert reply.failed and reply.content == f"there is no argument 'b'. '{name}' takes: a (an integer)"


def made(signature: str, args: str | None = "a: It.", body: str = "return 1") -> Any:
    """A function `tool` with this signature; its docstring describes these `args`, None: it has none."""
    docstring = "" if args is None else f'"""Does it.\n\n    Args:\n        {args}\n    """\n    '
    names = dict(globals())
    exec(f"def tool({signature}):\n    {docstring}{body}", names)
    return names["tool"]


def odd_name() -> int:
    """Gives one."""
    return 1


odd_name.__name__ = "odd name"


@pytest.mark.parametrize(
    "function, error, words",
    [
        (made("a: int", None), ValueError, ["'tool' cannot be described", "no docstring", "Args:"]),
        (made("a, b: int", "a: It.\n        b: It."), ValueError, ["Argument a is missing a type hint"]),
        (made("a: int, b: int"), ValueError, ["no description for the argument 'b'", "Args:"]),
        (made("a: Shop"), ValueError, ["'tool' cannot be described", "Shop"]),
        (made("a: Unknown"), ValueError, ["'tool' cannot be described", "Unknown"]),
        (made("*a: int"), TypeError, ["'tool' takes '*a"]),
        (made("a: int, /"), TypeError, ["'tool' takes 'a"]),
        (odd_name, ValueError, ["tools[0] is named 'odd name'"]),
        (lambda a: a, ValueError, ["tools[0] is named '<lambda>'"]),
        (Shop, TypeError, ["tools[0] is <class", "environment_factory"]),
        ("multiply", TypeError, ["tools[0] is 'multiply'"]),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(function: Any, error: type[Exception], words: list[str]):
    with pytest.raises(error) as raised:
        make_tools([function])
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value)


def test_two_tools_of_one_name_are_refused():
    assert make_tools([]) == []
    with pytest.raises(ValueError, match="two tools named 'multiply'"):
        make_tools([multiply, async_add, functools.partial(multiply, b=2)])


# Schemas that a callable brings along


def with_schema(parameters: Any, name: str = "find") -> Any:
    def find(**arguments: Any) -> Any:
        return arguments

    find.__dict__["tool_schema"] = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return find


def test_a_ready_schema_is_what_the_model_reads(workers: Workers):
    parameters = {
        "type": "object",
        "properties": {"self": {"type": "string"}, "most": {"type": "integer", "default": None}, "any": True},
        "required": ["self"],
    }
    function = with_schema(parameters, name="other")
    (tool,) = make_tools([functools.partial(function)])
    # The name is the callable's, by which it is called.
    described = {"name": "find", "description": "", "parameters": parameters}
    assert tool.schema == {"type": "function", "function": described}
    for arguments in ({"self": "a"}, {"self": "a", "most": 3, "any": [1]}, {"self": "a", "most": None}):
        assert call_tool(workers, [function], ToolCall("find", arguments)).result == str(arguments)
    for arguments, problem in (
        (
            {},
            "the argument 'self' is missing. 'find' takes: self (a string), most (an integer, may be left out), any (",
        ),
        ({"self": 3}, "the argument 'self' must be a string, but is 3"),
        ({"self": "a", "b": 1}, "there is no argument 'b'"),
    ):
        assert call_tool(workers, [function], ToolCall("find", arguments)).content.startswith(problem)


def test_a_ready_schema_may_take_arguments_without_names(workers: Workers):
    for parameters in ({"additionalProperties": {"type": "string"}}, {"patternProperties": {"^x": {}}}):
        assert call_tool(workers, [with_schema(parameters)], ToolCall("find", {"x": "a"})).result == "{'x': 'a'}"
    (tool,) = make_tools([with_schema({})])
    assert tool.schema["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize("schema", [3, {"name": "find"}, {"function": {"parameters": {"properties": 3}}}])
def test_a_ready_schema_of_another_form(schema: Any):
    function = with_schema({})
    function.__dict__["tool_schema"] = schema
    with pytest.raises(ValueError, match=r"the tool 'find' has a tool_schema that is no schema of a function: .* Give"):
        make_tools([function])
