"""Rollouts of a step as a table: one row a rollout, tokens as lists; the columns are in docs/run-folder.md."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from groupgrad.data.images import digest
from groupgrad.run_folder.render import plain_value

if TYPE_CHECKING:
    import torch

    from groupgrad.types import Media, Prompt, RewardTable, Rollout

REWARD = "reward/"
"""Prefix of the columns of single reward functions; the column `reward` is their weighted combination."""
SECONDS = "seconds/"
"""Prefix of the seconds of the call of a reward function that scored the row."""

TRAINING = "train"
"""The phase of training, as distinct from the prefixes of evaluations."""

MAX_DATA_CHARS = 2000
"""Characters of a data-set column that are stored."""

_CALLS = pa.list_(
    pa.struct([("name", pa.string()), ("failed", pa.bool_()), ("timed_out", pa.bool_()), ("seconds", pa.float64())])
)
_BRANCHES = pa.list_(pa.struct([("start", pa.int32()), ("context", pa.list_(pa.int32()))]))
_SUMMARY = (
    *("row", "group", "prompt", "completion", "is_messages", "reward"),
    *("advantage", "finish_reason", "num_tokens"),
)
_FLOAT_LISTS = ("logprobs", "entropy")


@dataclass(slots=True)
class StoredRows:
    """The rows of a generation batch on this rank, in the order of `rollouts`. `L` counts their tokens."""

    rollouts: Sequence[Rollout]
    ids: np.ndarray
    """(L,) completion token ids, end to end."""
    offsets: np.ndarray
    """(B+1,)."""
    texts: list[str]
    """(L,) text of each token."""
    advantages: list[float]
    table: RewardTable
    """(B, R) rewards, and what the functions logged of the rows."""
    combined: list[float]
    """(B,) weighted reward, NaN where nothing was scored."""
    num_generations: int
    turn_advantages: Sequence[list[float]] | None = None
    """(T,) advantages of the turns of each row; None unless the estimator credits turns."""
    logprobs: np.ndarray | None = None
    """(L,) float32 nats, NaN where unknown."""
    entropy: np.ndarray | None = None
    """(L,) float32 nats, NaN where unknown."""
    phase: str = TRAINING
    """`train`, or the metric prefix of an evaluation."""
    first_row: int = 0
    """Number of the first row: an evaluation numbers the rows of all its batches."""


def to_table(step: int, rows: StoredRows) -> pa.Table:
    """The rows as a table, with the number of the optimizer step that first trained on them."""
    rollouts = rows.rollouts
    prompts = [rollout.prompt for rollout in rollouts]
    rewards = np.asarray(rows.table.rewards.tolist(), np.float64).reshape(len(rollouts), len(rows.table.names))
    traces = [rollout.trace for rollout in rollouts]
    count = len(rollouts)
    numbers = [rows.first_row + rollout.index for rollout in rollouts]
    columns: dict[str, Any] = {
        "step": pa.array([step] * count, pa.int32()),
        "phase": pa.array([rows.phase] * count, pa.string()),
        "row": pa.array(numbers, pa.int32()),
        "group": pa.array([number // rows.num_generations for number in numbers], pa.int32()),
        "policy_version": pa.array([rollout.policy_version for rollout in rollouts], pa.int32()),
        "prompt_id": pa.array(_once_each(_prompt_id, prompts)),
        "prompt": pa.array(_once_each(_prompt_text, prompts), pa.string()),
        "completion": pa.array([message_text(rollout.completion) for rollout in rollouts], pa.string()),
        "is_messages": pa.array([prompt.is_conversational for prompt in prompts], pa.bool_()),
        "reward": _numbers(rows.combined),
        **{f"{REWARD}{name}": _numbers(rewards[:, place]) for place, name in enumerate(rows.table.names)},
        **{f"{SECONDS}{name}": _numbers([value] * count) for name, value in rows.table.seconds.items()},
        "advantage": _numbers(rows.advantages),
        "turn_advantages": pa.array(rows.turn_advantages or [None] * count, pa.list_(pa.float64())),
        "turn_rewards": pa.array(
            [_turn_rewards(rows.table.by_turn.get(row)) for row in range(count)], pa.list_(pa.list_(pa.float64()))
        ),
        "finish_reason": pa.array([rollout.finish_reason for rollout in rollouts], pa.string()),
        "num_tokens": pa.array([rollout.num_sampled for rollout in rollouts], pa.int32()),
        "turns": pa.array([1 if trace is None else trace.num_turns for trace in traces], pa.int32()),
        "wait_s": _numbers([0.0 if trace is None else trace.wait_s for trace in traces]),
        "problem": pa.array([trace.problem if trace else "" for trace in traces], pa.string()),
        "tool_calls": pa.array([[] if trace is None else _calls(trace.tool_uses) for trace in traces], _CALLS),
        "images": pa.array(_image_names([images_of(rollout) for rollout in rollouts]), pa.list_(pa.string())),
        "prompt_images": pa.array([len(prompt.media.images) if prompt.media else 0 for prompt in prompts], pa.int32()),
        "data": pa.array(_once_each(_data, prompts), pa.string()),
        "extra": pa.array([_extra(rows.table.columns, row) for row in range(count)], pa.string()),
        "prompt_ids": pa.array([prompt.ids for prompt in prompts], pa.list_(pa.int32())),
        "completion_ids": _lists(rows.offsets, pa.array(rows.ids, pa.int32())),
        "tokens": _lists(rows.offsets, pa.array(rows.texts, pa.string())),
        "policy_versions": pa.array([rollout.policy_versions for rollout in rollouts], pa.list_(pa.int32())),
        "sampled": pa.array([rollout.sampled for rollout in rollouts], pa.list_(pa.bool_())),
        "temperatures": pa.array([rollout.temperatures for rollout in rollouts], pa.list_(pa.float32())),
        "branches": pa.array([[asdict(b) for b in r.branches] for r in rollouts], _BRANCHES),
        "logprobs": _numbers_of_tokens(rows.offsets, rows.logprobs),
        "entropy": _numbers_of_tokens(rows.offsets, rows.entropy),
    }
    return pa.table(columns)


def summaries(table: pa.Table) -> list[dict[str, Any]]:
    """Texts and numbers of each row, without its tokens and without empty values, for spans and traces."""
    names = [name for name in table.column_names if name in _SUMMARY or name.startswith(REWARD)]
    rows = table.select(names).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def images_by_name(rows: StoredRows, table: pa.Table) -> dict[str, Any]:
    """The images of `rows` by the names that their `table` gives them."""
    pairs = zip(table["images"].to_pylist(), rows.rollouts)
    return {name: image for names, rollout in pairs for name, image in zip(names, images_of(rollout))}


def to_parquet(table: pa.Table) -> pa.Buffer:
    """The bytes of a parquet file."""
    sink = pa.BufferOutputStream()
    strings = [f.name for f in table.schema if pa.types.is_string(f.type)]
    lists = [f"{name}.list.element" for name in ("tokens", "prompt_ids", "completion_ids")]
    encodings: dict[str, Any] = {
        "use_dictionary": [*strings, *lists],
        "use_byte_stream_split": [f"{name}.list.element" for name in _FLOAT_LISTS],
    }
    pq.write_table(table, sink, compression="zstd", **encodings)
    return sink.getvalue()


def message_text(value: Any) -> str:
    """A text as it is, and messages as JSON, images as a marker."""
    plain = plain_value(value)
    return plain if isinstance(value, str) else json.dumps(plain, ensure_ascii=False)


def images_of(rollout: Rollout) -> tuple[Any, ...]:
    """The images of a rollout: those of its prompt, then those that its tools returned."""
    media: Media | None = rollout.media or rollout.prompt.media
    return () if media is None else media.images


def _image_names(images: Sequence[Sequence[Any]]) -> list[list[str]]:
    """A digest of each image of each row; an image that rows share is read once."""
    names = iter(_once_each(lambda image: digest([image])[:16], [image for row in images for image in row]))
    return [list(islice(names, len(row))) for row in images]


def _once_each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """The function's value for each item; it is called once for items that are the same object."""
    values = {key: function(item) for key, item in {id(item): item for item in items}.items()}
    return [values[id(item)] for item in items]


