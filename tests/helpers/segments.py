"""Segments of prompts and the rows behind them."""

from __future__ import annotations

from collections.abc import Sequence

from groupgrad.scoring.blocks import Segment


def make_segments(lengths: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[Segment], list[list[int]]]:
    """Returns the segments of prompts and their rows, and each segment's flat places behind those of its prompt.

    `lengths` has, for each prompt, its number of tokens (0: its rows have none) and those of its rows.
    """
    segments: list[Segment] = []
    places: list[list[int]] = []
    start = 0
    for length, rows in lengths:
        shared, prompt = Segment(start, length) if length else None, list(range(start, start + length))
        if shared is not None:
            segments.append(shared)
            places.append(prompt)
        start += length
        for row in rows:
            segments.append(Segment(start, row, shared=shared))
            places.append([*prompt, *range(start, start + row)])
            start += row
    return segments, places
