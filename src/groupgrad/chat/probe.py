"""Which syntax a chat template writes calls in, found by rendering calls and looking where their parts land."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from groupgrad.chat.channel_syntax import ChannelSyntax
from groupgrad.chat.compact_syntax import BracedCalls, PythonCalls
from groupgrad.chat.json_syntax import BareJson, JsonObjects, NamedJson
from groupgrad.chat.keyed_syntax import KeyedValues
from groupgrad.chat.literals import common_suffix
from groupgrad.chat.records import Call, Syntax
from groupgrad.chat.render import Template, shared_length
from groupgrad.chat.values import call_from_value, parameter_schemas

USER = {"role": "user", "content": "Probe7Question"}
FIRST = Call(
    "probe_tool_one",
    {"akey": "Probe7A", "bkey": "Probe7B", "ckey": 71, "dkey": True, "ekey": [7, "q"], "fkey": "Probe7F"},
    "probe0001",
)
SECOND = Call("probe_tool_two", {"akey": "Probe8A", "fkey": "Probe8F"}, "probe0002")
SIMPLE = Call("probe_tool_one", {"akey": "Probe7A", "bkey": "Probe7B", "fkey": "Probe7F"}, "probe0001")


def _schema(name: str) -> dict[str, Any]:
    text = {"type": "string", "description": "a text"}
    properties = {
        "akey": text,
        "bkey": text,
        "ckey": {"type": "integer", "description": "a number"},
        "dkey": {"type": "boolean", "description": "a flag"},
        "ekey": {"type": "array", "items": {}, "description": "a list"},
        "fkey": text,
    }
    parameters = {"type": "object", "properties": properties, "required": ["akey"]}
    return {"type": "function", "function": {"name": name, "description": "a probe", "parameters": parameters}}


SCHEMAS = [_schema(FIRST.name), _schema(SECOND.name)]


@dataclass(slots=True)
class Shown:
    """How the template shows calls, cut to what a model would sample."""

    generation_prompt: str
    """The conversation up to where the model goes on."""
    one: str = ""
    """The turn with one call; empty if the template shows none."""
    two: str = ""
    """The turn with two calls; empty if the template cannot show two."""
    call: Call = field(default_factory=lambda: FIRST)
    """The call that `one` shows."""
    arguments_as_text: bool = False
    """The template wants arguments as JSON text."""
    text_end: str = ""
    """What the template puts behind the text of a last turn without calls."""


def call_message(calls: list[Call], *, arguments_as_text: bool = False, content: str = "") -> dict[str, Any]:
    """An assistant message with calls, as transformers has them."""
    tool_calls = []
    for call in calls:
        arguments: Any = json.dumps(call.arguments) if arguments_as_text else call.arguments
        tool_calls.append({"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}})
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def turn_start(rendered: str, generation_prompt: str) -> int:
    """Where the assistant's turn begins in a rendered conversation."""
    if rendered.startswith(generation_prompt):
        return len(generation_prompt)
    # The template writes this turn in another way than it asks for it: back to the last whole piece they share.
    shared = rendered[: shared_length(rendered, generation_prompt)]
    return max(shared.rfind(mark) for mark in "\n>]") + 1


def look(template: Template) -> Shown:
    """Probe renderings of the template; ValueError if it refuses even a user's question."""
    prompt = template.attempt([USER], prompt=True)
    if prompt is None:
        raise ValueError(
            f"the chat template cannot render one user message: {template.failure}; give the tokenizer a chat "
            "template that can (tokenizer.chat_template = ...)"
        )
    shown = Shown(prompt)
    plain = template.attempt([USER, {"role": "assistant", "content": "Probe7Answer"}])
    if plain is not None and "Probe7Answer" in plain:
        shown.text_end = plain.split("Probe7Answer", 1)[1]
    for call, as_text in ((FIRST, False), (FIRST, True), (SIMPLE, False), (SIMPLE, True)):
        rendered = template.attempt([USER, call_message([call], arguments_as_text=as_text)])
        if rendered is None or call.name not in rendered or "Probe7F" not in rendered:
            continue
        shown.one = rendered[turn_start(rendered, prompt) :]
        shown.call, shown.arguments_as_text = call, as_text
        both = template.attempt([USER, call_message([call, SECOND], arguments_as_text=as_text)])
        if both is not None and call.name in both and "Probe8F" in both:
            shown.two = both[turn_start(both, prompt) :]
        break
    return shown


