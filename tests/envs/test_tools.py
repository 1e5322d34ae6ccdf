"""Tools: what functions are taken, and what the model is answered."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import pathlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.utils import get_json_schema

from groupgrad.concurrency.workers import Workers
from groupgrad.envs.tools import Tool, ToolBox, ToolOptions, ToolReply, make_tools

OPTIONS = ToolOptions(timeout_s=5.0)
HASTY = ToolOptions(timeout_s=0.2)


@dataclass
class Call:
    name: str
    arguments: Any = field(default_factory=dict)
    problem: str | None = None


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(4, blocked_s=0.2)
    yield pool
    pool.close()


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b


def returning(value: Any) -> Any:
    """A tool that returns `value`."""

    def give() -> str:
        """Gives it."""
        return value

    return give


def ask(workers: Workers, tools: Any, call: Call, options: ToolOptions = OPTIONS) -> ToolReply:
    return ToolBox(make_tools(tools)).call(call, workers, options).result(10)


# What functions are taken


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


class Shop:
    """A shop."""

    def price(self, item: str, count: int = 1) -> float:
        """What something costs.

        Args:
            item: What it is.
            count: How many of it.
        """
        return count * len(item) / 2

    def __call__(self, item: str) -> str:
        """Buys something.

        Args:
            item: What it is.
        """
        return f"bought {item}"

    @staticmethod
    def hours() -> str:
        """When it is open."""
        return "always"


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
    reply = ask(workers, [function], Call(name, arguments))
    assert (reply.name, reply.content, reply.failed, reply.timed_out, reply.images) == (name, content, False, False, [])


def test_what_a_partial_has_set_is_not_the_models_to_choose(workers: Workers):
    reply = ask(workers, [functools.partial(multiply, b=7)], Call("multiply", {"a": 6, "b": 1}))
    assert reply.failed
    assert reply.content == "there is no argument 'b'. 'multiply' takes: a (an integer)"


def no_docstring(a: int) -> int:
    return a


def no_hint(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Adds.

    Args:
        a: First.
        b: Second.
    """
    return a + b


def not_described(a: int, b: int) -> int:
    """Adds.

    Args:
        a: First.
    """
    return a + b


def types_in_brackets(a: int) -> int:
    """Gives it.

    Args:
        a (int): What is given.
    """
    return a


def strange_hint(a: Shop) -> int:
    """Visits.

    Args:
        a: The shop.
    """
    return 1


def unknown_hint(a: Unknown) -> int:  # type: ignore[name-defined] # noqa: F821
    """Visits.

    Args:
        a: The shop.
    """
    return 1


def starred(*items: int) -> int:
    """Adds.

    Args:
        items: What.
    """
    return sum(items)


def double_starred(**items: int) -> int:
    """Adds.

    Args:
        items: What.
    """
    return sum(items.values())


def by_position(a: int, /) -> int:
    """Gives it.

    Args:
        a: What.
    """
    return a


def yielding(a: int) -> Any:
    """Gives it.

    Args:
        a: What.
    """
    yield a


def odd_name() -> int:
    """Gives one."""
    return 1


odd_name.__name__ = "odd name"


@pytest.mark.parametrize(
    "function, error, words",
    [
        (no_docstring, ValueError, ["'no_docstring' has no docstring", "Args:"]),
        (no_hint, ValueError, ["'no_hint' has no type hint for the argument 'a'", "'a: int'"]),
        (not_described, ValueError, ["'not_described' does not describe the argument 'b'", "Args:"]),
        (types_in_brackets, ValueError, ["does not describe the argument 'a'", "without a type in brackets"]),
        (strange_hint, ValueError, ["'strange_hint' cannot be described", "Shop"]),
        (unknown_hint, ValueError, ["'unknown_hint' has a type hint that cannot be read", "Unknown"]),
        (starred, TypeError, ["'starred' takes *items"]),
        (double_starred, TypeError, ["'double_starred' takes **items"]),
        (by_position, TypeError, ["'by_position' takes 'a' by position only"]),
        (yielding, TypeError, ["'yielding' yields"]),
        (odd_name, ValueError, ["tools[0] is named 'odd name'"]),
        (lambda a: a, TypeError, ["tools[0] is a lambda"]),
        (functools.partial(lambda a, b: a, b=1), TypeError, ["tools[0] is a lambda"]),
        (Shop, TypeError, ["tools[0] is the class 'Shop'", "environment_factory"]),
        ({"type": "function"}, TypeError, ["tools[0] is a dict"]),
        ("multiply", TypeError, ["tools[0] is 'multiply'"]),
    ],
)
def test_what_cannot_be_a_tool_is_refused(function: Any, error: type[Exception], words: list[str]):
    with pytest.raises(error) as raised:
        make_tools([function])
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools named 'multiply'"):
        make_tools([multiply, async_add, functools.partial(multiply, b=2)])


