"""Tools: functions that the model may call, and how a call becomes a reply."""

from __future__ import annotations

import functools
import inspect
import keyword
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupgrad.chat.tool_messages import NotJson, Rendered, cut, render
from groupgrad.concurrency.callables import function_name
from groupgrad.concurrency.workers import Outcome, Workers
from groupgrad.envs.schemas import argument_problem, describe

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class ToolOptions:
    """How tools are run."""

    timeout_s: float = 60.0
    """Seconds that a call may run before the model is told that it did not answer."""
    max_result_chars: int = 20_000
    """Characters of a result that the model gets to read; of a longer one it gets the beginning, and a notice."""
    num_threads: int = 64
    """Plain functions that run at once; async ones have no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"tool_timeout_s={self.timeout_s}: every call needs a deadline; set a number of seconds above 0"
            )
        if self.max_result_chars < 1:
            raise ValueError(f"tool_max_result_chars={self.max_result_chars}: no result could be read; set 1 or more")
        if self.num_threads < 1:
            raise ValueError(f"tool_threads={self.num_threads}: no tool could ever run; set 1 or more")


@dataclass(slots=True, frozen=True)
class Tool:
    """A function that the model may call, inspected once."""

    name: str
    schema: dict[str, Any]
    """As chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    """Plain or async, called with keywords."""
    defaults: dict[str, Any]
    """Arguments that may be left out, and what they are then."""
    told: set[str] = field(default_factory=set[str], compare=False, repr=False)
    """What the user has been warned of already."""


class CallLike(Protocol):
    """A call that was parsed from what the model wrote."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Any: ...
    @property
    def problem(self) -> str | None: ...


@dataclass(slots=True, frozen=True)
class ToolReply:
    """What a call was answered."""

    name: str
    """As the model wrote it."""
    content: str | list[dict[str, Any]]
    """For the model: text, or content blocks if there is an image among them."""
    failed: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    """That it ran."""
    images: list[Any] = field(default_factory=list[Any])
    """What the image blocks of `content` show, in their order."""


class Holder(Protocol):
    """What the methods of an environment are asked of (`environments.EnvHandle`)."""

    def method(self, name: str) -> Callable[..., Any]:
        """The method that a tool's name stands for."""
        ...

    def problem(self) -> str | None:
        """Why it cannot be called now, in words for the model."""
        ...

    def spoil(self) -> None:
        """Note that a call did not end by its deadline."""
        ...


def make_tools(functions: Iterable[Callable[..., Any]] | None) -> list[Tool]:
    """The tools that functions stand for, in their order.

    Functions, bound methods, callable objects and `functools.partial` of these, plain or async, with a type hint and a
    line of the docstring for each argument. TypeError for what is none of these or cannot be called with keywords,
    ValueError for missing hints or words and for two of one name. The schemas are those of transformers'
    `get_json_schema`.
    """
    if functions is None:
        return []
    if callable(functions) or isinstance(functions, (str, dict)) or not isinstance(functions, Iterable):
        raise TypeError(f"tools={functions!r}: tools is a list of functions; put it into a list")
    tools = [_make_function_tool(function, place) for place, function in enumerate(functions)]
    check_names(tools)
    return tools


def make_tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    """One tool; `where` names the function in errors."""
    schema = describe(function, name, where)
    parameters = inspect.signature(function).parameters
    named = schema["function"]["parameters"].get("properties", {})
    defaults = {key: parameters[key].default for key in named if parameters[key].default is not inspect.Parameter.empty}
    return Tool(name, schema, function, defaults)


def check_names(tools: Sequence[Tool], of_environment: str = "") -> None:
    """ValueError if two tools have one name. `of_environment` names the environment that some of them belong to."""
    names = [tool.name for tool in tools]
    doubled = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if doubled:
        among = f" among tools and the methods of {of_environment}" if of_environment else " in tools"
        raise ValueError(
            f"there are two tools named {', '.join(map(repr, doubled))}{among}; a model calls a tool by its name, so "
            "rename one"
        )


def _make_function_tool(function: Any, place: int) -> Tool:
    if isinstance(function, dict):
        raise TypeError(f"tools[{place}] is a dict: a schema alone cannot be called; give the function itself")
    if isinstance(function, type):
        raise TypeError(
            f"tools[{place}] is the class '{function.__name__}'; give functions, or its instances' methods. A class "
            "whose public methods are tools goes to environment_factory"
        )
    if not callable(function):
        raise TypeError(f"tools[{place}] is {function!r} ({type(function).__name__}), which cannot be called")
    name = function_name(function)
    if name == "<lambda>":
        raise TypeError(f"tools[{place}] is a lambda, which has neither name nor docstring; write a function with def")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"tools[{place}] is named {name!r}, which a model cannot call; set its __name__ to a word")
    return make_tool(function, name, f"the tool '{name}'")