def find_syntax(shown: Shown, reasoning_closing: str) -> Syntax | None:
    """The syntax that reads the probe calls back as they were given; None if none of the known ones does."""
    for suggest in _SUGGESTIONS:
        try:
            syntax = suggest(shown, reasoning_closing)
        except (ValueError, IndexError):  # this template has no such parts
            continue
        if syntax is not None and reads_back(syntax, shown):
            return syntax
    return None


def reads_back(syntax: Syntax, shown: Shown) -> bool:
    """True if the syntax gives the probe calls back, types and order included."""
    parameters = parameter_schemas(SCHEMAS)
    for text, expected in ((shown.one, [shown.call]), (shown.two, [shown.call, SECOND])):
        if not text:
            continue
        got = [call for region in syntax.read(text, parameters) for call in region.calls]
        if [(call.name, call.arguments, call.problem) for call in got] != [
            (call.name, call.arguments, None) for call in expected
        ]:
            return False
    return True


@dataclass(slots=True)
class _Frame:
    """What stands around calls."""

    opening: str
    closing: str
    outer_opening: str
    outer_closing: str


def _frame(shown: Shown, before: str, behind: str, between: str, reasoning_closing: str) -> _Frame:
    """The tags of a call, from the texts before the first, behind a last, and between two (empty if unknown)."""
    before = before.rpartition(reasoning_closing)[2].lstrip()
    if not between.strip():
        closing = behind[: -len(shown.text_end)] if shown.text_end and behind.endswith(shown.text_end) else ""
        return _Frame(before.strip(), closing.strip(), "", "")
    opening = common_suffix(before.rstrip(), between.rstrip()).lstrip()
    if not opening:
        return _Frame(before.strip(), "", "", "")
    closing = between.rstrip()[: -len(opening)].strip()
    outer_opening = before.rstrip()[: -len(opening)].strip()
    outer_closing = ""
    behind = behind.strip()
    if closing and behind.startswith(closing) and outer_opening:
        behind = behind[len(closing) :]
        outer_closing = behind.removesuffix(shown.text_end.strip()).strip()
    return _Frame(opening, closing, outer_opening, outer_closing)


@dataclass(slots=True)
class _Object:
    start: int
    end: int
    value: Any


def _objects(text: str) -> list[_Object]:
    """The outermost JSON objects of a text."""
    decoder = json.JSONDecoder()
    found: list[_Object] = []
    at = 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            at = start + 1
            continue
        found.append(_Object(start, end, value))
        at = end
    return found


def _as_channel(shown: Shown, reasoning_closing: str) -> Syntax | None:
    return ChannelSyntax() if f"to=functions.{shown.call.name}" in shown.one and "<|message|>" in shown.one else None


def _as_json_objects(shown: Shown, reasoning_closing: str) -> Syntax | None:
    first = next((found for found in _objects(shown.one) if _is_whole(found, shown.call)), None)
    if first is None:
        return None
    before, behind, between = shown.one[: first.start], shown.one[first.end :], ""
    if shown.two:
        objects = [found for found in _objects(shown.two) if isinstance(found.value, dict)]
        places = [i for i, found in enumerate(objects) if _is_whole(found, shown.call)]
        after = objects[places[0]], objects[places[0] + 1]
        between = shown.two[after[0].end : after[1].start]
    if between.strip() == "," and before.rstrip().endswith("["):
        opening = before.rpartition(reasoning_closing)[2].strip()[:-1].strip()
        closing = behind.strip()[1:].removesuffix(shown.text_end.strip()).strip()
        return JsonObjects(opening, closing, in_list=True) if opening else BareJson()
    frame = _frame(shown, before, behind, between, reasoning_closing)
    if not frame.opening or frame.opening == "<|python_tag|>":
        return BareJson()
    return JsonObjects(frame.opening, frame.closing, frame.outer_opening, frame.outer_closing)


def _is_whole(found: _Object, call: Call) -> bool:
    read = call_from_value(found.value)
    return read.problem is None and read.name == call.name and read.arguments == call.arguments


