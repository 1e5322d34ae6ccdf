"""Spans of prompts and the rows behind them."""

from __future__ import annotations

from collections.abc import Sequence

from groupgrad.scoring.blocks import TokenSpan


def make_spans(lengths: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[TokenSpan], list[list[int]]]:
    """Returns the spans of prompts and their rows, and each span's flat places behind those of its prompt.

    `lengths` has, for each prompt, its number of tokens (0: its rows have none) and those of its rows.
    """
    spans: list[TokenSpan] = []
    places: list[list[int]] = []
    start = 0
    for length, rows in lengths:
        shared, prompt = TokenSpan(start, length) if length else None, list(range(start, start + length))
        if shared is not None:
            spans.append(shared)
            places.append(prompt)
        start += length
        for row in rows:
            spans.append(TokenSpan(start, row, shared=shared))
            places.append([*prompt, *range(start, start + row)])
            start += row
    return spans, places
