"""Token ids of tool replies: everything between a sampled turn with calls and the next assistant turn.

Sampled ids are never rendered again, so only the text behind the calling turn is needed: its end token, the tool
messages and the generation prompt. It is cut out of renderings of probe conversations, which works also for templates
that render earlier turns differently once messages follow them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.call_syntax import CallSyntax
from groupgrad.chat.chat_template import ChatTemplate, ControlToken
from groupgrad.chat.probe import ANSWER, USER, ProbeRenderings, call_message, turn_start
from groupgrad.chat.values import ToolCall

_RESULT = "Probe7Result"
_VALUE = "Probe7Value"
_SAFE_NAME = re.compile(r"[\w.-]{1,128}")
_PLACEHOLDER_NAME = "unknown_tool"
_CALL = ToolCall("probe_tool_one", {"akey": _VALUE}, "probe0001")
_TOOL_MESSAGE = {"role": "tool", "name": _CALL.name, "content": _RESULT, "tool_call_id": _CALL.id}
_USER_REPLY = {"role": "user", "content": _RESULT}


@dataclass(slots=True)
class _Conversation:
    """A rendered probe conversation whose last assistant turn calls tools."""

    text: str
    calls_end: int
    """Index behind the last call, before the turn's end token."""

    @property
    def tail(self) -> str:
        """The text behind the last call."""
        return self.text[self.calls_end :]