@pytest.mark.parametrize("tools", [multiply, "multiply", {"multiply": multiply}, 3])
def test_tools_that_are_no_list_are_refused(tools: Any):
    with pytest.raises(TypeError, match="tools is a list of functions"):
        make_tools(tools)


def test_no_tools():
    assert make_tools(None) == make_tools([]) == []


# What is wrong with a call


def test_a_call_of_no_tool(workers: Workers):
    reply = ask(workers, [multiply, async_add], Call("divide", {"a": 1}))
    assert reply == ToolReply("divide", "there is no tool 'divide'; the tools are: multiply, async_add", failed=True)
    assert ask(workers, [], Call("divide")).content == "there is no tool 'divide'; there are no tools"


def test_a_call_with_a_problem(workers: Workers):
    reply = ask(workers, [multiply], Call("multiply", {}, problem="the arguments are not valid JSON"))
    assert reply == ToolReply("multiply", "the arguments are not valid JSON", failed=True)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def many(
    i: int = 0,
    x: float = 0.0,
    s: str = "",
    b: bool = False,
    ints: list[int] = [],  # noqa: B006
    pair: tuple[int, str] = (0, ""),
    table: dict[str, float] = {},  # noqa: B006
    maybe: int | None = 0,
    either: int | str = 0,
    lists: list[int] | dict[str, int] = [],  # noqa: B006
    unit: Literal["km", 1] = "km",
    colour: Colour = Colour.RED,
    drink: str = "tea",
    anything: Any = 0,
    absent: str = None,  # type: ignore[assignment] # noqa: RUF013
) -> str:
    """Takes many.

    Args:
        i: It.
        x: It.
        s: It.
        b: It.
        ints: It.
        pair: It.
        table: It.
        maybe: It.
        either: It.
        lists: It.
        unit: It.
        colour: It.
        drink: It (choices: ["tea", "coffee"])
        anything: It.
        absent: It.
    """
    return "ok"


@pytest.mark.parametrize(
    "name, value",
    [
        ("i", 3),
        ("x", 3),
        ("x", 2.5),
        ("s", "a"),
        ("b", True),
        ("ints", []),
        ("ints", [1, 2]),
        ("pair", [1, "a"]),
        ("table", {"a": 1, "b": 2.5}),
        ("maybe", None),
        ("maybe", 4),
        ("either", "a"),
        ("either", 1),
        ("lists", [1]),
        ("lists", {"a": 1}),
        ("unit", "km"),
        ("unit", 1),
        ("colour", "blue"),
        ("drink", "coffee"),
        ("anything", [None]),
        ("absent", None),
    ],
)
def test_arguments_that_fit(workers: Workers, name: str, value: Any):
    assert ask(workers, [many], Call("many", {name: value})).content == "ok"


