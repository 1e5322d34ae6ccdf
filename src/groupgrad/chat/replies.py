"""What stands between a sampled turn that calls tools and the next turn, cut out of renderings of dummy conversations.

Sampled ids are never rendered again, so all that is needed of a template is the text from the end of the calling turn
on: the end mark, the tool messages and the generation prompt. That part is found also in templates that write earlier
turns in another way once messages follow them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.probe import USER, Shown, call_message, turn_start
from groupgrad.chat.records import Call, Syntax
from groupgrad.chat.render import Mark, Template, difference

_RESULT = "Probe7Result"
_VALUE = "Probe7Value"
_SAFE_NAME = re.compile(r"[\w.-]{1,128}")
_DUMMY_NAME = "unknown_tool"
_CALL = Call("probe_tool_one", {"akey": _VALUE}, "probe0001")
_REPLY = {"role": "tool", "name": _CALL.name, "content": _RESULT, "tool_call_id": _CALL.id}


@dataclass(slots=True)
class _Place:
    """A dummy conversation with replies, and where its calling turn ends."""

    text: str
    end: int
    """Behind the last call, before the turn's end mark."""


class ReplyWriter:
    """Writes tool replies as the template does; ValueError if no way to cut them out of it is found."""

    def __init__(self, template: Template, shown: Shown, syntax: Syntax | None, schemas: list[dict[str, Any]]):
        self._template, self._shown, self._syntax = template, shown, syntax
        self._several = bool(shown.two)
        self.as_user = False
        """Replies are put into a message of the user's, as the template has none for tools."""
        # Short conversations are rendered faster; the tools themselves are in them only if they make a difference.
        self._schemas: list[dict[str, Any]] | None = None
        self._prompt = shown.generation_prompt
        self._alone = template.attempt([USER, self._message([_CALL])])
        place = self._answered()
        self.end_mark = self._find_end(place)
        """The token that ends a calling turn; None if the template has none."""
        self._gap = "" if self.end_mark is None else place.text[place.end : self.end_mark.end]
        self._gap_ids = template.ids(self._gap) if self._gap else []
        self._check_tokens(place)
        # Special tokens that are part of a call end nothing.
        markup = {mark.id for mark in template.marks(shown.one + shown.two)}
        self._other_ends = set(template.tokenizer.all_special_ids) - markup
        self._show_tools_if_needed(place, schemas)

    def ids(self, turn_ids: list[int], replies: list[dict[str, Any]], encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids to append to a sampled turn: what its end lacks, the replies, the generation prompt. `encode` makes
        ids of a text in which the replies are; those returned are the last of them, behind what the turn's end lacks.
        """
        place = self._render(replies)
        if self.end_mark is None:
            return encode(place.text[place.end :])
        cut = place.end + len(self._gap)
        behind = self._behind_mark(place.text, cut, encode)
        return behind if self._is_ended(turn_ids) else self._gap_ids + behind

    def rewritten(self) -> tuple[str, str] | None:
        """Two renderings of one turn that differ by what follows it; None if turns stay as they were rendered."""
        thought = {"reasoning_content": "Probe7Thought", "thinking": "Probe7Thought"}
        plain = {"role": "assistant", "content": "Probe7Answer"}
        histories = [
            ([USER, self._message([_CALL])], [_REPLY], True),
            ([USER, {**self._message([_CALL]), **thought}], [_REPLY], True),
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

    def _answered(self) -> _Place:
        """A dummy conversation with one reply; ValueError if the template cannot render one behind a call."""
        answered = self._template.attempt([USER, self._message([_CALL]), _REPLY], prompt=True)
        failure = self._template.failure
        place = None if answered is None else self._locate(answered, 1)
        if place is not None and _RESULT in place.text[place.end :]:
            return place
        if not self._shown.one:
            # Whoever reads calls that the template knows nothing of may have no role for tools either.
            user = {"role": "user", "content": _RESULT}
            rendered = self._template.attempt([USER, self._message([_CALL]), user], prompt=True)
            place = None if rendered is None else self._locate(rendered, 1)
            if place is not None and _RESULT in place.text[place.end :]:
                self.as_user = True
                return place
        if answered is None:
            raise ValueError(
                f"the chat template refuses the answer to a tool call: {failure}; give the tokenizer a chat template "
                "that renders messages of the role 'tool' (tokenizer.chat_template = ...)"
            )
        raise ValueError(self._no_suffix(answered))

    def _show_tools_if_needed(self, place: _Place, schemas: list[dict[str, Any]]) -> None:
        """Render replies with the tools in the prompt if that changes how they are rendered."""
        without = place.text[place.end :]
        plain_prompt = self._prompt
        self._schemas, self._prompt = schemas, self._template.text([USER], schemas, prompt=True)
        reply = {"role": "user", "content": _RESULT} if self.as_user else _REPLY
        text = self._template.attempt([USER, self._message([_CALL]), reply], schemas, prompt=True)
        shown = None if text is None else self._locate(text, 1)
        if shown is None or shown.text[shown.end :] == without or not shown.text.startswith(self._gap, shown.end):
            self._schemas, self._prompt = None, plain_prompt

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
        if self.as_user:
            messages = [{"role": "user", "content": _together([reply.get("content") for reply in replies])}]
        shown = calls if self._several else calls[:1]
        rendered = self._template.attempt([USER, self._message(shown), *messages], self._schemas, prompt=True)
        if rendered is None:
            for number, (call, message) in enumerate(zip(calls, messages)):
                call.id = message["tool_call_id"] = f"call{number:05d}"
            rendered = self._template.text([USER, self._message(shown), *messages], self._schemas, prompt=True)
        place = self._locate(rendered, len(shown))
        if place is None or not rendered.startswith(self._gap, place.end):
            raise ValueError(self._no_suffix(rendered))
        return place

    def _locate(self, rendered: str, num_calls: int) -> _Place | None:
        """Where the calling turn of a dummy conversation ends."""
        start = turn_start(rendered, self._prompt)
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

    def _behind_mark(self, text: str, cut: int, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids behind the end mark, from the ids of the whole text: tokens next to a mark may depend on it."""
        assert self.end_mark is not None
        count = text.count(self.end_mark.text, 0, cut)
        ids = encode(text)
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


def _together(contents: list[Any]) -> Any:
    """The contents of several replies as one: a text, or content blocks if there are any."""
    if not any(isinstance(content, list) for content in contents):
        return "\n".join(map(str, contents))
    blocks: list[Any] = []
    for content in contents:
        blocks += content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
    return blocks


def _behind(text: str, part: str) -> int:
    place = text.find(part)
    return len(text) if place < 0 else place + len(part)
