"""Rectangles of rows whose attention is computed together as batched matrix products.

A block holds `n` groups of `R` rows with at most `C` tokens each. All rows of a group continue the same prompt of at
most `P` tokens; prompts are rows without a prompt. Rows of similar length share a block, so little is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

QUERY_TILE = 256
"""Queries of a long row computed at a time; keys behind them are skipped."""

BLOCK_SCORES = 1 << 19
"""Maximum number of scores of a block per head, unless a single row has more."""

_SLACK, _SLACK_TOKENS = 0.15, 8
"""Rows share a block if the shorter ones fall short by at most this share, or this many tokens."""


@dataclass(slots=True, frozen=True)
class Segment:
    """Consecutive flat tokens of one row, or of a prompt that several rows share."""

    start: int
    """Flat place of the first token."""
    length: int
    position: int = 0
    """Position of the first token in its row, the prompt counted."""
    prompt: int = 0
    """Number of the prompt in the batch."""
    row: int | None = None
    """Number of the row in the batch; None for a shared prompt."""
    shared: Segment | None = None
    """The shared prompt that comes before the row; None if the segment has all tokens of its row."""


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
        prompts = None if self.prompts is None else self.prompts.to(device)
        return Block(self.rows.to(device), prompts, self.prompt_lengths.to(device), self.start, self.num_tokens)

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
    own: torch.Tensor | None
    """(C', K'), over the row's own keys from `own_from` on; the keys before it are visible."""
    own_from: int


def _make_masks(block: Block, window: int | None) -> Masks:
    device, num_keys = block.rows.device, block.rows.shape[2]
    query = torch.arange(block.start, num_keys, device=device)[:, None]
    longest = num_keys + int(block.prompt_lengths.max()) if block.prompt_lengths.numel() else num_keys
    if window is None or longest <= window:
        window = None
    prompt = None
    if block.prompts is not None:
        padding = (block.prompts == block.num_tokens)[:, :, None, None, None]
        prompt = padding if bool(padding.any()) else None
        if window is not None:
            key = torch.arange(block.prompts.shape[2], device=device)
            too_far = (block.prompt_lengths[:, None, None] + query - key >= window)[:, None, None, None]
            prompt = too_far if prompt is None else too_far | prompt
    own_from = block.start if window is None else 0
    key = torch.arange(own_from, num_keys, device=device)
    own = key > query
    if window is not None:
        own |= query - key >= window
    return Masks(prompt, own if len(own) > 1 or window is not None else None, own_from)


@dataclass(slots=True)
class _Rectangle:
    """Groups of equally many rows, and the prompt of each group; no prompts if the rows have none."""

    rows: list[list[Segment]]
    prompts: list[Segment]

    @property
    def widths(self) -> tuple[int, int]:
        """C and P."""
        row_lengths = (row.length for group in self.rows for row in group)
        return max(row_lengths), max((prompt.length for prompt in self.prompts), default=0)

    def fits(self) -> bool:
        """True if one block of these rows wastes little on padding and has few scores."""
        row_lengths = [row.length for group in self.rows for row in group]
        width, prompt_width = self.widths
        shortest_prompt = min((prompt.length for prompt in self.prompts), default=0)
        return (
            width <= QUERY_TILE
            and _is_similar(min(row_lengths), width)
            and _is_similar(shortest_prompt, prompt_width)
            and len(set(self.prompts)) == len(self.prompts)
            and len(row_lengths) * width * (width + prompt_width) <= BLOCK_SCORES
        )


def _is_similar(short: int, long: int) -> bool:
    return long - short <= max(_SLACK_TOKENS, int(_SLACK * long))


def make_blocks(segments: Sequence[Segment]) -> list[Block]:
    """Blocks in which every token of `segments`, which are all flat tokens, is a query once."""
    num_tokens = sum(segment.length for segment in segments)
    rows = [_Rectangle([[row]], [] if row.shared is None else [row.shared]) for row in segments if row.length]

    def prompt_of(rectangle: _Rectangle) -> int:
        return rectangle.prompts[0].start if rectangle.prompts else -1

    def kind_of(rectangle: _Rectangle) -> tuple[bool, int]:
        return bool(rectangle.prompts), len(rectangle.rows[0])

    rows.sort(key=lambda row: (prompt_of(row), -row.widths[0]))
    groups = _merged(rows, prompt_of, lambda group, row: _Rectangle([group.rows[0] + row.rows[0]], group.prompts))
    groups.sort(key=lambda group: (kind_of(group), *(-width for width in group.widths)))
    rectangles = _merged(groups, kind_of, lambda a, b: _Rectangle(a.rows + b.rows, a.prompts + b.prompts))
    return [block for rectangle in rectangles for block in _blocks_of(rectangle, num_tokens)]


def _merged(
    rectangles: list[_Rectangle],
    kind_of: Callable[[_Rectangle], object],
    join: Callable[[_Rectangle, _Rectangle], _Rectangle],
) -> list[_Rectangle]:
    """Joins neighbours of one kind as long as the result fits."""
    merged: list[_Rectangle] = []
    for rectangle in rectangles:
        joined = join(merged[-1], rectangle) if merged and kind_of(merged[-1]) == kind_of(rectangle) else None
        if joined is not None and joined.fits():
            merged[-1] = joined
        else:
            merged.append(rectangle)
    return merged


def _blocks_of(rectangle: _Rectangle, num_tokens: int) -> list[Block]:
    """One block, or one for each query tile of long rows."""
    width, prompt_width = rectangle.widths
    prompts = None
    if rectangle.prompts:
        prompts = torch.from_numpy(_places([[prompt] for prompt in rectangle.prompts], prompt_width, num_tokens))
    prompt_lengths = torch.tensor([p.length for p in rectangle.prompts] or [0] * len(rectangle.rows))
    tile = width if width <= QUERY_TILE * 3 // 2 else QUERY_TILE
    blocks = []
    for start in range(0, width, tile):
        rows = torch.from_numpy(_places(rectangle.rows, min(start + tile, width), num_tokens))
        blocks.append(Block(rows, prompts, prompt_lengths, start, num_tokens))
    return blocks


def _places(groups: list[list[Segment]], width: int, padding: int) -> np.ndarray:
    """(groups, rows, width) int64 flat places of the rows' first tokens."""
    starts, lengths = (
        np.array([[getattr(row, name) for row in group] for group in groups])[..., None] for name in ("start", "length")
    )
    offset = np.arange(width)
    return np.where(offset < lengths, starts + offset, padding).astype(np.int64)
