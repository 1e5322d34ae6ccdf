"""Rectangles of rows whose attention is computed together as batched matrix products.

A block holds `n` groups of at most `R` rows with at most `C` tokens each. All rows of a group continue the same prompt
of at most `P` tokens; prompts are rows without a prompt. Rows of similar length share a block, so little is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from groupgrad.batch import on_host, to_device

QUERY_TILE = 256
"""Queries whose scores are computed at a time, in every implementation of attention in PyTorch."""

BLOCK_SCORES = 1 << 19
"""Maximum number of scores of a block per head, unless a single row has more."""

_SLACK, _SLACK_TOKENS = 0.15, 8
"""Rows share a block if the shorter ones fall short by at most this share, or this many tokens."""

_SPARE_SCORES = 4096
"""Maximum number of padded scores per head that a group with fewer rows may add to a block.

A block of its own would cost about as much as this padding.
"""


@dataclass(slots=True, frozen=True)
class TokenSpan:
    """A run of flat tokens that belong to one row, or to a prompt that several rows share.

    Where a pass is cut over ranks, a span is the part that lies there.
    """

    start: int
    """Flat place of the first token, among those of its rank."""
    length: int
    position: int = 0
    """Position of the first token in its row, the prompt counted."""
    prompt: int = 0
    """Number of the prompt in the batch."""
    row: int | None = None
    """Number of the row in the batch; None for a shared prompt."""
    shared: TokenSpan | None = None
    """The shared prompt before the row, cut to the tokens that the row continues; None if no prompt is shared."""


def span_records(spans: Sequence[TokenSpan]) -> torch.Tensor:
    """(n, 6) int64, the spans as the compiled kernels lay them out."""
    none = TokenSpan(0, 0)
    pairs = [(span, span.shared or none) for span in spans]
    rows = [(s.start, s.length, 0, prompt.length, prompt.start, s.start) for s, prompt in pairs]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 6)


@dataclass(slots=True)
class Block:
    """Rows whose attention is computed together. Padding has the place `num_tokens`."""

    rows: torch.Tensor
    """(n, R, C) int64, the flat places of the rows' tokens, each at most once."""
    prompts: torch.Tensor | None
    """(n, 1, P) int64, the flat places of the groups' prompt tokens, each at most once; None without prompts."""
    prompt_lengths: torch.Tensor
    """(n,) int64, 0 without prompts."""
    start: int
    """First of the C tokens that are queries; those before it are keys only (query tiles of long rows)."""
    num_tokens: int
    """T, the number of all flat tokens."""
    _masks: dict[int | None, Masks] = field(default_factory=dict)

    @property
    def queries(self) -> torch.Tensor:
        """(n, R, C - start) flat places of the queries."""
        return self.rows[:, :, self.start :]

    def to(self, device: torch.device) -> Block:
        """The block with its tensors on `device`."""
        prompts = None if self.prompts is None else to_device(self.prompts, device)
        rows, lengths = to_device(self.rows, device), to_device(self.prompt_lengths, device)
        return Block(rows, prompts, lengths, self.start, self.num_tokens)

    def masks(self, window: int | None) -> Masks:
        """Masks of the queries, made once for all layers with the same sliding window."""
        if window not in self._masks:
            self._masks[window] = _make_masks(self, window)
        return self._masks[window]


@dataclass(slots=True, frozen=True)
class Masks:
    """Keys hidden from the queries: True is hidden, None hides nothing."""

    prompt: torch.Tensor | None
    """(n, 1, 1, 1, C' or 1, P), where C' is C - start."""
    row: torch.Tensor | None
    """(C', K'), over the keys of the row itself from `row_from` on; the keys before it are visible."""
    row_from: int


def _make_masks(block: Block, window: int | None) -> Masks:
    device, num_keys = block.rows.device, block.rows.shape[2]
    query = torch.arange(block.start, num_keys, device=device)[:, None]
    longest = num_keys + int(on_host(block.prompt_lengths).max()) if block.prompt_lengths.numel() else num_keys
    if window is None or longest <= window:
        window = None
    prompt = None
    if block.prompts is not None:
        padding = (block.prompts == block.num_tokens)[:, :, None, None, None]
        prompt = padding if bool((on_host(block.prompts) == block.num_tokens).any()) else None
        if window is not None:
            key = torch.arange(block.prompts.shape[2], device=device)
            too_far = (block.prompt_lengths[:, None, None] + query - key >= window)[:, None, None, None]
            prompt = too_far if prompt is None else too_far | prompt
    row_from = block.start if window is None else 0
    key = torch.arange(row_from, num_keys, device=device)
    row = key > query
    if window is not None:
        row |= query - key >= window
    return Masks(prompt, row if len(row) > 1 or window is not None else None, row_from)


