"""Tools: functions that the model may call, and the replies to its calls."""

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

from groupgrad.chat import ToolCall
from groupgrad.chat.tool_messages import NotJson, Rendered, cut, render
from groupgrad.concurrency.callables import function_name
from groupgrad.concurrency.workers import Outcome, Workers
from groupgrad.envs.schemas import argument_problem, describe

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class ToolOptions:
    """Limits of tool calls."""

    timeout_s: float = 60.0
    """Seconds that a call may run before its reply is an error."""
    max_result_chars: int = 20_000
    """Characters of a result for the model; a longer one is cut, with a notice."""
    num_threads: int = 64
    """Plain functions that run at once; the number of async ones has no limit."""

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
    """In the form of chat templates: {"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    """Plain or async, called with keywords."""
    defaults: dict[str, Any]
    """Default values of the arguments that may be left out."""
    warned_types: set[str] = field(default_factory=set[str], compare=False, repr=False)
    """Types of results without a JSON form that the user has been warned of."""


@dataclass(slots=True, frozen=True)
class ToolReply:
    """The reply to a call."""

    name: str
    """As the model wrote it."""
    content: str | list[dict[str, Any]]
    """Text for the model, or content blocks if there is an image among them."""
    failed: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    """Seconds that the tool ran."""
    images: list[Any] = field(default_factory=list[Any])
    """Images of the image blocks in `content`, in their order."""


class MethodOwner(Protocol):
    """The environment that a rollout's methods belong to (`environments.EnvHandle`)."""

    def method(self, name: str) -> Callable[..., Any]:
        """The method of a tool's name."""
        ...

    def problem(self) -> str | None:
        """Why no method can be called now, in words for the model; None if one can."""
        ...

    def discard(self) -> None:
        """Note that a call did not end by its deadline, so that the environment is not used again."""
        ...


def make_tools(functions: Iterable[Callable[..., Any]] | None) -> list[Tool]:
    """Make a tool of each function, with the schema that transformers' `get_json_schema` gives.

    A function is a function, bound method, callable object or `functools.partial` of one, plain or async, with a type
    hint and a line of the docstring for each argument. TypeError for other objects and for functions that cannot be
    called with keywords; ValueError for missing hints or descriptions and for two tools of one name.
    """
    if functions is None:
        return []
    if callable(functions) or isinstance(functions, (str, dict)) or not isinstance(functions, Iterable):
        raise TypeError(f"tools={functions!r}: tools is a list of functions; put it into a list")
    tools = [_make_function_tool(function, index) for index, function in enumerate(functions)]
    check_names(tools)
    return tools


def make_tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    """Make one tool; `where` names the function in errors."""
    schema = describe(function, name, where)
    parameters = inspect.signature(function).parameters
    names = schema["function"]["parameters"].get("properties", {})
    defaults = {key: parameters[key].default for key in names if parameters[key].default is not inspect.Parameter.empty}
    return Tool(name, schema, function, defaults)


def check_names(tools: Sequence[Tool], of_environment: str = "") -> None:
    """ValueError if two tools have one name. `of_environment` names the environment that some of them belong to."""
    names = [tool.name for tool in tools]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        among = f" among tools and the methods of {of_environment}" if of_environment else " in tools"
        raise ValueError(
            f"there are two tools named {', '.join(map(repr, repeated))}{among}; a model calls a tool by its name, so "
            "rename one"
        )


def _make_function_tool(function: Any, index: int) -> Tool:
    if isinstance(function, dict):
        raise TypeError(f"tools[{index}] is a dict: a schema alone cannot be called; give the function itself")
    if isinstance(function, type):
        raise TypeError(
            f"tools[{index}] is the class '{function.__name__}'; give functions, or its instances' methods. A class "
            "whose public methods are tools goes to environment_factory"
        )
    if not callable(function):
        raise TypeError(f"tools[{index}] is {function!r} ({type(function).__name__}), which cannot be called")
    name = function_name(function)
    if name == "<lambda>":
        raise TypeError(f"tools[{index}] is a lambda, which has neither name nor docstring; write a function with def")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"tools[{index}] is named {name!r}, which a model cannot call; set its __name__ to a word")
    return make_tool(function, name, f"the tool '{name}'")