class ToolBox:
    """The tools of one rollout: those that every rollout has, and its environment's methods.

    `methods` are asked of `holder`, one at a time and in the order of the calls, since an environment has a state; the
    other tools run side by side. Called on one thread.
    """

    def __init__(self, tools: Sequence[Tool] = (), methods: Sequence[Tool] = (), holder: Holder | None = None):
        self.schemas: list[dict[str, Any]] = [tool.schema for tool in (*tools, *methods)]
        """Of all tools, in their order."""
        self._tools = {tool.name: tool for tool in (*tools, *methods)}
        self._own = {tool.name for tool in methods} if holder is not None else set[str]()
        self._holder = holder
        self._last: Future[ToolReply] | None = None

    def is_own(self, name: str) -> bool:
        """True for a method of the rollout's environment."""
        return name in self._own

    def call(self, call: CallLike, workers: Workers, options: ToolOptions) -> Future[ToolReply]:
        """Start a call; the future gets its reply and never raises.

        What is wrong with a call is the reply, at once: a problem that its parser found, a tool that does not exist,
        arguments that do not fit.
        """
        future: Future[ToolReply] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it, so it always gets its reply
        tool = self._tools.get(call.name)
        if (problem := self._problem(call, tool)) is not None or tool is None:
            future.set_result(ToolReply(call.name, cut(problem or "", options.max_result_chars), failed=True))
            return future
        holder = self._holder if call.name in self._own else None
        asked = _Asked(tool, call.arguments, workers, options, holder, future)
        before = self._last
        if holder is not None:
            self._last = future
        if holder is None or before is None:
            asked.start()
        else:
            before.add_done_callback(lambda _: asked.start())
        return future

    def _problem(self, call: CallLike, tool: Tool | None) -> str | None:
        if call.problem:
            return call.problem
        if tool is None:
            names = ", ".join(self._tools)
            there_are = f"the tools are: {names}" if names else "there are no tools"
            return f"there is no tool {call.name!r}; {there_are}"
        return argument_problem(tool.schema, tool.defaults, call.arguments)


@dataclass(slots=True, frozen=True)
class _Asked:
    """A call whose arguments fit, on its way to its reply."""

    tool: Tool
    arguments: dict[str, Any]
    workers: Workers
    options: ToolOptions
    holder: Holder | None
    """What the tool is a method of."""
    future: Future[ToolReply]

    def start(self) -> None:
        """Have the workers run it, unless its environment cannot be asked. Never raises: it may be run by a future."""
        try:
            problem = None if self.holder is None else self.holder.problem()
            if problem is not None:
                self.future.set_result(ToolReply(self.tool.name, f"Error: {problem}", failed=True))
                return
            function = self.tool.function if self.holder is None else self.holder.method(self.tool.name)
            then = functools.partial(render, max_chars=self.options.max_result_chars)
            running = self.workers.call(
                function, self.arguments, timeout_s=self.options.timeout_s, then=then, name=self.tool.name
            )
        except Exception as error:
            self.future.set_result(_reply(self.tool, Outcome(error=error), self.options))
        else:
            running.add_done_callback(self._end)

    def _end(self, running: Future[Outcome]) -> None:
        outcome = running.result()
        if outcome.timed_out and self.holder is not None:
            self.holder.spoil()  # before the next of its calls starts
        self.future.set_result(_reply(self.tool, outcome, self.options))


def _reply(tool: Tool, outcome: Outcome, options: ToolOptions) -> ToolReply:
    """What the model is answered, of how the call ended."""
    if isinstance(outcome.value, Rendered) and outcome.error is None:
        return ToolReply(tool.name, outcome.value.content, seconds=outcome.seconds, images=outcome.value.images)
    text = f"Error: {error_text(outcome, options.timeout_s)}"
    if isinstance(outcome.error, NotJson):
        text = f"Error: {outcome.error}"
        if outcome.error.type_name not in tool.told:
            tool.told.add(outcome.error.type_name)
            logger.warning(
                "the tool '%s' returned a %s, which cannot be written as JSON (%s); the model was told so. Return "
                "text, numbers, lists, dicts or dataclasses. Said once for each type",
                tool.name,
                outcome.error.type_name,
                outcome.error.reason,
            )
    return ToolReply(
        tool.name,
        cut(text, options.max_result_chars),
        failed=True,
        timed_out=outcome.timed_out,
        seconds=outcome.seconds,
    )


def error_text(outcome: Outcome, timeout_s: float) -> str:
    """Why a call failed, in a line without a traceback: 'ValueError: no such city'."""
    if outcome.timed_out:
        return f"no answer within {timeout_s:g} seconds"
    kind = type(outcome.error).__name__
    try:
        message = str(outcome.error)
    except Exception:  # an exception class of the user's may fail at this too
        message = ""
    return f"{kind}: {message}" if message else kind