@dataclass(slots=True, frozen=True)
class _Group:
    """Rows of similar length that continue the same tokens of a prompt, or have none."""

    rows: list[TokenSpan]
    prompt: TokenSpan | None
    kind: tuple[int, int]
    """The size classes of the rows and of the prompt."""


@dataclass(slots=True)
class _Rectangle:
    """Groups of one kind, the one with most rows first. Missing rows of the others are padding."""

    groups: list[_Group]
    prompts: set[int]
    """The places of the groups' prompts."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.groups[0].rows)

    def takes(self, group: _Group) -> bool:
        """True if another group wastes little on padding and there are few scores.

        No block has two groups of one prompt: `Block.prompts` has a token once.
        """
        width, prompt_width = group.kind
        row_scores = width * (width + prompt_width)
        missing = self.num_rows - len(group.rows)
        return (
            self.groups[0].kind == group.kind
            and (group.prompt is None or group.prompt.start not in self.prompts)
            and width <= QUERY_TILE
            and missing * row_scores <= _SPARE_SCORES
            and (len(self.groups) + 1) * self.num_rows * row_scores <= BLOCK_SCORES
        )


@cache
def _size_class(length: int) -> int:
    """The longest length of the class of similar lengths that `length` belongs to."""
    if length * _SLACK <= _SLACK_TOKENS:
        size = -(-length // _SLACK_TOKENS) * _SLACK_TOKENS
    else:
        steps = math.ceil(math.log(length * _SLACK / _SLACK_TOKENS) / math.log1p(_SLACK))
        size = math.ceil(_SLACK_TOKENS / _SLACK * (1 + _SLACK) ** steps)
    return min(size, QUERY_TILE) if length <= QUERY_TILE else size


def make_blocks(spans: Sequence[TokenSpan]) -> list[Block]:
    """Blocks in which every token of `spans`, which are all flat tokens, is a query once."""
    num_tokens = sum(span.length for span in spans)
    rectangles: list[_Rectangle] = []
    for group in sorted(_groups(spans), key=lambda group: (group.kind, -len(group.rows))):
        if not rectangles or not rectangles[-1].takes(group):
            rectangles.append(_Rectangle([], set()))
        rectangles[-1].groups.append(group)
        if group.prompt is not None:
            rectangles[-1].prompts.add(group.prompt.start)
    return [block for rectangle in rectangles for block in _blocks_of(rectangle, num_tokens)]


def _groups(spans: Sequence[TokenSpan]) -> list[_Group]:
    """Groups of at most `BLOCK_SCORES` scores, unless a single row has more."""
    classes: dict[tuple[int, int, int], _Group] = {}
    groups: list[_Group] = []
    for row in spans:
        if not row.length:
            continue
        prompt = row.shared
        prompt_length = 0 if prompt is None else prompt.length
        kind = (_size_class(row.length), _size_class(prompt_length))
        # Rows without a prompt are groups of their own.
        key = (-1 - row.start if prompt is None else prompt.start, kind[0], prompt_length)
        group = classes.get(key)
        is_full = group is not None and (len(group.rows) + 1) * kind[0] * sum(kind) > BLOCK_SCORES
        if group is None or is_full or kind[0] > QUERY_TILE:
            group = classes[key] = _Group([], prompt, kind)
            groups.append(group)
        group.rows.append(row)
    return groups


def _blocks_of(rectangle: _Rectangle, num_tokens: int) -> list[Block]:
    """One block, or one for each query tile of long rows."""
    rows = [group.rows for group in rectangle.groups]
    found = [group.prompt for group in rectangle.groups if group.prompt is not None]
    width = max(row.length for group in rows for row in group)
    prompts = None
    if found:
        prompt_width = max(prompt.length for prompt in found)
        prompts = torch.from_numpy(_places([[prompt] for prompt in found], 1, prompt_width, num_tokens))
    prompt_lengths = torch.tensor([prompt.length for prompt in found] or [0] * len(rows))
    tile = width if width <= QUERY_TILE * 3 // 2 else QUERY_TILE
    blocks = []
    for start in range(0, width, tile):
        places = torch.from_numpy(_places(rows, rectangle.num_rows, min(start + tile, width), num_tokens))
        blocks.append(Block(places, prompts, prompt_lengths, start, num_tokens))
    return blocks


def _places(groups: list[list[TokenSpan]], num_rows: int, width: int, padding: int) -> np.ndarray:
    """(groups, num_rows, width) int64 flat places of the rows' first tokens."""
    starts, lengths = np.zeros((2, len(groups), num_rows, 1), dtype=np.int64)
    for number, group in enumerate(groups):
        starts[number, : len(group), 0] = [row.start for row in group]
        lengths[number, : len(group), 0] = [row.length for row in group]
    offset = np.arange(width)
    return np.where(offset < lengths, starts + offset, padding)
