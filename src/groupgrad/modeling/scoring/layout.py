"""Where the tokens of a batch lie in a flat forward pass, and which of them are computed together.

In the shared layout each distinct prompt lies once, its rows behind it; in the packed layout every row has its own copy
of its prompt. Nothing is padded in either. The last token of a completion predicts nothing, so it is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from groupgrad.batch import Batch
from groupgrad.modeling.scoring.attention import AttentionCall
from groupgrad.modeling.scoring.block_attention import QUERY_TILE, Block, attend_blocks
from groupgrad.modeling.scoring.flex_attention import TokenPlaces, attend_flex, is_usable

BLOCK_SCORES = 1 << 19
"""Scores that a block has for each head at most, unless a single row has more."""

_SLACK, _SLACK_TOKENS = 0.15, 8
"""Rows share a rectangle if the shorter ones fall short by at most this share, or this many tokens."""


@dataclass(slots=True, frozen=True)
class Row:
    """Consecutive flat tokens that see each other causally, and a prompt before them."""

    start: int
    length: int
    group: int = -1
    """Which prompt the row continues; -1: none."""


@dataclass(slots=True, frozen=True)
class Stretch:
    """Consecutive flat tokens of a row, or of a prompt."""

    start: int
    length: int
    first: int
    """Place of the first of them in its row, the prompt counted."""
    prompt: int
    """Which prompt it is, or continues."""
    row: int | None = None
    """Which row it is; None for a prompt that lies once."""


class BlockPlan:
    """The attention plan (see `attention.AttentionPlan`) of rows that share prompts."""

    def __init__(self, blocks: list[Block], places: TokenPlaces, rows: torch.Tensor):
        cpu = torch.device("cpu")
        self._rows = rows
        self._blocks, self._places = {cpu: blocks}, {cpu: places}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        device = query.device
        # Layers of a spread model may lie on several devices.
        if device not in self._blocks:
            cpu = torch.device("cpu")
            self._blocks[device] = [block.to(device) for block in self._blocks[cpu]]
            self._places[device] = self._places[cpu].to(device)
        if is_usable(query, value, call):
            output = attend_flex(query, key, value, self._places[device], call)
            if output is not None:
                return output
        return attend_blocks(query, key, value, self._blocks[device], call, self._rows)


@dataclass(slots=True)
class FlatLayout:
    """A batch as one flat forward pass."""

    ids: torch.Tensor
    """(T,) int64."""
    positions: torch.Tensor
    """(T,) int64, each token's place in its row, its prompt counted."""
    predictors: torch.Tensor
    """(L,) int64, the flat token whose output predicts each completion token."""
    plan: BlockPlan
    stretches: list[Stretch]
    """All tokens, in the order in which they lie."""


def flat_layout(batch: Batch, *, share: bool = True, keep_last: bool = False) -> FlatLayout:
    """The batch with each distinct prompt once (`share`) or once a row, on the batch's device.

    A row with images of its own has its own prompt in any case: its images are given to the model together.
    `keep_last` computes the last tokens of completions and the prompts of empty ones too, which matters to sums over
    all tokens (the load balancing of experts) and to nothing else.
    """
    prompts, completions = _split(batch.prompt_ids, batch.prompt_offsets), _split(batch.completion_ids, batch.offsets)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * batch.num_rows
    rows: list[Row] = []
    groups: dict[int, Row] = {}
    stretches: list[Stretch] = []
    end = 0

    def lay(tokens: np.ndarray, position: int, group: int, prompt: int, number: int | None = None) -> Row:
        nonlocal end
        row = Row(end, len(tokens), group)
        stretches.append(Stretch(end, len(tokens), position, prompt, number))
        ids.append(tokens)
        positions.append(np.arange(position, position + len(tokens)))
        end += len(tokens)
        return row

    by_prompt: dict[int, list[int]] = {}
    for i, prompt in enumerate(batch.prompt_of_row.tolist()):
        if len(completions[i]) or keep_last:
            by_prompt.setdefault(prompt, []).append(i)
    own = batch.row_media or (None,) * batch.num_rows
    alone = {i for i, media in enumerate(own) if media is not None or not share}
    for prompt, members in by_prompt.items():
        length = len(prompts[prompt])
        if not alone.issuperset(members):
            groups[prompt] = lay(prompts[prompt], 0, -1, prompt)
        for i in members:
            tokens = completions[i] if keep_last else completions[i][:-1]
            if i not in alone:
                row, last = lay(tokens, length, prompt, prompt, i), groups[prompt].start + length - 1
                first = row.start
            else:
                row = lay(np.concatenate([prompts[prompt], tokens]), 0, -1, prompt, i)
                last, first = row.start + length - 1, row.start + length
            if len(completions[i]):
                predictors[i] = np.concatenate([[last], np.arange(first, first + len(completions[i]) - 1)])
            rows.append(row)
    all_rows = [*groups.values(), *rows]
    plan = BlockPlan(
        make_blocks(all_rows, groups), _token_places(groups, rows, positions), _row_table(all_rows, groups)
    )
    device = batch.completion_ids.device
    return FlatLayout(_tensor(ids, device), _tensor(positions, device), _tensor(predictors, device), plan, stretches)


def _row_table(rows: Sequence[Row], groups: dict[int, Row]) -> torch.Tensor:
    """(n, 4) int64: the start and the length of each row, and of its prompt."""
    none = Row(0, 0)
    prompts = [groups.get(row.group, none) for row in rows]
    table = [(r.start, r.length, p.start, p.length) for r, p in zip(rows, prompts)]
    return torch.tensor(table, dtype=torch.int64).view(-1, 4)