@pytest.mark.parametrize(
    "name, value, problem",
    [
        ("i", "3", "'i' must be an integer, but is \"3\""),
        ("i", 3.0, "'i' must be an integer, but is 3.0"),
        ("i", True, "'i' must be an integer, but is true"),
        ("i", None, "'i' must be an integer, but is null"),
        ("x", "1.5", "'x' must be a number, but is \"1.5\""),
        ("x", False, "'x' must be a number, but is false"),
        ("s", 3, "'s' must be a string, but is 3"),
        ("b", 1, "'b' must be a boolean, but is 1"),
        ("ints", 1, "'ints' must be an array with an integer at each place, but is 1"),
        ("ints", [1, "2"], "'ints'[1] must be an integer, but is \"2\""),
        ("pair", [1], "'pair' must have 2 values, but has 1: [1]"),
        ("pair", [1, 2], "'pair'[1] must be a string, but is 2"),
        ("table", {"a": "b"}, "'table'['a'] must be a number, but is \"b\""),
        ("table", [], "'table' must be an object, but is []"),
        ("maybe", "4", "'maybe' must be an integer or null, but is \"4\""),
        ("either", 1.5, "'either' must be an integer or a string, but is 1.5"),
        ("lists", ["a"], "'lists' must be"),
        ("unit", "mile", '\'unit\' must be one of "km", 1, but is "mile"'),
        ("unit", True, "'unit' must be one of \"km\", 1, but is true"),
        ("colour", "RED", '\'colour\' must be one of "red", "blue", but is "RED"'),
        ("drink", "milk", '\'drink\' must be one of "tea", "coffee", but is "milk"'),
        ("s", ["x" * 900], "x..."),
    ],
)
def test_arguments_that_do_not_fit(workers: Workers, name: str, value: Any, problem: str):
    reply = ask(workers, [many], Call("many", {name: value}))
    assert (reply.failed, reply.timed_out, reply.seconds) == (True, False, 0.0)
    assert problem in reply.content
    assert len(reply.content) < 320


@pytest.mark.parametrize(
    "arguments, content",
    [
        ({"a": 1}, "the argument 'b' is missing. 'multiply' takes: a (an integer), b (an integer)"),
        ({}, "the argument 'a' is missing; the argument 'b' is missing. 'multiply' takes: a (an integer), b"),
        ({"a": 1, "b": 2, "c": 3}, "there is no argument 'c'. 'multiply' takes: a (an integer), b (an integer)"),
        ([1, 2], "the arguments must be an object with a value for each name, but are [1, 2]"),
        (None, "the arguments must be an object with a value for each name, but are null"),
    ],
)
def test_arguments_of_wrong_names(workers: Workers, arguments: Any, content: str):
    reply = ask(workers, [multiply], Call("multiply", arguments))
    assert reply.failed
    assert content in reply.content


def test_a_tool_without_arguments_says_so(workers: Workers):
    content = ask(workers, [returning("x")], Call("give", {"a": 1})).content
    assert content == "there is no argument 'a'. 'give' takes no arguments"


def test_arguments_that_may_be_left_out_are_named_as_such(workers: Workers):
    content = ask(workers, [Shop().price], Call("price")).content
    assert content.endswith("'price' takes: item (a string), count (an integer, may be left out)")


