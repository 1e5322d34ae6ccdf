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
    ids, is_cut = _cut(tokenizer, sample.ids, question.stop)
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
    )
    return Answered(ids, is_cut, turn.message, answer)


def _cut(tokenizer: Any, ids: list[int], stop: Sequence[str]) -> tuple[list[int], bool]:
    """The ids up to the token that completes a stop text, and whether there is one."""

    def has_stop(length: int) -> bool:
        text = tokenizer.decode(ids[:length], skip_special_tokens=False)
        return any(one in text for one in stop)

    if not stop or not has_stop(len(ids)):
        return ids, False
    low, high = 1, len(ids)
    while low < high:  # the first length whose text has a stop text
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle + 1, high)
    return ids[:low], True


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop text, which OpenAI's API leaves out."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]
