"""Token ids between a sampled turn of text and the next turn of the assistant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from groupgrad.chat.chat_template import ChatTemplate
from groupgrad.chat.probe import ANSWER, USER


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