def _prompt_text(prompt: Prompt) -> str:
    return message_text(prompt.row["prompt"])


def _prompt_id(prompt: Prompt) -> str:
    text = f"{_prompt_text(prompt)}\0{prompt.media.key if prompt.media else ''}"
    return hashlib.sha1(text.encode("utf-8", errors="replace")).hexdigest()[:12]


def _numbers(values: Sequence[float] | np.ndarray) -> pa.Array:
    return pa.array(np.asarray(values, dtype=np.float64), pa.float64(), from_pandas=True)


def _turn_rewards(rewards: torch.Tensor | None) -> list[list[float | None]] | None:
    """The rewards of each turn by function, None for no reward."""
    if rewards is None:
        return None
    return [[None if math.isnan(value) else value for value in turn] for turn in rewards.tolist()]


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _numbers_of_tokens(offsets: np.ndarray, values: np.ndarray | None) -> pa.Array:
    """Lists of float32, null for an unknown number; null lists if all numbers are unknown."""
    if values is None:
        return pa.nulls(len(offsets) - 1, pa.list_(pa.float32()))
    return _lists(offsets, pa.array(values, pa.float32(), from_pandas=True))


def _calls(uses: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"name": plain_value(use.name), "failed": use.failed, "timed_out": use.timed_out, "seconds": use.seconds}
        for use in uses
    ]


def _data(prompt: Prompt) -> str | None:
    """The data-set columns beside prompt and images, as JSON with long texts cut."""
    others = {key: value for key, value in prompt.row.items() if key not in ("prompt", "image", "images")}
    return _json({key: _cut(plain_value(value)) for key, value in others.items()})


def _extra(columns: Mapping[str, Sequence[Any]], row: int) -> str | None:
    return _json({name: _cut(plain_value(values[row])) for name, values in columns.items()})


def _json(values: Mapping[str, Any]) -> str | None:
    return json.dumps(values, ensure_ascii=False, default=str) if values else None


def _cut(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_DATA_CHARS else text[:MAX_DATA_CHARS] + " ..."
