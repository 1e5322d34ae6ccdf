"""Tool calls: wrong calls, the ends of calls, results for the model, and methods of an environment."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from example_tools import HASTY, PATIENT, Shop, async_add, call_tool, multiply, returning
from PIL import Image

from groupgrad.chat import ToolCall
from groupgrad.concurrency.workers import Workers
from groupgrad.envs.tools import Tool, ToolBox, ToolOptions, ToolReply, make_tools

# What is wrong with a call


def test_a_call_that_cannot_be_made(workers: Workers):
    tools = [multiply, async_add, returning("x"), Shop().price]
    for call, content in [
        (ToolCall("divide", {"a": 1}), "there is no tool 'divide'; the tools are: multiply, async_add, give, price"),
        (ToolCall("multiply", {}, problem="the arguments are not valid JSON"), "the arguments are not valid JSON"),
        (ToolCall("give", {"a": 1}), "there is no argument 'a'. 'give' takes no arguments"),
        (
            ToolCall("price"),
            "the argument 'item' is missing. 'price' takes: item (a string), count (an integer, may be left out)",
        ),
    ]:
        assert call_tool(workers, tools, call) == ToolReply(call.name, content, failed=True)
    assert call_tool(workers, [], ToolCall("divide")).content == "there is no tool 'divide'; there are no tools"


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


def test_arguments_that_fit(workers: Workers):
    for name, value in (
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
    ):
        assert call_tool(workers, [many], ToolCall("many", {name: value})).content == "ok", (name, value)


def test_arguments_that_do_not_fit(workers: Workers):
    for name, value, problem in (
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
    ):
        reply = call_tool(workers, [many], ToolCall("many", {name: value}))
        assert (reply.failed, reply.timed_out, reply.seconds) == (True, False, 0.0)
        assert problem in reply.content
        assert len(reply.content) < 320
    for arguments, content in (
        ({"a": 1}, "the argument 'b' is missing. 'multiply' takes: a (an integer), b (an integer)"),
        ({}, "the argument 'a' is missing; the argument 'b' is missing. 'multiply' takes: a (an integer), b"),
        ({"a": 1, "b": 2, "c": 3}, "there is no argument 'c'. 'multiply' takes: a (an integer), b (an integer)"),
        ([1, 2], "the arguments must be an object with a value for each name, but are [1, 2]"),
        (None, "the arguments must be an object with a value for each name, but are null"),
    ):
        reply = call_tool(workers, [multiply], ToolCall("multiply", arguments))
        assert reply.failed
        assert content in reply.content


# How a call ends


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_tool_that_raises(workers: Workers):
    def fail(error: BaseException) -> Any:
        def fail() -> str:
            """Fails."""
            raise error

        async def fail_later() -> str:
            """Fails."""
            raise error

        return fail, fail_later

    for error, content in (
        (ValueError("no such city"), "Error: ValueError: no such city"),
        (KeyError("x"), "Error: KeyError: 'x'"),
        (ZeroDivisionError(), "Error: ZeroDivisionError"),
        (SystemExit(2), "Error: SystemExit: 2"),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt"),
        (TimeoutError("the server's"), "Error: TimeoutError: the server's"),
        (Unprintable(), "Error: Unprintable"),
    ):
        for function in fail(error):
            reply = call_tool(workers, [function], ToolCall(function.__name__))
            assert (reply.content, reply.failed, reply.timed_out) == (content, True, False)


def test_a_tool_that_hangs(workers: Workers):
    event = threading.Event()

    def hang() -> str:
        """Hangs."""
        event.wait()
        return "late"

    async def hang_async() -> str:
        """Hangs."""
        await asyncio.Event().wait()
        return "late"

    for function in (hang, hang_async):
        reply = call_tool(workers, [function], ToolCall(function.__name__), HASTY)
        assert (reply.content, reply.failed, reply.timed_out) == ("Error: no answer within 0.2 seconds", True, True)
        assert 0.2 <= reply.seconds < 2
    event.set()


def test_replies_are_in_the_order_of_the_calls_whatever_ends_first(workers: Workers):
    def slow(a: int) -> int:
        """Slow.

        Args:
            a: It.
        """
        time.sleep(1.0)
        return a

    box = ToolBox(make_tools([slow, async_add, multiply]))
    calls = [
        ToolCall("slow", {"a": 1}),
        ToolCall("async_add", {"a": 1, "b": 1}),
        ToolCall("nothing"),
        ToolCall("slow", {"a": 4}),
    ]
    began = time.monotonic()
    futures = [box.call(call, workers, PATIENT) for call in calls]
    replies = [future.result(5) for future in futures]
    assert [reply.name for reply in replies] == ["slow", "async_add", "nothing", "slow"]
    assert [reply.content for reply in replies if not reply.failed] == ["1", "2", "4"]
    assert time.monotonic() - began < 1.8  # the two slow ones ran side by side


# Results


@dataclasses.dataclass
class Point:
    x: int
    where: pathlib.PurePosixPath


class Text(str):
    def __str__(self) -> str:
        return "something else"


def test_results_reach_the_model_as_text(workers: Workers):
    for value, content in (
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
    ):
        reply = call_tool(workers, [returning(value)], ToolCall("give"))
        assert (reply.content, reply.failed, type(reply.content)) == (content, False, str)


def test_a_result_without_a_json_form_is_an_error(workers: Workers):
    circle: list[Any] = []
    circle.append(circle)
    for value, type_name in [(object(), "object"), (b"\xff", "bytes"), (circle, "list"), ({(1, 2): 3}, "dict")]:
        reply = call_tool(workers, [returning(value)], ToolCall("give"))
        assert (reply.content, reply.failed) == (
            f"Error: the tool returned a {type_name}, which cannot be written as JSON",
            True,
        )


def test_images_stay(workers: Workers):
    image = Image.new("RGB", (2, 2))
    blocks = [{"type": "text", "text": "here:"}, {"type": "image", "image": image}, {"type": "image", "url": "a.png"}]
    reply = call_tool(workers, [returning(blocks)], ToolCall("give"))
    assert reply.content == blocks
    assert reply.content[1]["image"] is image
    alone = call_tool(workers, [returning(image)], ToolCall("give"))
    assert alone.content == [{"type": "image", "image": image}]


def test_a_long_result_is_cut_with_a_notice(workers: Workers):
    short = ToolOptions(max_result_chars=10)
    assert call_tool(workers, [returning("0123456789")], ToolCall("give"), short).content == "0123456789"
    reply = call_tool(workers, [returning("0123456789ab")], ToolCall("give"), short)
    assert (reply.content, reply.failed) == ("0123456789\n[cut: 10 characters of 12 shown]", False)
    assert call_tool(workers, [returning([1] * 9)], ToolCall("give"), short).content.startswith(
        "[1, 1, 1, \n[cut: 10 characters"
    )
    million = call_tool(workers, [returning("x" * 1_000_000)], ToolCall("give")).content
    assert million == "x" * 20_000 + "\n[cut: 20000 characters of 1000000 shown]"


def test_long_errors_and_the_texts_of_blocks_are_cut_too(workers: Workers):
    def fail() -> str:
        """Fails."""
        raise ValueError("y" * 100)

    reply = call_tool(workers, [fail], ToolCall("fail"), ToolOptions(max_result_chars=30))
    assert reply.content == f"Error: ValueError: {'y' * 11}\n[cut: 30 characters of 119 shown]"
    show = {"type": "image", "image": Image.new("RGB", (2, 2))}
    blocks = [{"type": "text", "text": text} for text in ("abc", "defgh", "ij")]
    value = [blocks[0], show, *blocks[1:], show]
    reply = call_tool(workers, [returning(value)], ToolCall("give"), ToolOptions(max_result_chars=5))
    cut = {"type": "text", "text": "de\n[cut: 5 characters of 10 shown]"}
    assert reply.content == [blocks[0], show, cut, show]


class Slow(dict[str, int]):
    """Slow to serialise."""

    def items(self) -> Any:
        time.sleep(3.0)
        return super().items()


def test_writing_a_result_counts_towards_the_deadline(workers: Workers):
    def give() -> Any:
        """Gives it."""
        return functools.reduce(lambda inner, _: [inner], range(10), Slow(a=1))

    began = time.monotonic()
    assert call_tool(workers, [give], ToolCall("give"), HASTY).timed_out
    assert time.monotonic() - began < 2.7


# Methods of an environment


class ScriptedOwner:
    """An owner of methods with a script of problems."""

    thread = None

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

    @property
    def must_discard(self) -> bool:
        return "discarded" in self.log

    @must_discard.setter
    def must_discard(self, value: bool) -> None:
        assert value
        self.log.append("discarded")


def step(a: int) -> int:
    """Steps.

    Args:
        a: How far.
    """
    raise AssertionError("the owner's method is called instead")


def method_tools() -> list[Tool]:
    return make_tools([step])


def test_methods_of_an_environment_are_called_one_after_another(workers: Workers):
    owner: Any = ScriptedOwner()
    box = ToolBox(make_tools([multiply]), method_tools(), owner)
    assert [schema["function"]["name"] for schema in box.schemas] == ["multiply", "step"]
    futures = [box.call(ToolCall("step", {"a": a}), workers, PATIENT) for a in range(4)]
    other = box.call(ToolCall("multiply", {"a": 6, "b": 7}), workers, PATIENT)
    assert [future.result(5).content for future in futures] == ["0", "1", "2", "3"]
    assert owner.log == [(event, a) for a in range(4) for event in ("begin", "end")]
    assert other.result(5).content == "42"


def test_a_method_that_hangs_discards_the_environment_before_the_next_call(workers: Workers):
    owner: Any = ScriptedOwner([None, "it is busy"])
    box = ToolBox((), method_tools(), owner)
    first, second = (box.call(ToolCall("step", {"a": a}), workers, HASTY) for a in (-1, 2))
    assert first.result(5).timed_out
    assert second.result(5) == ToolReply("step", "Error: it is busy", failed=True)
    assert owner.log[:2] == [("begin", -1), "discarded"]


def test_an_owner_that_fails_is_a_reply(workers: Workers):
    class Broken(ScriptedOwner):
        def method(self, name: str) -> Any:
            raise AttributeError(f"there is no {name}")

    owner: Any = Broken()
    reply = ToolBox((), method_tools(), owner).call(ToolCall("step", {"a": 1}), workers, PATIENT).result(5)
    assert (reply.content, reply.failed) == ("Error: AttributeError: there is no step", True)


# Tools that work on the main thread alone (tests/contract/test_thread_bound_tools.py trains with them)


def look_up() -> str:
    """Looks up."""
    raise ValueError("signal only works in main thread of the main interpreter")


COMPLAINT = "Error: ValueError: signal only works in main thread of the main interpreter"


def test_a_run_on_another_thread_is_told_once(workers: Workers, caplog: pytest.LogCaptureFixture):
    box, call = ToolBox(make_tools([look_up])), ToolCall("look_up")

    def reply() -> ToolReply:
        return box.repeat_here(call, box.call(call, workers, PATIENT).result(5), PATIENT)

    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(reply).result().content for _ in range(2)] == [COMPLAINT] * 2
    assert caplog.text.count("set rollout_ahead=0") == 1


def test_a_page_with_the_words_of_such_an_error_is_a_result_like_any_other():
    box = ToolBox(make_tools([look_up]))
    for content in (f"{COMPLAINT} " + "Read on in the next chapter. " * 20, [{"type": "image"}], "3"):
        page = ToolReply("look_up", content)
        assert box.repeat_here(ToolCall("look_up"), page, PATIENT) is page
