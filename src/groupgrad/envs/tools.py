"""Tools: functions that the model may call, and the replies to its calls."""

from __future__ import annotations

import inspect
import keyword
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupgrad.chat import ToolCall
from groupgrad.chat.tool_messages import Content, NotJson, cut, render, returned
from groupgrad.concurrency.callables import function_name, innermost
from groupgrad.concurrency.workers import NoAnswer, Outcome, Workers, call_here, needs_main_thread
from groupgrad.data.values import short_repr
from groupgrad.envs.schemas import argument_problem, describe, ready_schema

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


@dataclass(slots=True)
class Tool:
    """A function that the model may call, inspected once."""

    name: str
    schema: dict[str, Any]
    """In the form of chat templates: {"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    """Plain or async, called with keywords."""
    defaults: dict[str, Any]
    """Default values of the arguments that may be left out."""
    needs_main_thread: bool | None = field(default=None, compare=False, repr=False)
    """True once a call has failed on another thread and gone well on the main one, as if it limits its time by
    `signal.alarm`; False if the main thread does not help; None: not known."""


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
    hint and a line of the docstring for each argument; or with an attribute `tool_schema`, a ready schema in the form
    of `Tool.schema`, as tools of servers have. TypeError for other objects and for functions that cannot be called with
    keywords; ValueError for missing hints or descriptions, for a `tool_schema` of another form, and for two tools of
    one name.
    """
    tools = [_make_function_tool(function, index) for index, function in enumerate(functions)]
    check_names(tools)
    return tools


def make_tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    """Makes one tool; `where` names the function in errors."""
    if (ready := getattr(innermost(function), "tool_schema", None)) is not None:
        schema, defaults = ready_schema(ready, name, where)
        return Tool(name, schema, function, defaults)
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
    known = [tool.name for tool in tools]
    if not isinstance(names, (list, tuple)) or not all(name in known for name in names):
        raise ValueError(
            f"its column '{TOOLS_COLUMN}' is {short_repr(names)}; give a list of names of tools that the trainer was "
            f"given, which are {', '.join(map(repr, known))}"
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
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"tools[{index}] is {short_repr(function)}; give functions, or methods of objects. A class whose public "
            "methods are tools goes to environment_factory"
        )
    name = function_name(function)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"tools[{index}] is named {name!r}, which a model cannot call; set its __name__ to a word")
    return make_tool(function, name, f"the tool '{name}'")


class ToolBox:
    """The tools of one rollout: those that all rollouts share, and the methods of its environment, the `owner`.

    Calls of the environment's methods run one after another in the order of the calls, because an environment has a
    state; calls of the other tools run side by side. Use it on one thread only. The owner is the `EnvHandle`, which has
    the thread of these methods, and says why none can be called now (`problem`).
    """

    def __init__(self, tools: Sequence[Tool] = (), methods: Sequence[Tool] = (), owner: Any = None):
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
        is_method = call.name in self._methods
        runs_here = tool.needs_main_thread and _is_main_thread()
        if runs_here and (not is_method or self._last_method_call.done()):
            self._start(tool, call.arguments, reply, None, options)
        elif not is_method:
            self._start(tool, call.arguments, reply, workers, options)
        else:
            previous, self._last_method_call = self._last_method_call, reply
            previous.add_done_callback(lambda _: self._start(tool, call.arguments, reply, workers, options))
        return reply

    def repeat_here(self, call: ToolCall, reply: ToolReply, options: ToolOptions) -> ToolReply:
        """The reply to a call, made again if this is the main thread and its error says that it works there alone.

        Where that helps, the next calls run on the main thread at once. Warns once of such a tool.
        """
        tool = self._tools.get(call.name)
        if tool is None or tool.needs_main_thread is False or not needs_main_thread(reply.content):
            return reply
        if not _is_main_thread():
            tool.needs_main_thread = False
            logger.warning(
                "the tool '%s' works on the main thread alone (%s), and this run makes its rollouts on another one; "
                "set rollout_ahead=0 and start the training on the main thread, or take signals out of the tool: "
                "tool_timeout_s bounds its time",
                *(tool.name, reply.content),
            )
            return reply
        repeated: Future[ToolReply] = Future()
        self._start(tool, call.arguments, repeated, None, options)
        if tool.needs_main_thread is None:
            tool.needs_main_thread = not needs_main_thread(repeated.result().content)
            if tool.needs_main_thread:
                logger.warning(
                    "the tool '%s' works on the main thread alone (%s): its calls run there, one after another and "
                    "without tool_timeout_s, while nothing is sampled. Without signals in the tool they run side by "
                    "side, and tool_timeout_s bounds their time",
                    *(tool.name, reply.content),
                )
        return repeated.result()

    def _problem(self, call: ToolCall, tool: Tool | None) -> str | None:
        if call.problem:
            return call.problem
        if tool is None:
            names = ", ".join(self._tools)
            there_are = f"the tools are: {names}" if names else "there are no tools"
            return f"there is no tool {call.name!r}; {there_are}"
        return argument_problem(tool.schema, tool.defaults, call.arguments)

    def _start(
        self,
        tool: Tool,
        arguments: dict[str, Any],
        reply: Future[ToolReply],
        workers: Workers | None,
        options: ToolOptions,
    ) -> None:
        """Runs a tool with valid arguments on the workers, or without them on this thread. Raises KeyboardInterrupt.

        A method runs only if its owner has no problem.
        """
        owner = self._owner if tool.name in self._methods else None

        def finish(outcome: Outcome) -> None:
            if outcome.timed_out and owner is not None:
                owner.must_discard = True  # before its next call starts
            reply.set_result(_reply(tool, outcome, options))

        def render_result(value: Any) -> tuple[Content, Any]:
            content = render(value, options.max_result_chars)
            return content, returned(value, content, options.max_result_chars)

        try:
            if owner is not None and (problem := owner.problem()) is not None:
                reply.set_result(ToolReply(tool.name, f"Error: {problem}", failed=True))
                return
            function = tool.function if owner is None else owner.method(tool.name)
            if workers is None:
                finish(call_here(lambda: render_result(function(**arguments))))
                return
            thread = None if owner is None else owner.thread
            running = workers.call(
                function, arguments, timeout_s=options.timeout_s, then=render_result, name=tool.name, thread=thread
            )
        except Exception as error:
            finish(Outcome(error=error))
        else:
            running.add_done_callback(lambda ended: finish(ended.result()))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _reply(tool: Tool, outcome: Outcome, options: ToolOptions) -> ToolReply:
    """The result of a call for the model, or its error."""
    if outcome.error is None:
        content, result = outcome.value
        return ToolReply(tool.name, content, result, seconds=outcome.seconds)
    text = error_text(outcome.error)
    if isinstance(outcome.error, NotJson):
        text = str(outcome.error)
    text = cut(f"Error: {text}", options.max_result_chars)
    return ToolReply(tool.name, text, failed=True, timed_out=outcome.timed_out, seconds=outcome.seconds)


def error_text(error: BaseException | None) -> str:
    """Describes the error of a call in a line without a traceback: 'ValueError: no such city'."""
    type_name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # the user's exception class may fail at this too
        message = ""
    return message if isinstance(error, NoAnswer) else f"{type_name}: {message}" if message else type_name
