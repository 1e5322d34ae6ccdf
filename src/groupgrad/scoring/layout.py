"""Lays out a batch for the forward pass that scores it, in one of three layouts.

The shared layout has each distinct prompt once, followed by its rows; a prompt that begins a longer one is a part of
it. (`beginnings.py` takes out what prompts have in common otherwise.) The packed layout has a copy of the prompt for
each row. Both are flat and without padding; the last token of a completion predicts nothing, so it is left out. The
dense layout has a padded row for each completion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from groupgrad.batch import Batch, on_host, to_device, wholes_of
from groupgrad.scoring.attention import run_flat
from groupgrad.scoring.attention_layout import AttentionLayout
from groupgrad.scoring.block_attention import BlockLayout
from groupgrad.scoring.blocks import TokenSpan


@dataclass(slots=True)
class ForwardInputs:
    """Arguments of a model's forward pass, and the places in them that predict the completion tokens."""

    ids: torch.Tensor
    """(B, T) int64 with padding on the right, or (T,) flat tokens."""
    rows: torch.Tensor
    """(L,) int64, the input row that predicts each completion token; 0 for flat tokens."""
    predictors: torch.Tensor
    """(L,) int64, the index within that input row whose output predicts the token."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model."""
    positions: torch.Tensor | None = None
    """(T,) positions of flat tokens in their rows, the prompt counted; (3, T) or (3, B, T) where they depend on images.
    None for dense rows, where the position is the index in the row."""
    attention: AttentionLayout | None = None
    """Attention of flat tokens; None for dense rows."""
    spans: list[TokenSpan] = field(default_factory=list)
    """All flat tokens, in order; empty for dense rows and where tokens are copied."""
    num_copied: int = 0
    """Copies of flat tokens in attention (`beginnings.py`)."""
    hooks: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    """Hooks on the model for the time of its pass: its embedding gets the ids of sampled placeholders of images."""

    @property
    def shape(self) -> torch.Size:
        """(B, T), or (1, T) for flat tokens."""
        return torch.Size((1, len(self.ids))) if self.ids.dim() == 1 else self.ids.shape

    def run(self, model: nn.Module) -> Any:
        """The model's output."""
        with nullcontext() if self.hooks is None else self.hooks(model):
            if self.attention is not None and self.positions is not None:
                return run_flat(model, self.ids, self.positions, self.attention, **self.arguments)
            positions = {} if self.positions is None else {"position_ids": self.positions}
            return model(input_ids=self.ids, use_cache=False, **positions, **self.arguments)


def dense_inputs(batch: Batch, pad_id: int, *, aux_loss: bool) -> ForwardInputs:
    """One row per completion, padded on the right. Causal models need no mask; the auxiliary loss does."""
    device, prompt_of_row = batch.completion_ids.device, on_host(batch.prompt_of_row)
    prompt_offsets, offsets, rows = (on_host(x) for x in (batch.prompt_offsets, batch.offsets, batch.row_of_token))
    prompt_lengths = prompt_offsets.diff()[prompt_of_row]
    lengths = prompt_lengths + offsets.diff()
    num_rows, width = batch.num_rows, int(lengths.max()) if batch.num_rows else 0
    place = torch.arange(width).expand(num_rows, width)
    mask, is_prompt = place < lengths[:, None], place < prompt_lengths[:, None]
    ids = torch.full((num_rows, width), pad_id, dtype=torch.int64)
    source = prompt_offsets[prompt_of_row][:, None] + place
    ids[is_prompt] = on_host(batch.prompt_ids)[source[is_prompt]]
    ids[mask & ~is_prompt] = on_host(batch.completion_ids)
    predictors = prompt_lengths[rows] + torch.arange(batch.num_tokens) - offsets[rows] - 1
    arguments = {"attention_mask": to_device(mask.long(), device), "output_router_logits": True} if aux_loss else {}
    return ForwardInputs(to_device(ids, device), batch.row_of_token, to_device(predictors, device), arguments)


def flat_inputs(batch: Batch, *, shared_prompts: bool, shared_prefixes: bool = False, aux_loss: bool) -> ForwardInputs:
    """All rows end to end, with each distinct prompt once (`shared_prompts`) or once per row.

    The auxiliary loss counts the tokens of every prompt, so there no prompt is a part of another.
    """
    inputs = flat_layout(
        batch, shared_prompts=shared_prompts, shared_prefixes=shared_prefixes and not aux_loss, keep_last=aux_loss
    )
    if aux_loss:
        inputs.arguments["output_router_logits"] = True
    if aux_loss and shared_prompts:
        # The attention layout takes the mask's place, so the mask is free to weigh the tokens of the auxiliary loss.
        inputs.arguments["attention_mask"] = to_device(_rows_per_token(inputs.spans), inputs.ids.device)[None]
    return inputs


