"""Selects and orders rows of the table of rollouts, also by a text that prompt or completion contain.

Of a conversation the search reads what was written and called, not the JSON that holds it: reasoning, content, and the
names and arguments of calls, from the first message to the last. Any white space in the text that is sought matches any
white space, also that between two messages. Case does not matter. `apps/view/static/source.js` has the same rule for
reports.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from groupgrad.run_folder.rollout_table import TRAINING

pc: Any = pyarrow.compute  # whose functions are made at run time

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which chat templates keep the reasoning of a message."""

_SPACE = r"[ \t\n\x0b\f\r]+"


@dataclass(slots=True, frozen=True)
class Selection:
    """Conditions that a row has to meet; None sets none."""

    first_step: int | None = None
    last_step: int | None = None
    text: str | None = None
    """Part of prompt or completion, by the rule of `rows_with`."""
    prompt_id: str | None = None
    group: int | None = None
    reward: str | None = None
    """Reward function that the bounds are of; None: the weighted reward."""
    min_reward: float | None = None
    max_reward: float | None = None
    finish_reason: str | None = None
    tool: str | None = None
    """Name of a tool that was called."""
    phase: str | None = None
    """`train`, or the metric prefix of an evaluation."""

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Selection:
        """A selection from texts. ValueError, with the name, for one that is no number."""
        kinds = {"first_step": int, "last_step": int, "group": int, "min_reward": float, "max_reward": float}
        parsed: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = values.get(field.name, "")
            if value == "":
                continue
            try:
                parsed[field.name] = kinds.get(field.name, str)(value)
            except ValueError as error:
                raise ValueError(f"{field.name}={value!r} is no number") from error
        return cls(**parsed)


def select(table: pa.Table, selection: Selection, texts: pa.Array | None = None) -> pa.Table:
    """Returns the rows that meet all conditions; `texts` (rows,) is True for rows that contain the text."""
    if not table.num_rows:
        return table
    masks = [] if texts is None else [texts]
    reward = "reward" if selection.reward is None else f"reward/{selection.reward}"
    for column, comparison, value in (
        ("step", pc.greater_equal, selection.first_step),
        ("step", pc.less_equal, selection.last_step),
        ("prompt_id", pc.equal, selection.prompt_id),
        ("group", pc.equal, selection.group),
        (reward, pc.greater_equal, selection.min_reward),
        (reward, pc.less_equal, selection.max_reward),
        ("finish_reason", pc.equal, selection.finish_reason),
        ("phase", pc.equal, selection.phase),
    ):
        if value is not None and column in table.column_names:
            masks.append(comparison(table[column], value))
        elif value is not None:
            return table.slice(0, 0)
    if selection.tool is not None:
        lines = pc.binary_join_element_wise("", table["tools"], "", "\n")
        masks.append(pc.match_substring(lines, f"\n{selection.tool}\n"))
    if not masks:
        return table
    combined = masks[0]
    for mask in masks[1:]:
        combined = pc.and_kleene(combined, mask)
    return table.filter(combined)


def ordered(table: pa.Table, column: str, *, descending: bool, offset: int, limit: int) -> pa.Table:
    """Some of the rows in order of a column, empty values last. Equal ones are in order of step, phase and row,
    training before evaluations."""
    if column not in table.column_names or not table.num_rows:
        return table.slice(offset, limit)
    names = [column, *(name for name in ("step", "held_out", "phase", "row") if name != column)]
    keys = [(name, "descending" if descending and name == column else "ascending") for name in names]
    ranks = table.append_column("held_out", pc.not_equal(table["phase"], TRAINING)).select(names)
    return table.take(pc.sort_indices(ranks, sort_keys=keys).slice(offset, limit))


def rows_with(sought: str, columns: Sequence[pa.Array], is_messages: pa.Array) -> pa.Array:
    """(rows,) true where one of the columns of texts contains `sought`. `is_messages` (rows,): texts are JSON."""
    pattern = _SPACE.join(map(re.escape, re.split(_SPACE, sought)))
    found = np.zeros(len(is_messages), dtype=bool)
    for texts in columns:
        read = [words(text) if is_json else text for text, is_json in zip(texts.to_pylist(), is_messages.to_pylist())]
        holds = pc.match_substring_regex(pa.array(read, pa.string()), pattern, ignore_case=True)
        found |= pc.fill_null(holds, False).to_numpy(zero_copy_only=False)
    return pa.array(found)


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
