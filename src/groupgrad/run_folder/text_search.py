"""Finds prompts and completions that contain a text.

Of a conversation the search reads what was written and called, not the JSON that holds it: reasoning, content, and the
names and arguments of calls, from the first message to the last. Any white space in the text that is sought matches any
white space, also that between two messages. Case does not matter. `apps/view/static/source.js` has the same rule for
reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from groupgrad.run_folder.row_selection import pc

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which chat templates keep the reasoning of a message."""

_SPACE = r"[ \t\n\x0b\f\r]+"


def rows_with(sought: str, columns: Sequence[pa.Array], is_messages: pa.Array) -> pa.Array:
    """(rows,) true where one of the columns of texts contains `sought`. `is_messages` (rows,): texts are JSON."""
    pieces = re.split(_SPACE, sought)
    pattern = _SPACE.join(map(re.escape, pieces))
    of_messages = is_messages.to_numpy(zero_copy_only=False)
    found = np.zeros(len(of_messages), dtype=bool)
    for texts in columns:
        if not of_messages.all():
            found |= _matches(texts, pattern) & ~of_messages
        if of_messages.any():
            maybe = np.logical_and.reduce([of_messages & ~found, *(_holds(texts, piece) for piece in pieces if piece)])
            places = np.flatnonzero(maybe)
            said = pa.array([words(text.as_py()) for text in texts.filter(pa.array(maybe))], pa.string())
            found[places[_matches(said, pattern)]] = True
    return pa.array(found)


def _matches(texts: pa.Array, pattern: str) -> np.ndarray:
    found = pc.match_substring_regex(texts, pattern, ignore_case=True)
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)


def _holds(texts: pa.Array, piece: str) -> np.ndarray:
    """(rows,) true for JSON that contains a text without white space, as it is or escaped."""
    forms = {piece, json.dumps(piece, ensure_ascii=False)[1:-1]}
    return np.logical_or.reduce([_matches(texts, re.escape(form)) for form in forms])


def words(text: str) -> str:
    """The text of messages that a search reads; a text that is no JSON of messages is returned."""
    try:
        return "\n".join(line for message in json.loads(text) for line in _lines(message) if line)
    except (ValueError, TypeError, KeyError, AttributeError):  # a user's function may return any messages
        return text


def _lines(message: dict[str, Any]) -> Iterator[str]:
    yield from filter(None, map(message.get, REASONING))
    content = message.get("content") or []
    yield from [content] if isinstance(content, str) else [block.get("text") or "" for block in content]
    for call in message.get("tool_calls") or ():
        called = call.get("function", call)
        arguments = called.get("arguments")
        yield called.get("name") or ""
        if arguments is not None:
            yield arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if isinstance(arguments, dict):  # texts as they were written too, without JSON's escapes
            yield from (value for value in arguments.values() if isinstance(value, str))
