"""Finds what differs between two records of the same steps, bit by bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from groupgrad.apps.replay.run_records import RunRecords

_FIRST = ("prompt_id", "prompt", "images", "data", "is_messages", "group")
_THEN = ("completion_ids", "sampled", "logprobs", "entropy", "policy_version", "tool_calls", "finish_reason")
_LATER = ("tokens", "completion", "num_tokens", "turns", "problem", "extra")
_NAMES = {
    "completion_ids": "token id", "logprobs": "log-prob", "sampled": "who wrote the token", "reward": "weighted reward",
    "data": "data-set columns", "prompt_id": "prompt", "policy_version": "version of the weights",
}  # fmt: skip
_LISTS = ("completion_ids", "sampled", "logprobs", "entropy", "temperatures")


@dataclass(frozen=True, slots=True)
class Difference:
    """One place at which two records differ."""

    step: int
    what: str
    """Such as `log-prob` or `loss`."""
    first: Any
    second: Any
    row: int | None = None
    token: int | None = None
    """Number of the token in the completion, from 0."""
    count: int = 1
    """Numbers of this kind that differ in the step."""
    of: int = 1
    """Numbers of this kind that were compared."""

    @property
    def place(self) -> str:
        """Step, row and token, in words."""
        parts = [f"step {self.step}"]
        if self.row is not None:
            parts.append(f"row {self.row}")
        if self.token is not None:
            parts.append(f"token {self.token}")
        return ", ".join(parts)

    def text(self, first: str, second: str) -> str:
        """The difference in one line, with names of the two records."""
        more = f" ({self.count:,} of {self.of:,} differ)" if self.of > 1 else ""
        return f"{self.place}: {self.what} is {shown(self.first)} in {first} and {shown(self.second)} in {second}{more}"


@dataclass(slots=True)
class Compared:
    """Counts of what was compared, and the differences in the order in which a step computes them."""

    rows: int = 0
    tokens: int = 0
    numbers: int = 0
    """Log-probs, entropies, rewards and advantages."""
    metrics: int = 0
    digests: int = 0
    unmatched: int = 0
    """Rows that only one of the two records has."""
    differences: tuple[Difference, ...] = ()

    def __add__(self, other: Compared) -> Compared:
        names = ("rows", "tokens", "numbers", "metrics", "digests", "unmatched", "differences")
        return Compared(*(getattr(self, name) + getattr(other, name) for name in names))


def compare_step(
    first: RunRecords,
    second: RunRecords,
    step: int,
    *,
    metrics: bool = True,
    evaluations: bool = True,
    optional: bool = False,
) -> Compared:
    """Compares what two runs have recorded of a step: rollouts, metrics and the digest of the weights after it.

    Without `metrics` these are left out, without `evaluations` those of evaluations; with `optional` a metric that one
    of the two lacks is.
    """
    found = compare_rollouts(step, first.rollouts(step), second.rollouts(step))
    if metrics:
        found += compare_metrics(step, first.metrics, second.metrics, evaluations=evaluations, optional=optional)
    if step in first.digests and step in second.digests:
        one, two = first.digests[step], second.digests[step]
        changed = (Difference(step, "digest of the weights after the step", one, two),) if one != two else ()
        found += Compared(digests=1, differences=changed)
    return found


def compare_metrics(
    step: int,
    first: Mapping[int, Mapping[str, Any]],
    second: Mapping[int, Mapping[str, Any]],
    *,
    evaluations: bool,
    optional: bool,
) -> Compared:
    """Compares the metrics of a step by name."""
    if step not in first or step not in second:
        return Compared()
    one, two = first[step], second[step]
    names = [name for name in {**one, **two} if evaluations or not name.startswith("eval_")]
    names = [name for name in names if (name in one and name in two) or not optional]
    head = ("loss", "grad_norm")
    names.sort(key=lambda name: head.index(name) if name in head else len(head))
    differing = [name for name in names if not same_bits(one.get(name, _ABSENT), two.get(name, _ABSENT))]
    differences = tuple(
        Difference(step, name, one.get(name, _ABSENT), two.get(name, _ABSENT), count=len(differing), of=len(names))
        for name in differing
    )
    return Compared(metrics=len(names), differences=differences)


def compare_rollouts(step: int, first: pa.Table | None, second: pa.Table | None) -> Compared:
    """Compares the rows that both have stored; the first differing place of each column, in causal order."""
    if first is None or second is None:
        return Compared(unmatched=sum(table.num_rows for table in (first, second) if table is not None))
    left: pa.Table = first
    right: pa.Table = second
    one, two = _matched(left), _matched(right)
    keys = [key for key in one if key in two]
    if len(keys) != len(one) or len(keys) != len(two):
        left, right = _taken(left, [one[key] for key in keys]), _taken(right, [two[key] for key in keys])
    unmatched = len(one) + len(two) - 2 * len(keys)
    names = _ordered(list(dict.fromkeys([*left.column_names, *right.column_names])))
    rows = left["row"].to_pylist() if keys else []
    differences = [_column(step, name, rows, left, right) for name in names] if keys else []
    ids = left["completion_ids"].combine_chunks().flatten() if keys else ()
    reward_columns = [name for name in names if name.startswith("reward")]
    return Compared(
        rows=len(keys),
        tokens=len(ids),
        numbers=2 * len(ids) + (len(reward_columns) + 1) * len(keys),
        unmatched=unmatched,
        differences=tuple(item for item in differences if item is not None),
    )


def _taken(table: pa.Table, places: Sequence[int]) -> pa.Table:
    return table.take(pa.array(places, pa.int64()))  # pyright: ignore[reportReturnType]


def _matched(table: pa.Table) -> dict[tuple[int, int], int]:
    """(Row number, how often it has come before) → place; a step may sample several generation batches."""
    seen: dict[int, int] = {}
    places = {}
    for place, row in enumerate(table["row"].to_pylist()):
        seen[row] = seen.get(row, -1) + 1
        places[row, seen[row]] = place
    return places


def _ordered(names: Sequence[str]) -> list[str]:
    """Columns in the order in which a step makes them: prompts, tokens, rewards, advantages, the rest."""
    single = [name for name in names if name.startswith("reward/")]
    known = [*_FIRST, *_THEN, *single, "reward", "advantage", *_LATER]
    others = [name for name in names if name not in known and name not in ("step", "row")]
    return [name for name in [*known, *others] if name in names]


def _column(step: int, name: str, rows: Sequence[int], first: pa.Table, second: pa.Table) -> Difference | None:
    """The first difference of a column; None if all values have the same bits."""
    what = _NAMES.get(name, f"reward of {name[7:]}" if name.startswith("reward/") else name)
    is_in_both = name in first.column_names and name in second.column_names
    if name.startswith(("gradient_share", "turn_", "writers")):  # earlier releases recorded other ones
        if not is_in_both or any(table[name].null_count == len(table) for table in (first, second)):
            return None
    elif not is_in_both:
        there = ["present" if name in table.column_names else _ABSENT for table in (first, second)]
        return Difference(step, what, there[0], there[1])
    one, two = first[name].combine_chunks(), second[name].combine_chunks()
    if one.equals(two) and _bits(one) == _bits(two):
        return None
    pairs = list(_pairs(name, one.to_pylist(), two.to_pylist()))
    found = [pair for pair in pairs if not same_bits(*pair[2:])]
    if not found:
        return None
    place, token, a, b = found[0]
    if name == "completion_ids":
        a, b = (_with_text(table, place, token, value) for table, value in ((first, a), (second, b)))
    return Difference(step, what, a, b, row=rows[place], token=token, count=len(found), of=len(pairs))


def _pairs(name: str, first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[int, Any, Any, Any]]:
    """Place in the column, token in the row (None where a row has one value) and both values."""
    for place, (a, b) in enumerate(zip(first, second)):
        if name in _LISTS:
            for token, pair in enumerate(zip_longest(a or (), b or (), fillvalue=_ABSENT)):
                yield place, token, *pair
        else:
            yield place, None, _plain(name, a), _plain(name, b)


def _with_text(table: pa.Table, place: int, token: int, value: Any) -> Any:
    texts = table["tokens"][place].as_py() or []
    return f"{value} {texts[token]!r}" if token < len(texts) else value


def _plain(name: str, value: Any) -> Any:
    if name == "tool_calls":  # without their seconds
        return [[call["name"], call["failed"], call["timed_out"]] for call in value or ()]
    return value


def _bits(column: pa.Array) -> bytes:
    """The sign bits of a column of floats or lists of floats, as 0.0 == -0.0; empty for other columns."""
    values = column.flatten() if pa.types.is_list(column.type) else column
    if not pa.types.is_floating(values.type):
        return b""
    return np.signbit(values.to_numpy(zero_copy_only=False)).tobytes()


def same_bits(first: Any, second: Any) -> bool:
    """True for equal values; 0.0 and -0.0 differ, and NaN equals NaN."""
    if isinstance(first, float) and isinstance(second, float):
        return struct.pack("<d", first) == struct.pack("<d", second)
    return type(first) is type(second) and first == second


def compare_weights(first: Path, second: Path) -> list[str]:
    """Compares the weights in two folders: the names of the tensors that have other bits, or that only one has."""
    one, two = dict(_tensors(first)), dict(_tensors(second))
    return [name for name in {**one, **two} if not _equal_bits(one.get(name), two.get(name))]


def _equal_bits(first: Any, second: Any) -> bool:
    import torch

    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    one, two = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, two)


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                yield name, file.get_tensor(name)


def compare_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name → both values of what two configurations differ in."""
    one, two = (json.loads(json.dumps(dict(settings), default=str)) for settings in (first, second))
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    return {name: (one.get(name), two.get(name)) for name in names}


class _Absent:
    def __repr__(self) -> str:
        return "missing"


_ABSENT = _Absent()


def shown(value: Any, width: int = 80) -> str:
    """A value as text of at most `width` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."