# How a call ends


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error, content",
    [
        (ValueError("no such city"), "Error: ValueError: no such city"),
        (KeyError("x"), "Error: KeyError: 'x'"),
        (ZeroDivisionError(), "Error: ZeroDivisionError"),
        (SystemExit(2), "Error: SystemExit: 2"),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt"),
        (TimeoutError("the server's"), "Error: TimeoutError: the server's"),
        (Unprintable(), "Error: Unprintable"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_raises(workers: Workers, error: BaseException, content: str, is_async: bool):
    def fail() -> str:
        """Fails."""
        raise error

    async def fail_later() -> str:
        """Fails."""
        raise error

    function = fail_later if is_async else fail
    reply = ask(workers, [function], Call(function.__name__))
    assert (reply.content, reply.failed, reply.timed_out) == (content, True, False)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_hangs(workers: Workers, is_async: bool):
    event = threading.Event()

    def hang() -> str:
        """Hangs."""
        event.wait()
        return "late"

    async def hang_async() -> str:
        """Hangs."""
        await asyncio.Event().wait()
        return "late"

    function = hang_async if is_async else hang
    reply = ask(workers, [function], Call(function.__name__), HASTY)
    event.set()
    assert (reply.content, reply.failed, reply.timed_out) == ("Error: no answer within 0.2 seconds", True, True)
    assert 0.2 <= reply.seconds < 2


def test_replies_are_in_the_order_of_the_calls_whatever_ends_first(workers: Workers):
    def slow(a: int) -> int:
        """Slow.

        Args:
            a: It.
        """
        time.sleep(0.4)
        return a

    box = ToolBox(make_tools([slow, async_add, multiply]))
    calls = [Call("slow", {"a": 1}), Call("async_add", {"a": 1, "b": 1}), Call("nothing"), Call("slow", {"a": 4})]
    began = time.monotonic()
    futures = [box.call(call, workers, OPTIONS) for call in calls]
    replies = [future.result(5) for future in futures]
    assert [reply.name for reply in replies] == ["slow", "async_add", "nothing", "slow"]
    assert [reply.content for reply in replies if not reply.failed] == ["1", "2", "4"]
    assert time.monotonic() - began < 0.75  # the two slow ones ran side by side


# Results


@dataclasses.dataclass
class Point:
    x: int
    where: pathlib.PurePosixPath


class Text(str):
    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    "value, content",
    [
        ("as it is", "as it is"),
        ("", ""),
        (Text("plain"), "plain"),
        (None, "null"),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        ([("Ada", 36), ("Alan", 41)], '[["Ada", 36], ["Alan", 41]]'),
        ([], "[]"),
        (["a", 1], '["a", 1]'),
        (("a", None), '["a", null]'),
        ({"name": "Zoë", 1: [2]}, '{"name": "Zoë", "1": [2]}'),
        ([{"type": "text", "id": 3}], '[{"type": "text", "id": 3}]'),
        ([{"type": "image", "id": 3}], '[{"type": "image", "id": 3}]'),
        (Point(1, pathlib.PurePosixPath("/a")), '{"x": 1, "where": "/a"}'),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        (datetime.datetime(2024, 1, 2, 3, 4), '"2024-01-02T03:04:00"'),
        ([datetime.date(2024, 1, 2)], '["2024-01-02"]'),
        ([decimal.Decimal("1.5"), decimal.Decimal("12")], "[1.5, 12]"),
        (Colour.RED, "red"),
        ({"colour": Colour.RED}, '{"colour": "red"}'),
        (np.float64(0.5), "0.5"),
        (np.int32(5), "5"),
        (np.arange(3), "[0, 1, 2]"),
        (torch.tensor(7), "7"),
        (torch.tensor([[1.5]]), "[[1.5]]"),
        ({"a": np.bool_(True)}, '{"a": true}'),
        (b"bytes \xc3\xab", "bytes ë"),
        ("\ud800x", "?x"),
        ([{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}], "two parts"),
    ],
)
def test_results_reach_the_model_as_text(workers: Workers, value: Any, content: str):
    reply = ask(workers, [returning(value)], Call("give"))
    assert (reply.content, reply.failed) == (content, False)
    assert type(reply.content) is str


def test_what_json_has_no_form_for_is_an_error_and_said_once(workers: Workers, caplog: pytest.LogCaptureFixture):
    circle: list[Any] = []
    circle.append(circle)
    tools = make_tools([returning(threading.Lock())])
    with caplog.at_level(logging.WARNING):
        replies = [ToolBox(tools).call(Call("give"), workers, OPTIONS).result(5) for _ in range(3)]
    assert all(reply.failed for reply in replies)
    assert replies[0].content == "Error: the tool returned a lock, which cannot be written as JSON"
    assert len([record for record in caplog.records if "'give' returned a lock" in record.getMessage()]) == 1
    for value, kind in [(object(), "object"), (b"\xff", "bytes"), (circle, "list"), ({(1, 2): 3}, "dict")]:
        reply = ask(workers, [returning(value)], Call("give"))
        assert (reply.content, reply.failed) == (
            f"Error: the tool returned a {kind}, which cannot be written as JSON",
            True,
        )


def test_images_stay(workers: Workers):
    image = Image.new("RGB", (2, 2))
    blocks = [{"type": "text", "text": "here:"}, {"type": "image", "image": image}, {"type": "image", "url": "a.png"}]
    reply = ask(workers, [returning(blocks)], Call("give"))
    assert reply.content == blocks
    assert reply.images == [image, "a.png"]
    assert reply.images[0] is image
    alone = ask(workers, [returning(image)], Call("give"))
    assert alone.content == [{"type": "image", "image": image}]
    assert alone.images == [image]


def test_a_long_result_is_cut_with_a_notice(workers: Workers):
    short = ToolOptions(max_result_chars=10)
    assert ask(workers, [returning("0123456789")], Call("give"), short).content == "0123456789"
    reply = ask(workers, [returning("0123456789ab")], Call("give"), short)
    assert (reply.content, reply.failed) == ("0123456789\n[cut: 10 characters of 12 shown]", False)
    assert ask(workers, [returning([1] * 9)], Call("give"), short).content.startswith("[1, 1, 1, \n[cut: 10 characters")
    million = ask(workers, [returning("x" * 1_000_000)], Call("give")).content
    assert million == "x" * 20_000 + "\n[cut: 20000 characters of 1000000 shown]"


def test_a_long_error_is_cut_too(workers: Workers):
    def fail() -> str:
        """Fails."""
        raise ValueError("y" * 100)

    reply = ask(workers, [fail], Call("fail"), ToolOptions(max_result_chars=30))
    assert reply.content == f"Error: ValueError: {'y' * 11}\n[cut: 30 characters of 119 shown]"


def test_the_texts_of_blocks_are_cut_together(workers: Workers):
    image = Image.new("RGB", (2, 2))
    show = {"type": "image", "image": image}
    blocks = [{"type": "text", "text": text} for text in ("abc", "defgh", "ij")]
    value = [blocks[0], show, *blocks[1:], show]
    reply = ask(workers, [returning(value)], Call("give"), ToolOptions(max_result_chars=5))
    cut = {"type": "text", "text": "de\n[cut: 5 characters of 10 shown]"}
    assert reply.content == [blocks[0], show, cut, show]
    assert reply.images == [image, image]


class Slow(dict[str, int]):
    """Takes long to be written."""

    def items(self) -> Any:
        time.sleep(1.0)
        return super().items()


def test_writing_a_result_counts_towards_the_deadline(workers: Workers):
    def give() -> Any:
        """Gives it."""
        return functools.reduce(lambda inner, _: [inner], range(10), Slow(a=1))

    began = time.monotonic()
    assert ask(workers, [give], Call("give"), HASTY).timed_out
    assert time.monotonic() - began < 0.9


# Methods of an environment


class Held:
    """A holder with a script of problems."""

    def __init__(self, problems: list[str | None] | None = None):
        self.problems = problems or []
        self.log: list[Any] = []

    def method(self, name: str) -> Any:
        def run(a: int) -> int:
            self.log.append(("begin", a))
            time.sleep(0.5 if a < 0 else 0.02)
            self.log.append(("end", a))
            return a

        return run

    def problem(self) -> str | None:
        return self.problems.pop(0) if self.problems else None

    def spoil(self) -> None:
        self.log.append("spoiled")


def step(a: int) -> int:
    """Steps.

    Args:
        a: How far.
    """
    raise AssertionError("the holder's method is called instead")


def method_tools() -> list[Tool]:
    return make_tools([step])


def test_methods_of_an_environment_are_called_one_after_another(workers: Workers):
    held = Held()
    box = ToolBox(make_tools([multiply]), method_tools(), held)
    assert [schema["function"]["name"] for schema in box.schemas] == ["multiply", "step"]
    assert (box.is_own("step"), box.is_own("multiply"), box.is_own("nothing")) == (True, False, False)
    futures = [box.call(Call("step", {"a": a}), workers, OPTIONS) for a in range(4)]
    other = box.call(Call("multiply", {"a": 6, "b": 7}), workers, OPTIONS)
    assert [future.result(5).content for future in futures] == ["0", "1", "2", "3"]
    assert held.log == [(what, a) for a in range(4) for what in ("begin", "end")]
    assert other.result(5).content == "42"


def test_a_method_that_hangs_spoils_the_environment_before_the_next_call(workers: Workers):
    held = Held([None, "it is busy"])
    box = ToolBox((), method_tools(), held)
    first, second = (box.call(Call("step", {"a": a}), workers, HASTY) for a in (-1, 2))
    assert first.result(5).timed_out
    assert second.result(5) == ToolReply("step", "Error: it is busy", failed=True)
    assert held.log[:2] == [("begin", -1), "spoiled"]


def test_a_holder_that_fails_is_a_reply(workers: Workers):
    class Broken(Held):
        def method(self, name: str) -> Any:
            raise AttributeError(f"there is no {name}")

    reply = ToolBox((), method_tools(), Broken()).call(Call("step", {"a": 1}), workers, OPTIONS).result(5)
    assert (reply.content, reply.failed) == ("Error: AttributeError: there is no step", True)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"timeout_s": 0}, "tool_timeout_s=0"),
        ({"timeout_s": float("inf")}, "tool_timeout_s=inf"),
        ({"timeout_s": float("nan")}, "tool_timeout_s=nan"),
        ({"max_result_chars": 0}, "tool_max_result_chars=0"),
        ({"num_threads": 0}, "tool_threads=0"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        ToolOptions(**changes)
