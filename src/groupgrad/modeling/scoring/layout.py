"""Arranges a batch as one flat, unpadded forward pass.

The shared layout has each distinct prompt once, with its rows behind it. The packed layout has a copy of the prompt for
each row. Neither pads. The last token of a completion predicts nothing, so it is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from groupgrad.batch import Batch
from groupgrad.modeling.scoring.attention import AttentionCall
from groupgrad.modeling.scoring.block_attention import RowAttention
from groupgrad.modeling.scoring.blocks import Segment
from groupgrad.modeling.scoring.flex_attention import TokenPlaces, attend_flex, is_usable


class BlockPlan:
    """Attention plan of rows that may share prompts (see `attention.AttentionPlan`)."""

    def __init__(self, segments: Sequence[Segment]):
        self._segments, self._blocks = segments, RowAttention(segments)
        self._places: dict[torch.device, TokenPlaces] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        if is_usable(query, value, call):
            output = attend_flex(query, key, value, self.places(query.device), call)
            if output is not None:
                return output
        return self._blocks.attend(query, key, value, call)

    def places(self, device: torch.device) -> TokenPlaces:
        """The tokens as flex attention masks them. Layers of a model may lie on several devices."""
        if device not in self._places:
            self._places[device] = TokenPlaces.of(self._segments, device)
        return self._places[device]


@dataclass(slots=True)
class FlatLayout:
    """A batch as one flat forward pass."""

    ids: torch.Tensor
    """(T,) int64."""
    positions: torch.Tensor
    """(T,) int64, each token's position in its row, the prompt counted."""
    predictors: torch.Tensor
    """(L,) int64, the flat token whose output predicts each completion token."""
    segments: list[Segment]
    """All tokens, in flat order."""
    plan: BlockPlan


def flat_layout(batch: Batch, *, share: bool = True, keep_last: bool = False) -> FlatLayout:
    """Lays out each distinct prompt once (`share`) or once per row, on the batch's device.

    A row with images of its own always has its own prompt, because a row's images go to the model together.
    `keep_last` also computes the last tokens of completions and the prompts of empty ones. That matters only to sums
    over all tokens (the load balancing of experts).
    """
    prompts, completions = _split(batch.prompt_ids, batch.prompt_offsets), _split(batch.completion_ids, batch.offsets)
    ids: list[np.ndarray] = []
    segments: list[Segment] = []
    predictors: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * batch.num_rows

    def append(tokens: np.ndarray, prompt: int, row: int | None = None, shared: Segment | None = None) -> Segment:
        start = segments[-1].start + segments[-1].length if segments else 0
        position = 0 if shared is None else shared.length
        segments.append(Segment(start, len(tokens), position, prompt, row, shared))
        ids.append(tokens)
        return segments[-1]

    rows_of_prompt: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_of_row.tolist()):
        if len(completions[row]) or keep_last:
            rows_of_prompt.setdefault(prompt, []).append(row)
    row_media = batch.row_media or (None,) * batch.num_rows
    has_own_prompt = {row for row, media in enumerate(row_media) if media is not None or not share}
    for prompt, rows in rows_of_prompt.items():
        shared = None if has_own_prompt.issuperset(rows) else append(prompts[prompt], prompt)
        for row in rows:
            tokens = completions[row] if keep_last else completions[row][:-1]
            if shared is None or row in has_own_prompt:
                start = append(np.concatenate([prompts[prompt], tokens]), prompt, row).start
                first = start + len(prompts[prompt])
                last_of_prompt = first - 1
            else:
                first = append(tokens, prompt, row, shared).start
                last_of_prompt = shared.start + shared.length - 1
            if len(completions[row]):
                others = np.arange(first, first + len(completions[row]) - 1)
                predictors[row] = np.concatenate([[last_of_prompt], others])
    positions = [np.arange(s.position, s.position + s.length) for s in segments]
    device = batch.completion_ids.device
    return FlatLayout(
        ids=_tensor(ids, device),
        positions=_tensor(positions, device),
        predictors=_tensor(predictors, device),
        segments=segments,
        plan=BlockPlan(segments),
    )


def _split(flat: torch.Tensor, offsets: torch.Tensor) -> list[np.ndarray]:
    values, ends = flat.cpu().numpy(), offsets.tolist()
    return [values[a:b] for a, b in pairwise(ends)]


def _tensor(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    flat = np.concatenate(parts) if parts else np.zeros(0)
    return torch.from_numpy(flat.astype(np.int64)).to(device)
