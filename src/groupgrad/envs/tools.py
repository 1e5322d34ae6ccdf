"""Tools: functions that the model may call, and the replies to its calls."""

from __future__ import annotations

import functools
import inspect
import keyword
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupgrad.chat import ToolCall
from groupgrad.chat.tool_messages import Content, NotJson, cut, render, returned
from groupgrad.concurrency.callables import function_name
from groupgrad.concurrency.daemon_threads import OwnThread
from groupgrad.concurrency.workers import NoAnswer, Outcome, Workers
from groupgrad.data.values import short_repr
from groupgrad.envs.main_thread import MainThreadNeed, call_here
from groupgrad.envs.schemas import argument_problem, describe

logger = logging.getLogger(__name__)


TOOLS_COLUMN = "tools"
"""Column of the data set that names the tools of a row, among those of the trainer."""


@dataclass(slots=True, frozen=True)
class ToolOptions:
    """Limits of tool calls."""

    timeout_s: float = 60.0
    """Seconds that a call may run before its reply is an error."""
    max_result_chars: int = 20_000
    """Characters of a result for the model; a longer one is cut, with a notice."""
    num_threads: int = 64
    """Plain functions that run at once; the number of async ones has no limit."""


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
    main_thread: MainThreadNeed = field(default_factory=MainThreadNeed, compare=False, repr=False)


@dataclass(slots=True, frozen=True)
class ToolReply:
    """The reply to a call."""

    name: str
    """As the model wrote it."""
    content: Content
    """Text for the model, or content blocks if there is an image among them."""
    result: Any = None
    """What reward functions get in the content's place; the content itself if the call failed."""
    failed: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    """Seconds that the tool ran."""


def make_tools(functions: Iterable[Callable[..., Any]]) -> list[Tool]:
    """Makes a tool of each function, with the schema that transformers' `get_json_schema` gives.

    A function is a function, bound method, callable object or `functools.partial` of one, plain or async, with a type
    hint and a line of the docstring for each argument. TypeError for other objects and for functions that cannot be
    called with keywords; ValueError for missing hints or descriptions and for two tools of one name.
    """
    tools = [_make_function_tool(function, index) for index, function in enumerate(functions)]
    check_names(tools)
    return tools


def make_tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    """Makes one tool; `where` names the function in errors."""
    schema = describe(function, name, where)
    parameters = inspect.signature(function).parameters
    names = schema["function"]["parameters"].get("properties", {})
    defaults = {key: parameters[key].default for key in names if parameters[key].default is not inspect.Parameter.empty}
    return Tool(name, schema, function, defaults)


def chosen_tools(tools: Sequence[Tool], row: Mapping[str, Any]) -> list[Tool]:
    """The tools that a row's column `tools` names; all of them for a row without. ValueError for what is no name."""
    names = row.get(TOOLS_COLUMN) if tools else None
    if names is None:
        return list(tools)
    known = ", ".join(repr(tool.name) for tool in tools)
    if not isinstance(names, (list, tuple)):
        raise ValueError(f"its column '{TOOLS_COLUMN}' is {short_repr(names)}; give a list of names among {known}")
    for name in names:
        if name not in [tool.name for tool in tools]:
            raise ValueError(
                f"its column '{TOOLS_COLUMN}' has {short_repr(name)}, which is no name of a tool that the trainer was "
                f"given; it has {known}"
            )
    return [tool for tool in tools if tool.name in names]


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


class MethodOwner(Protocol):
    """A rollout's environment, whose methods are tools."""

    thread: OwnThread
    """The thread on which its plain methods run."""
    must_discard: bool
    """Set to True when a call has timed out, since it may still run."""

    def method(self, name: str) -> Callable[..., Any]:
        """A method, to be called with keywords."""
        ...

    def problem(self) -> str | None:
        """The reason why no method can be called now, in words for the model; None if one can."""
        ...