def _token_places(groups: dict[int, Row], rows: Sequence[Row], positions: list[np.ndarray]) -> TokenPlaces:
    """Rows and prompts by the flat places of their first tokens."""
    cpu, prompt_of = torch.device("cpu"), {id(row): groups[row.group].start for row in rows if row.group in groups}
    laid = sorted([*groups.values(), *rows], key=lambda row: row.start)
    own = [np.full(row.length, row.start) for row in laid]
    prompt = [np.full(row.length, prompt_of.get(id(row), row.start)) for row in laid]
    return TokenPlaces(_tensor(own, cpu), _tensor(prompt, cpu), _tensor(positions, cpu))


def make_blocks(rows: Sequence[Row], groups: dict[int, Row]) -> list[Block]:
    """Blocks in which every token of `rows` is a query once; `groups` holds the prompt of each group.

    Rows of like length are computed together, those of one group in one product with their prompt.
    """
    rectangles: list[_Rectangle] = []
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        if row.length:
            by_group.setdefault(row.group, []).append(row)
    for group, members in by_group.items():
        prompt = groups.get(group)
        for chunk in _alike(sorted(members, key=lambda row: -row.length), 0 if prompt is None else prompt.length):
            rectangles.append(_Rectangle([chunk], [] if prompt is None else [prompt]))
    blocks = []
    for rectangle in _merged(rectangles):
        blocks += rectangle.blocks()
    return blocks


@dataclass(slots=True)
class _Rectangle:
    """Groups of equally many rows of like lengths, behind prompts of like lengths (or none)."""

    rows: list[list[Row]]
    prompts: list[Row]

    @property
    def width(self) -> int:
        return max(row.length for group in self.rows for row in group)

    @property
    def prompt_width(self) -> int:
        return max((prompt.length for prompt in self.prompts), default=0)

    def fits(self, other: _Rectangle) -> bool:
        """Whether both may be one rectangle."""
        if len(self.rows[0]) != len(other.rows[0]) or bool(self.prompts) != bool(other.prompts):
            return False
        wide, prompt_wide = max(self.width, other.width), max(self.prompt_width, other.prompt_width)
        shortest = min(row.length for group in [*self.rows, *other.rows] for row in group)
        prompts = min((prompt.length for prompt in [*self.prompts, *other.prompts]), default=0)
        num_rows = (len(self.rows) + len(other.rows)) * len(self.rows[0])
        return (
            _is_like(shortest, wide)
            and _is_like(prompts, prompt_wide)
            and num_rows * wide * (wide + prompt_wide) <= BLOCK_SCORES
        )

    def blocks(self) -> list[Block]:
        """The rectangle as one block, or as one for each query tile if its rows are long."""
        lengths = np.array([[row.length for row in group] for group in self.rows])
        starts = np.array([[row.start for row in group] for group in self.rows])
        prompt_lengths = np.array([prompt.length for prompt in self.prompts] or [0] * len(self.rows))
        prompts = None
        if self.prompts:
            prompts = _places(np.array([prompt.start for prompt in self.prompts]), prompt_lengths, self.prompt_width)
        tile = self.width if self.width <= QUERY_TILE * 3 // 2 else QUERY_TILE
        blocks = []
        for start in range(0, self.width, tile):
            end = min(start + tile, self.width)
            blocks.append(
                Block(
                    rows=torch.from_numpy(_places(starts, lengths, end)),
                    row_lengths=torch.from_numpy(lengths),
                    prompts=None if prompts is None else torch.from_numpy(prompts),
                    prompt_lengths=torch.from_numpy(prompt_lengths),
                    start=start,
                    is_full=bool((lengths >= end).all()),
                    prompts_are_full=bool((prompt_lengths == self.prompt_width).all()),
                )
            )
        return blocks


def _places(starts: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """(..., width) flat places of rows; 0 behind their ends."""
    place = np.arange(width)
    return np.where(place < lengths[..., None], starts[..., None] + place, 0).astype(np.int64)


def _alike(rows: list[Row], prompt_length: int) -> list[list[Row]]:
    """Runs of rows, longest first, that may share a rectangle."""
    chunks: list[list[Row]] = []
    for row in rows:
        if chunks:
            width = chunks[-1][0].length
            scores = (len(chunks[-1]) + 1) * width * (width + prompt_length)
            if _is_like(row.length, width) and width <= QUERY_TILE and scores <= BLOCK_SCORES:
                chunks[-1].append(row)
                continue
        chunks.append([row])
    return chunks


def _merged(rectangles: list[_Rectangle]) -> list[_Rectangle]:
    """Rectangles of several groups where their shapes are alike."""
    merged: list[_Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda r: (bool(r.prompts), len(r.rows[0]), -r.width, -r.prompt_width)):
        if merged and rectangle.width <= QUERY_TILE and merged[-1].fits(rectangle):
            merged[-1].rows += rectangle.rows
            merged[-1].prompts += rectangle.prompts
        else:
            merged.append(rectangle)
    return merged


def _is_like(short: int, long: int) -> bool:
    return long - short <= max(_SLACK_TOKENS, int(_SLACK * long))


def _split(flat: torch.Tensor, offsets: torch.Tensor) -> list[np.ndarray]:
    values, ends = flat.cpu().numpy(), offsets.tolist()
    return [values[a:b] for a, b in pairwise(ends)]


def _tensor(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    flat = np.concatenate(parts) if parts else np.zeros(0)
    return torch.from_numpy(flat.astype(np.int64)).to(device)