class ToolBox:
    """The tools of one rollout: those that all rollouts share, and the methods of its environment.

    Calls of the environment's methods run one after another in the order of the calls, because an environment has a
    state; calls of the other tools run side by side. Use it on one thread only.
    """

    def __init__(self, tools: Sequence[Tool] = (), methods: Sequence[Tool] = (), owner: MethodOwner | None = None):
        self.schemas: list[dict[str, Any]] = [tool.schema for tool in (*tools, *methods)]
        """Schemas of all tools, in their order."""
        self._tools = {tool.name: tool for tool in (*tools, *methods)}
        self._methods = {tool.name for tool in methods}
        self._owner = owner
        self._last_method_call: Future[ToolReply] | None = None

    def call(self, call: ToolCall, workers: Workers, options: ToolOptions) -> Future[ToolReply]:
        """Start a call. The future gets its reply and never raises.

        A call that cannot be made is answered with its problem at once: one that could not be parsed, an unknown tool,
        arguments that do not fit.
        """
        reply: Future[ToolReply] = Future()
        reply.set_running_or_notify_cancel()  # nobody can cancel it, so it always gets its reply
        tool = self._tools.get(call.name)
        if (problem := self._problem(call, tool)) is not None or tool is None:
            reply.set_result(ToolReply(call.name, cut(problem or "", options.max_result_chars), failed=True))
            return reply
        if call.name not in self._methods:
            _PendingCall(tool, call.arguments, workers, options, None, reply).start()
            return reply
        pending = _PendingCall(tool, call.arguments, workers, options, self._owner, reply)
        previous, self._last_method_call = self._last_method_call, reply
        if previous is None:
            pending.start()
        else:
            previous.add_done_callback(lambda _: pending.start())
        return reply

    def _problem(self, call: ToolCall, tool: Tool | None) -> str | None:
        if call.problem:
            return call.problem
        if tool is None:
            names = ", ".join(self._tools)
            there_are = f"the tools are: {names}" if names else "there are no tools"
            return f"there is no tool {call.name!r}; {there_are}"
        return argument_problem(tool.schema, tool.defaults, call.arguments)


@dataclass(slots=True, frozen=True)
class _PendingCall:
    """A call with valid arguments and the future that gets its reply."""

    tool: Tool
    arguments: dict[str, Any]
    workers: Workers
    options: ToolOptions
    owner: MethodOwner | None
    """The environment whose method the tool is; None for a function."""
    reply: Future[ToolReply]

    def start(self) -> None:
        """Run it on the workers, unless its environment has a problem. Never raises: it may be a future's callback."""
        try:
            if self.owner is not None and (problem := self.owner.problem()) is not None:
                self.reply.set_result(ToolReply(self.tool.name, f"Error: {problem}", failed=True))
                return
            running = self.workers.call(
                self.tool.function if self.owner is None else self.owner.method(self.tool.name),
                self.arguments,
                timeout_s=self.options.timeout_s,
                then=functools.partial(render, max_chars=self.options.max_result_chars),
                name=self.tool.name,
            )
        except Exception as error:
            self.reply.set_result(_reply(self.tool, Outcome(error=error), self.options))
        else:
            running.add_done_callback(self._finish)

    def _finish(self, running: Future[Outcome]) -> None:
        outcome = running.result()
        if outcome.timed_out and self.owner is not None:
            self.owner.discard()  # before its next call starts
        self.reply.set_result(_reply(self.tool, outcome, self.options))


def _reply(tool: Tool, outcome: Outcome, options: ToolOptions) -> ToolReply:
    """The result of a call for the model, or its error."""
    if isinstance(outcome.value, Rendered) and outcome.error is None:
        return ToolReply(tool.name, outcome.value.content, seconds=outcome.seconds, images=outcome.value.images)
    text = error_text(outcome, options.timeout_s)
    if isinstance(outcome.error, NotJson):
        text = str(outcome.error)
        _warn_not_json(tool, outcome.error)
    text = cut(f"Error: {text}", options.max_result_chars)
    return ToolReply(tool.name, text, failed=True, timed_out=outcome.timed_out, seconds=outcome.seconds)


def _warn_not_json(tool: Tool, error: NotJson) -> None:
    if error.type_name not in tool.warned_types:
        tool.warned_types.add(error.type_name)
        logger.warning(
            "the tool '%s' returned a %s, which cannot be written as JSON (%s); the model was told so. Return text, "
            "numbers, lists, dicts or dataclasses. Said once for each type",
            tool.name,
            error.type_name,
            error.reason,
        )


def error_text(outcome: Outcome, timeout_s: float) -> str:
    """Why a call failed, in a line without a traceback: 'ValueError: no such city'."""
    if outcome.timed_out:
        return f"no answer within {timeout_s:g} seconds"
    type_name = type(outcome.error).__name__
    try:
        message = str(outcome.error)
    except Exception:  # the user's exception class may fail at this too
        message = ""
    return f"{type_name}: {message}" if message else type_name