class ToolBox:
    """The tools of one rollout: those that all rollouts share, and the methods of its environment, the `owner`.

    Calls of the environment's methods run one after another in the order of the calls, because an environment has a
    state; calls of the other tools run side by side. Use it on one thread only.
    """

    def __init__(self, tools: Sequence[Tool] = (), methods: Sequence[Tool] = (), owner: MethodOwner | None = None):
        self.schemas: list[dict[str, Any]] = [tool.schema for tool in (*tools, *methods)]
        """Schemas of all tools, in their order."""
        self._tools = {tool.name: tool for tool in (*tools, *methods)}
        self._methods = {tool.name for tool in methods}
        self._owner = owner
        self._last_method_call: Future[Any] = Future()
        self._last_method_call.set_result(None)

    def call(self, call: ToolCall, workers: Workers, options: ToolOptions) -> Future[ToolReply]:
        """Starts a call. The future gets its reply and never raises.

        A call that cannot be made is answered with its problem at once: one that could not be parsed, an unknown tool,
        arguments that do not fit.
        """
        reply: Future[ToolReply] = Future()
        reply.set_running_or_notify_cancel()  # a future that cannot be cancelled always gets its reply
        tool = self._tools.get(call.name)
        problem = self._problem(call, tool)
        if tool is None or problem is not None:
            reply.set_result(ToolReply(call.name, cut(problem or "", options.max_result_chars), failed=True))
            return reply
        owner = self._owner if call.name in self._methods else None
        if tool.main_thread.calls_here() and (owner is None or self._last_method_call.done()):
            reply.set_result(_reply_here(tool, call.arguments, owner, options))
            return reply
        start = functools.partial(_start, tool, call.arguments, owner, reply, workers, options)
        if owner is None:
            start()
        else:
            previous, self._last_method_call = self._last_method_call, reply
            previous.add_done_callback(lambda _: start())
        return reply

    def repeat_here(self, call: ToolCall, reply: ToolReply, options: ToolOptions) -> ToolReply:
        """The reply to a call, made again on this thread if it is the main one and the tool works there alone."""
        tool = self._tools.get(call.name)
        if tool is None or not tool.main_thread.may_help(reply.content, tool.name):
            return reply
        repeated = _reply_here(tool, call.arguments, self._owner if call.name in self._methods else None, options)
        tool.main_thread.learn(repeated.content, tool.name, reply.content)
        return repeated

    def _problem(self, call: ToolCall, tool: Tool | None) -> str | None:
        if call.problem:
            return call.problem
        if tool is None:
            names = ", ".join(self._tools)
            there_are = f"the tools are: {names}" if names else "there are no tools"
            return f"there is no tool {call.name!r}; {there_are}"
        return argument_problem(tool.schema, tool.defaults, call.arguments)


def _start(
    tool: Tool,
    arguments: dict[str, Any],
    owner: MethodOwner | None,
    reply: Future[ToolReply],
    workers: Workers,
    options: ToolOptions,
) -> None:
    """Runs a tool with valid arguments on the workers, a method only if its owner has no problem. Never raises."""

    def finish(running: Future[Outcome]) -> None:
        outcome = running.result()
        if outcome.timed_out and owner is not None:
            owner.must_discard = True  # before its next call starts
        reply.set_result(_reply(tool, outcome, options))

    try:
        if owner is not None and (problem := owner.problem()) is not None:
            reply.set_result(ToolReply(tool.name, f"Error: {problem}", failed=True))
            return
        function = tool.function if owner is None else owner.method(tool.name)
        render_result = functools.partial(_rendered, max_chars=options.max_result_chars)
        thread = None if owner is None else owner.thread
        running = workers.call(
            function, arguments, timeout_s=options.timeout_s, then=render_result, name=tool.name, thread=thread
        )
    except Exception as error:
        reply.set_result(_reply(tool, Outcome(error=error), options))
    else:
        running.add_done_callback(finish)


def _reply_here(tool: Tool, arguments: dict[str, Any], owner: MethodOwner | None, options: ToolOptions) -> ToolReply:
    """Runs a plain tool with valid arguments on this thread. Raises KeyboardInterrupt."""
    if owner is not None and (problem := owner.problem()) is not None:
        return ToolReply(tool.name, f"Error: {problem}", failed=True)
    function = tool.function if owner is None else owner.method(tool.name)
    render_result = functools.partial(_rendered, max_chars=options.max_result_chars)
    return _reply(
        tool,
        call_here(function, arguments, timeout_s=options.timeout_s, then=render_result, name=tool.name),
        options,
    )


def _reply(tool: Tool, outcome: Outcome, options: ToolOptions) -> ToolReply:
    """The result of a call for the model, or its error."""
    if outcome.error is None:
        content, result = outcome.value
        return ToolReply(tool.name, content, result, seconds=outcome.seconds)
    text = error_text(outcome.error)
    if isinstance(outcome.error, NotJson):
        text = str(outcome.error)
        _warn_not_json(tool, outcome.error)
    text = cut(f"Error: {text}", options.max_result_chars)
    return ToolReply(tool.name, text, failed=True, timed_out=outcome.timed_out, seconds=outcome.seconds)


def _rendered(value: Any, max_chars: int) -> tuple[Content, Any]:
    """A result as the model and as reward functions get it."""
    content = render(value, max_chars)
    return content, returned(value, content, max_chars)


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


def error_text(error: BaseException | None) -> str:
    """Describes the error of a call in a line without a traceback: 'ValueError: no such city'."""
    type_name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # the user's exception class may fail at this too
        message = ""
    return message if isinstance(error, NoAnswer) else f"{type_name}: {message}" if message else type_name