class ToolReplies:
    """Renders tool replies as the template does; ValueError if they cannot be cut out of its renderings.

    The tools' schemas are left out of the rendered conversations, which no template repeats behind a call.
    """

    def __init__(
        self,
        template: ChatTemplate,
        probes: ProbeRenderings,
        syntax: CallSyntax | None,
    ):
        self._template, self._probes, self._syntax = template, probes, syntax
        self.as_user = False
        """Replies are rendered as a user message, as the template has no tool messages."""
        self._unanswered = template.try_render([USER, self._calling_turn([_CALL])])
        conversation = self._probe_reply()
        self.end_token = self._find_end_token(conversation)
        """The control token that ends a calling turn; None if the template has none."""
        self._turn_end = conversation.text[conversation.calls_end : self.end_token.end] if self.end_token else ""
        self._turn_end_ids = template.encode(self._turn_end) if self._turn_end else []
        self._closing_ids = self._find_closing_ids()

    def ids(
        self,
        turn_ids: list[int],
        replies: list[dict[str, Any]],
        encode: Callable[[str], list[int]],
        then: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Token ids to append to a sampled turn: the missing part of its end, the replies, the generation prompt.

        `then` are further messages behind the replies. `encode` makes ids of the text with the replies; the last ids of
        its result are returned, behind the missing part of the turn's end.
        """
        conversation = self._render(replies, then)
        if self.end_token is None:
            return encode(conversation.tail)
        # The whole text is encoded, as the ids next to a control token may depend on it.
        ids = encode(conversation.text)
        turn_end = conversation.calls_end + len(self._turn_end)
        num_end_tokens = conversation.text.count(self.end_token.text, 0, turn_end)
        ends = [i + 1 for i, token in enumerate(ids) if token == self.end_token.id]
        reply_ids = ids[ends[num_end_tokens - 1] :]
        is_ended = bool(turn_ids) and turn_ids[-1] in self._closing_ids
        return reply_ids if is_ended else self._turn_end_ids + reply_ids

    def _probe_reply(self) -> _Conversation:
        """A conversation with one reply; ValueError if the template cannot render one behind a call."""
        calling_turn = self._calling_turn([_CALL])
        # A template without calls may have no role for tools either.
        replies = [_TOOL_MESSAGE] if self._probes.one_call else [_TOOL_MESSAGE, _USER_REPLY]
        for reply in replies:
            conversation = self._locate(self._template.try_render([USER, calling_turn, reply], prompt=True))
            if conversation is not None and _RESULT in conversation.tail:
                self.as_user = reply is _USER_REPLY
                return conversation
        rendered = self._template.try_render([USER, calling_turn, _TOOL_MESSAGE], prompt=True)
        raise ValueError(self._no_continuation(rendered or str(self._template.error)))

    def _calling_turn(self, calls: list[ToolCall]) -> dict[str, Any]:
        if self._probes.one_call:
            return call_message(calls, arguments_as_text=self._probes.arguments_as_text)
        # The template renders only the content of a turn, so the content marks its end.
        return call_message(calls, content=_VALUE)

    def _render(self, replies: list[dict[str, Any]], then: Sequence[dict[str, Any]] = ()) -> _Conversation:
        """A conversation with these replies to as many calls. Call ids that the template rejects are replaced."""
        placeholders = [f"call{number:05d}" for number in range(len(replies))]  # nine characters for some templates
        ids = [reply.get("tool_call_id") or placeholder for reply, placeholder in zip(replies, placeholders)]
        rendered = self._template.try_render([*self._messages(replies, ids), *then], prompt=True)
        if rendered is None:
            messages = [*self._messages(replies, placeholders), *then]
            rendered = self._template.render(messages, prompt=True)
        conversation = self._locate(rendered, len(replies) if self._probes.two_calls else 1)
        if conversation is None or not conversation.tail.startswith(self._turn_end):
            raise ValueError(self._no_continuation(rendered))
        return conversation

    def _messages(self, replies: list[dict[str, Any]], ids: list[str]) -> list[dict[str, Any]]:
        names = [str(reply.get("name") or "") for reply in replies]
        names = [name if _SAFE_NAME.fullmatch(name) else _PLACEHOLDER_NAME for name in names]
        calls = [ToolCall(name, _CALL.arguments, call_id) for name, call_id in zip(names, ids)]
        calling_turn = self._calling_turn(calls if self._probes.two_calls else calls[:1])
        if self.as_user:
            return [USER, calling_turn, {"role": "user", "content": _joined([r.get("content") for r in replies])}]
        places = [{"role": "tool", "name": name, "tool_call_id": call_id} for name, call_id in zip(names, ids)]
        return [USER, calling_turn, *({**reply, **place} for reply, place in zip(replies, places))]

    def _locate(self, rendered: str | None, num_calls: int = 1) -> _Conversation | None:
        """Finds the end of the calls in a rendered conversation; None if they are not in it as they were given."""
        if rendered is None:
            return None
        start = turn_start(rendered, self._probes.generation_prompt)
        if self._syntax is None:
            return self._locate_by_value(rendered, start, num_calls)
        num_found = 0
        for span in self._syntax.read(rendered[start:], {}):
            num_found += len(span.calls)
            if num_found >= num_calls:
                is_kept = span.is_well_formed and span.calls[-1].arguments == _CALL.arguments
                return _Conversation(rendered, start + span.end) if is_kept else None
        return None

    def _locate_by_value(self, rendered: str, start: int, num_calls: int) -> _Conversation | None:
        end = start
        for _ in range(num_calls):
            value = rendered.find(_VALUE, end)
            if value < 0:
                return None
            end = value + len(_VALUE)
        # An unknown closing tag of the call stands before the end token of the turn.
        end_tokens = self._template.control_tokens(self._unanswered or "")[-1:]
        place = rendered.find(end_tokens[0].text, end) if end_tokens else -1
        return _Conversation(rendered, end if place < 0 else place)

    def _find_end_token(self, conversation: _Conversation) -> ControlToken | None:
        """The token that ends the turn if nothing follows it, else the first token before the reply.

        ValueError if the tokenizer does not keep it as one token.
        """
        text, start = conversation.text, conversation.calls_end
        tokens = self._template.control_tokens(text, start, text.index(_RESULT, start))
        unanswered = self._locate(self._unanswered)
        if unanswered is not None:
            last = self._template.control_tokens(unanswered.text, unanswered.calls_end)[-1:]
            tokens = [token for token in tokens if last and token.text == last[0].text] or tokens
        if not tokens:
            return None
        if self._template.encode(text).count(tokens[0].id) != text.count(tokens[0].text):
            raise ValueError(
                f"the tokenizer does not keep {tokens[0].text!r}, which ends a turn in its chat template, as one "
                "token; tools need a tokenizer whose template and special tokens belong together"
            )
        return tokens[0]

    def _find_closing_ids(self) -> set[int]:
        """Ids of the end token and of tokens that end a calling turn as well, such as the second one of Llama.

        There are no others if the end token opens the replies. Special tokens inside calls end no turn.
        """
        if self.end_token is None:
            return set()
        ends = self._template.control_tokens(self._probes.text_end)
        if not ends or ends[0].text != self.end_token.text:
            return {self.end_token.id}
        in_calls = self._template.control_tokens(self._probes.one_call + self._probes.two_calls)
        return {*self._template.tokenizer.all_special_ids} - {token.id for token in in_calls} | {self.end_token.id}

    def _no_continuation(self, answered: str) -> str:
        return (
            "the chat template gives no way to continue a turn that calls a tool: the turn's call and the reply "
            f"cannot both be found behind each other. A turn with a call is rendered as\n  "
            f"{self._unanswered!r}\nand with the "
            f"reply as\n  {answered!r}\nGive the tokenizer a chat template that keeps a call as it was and puts tool "
            "messages behind it (tokenizer.chat_template = ...)"
        )


def _joined(contents: list[Any]) -> Any:
    """Joins the contents of several replies: one text, or one list if any content consists of blocks."""
    if not any(isinstance(content, list) for content in contents):
        return "\n".join(map(str, contents))
    blocks: list[Any] = []
    for content in contents:
        blocks += content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
    return blocks


class TextTurns:
    """Continues turns without calls. What the template writes is cut out of a rendering of a probe conversation, so
    that sampled ids are never rendered again."""

    def __init__(self, template: ChatTemplate):
        self._template = template

    def ids(
        self, turn_ids: Sequence[int], messages: Sequence[dict[str, Any]], encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Token ids to append to a sampled turn: the missing part of its end, `messages`, and the generation prompt.

        `encode` makes ids of the rendered text. ValueError if the template cannot render the messages behind an
        answer; it may raise whatever a template raises.
        """
        text = self._template.render([USER, ANSWER, *messages], prompt=True)
        _, found, tail = text.partition(ANSWER["content"])
        if not found:
            raise ValueError(f"the chat template drops an answer that messages follow: {text!r}")
        ends = self._template.control_tokens(tail)[:1]
        if not ends:
            return encode(tail)
        end = ends[0]
        # The whole text is encoded, as the ids next to a control token may depend on it.
        ids = encode(text)
        before = text[: len(text) - len(tail)].count(end.text)
        places = [place for place, token in enumerate(ids) if token == end.id]
        if len(places) <= before:
            raise ValueError(f"the tokenizer does not keep {end.text!r}, which ends a turn, as one token")
        turn_end = tail[: end.end]
        is_ended = bool(turn_ids) and turn_ids[-1] == end.id
        # A turn that was cut, as by a stop string, lacks all of its end.
        return ids[places[before] + 1 :] if is_ended else [*encode(turn_end), *ids[places[before] + 1 :]]
