"""Derives a chat template's call syntax from probe renderings, in which it locates names, keys and values."""

from __future__ import annotations

import re
from collections.abc import Callable

from groupgrad.chat.call_syntax import (
    BareJson,
    JsonCalls,
    KeyedArguments,
    NamedArguments,
    PythonCalls,
    TaggedCalls,
    Tags,
)
from groupgrad.chat.channels import ChannelSyntax
from groupgrad.chat.probe import SCHEMAS, SECOND_CALL, ProbeRenderings
from groupgrad.chat.records import ToolCall
from groupgrad.chat.values import call_from_value, decode_json, parameter_schemas

_PIECES = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|\w+|\s+|.", re.DOTALL)

CallSyntax = TaggedCalls | BareJson | ChannelSyntax
"""Parser of the tool calls in a turn's text."""

SpanFinder = Callable[[str, ToolCall, int], tuple[int, int]]
"""Finds `text[start:end]`, a call without its tags, from an index on; ValueError if there is none."""


def derive_syntax(probes: ProbeRenderings, reasoning_closing: str) -> CallSyntax | None:
    """Finds the syntax that parses the probe calls back exactly; None if none does."""
    turn = probes.one_call.rpartition(reasoning_closing)[2]
    for derive in (_channels, _json, _named_json, _keyed, _braced, _python):
        try:
            syntax = derive(turn, probes)
        except (ValueError, IndexError):  # the rendering lacks the parts of this syntax
            continue
        if _parses_probes(syntax, probes):
            return syntax
    return None


def _parses_probes(syntax: CallSyntax, probes: ProbeRenderings) -> bool:
    """True if the syntax parses the probe calls with the same types and order."""
    parameters = parameter_schemas(SCHEMAS)
    for text, expected in ((probes.one_call, [probes.call]), (probes.two_calls, [probes.call, SECOND_CALL])):
        calls = [call for span in syntax.read(text, parameters) for call in span.calls]
        if text and [(call.name, call.arguments, call.problem) for call in calls] != [
            (call.name, call.arguments, None) for call in expected
        ]:
            return False
    return True


def _tags(turn: str, probes: ProbeRenderings, find: SpanFinder) -> Tags:
    """Tags around the calls that `find` finds: from the text before the first, behind the last and between two."""
    start, end = find(turn, probes.call, 0)
    before, behind, text_end = turn[:start].strip(), turn[end:].strip(), probes.text_end.strip()
    if before.endswith("[") and behind.startswith("]"):
        return Tags(before[:-1].strip(), behind[1:].removesuffix(text_end).strip(), in_list=True)
    between = ""
    if probes.two_calls:
        first_end = find(probes.two_calls, probes.call, 0)[1]
        between = probes.two_calls[first_end : find(probes.two_calls, SECOND_CALL, first_end)[0]].strip()
    if not between:
        is_cut = bool(probes.text_end) and turn.endswith(probes.text_end)
        return Tags(before, behind.removesuffix(text_end).strip() if is_cut else "")
    opening = _common_suffix(before, between).strip()
    if not opening:
        return Tags(before)
    closing, outer_opening = between.removesuffix(opening).strip(), before.removesuffix(opening).strip()
    has_outer = bool(closing and outer_opening) and behind.startswith(closing)
    outer_closing = behind[len(closing) :].removesuffix(text_end).strip() if has_outer else ""
    return Tags(opening, closing, outer_opening, outer_closing)


def _closed_tags(turn: str, probes: ProbeRenderings, find: SpanFinder) -> Tags:
    tags = _tags(turn, probes, find)
    if not tags.closing:
        raise ValueError("no tag closes a call")
    return tags


def _channels(turn: str, probes: ProbeRenderings) -> CallSyntax:
    turn.index(f"to=functions.{probes.call.name}")
    turn.index("<|message|>")
    return ChannelSyntax()


def _json(turn: str, probes: ProbeRenderings) -> CallSyntax:
    tags = _tags(turn, probes, _find_object)
    return BareJson() if tags.opening in ("", "<|python_tag|>") else JsonCalls(tags)


def _named_json(turn: str, probes: ProbeRenderings) -> CallSyntax:
    call, find = probes.call, _ending_with("}")
    name_end = find(turn, call, 0)[0] + len(call.name)
    middle = turn[name_end : turn.index("{", name_end)]
    return NamedArguments(
        _tags(turn, probes, find), middle, id_example=call.id if call.id and call.id in middle else ""
    )


def _keyed(turn: str, probes: ProbeRenderings) -> CallSyntax:
    name_start, key_start = _name_and_key(turn, probes.call, 0)
    value_start = turn.index("Probe7A", key_start)
    behind_name = turn[name_start + len(probes.call.name) : key_start]
    behind_value = turn[value_start + len("Probe7A") : turn.index("bkey", value_start)]
    key_opening = _common_suffix(behind_name, behind_value).lstrip()
    # White space between the end of a value and the next key belongs to neither.
    value_end = behind_value[: len(behind_value) - len(key_opening)].rstrip()
    if not (key_opening and value_end):
        raise ValueError("no text separates a value from the next key")
    tags = _closed_tags(turn, probes, _ending_with(value_end))
    name_end = behind_name[: len(behind_name) - len(key_opening)].strip()
    return KeyedArguments(tags, name_end, key_opening, turn[key_start + len("akey") : value_start], value_end)


def _braced(turn: str, probes: ProbeRenderings) -> CallSyntax:
    head = re.search(probes.call.name + r"\{\s*akey:(?P<quote>\S*?)Probe7A(?P=quote)", turn)
    if head is None:
        raise ValueError("no braces with bare keys follow the name")
    return NamedArguments(_closed_tags(turn, probes, _ending_with("}")), quote=head["quote"])


def _python(turn: str, probes: ProbeRenderings) -> CallSyntax:
    tags = _closed_tags(turn, probes, _ending_with(")"))
    if not tags.in_list:
        raise ValueError("the calls stand in no list")
    return PythonCalls(tags)


def _ending_with(closing: str) -> SpanFinder:
    """Finder of calls that begin with the name and end with the first `closing` behind their last value."""

    def find(text: str, call: ToolCall, at: int) -> tuple[int, int]:
        start, key = _name_and_key(text, call, at)
        return start, text.index(closing, text.index(call.arguments["fkey"], key)) + len(closing)

    return find


def _name_and_key(text: str, call: ToolCall, at: int) -> tuple[int, int]:
    """Index of the last occurrence of the call's name before its first key, and index of that key."""
    key = text.index("akey", text.index(call.name, at))
    return text.rindex(call.name, at, key), key


def _find_object(text: str, call: ToolCall, at: int) -> tuple[int, int]:
    """Finds a call that is a JSON object with its name and arguments."""
    while True:
        start = text.index("{", at)
        try:
            value, end = decode_json(text, start)
        except ValueError:
            at = start + 1
            continue
        found = call_from_value(value)
        if (found.name, found.arguments, found.problem) == (call.name, call.arguments, None):
            return start, end
        at = end


def _common_suffix(first: str, second: str) -> str:
    """The longest common ending that splits no tag or word."""
    pieces, others = _PIECES.findall(first), _PIECES.findall(second)
    count = 0
    while count < min(len(pieces), len(others)) and pieces[-1 - count] == others[-1 - count]:
        count += 1
    return "".join(pieces[len(pieces) - count :])
