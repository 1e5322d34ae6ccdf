"""Reads a sample as the answer to a request: cuts it at a stop text and parses its message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.engines.base import Sample
from groupgrad.integrations.agents.conversations import Formats
from groupgrad.integrations.agents.wire import Answer, Question, message_of


@dataclass(slots=True, frozen=True)
class Answered:
    """A sample, read as the answer to a question."""

    ids: list[int]
    """Its token ids up to the one that completes a stop text. The others were never used, and the first ones are a
    sample of the policy with or without them."""
    is_cut: bool
    """There is a stop text."""
    message: dict[str, Any]
    """The turn as chat templates take it."""
    answer: Answer


def read_sample(formats: Formats, question: Question, sample: Sample, num_read: int, mark: str) -> Answered:
    """The answer that a sample is. `num_read` tokens stood before it; ids of calls that have none begin with `mark`."""
    tokenizer = formats.maker.tokenizer
    ids, stop_text = _cut(tokenizer, sample.ids, question.stop)
    is_cut = stop_text is not None
    turn = formats.parse(ids, question)
    if is_cut:
        turn.message["content"] = _before_stop(turn.message["content"], question.stop)
    calls = turn.message.get("tool_calls", [])
    for number, call in enumerate(calls):
        call.setdefault("id", f"call_{mark}_{number}")
    ended = "stop" if is_cut or sample.finish_reason == "eos" else "length"
    answer = Answer(
        message_of(turn.message),
        turn.message.get("content") or "",
        "tool_calls" if calls and ended == "stop" else ended,
        num_read,
        [tokenizer.decode([token]) for token in ids],
        None if sample.logprobs is None else sample.logprobs[: len(ids)],
        stop_text,
    )
    return Answered(ids, is_cut, turn.message, answer)


def _cut(tokenizer: Any, ids: list[int], stop: Sequence[str]) -> tuple[list[int], str | None]:
    """The ids up to the token that completes a stop text, and that text; None if there is none."""

    def first_stop(length: int) -> str | None:
        text = tokenizer.decode(ids[:length], skip_special_tokens=False)
        return min((one for one in stop if one in text), key=text.find, default=None)

    if not stop or first_stop(len(ids)) is None:
        return ids, None
    low, high = 1, len(ids)
    while low < high:  # the first length whose text has a stop text
        middle = (low + high) // 2
        low, high = (low, middle) if first_stop(middle) is not None else (middle + 1, high)
    return ids[:low], first_stop(low)


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop text, which OpenAI's API leaves out."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]