def flat_layout(
    batch: Batch, *, shared_prompts: bool = True, shared_prefixes: bool = False, keep_last: bool = False
) -> ForwardInputs:
    """Lays out each distinct prompt once (`shared_prompts`) or once per row, on the batch's device.

    With `shared_prefixes` a prompt that begins a longer one is a part of it, and its rows go on from inside the longer
    one. So an agent's history is computed once, however many of its turns are branches.
    A row with images of its own never shares its prompt, because a row's images go to the model together.
    `keep_last` also computes the last tokens of completions and the prompts of empty ones. That matters only to sums
    over all tokens (the load balancing of experts).
    """
    prompts, completions = _split(batch.prompt_ids, batch.prompt_offsets), _split(batch.completion_ids, batch.offsets)
    ids: list[np.ndarray] = []
    spans: list[TokenSpan] = []
    # (B,) places of each completion's first token, and of the token before it.
    firsts, predecessors = np.zeros(batch.num_rows, np.int64), np.zeros(batch.num_rows, np.int64)

    def append(tokens: np.ndarray, prompt: int, row: int | None = None, shared: TokenSpan | None = None) -> TokenSpan:
        start = spans[-1].start + spans[-1].length if spans else 0
        position = 0 if shared is None else shared.length
        spans.append(TokenSpan(start, len(tokens), position, prompt, row, shared))
        ids.append(tokens)
        return spans[-1]

    prompt_of_row = on_host(batch.prompt_of_row).tolist()
    computed = [row for row in range(batch.num_rows) if len(completions[row]) or keep_last]
    wholes = {prompt: prompt for prompt in {prompt_of_row[row] for row in computed}}
    if shared_prompts and shared_prefixes and not batch.has_images:
        wholes |= wholes_of({prompt: prompts[prompt].tobytes() for prompt in wholes})
    rows_of_prompt: dict[int, list[int]] = {}
    for row in computed:
        rows_of_prompt.setdefault(wholes[prompt_of_row[row]], []).append(row)
    row_media = batch.row_media or (None,) * batch.num_rows
    has_separate_prompt = {row for row, media in enumerate(row_media) if media is not None or not shared_prompts}
    for whole, rows in rows_of_prompt.items():
        shared = None if has_separate_prompt.issuperset(rows) else append(prompts[whole], whole)
        for row in rows:
            tokens = completions[row] if keep_last else completions[row][:-1]
            before = prompts[prompt_of_row[row]]
            if shared is None or row in has_separate_prompt:
                firsts[row] = append(np.concatenate([before, tokens]), whole, row).start + len(before)
                predecessors[row] = firsts[row] - 1
            else:
                part = shared if len(before) == shared.length else replace(shared, length=len(before))
                firsts[row] = append(tokens, whole, row, part).start
                predecessors[row] = part.start + part.length - 1
    starts, begins, sizes = np.array([(s.start, s.position, s.length) for s in spans], np.int64).reshape(-1, 3).T
    positions = np.arange(sizes.sum()) - np.repeat(starts - begins, sizes)
    device = batch.completion_ids.device
    return ForwardInputs(
        ids=to_device(torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ids])), device),
        rows=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
        predictors=to_device(torch.from_numpy(_predictors(batch, firsts, predecessors)), device),
        positions=to_device(torch.from_numpy(positions), device),
        attention=BlockLayout(spans),
        spans=spans,
    )


def _split(flat: torch.Tensor, offsets: torch.Tensor) -> list[np.ndarray]:
    values, ends = on_host(flat).numpy(), on_host(offsets).tolist()
    return [values[a:b] for a, b in pairwise(ends)]


def _predictors(batch: Batch, firsts: np.ndarray, predecessors: np.ndarray) -> np.ndarray:
    """(L,) places before completion tokens, from the (B,) places of first tokens and of those before them."""
    offsets = on_host(batch.offsets).numpy()
    starts, lengths = offsets[:-1], np.diff(offsets)
    places = np.arange(batch.num_tokens) + np.repeat(firsts - starts - 1, lengths)
    places[starts[lengths > 0]] = predecessors[lengths > 0]
    return places


def _rows_per_token(spans: list[TokenSpan]) -> torch.Tensor:
    """(T,) float: the number of rows that each flat token belongs to; more than 1 only in shared prompts."""
    num_rows = Counter(span.prompt for span in spans if span.shared is not None)
    counts = [float(num_rows[s.prompt]) if s.row is None else 1.0 for s in spans]
    return torch.tensor(counts).repeat_interleave(torch.tensor([s.length for s in spans], dtype=torch.int64))
