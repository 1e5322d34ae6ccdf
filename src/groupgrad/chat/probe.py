"""Renders made-up conversations (probes), which show how a chat template writes calls and reasoning."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.chat_template import ChatTemplate, common_prefix
from groupgrad.chat.values import ToolCall

USER = {"role": "user", "content": "Probe7Question"}
ANSWER = {"role": "assistant", "content": "Probe7Answer"}
CALL = ToolCall(
    "probe_tool_one",
    {"akey": "Probe7A", "bkey": "Probe7B", "ckey": 71, "dkey": True, "ekey": [7, "q"], "fkey": "Probe7F"},
    "probe0001",
)
SECOND_CALL = ToolCall("probe_tool_two", {"akey": "Probe8A", "fkey": "Probe8F"}, "probe0002")

_TYPES = {"akey": "string", "bkey": "string", "ckey": "integer", "dkey": "boolean", "ekey": "array", "fkey": "string"}

_REASONING = "Probe7Thought"
_TAG_BEFORE = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_]+\])\w*\s*\Z")
_TAG_BEHIND = re.compile(r"\s*(?:<[^<>\s]+>|\[/?[A-Z_]+\])")


def _schema(name: str) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"type": kind, "description": f"a {kind}"} for key, kind in _TYPES.items()}
    properties["ekey"]["items"] = {}
    parameters = {"type": "object", "properties": properties, "required": ["akey"]}
    return {"type": "function", "function": {"name": name, "description": "a probe", "parameters": parameters}}


SCHEMAS = [_schema(CALL.name), _schema(SECOND_CALL.name)]
"""Schemas of the tools that the probe calls call."""


@dataclass(slots=True)
class ProbeRenderings:
    """Texts that a template renders for probe conversations, cut to the part that a model would sample."""

    generation_prompt: str
    """The conversation up to the start of the assistant turn."""
    one_call: str = ""
    """A turn with `CALL`; empty if the template renders no calls."""
    two_calls: str = ""
    """A turn with `CALL` and `SECOND_CALL`; empty if the template cannot render two."""
    arguments_as_text: bool = False
    """The template expects arguments as a JSON text instead of a dict."""
    text_end: str = ""
    """The text behind the content of a last turn without calls."""


def call_message(calls: list[ToolCall], *, arguments_as_text: bool = False, content: str = "") -> dict[str, Any]:
    """Assistant message with tool calls, in the form of transformers."""
    entries = []
    for call in calls:
        arguments = json.dumps(call.arguments) if arguments_as_text else call.arguments
        entries.append({"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}})
    return {"role": "assistant", "content": content, "tool_calls": entries}


def turn_start(rendered: str, generation_prompt: str) -> int:
    """Index of the assistant turn in a rendered conversation."""
    if rendered.startswith(generation_prompt):
        return len(generation_prompt)
    # The template renders a finished turn with another opening than its generation prompt: cut behind the last tag or
    # line that both share.
    shared = common_prefix(rendered, generation_prompt)
    return max(shared.rfind(character) for character in "\n>]") + 1


def render_probes(template: ChatTemplate) -> ProbeRenderings:
    """Renders the probe conversations; raises what the template raises on a single user message."""
    prompt = template.render([USER], prompt=True)
    probes = ProbeRenderings(prompt)
    probes.text_end = (template.try_render([USER, ANSWER]) or "").partition(ANSWER["content"])[2]
    for as_text in (False, True):
        one = template.try_render([USER, call_message([CALL], arguments_as_text=as_text)])
        if one is None or CALL.name not in one or "Probe7F" not in one:
            continue
        probes.one_call, probes.arguments_as_text = one[turn_start(one, prompt) :], as_text
        two = template.try_render([USER, call_message([CALL, SECOND_CALL], arguments_as_text=as_text)])
        if two is not None and CALL.name in two and "Probe8F" in two:
            probes.two_calls = two[turn_start(two, prompt) :]
        break
    return probes


@dataclass(slots=True)
class ReasoningTags:
    """Tags around the reasoning block at the beginning of a turn."""

    opening: str = "<think>"
    closing: str = "</think>"
    opened_by_prompt: bool = False
    """The generation prompt ends inside a block."""

    def split(self, text: str) -> tuple[str | None, str]:
        """The text of the block, None if there is none, and the text after it.

        Without a closing tag all of the turn is text, as nothing marks the end of the block.
        """
        trimmed = text.lstrip()
        if trimmed.startswith(self.opening):
            body = trimmed[len(self.opening) :]
        elif self.opened_by_prompt:
            body = text
        else:
            return None, text
        reasoning, closing, rest = body.partition(self.closing)
        return (reasoning.strip(), rest.lstrip()) if closing else (None, text)


def find_reasoning_tags(
    template: ChatTemplate, call_message: dict[str, object], generation_prompt: str
) -> ReasoningTags:
    """Finds the tags in a rendered message with reasoning and a call; `<think>` tags if the template renders none."""
    tags = ReasoningTags()
    for name in ("reasoning_content", "reasoning", "thinking"):
        text = template.try_render([{"role": "user", "content": "U"}, {**call_message, name: _REASONING}])
        if text is None or text.count(_REASONING) != 1:
            continue
        start = text.index(_REASONING)
        before, behind = _TAG_BEFORE.search(text[:start]), _TAG_BEHIND.match(text, start + len(_REASONING))
        if before and behind:
            tags = ReasoningTags(before[0].strip(), behind[0].strip())
            break
    tags.opened_by_prompt = generation_prompt.rfind(tags.opening) > generation_prompt.rfind(tags.closing)
    return tags