def _as_named_json(shown: Shown, reasoning_closing: str) -> Syntax | None:
    spots: list[tuple[int, int, int, int]] = []
    for text, calls in ((shown.one, [shown.call]), (shown.two, [shown.call, SECOND])):
        at = 0
        for call in calls if text else []:
            start = text.index(call.name, at)
            value = next((found for found in _objects(text[start:]) if found.value == call.arguments), None)
            if value is None:
                return None
            at = start + value.end
            spots.append((start, start + len(call.name), start + value.start, at))
    start, name_end, object_start, end = spots[0]
    between = shown.two[spots[1][3] : spots[2][0]] if shown.two else ""
    frame = _frame(shown, shown.one[:start], shown.one[end:], between, reasoning_closing)
    middle = shown.one[name_end:object_start]
    mark = shown.call.id if shown.call.id and shown.call.id in middle else ""
    if not frame.opening:
        return None
    return NamedJson(frame.opening, middle, frame.closing, frame.outer_opening, frame.outer_closing, mark or "")


def _as_keyed_values(shown: Shown, reasoning_closing: str) -> Syntax | None:
    text, call = shown.one, shown.call
    a_key = text.index("akey", text.index(call.name))
    name = text.rindex(call.name, 0, a_key)
    a_value = text.index("Probe7A", a_key)
    b_key = text.index("bkey", a_value)
    last_end = text.index("Probe7F", b_key) + len("Probe7F")
    behind_name = text[name + len(call.name) : a_key]
    behind_value = text[a_value + len("Probe7A") : b_key]
    key_end = text[a_key + len("akey") : a_value]
    key_opening = common_suffix(behind_name, behind_value).lstrip()
    value_end = behind_value[: len(behind_value) - len(key_opening)]
    # White space between a value's end and the next key belongs to neither.
    value_end = value_end[: len(value_end.rstrip())]
    name_end = behind_name[: len(behind_name) - len(key_opening)].strip()
    behind = text[last_end:]
    if not (key_opening and value_end.strip() and behind.startswith(value_end)):
        return None
    behind, between = behind[len(value_end) :], ""
    if shown.two:
        first_end = shown.two.index("Probe7F") + len("Probe7F")
        between = shown.two[first_end + len(value_end) : shown.two.index(SECOND.name)]
    frame = _frame(shown, text[:name], behind, between, reasoning_closing)
    if not (frame.opening and frame.closing):
        return None
    return KeyedValues(
        frame.opening,
        name_end,
        key_opening,
        key_end,
        value_end,
        frame.closing,
        frame.outer_opening,
        frame.outer_closing,
    )


def _as_braced_calls(shown: Shown, reasoning_closing: str) -> Syntax | None:
    text, name = shown.one, shown.one.index(shown.call.name)
    head = re.compile(r"\{\s*akey:(?P<quote>\S*?)Probe7A(?P=quote)").match(text, name + len(shown.call.name))
    if head is None:
        return None
    last = text.index("Probe7F") + len("Probe7F") + len(head["quote"])
    end = text.index("}", last) + 1
    between = ""
    if shown.two:
        first_end = shown.two.index("}", shown.two.index("Probe7F")) + 1
        between = shown.two[first_end : shown.two.index(SECOND.name)]
    frame = _frame(shown, text[:name], text[end:], between, reasoning_closing)
    if not (frame.opening and frame.closing):
        return None
    return BracedCalls(frame.opening, frame.closing, head["quote"], frame.outer_opening, frame.outer_closing)


def _as_python_calls(shown: Shown, reasoning_closing: str) -> Syntax | None:
    text = shown.one
    start = text.index(f"[{shown.call.name}(")
    end = text.index(")]", text.index("Probe7F", start)) + 2
    opening = text[:start].rpartition(reasoning_closing)[2].strip()
    closing = text[end:].strip().removesuffix(shown.text_end.strip()).strip()
    return PythonCalls(opening, closing) if opening and closing else None


_SUGGESTIONS: tuple[Callable[[Shown, str], Syntax | None], ...] = (
    _as_channel,
    _as_json_objects,
    _as_named_json,
    _as_keyed_values,
    _as_braced_calls,
    _as_python_calls,
)
