"""Finds the writer of each token of a completion: the policy, a tool or the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from groupgrad.types import Messages, Rollout

Writer = Literal["policy", "tool", "template"]


def token_writers(rollout: Rollout, texts: Sequence[str]) -> list[Writer] | None:
    """The writer of each completion token, from `texts`, the text of each; None if the policy wrote all.

    Between two turns of the policy a tool wrote the tokens that hold characters of its reply, and the template the
    others. Where the template has changed a reply, so that it does not stand there literally, and in the tokens that a
    `rollout_func` has put in, all of them count as the tool's.
    """
    if rollout.sampled is None or all(rollout.sampled):
        return None
    replies = _replies(rollout.completion if isinstance(rollout.completion, list) else [])
    writers: list[Writer] = []
    for own, places in groupby(range(len(texts)), key=rollout.sampled.__getitem__):
        stretch = [texts[place] for place in places]
        policy: list[Writer] = ["policy"] * len(stretch)
        writers += policy if own else _between_turns(stretch, next(replies, []))
    return writers


def _replies(messages: Messages) -> Iterator[list[str]]:
    """The texts of the messages between two of the policy, for each time that there are some."""
    for own, some in groupby(messages, key=lambda message: message.get("role") == "assistant"):
        if not own:
            yield [text for message in some for text in _texts(message.get("content"))]


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    blocks = content if isinstance(content, (list, tuple)) else []
    return [str(block["text"]) for block in blocks if isinstance(block, Mapping) and "text" in block]


def _between_turns(stretch: Sequence[str], replies: Sequence[str]) -> list[Writer]:
    if not replies:
        return ["tool"] * len(stretch)
    text, end, found = "".join(stretch), 0, []
    for reply in filter(None, (reply.strip() for reply in replies)):
        start = text.find(reply, end)
        if start < 0:
            return ["tool"] * len(stretch)
        end = start + len(reply)
        found.append((start, end))
    starts = accumulate((len(token) for token in stretch), initial=0)
    return [
        "tool" if any(begin < start + len(token) and start < end for begin, end in found) else "template"
        for token, start in zip(stretch, starts)
    ]
