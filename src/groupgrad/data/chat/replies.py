"""What stands between a sampled turn that calls tools and the next turn, cut out of renderings of dummy conversations.

Sampled ids are never rendered again, so all that is needed of a template is the text from the end of the calling turn
on: the end mark, the tool messages and the generation prompt. That part is found also in templates that write earlier
turns in another way once messages follow them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from groupgrad.data.chat.probe import USER, Shown, call_message, turn_start
from groupgrad.data.chat.records import Call, Syntax
from groupgrad.data.chat.render import Mark, Template, difference

_RESULT = "Probe7Result"
_VALUE = "Probe7Value"
_SAFE_NAME = re.compile(r"[\w.-]{1,128}")
_DUMMY_NAME = "unknown_tool"


@dataclass(slots=True)
class _Place:
    """A dummy conversation with replies, and where its calling turn ends."""

    text: str
    end: int
    """Behind the last call, before the turn's end mark."""


class ReplyWriter:
    """Writes tool replies as the template does; ValueError if no way to cut them out of it is found."""

    def __init__(self, template: Template, shown: Shown, syntax: Syntax | None):
        self._template, self._shown, self._syntax = template, shown, syntax
        self._several = bool(shown.two)
        call = Call("probe_tool_one", {"akey": _VALUE}, "probe0001")
        reply = {"role": "tool", "name": call.name, "content": _RESULT, "tool_call_id": call.id}
        self._alone = template.attempt([USER, self._message([call])])
        conversation = [USER, self._message([call]), reply]
        answered = template.attempt(conversation, prompt=True)
        if answered is None:
            raise ValueError(
                f"the chat template refuses the answer to a tool call: {template.failure}; give the tokenizer a chat "
                "template that renders messages of the role 'tool' (tokenizer.chat_template = ...)"
            )
        place = self._locate(answered, 1)
        if place is None or _RESULT not in answered[place.end :]:
            raise ValueError(self._no_suffix(answered))
        self.end_mark = self._find_end(place)
        """The token that ends a calling turn; None if the template has none."""
        self._gap = "" if self.end_mark is None else answered[place.end : self.end_mark.end]
        self._gap_ids = template.ids(self._gap) if self._gap else []
        self._check_tokens(place)
        # Special tokens that are part of a call end nothing.
        markup = {mark.id for mark in template.marks(shown.one + shown.two)}
        self._other_ends = set(template.tokenizer.all_special_ids) - markup

    def ids(self, turn_ids: list[int], replies: list[dict[str, Any]]) -> list[int]:
        """Token ids to append to a sampled turn: what its end lacks, the replies, the generation prompt."""
        place = self._render(replies)
        if self.end_mark is None:
            return self._template.ids(place.text[place.end :])
        cut = place.end + len(self._gap)
        behind = self._behind_mark(place.text, cut)
        return behind if self._is_ended(turn_ids) else self._gap_ids + behind

    def rewritten(self) -> tuple[str, str] | None:
        """Two renderings of one turn that differ by what follows it; None if turns stay as they were rendered."""
        call = Call("probe_tool_one", {"akey": _VALUE}, "probe0001")
        reply = {"role": "tool", "name": call.name, "content": _RESULT, "tool_call_id": call.id}
        thought = {"reasoning_content": "Probe7Thought", "thinking": "Probe7Thought"}
        plain = {"role": "assistant", "content": "Probe7Answer"}
        histories = [
            ([USER, self._message([call])], [reply], True),
            ([USER, {**self._message([call]), **thought}], [reply], True),
            ([USER, {**plain, **thought}], [{"role": "user", "content": "Probe7Next"}], False),
        ]
        for history, more, is_call in histories:
            before, after = self._template.attempt(history), self._template.attempt(history + more)
            if before is None or after is None:
                continue
            if is_call:
                first, second = self._locate(before, 1), self._locate(after, 1)
                ends = (first.end, second.end) if first and second else (0, 0)
            else:
                ends = (_behind(before, "Probe7Answer"), _behind(after, "Probe7Answer"))
            if before[: ends[0]] != after[: ends[1]]:
                return difference(before, after)
        return None

    def _message(self, calls: list[Call]) -> dict[str, Any]:
        if self._shown.one:
            return call_message(calls, arguments_as_text=self._shown.arguments_as_text)
        # Nothing but the text of a turn is shown, so the text marks its end.
        return {**call_message(calls), "content": _VALUE}

    def _render(self, replies: list[dict[str, Any]]) -> _Place:
        """A conversation with these replies, and its calling turn's end."""
        calls, messages = [], []
        for number, reply in enumerate(replies):
            name = str(reply.get("name") or "")
            name = name if _SAFE_NAME.fullmatch(name) else _DUMMY_NAME
            # Some templates insist on ids of nine letters and digits.
            call_id = reply.get("tool_call_id") or f"call{number:05d}"
            calls.append(Call(name, {"akey": _VALUE}, call_id))
            messages.append({**reply, "role": "tool", "name": name, "tool_call_id": call_id})
        shown = calls if self._several else calls[:1]
        rendered = self._template.attempt([USER, self._message(shown), *messages], prompt=True)
        if rendered is None:
            for number, (call, message) in enumerate(zip(calls, messages)):
                call.id = message["tool_call_id"] = f"call{number:05d}"
            rendered = self._template.text([USER, self._message(shown), *messages], prompt=True)
        place = self._locate(rendered, len(shown))
        if place is None or not rendered.startswith(self._gap, place.end):
            raise ValueError(self._no_suffix(rendered))
        return place

    def _locate(self, rendered: str, num_calls: int) -> _Place | None:
        """Where the calling turn of a dummy conversation ends."""
        start = turn_start(rendered, self._shown.generation_prompt)
        if self._syntax is None or not self._shown.one:
            end = start - 1
            for _ in range(num_calls):
                end = rendered.find(_VALUE, end + 1)
                if end < 0:
                    return None
            end += len(_VALUE)
            # The call's own closing lies before the mark that ends the turn wherever the turn stands last.
            mark = self._template.last_mark(self._alone, 0) if self._alone else None
            place = -1 if mark is None else rendered.find(mark.text, end)
            return _Place(rendered, end if place < 0 else place)
        seen = 0
        turn = rendered[start:]
        for region in self._syntax.read(turn, {}):
            seen += len(region.calls)
            if seen >= num_calls:
                well = region.is_well_formed and region.calls[-1].arguments == {"akey": _VALUE}
                return _Place(rendered, start + region.end) if well else None
        return None

    def _find_end(self, place: _Place) -> Mark | None:
        """The mark that ends the turn: the one that ends it where nothing follows, else the first before the reply."""
        text, result = place.text, place.text.index(_RESULT, place.end)
        alone = self._locate(self._alone, 1) if self._alone else None
        if alone is not None:
            last = self._template.last_mark(alone.text, alone.end)
            at = -1 if last is None else text.find(last.text, place.end, result)
            if last is not None and at >= 0:
                return Mark(last.text, last.id, at, at + len(last.text))
        return self._template.first_mark(text, place.end, result)

    def _behind_mark(self, text: str, cut: int) -> list[int]:
        """Ids behind the end mark, from the ids of the whole text: tokens next to a mark may depend on it."""
        assert self.end_mark is not None
        count = text.count(self.end_mark.text, 0, cut)
        ids = self._template.ids(text)
        at = -1
        for _ in range(count):
            at = ids.index(self.end_mark.id, at + 1)
        return ids[at + 1 :]

    def _is_ended(self, turn_ids: list[int]) -> bool:
        assert self.end_mark is not None
        if not turn_ids:
            return False
        if turn_ids[-1] == self.end_mark.id:
            return True
        # Another end-of-turn token of the model's (Llama has two) does as well, unless the mark is one that opens
        # the replies.
        ends_text = self._template.first_mark(self._shown.text_end, 0)
        is_plain = ends_text is not None and ends_text.text == self.end_mark.text
        return is_plain and turn_ids[-1] in self._other_ends

    def _check_tokens(self, place: _Place) -> None:
        if self.end_mark is None:
            return
        ids = self._template.ids(place.text)
        if ids.count(self.end_mark.id) != place.text.count(self.end_mark.text):
            raise ValueError(
                f"the tokenizer does not keep {self.end_mark.text!r}, which ends a turn in its chat template, as one "
                "token; tools need a tokenizer whose template and special tokens belong together"
            )

    def _no_suffix(self, answered: str) -> str:
        alone = self._alone or ""
        first, second = difference(alone, answered)
        return (
            "the chat template gives no way to continue a turn that calls a tool: the turn's call and the reply "
            f"cannot both be found behind each other. A turn with a call is rendered as\n  {first!r}\nand with the "
            f"reply as\n  {second!r}\nGive the tokenizer a chat template that keeps a call as it was and puts tool "
            "messages behind it (tokenizer.chat_template = ...)"
        )


def _behind(text: str, part: str) -> int:
    place = text.find(part)
    return len(text) if place < 0 else place + len(part)
