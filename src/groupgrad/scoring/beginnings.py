"""Computes once what several prompts of a pass begin with, such as a system prompt.

Layers compute such tokens once. Attention alone sees them in front of each prompt, since its keys have to lie one after
the other: the layout copies queries, keys and values there, and attends as without this module. So no number changes on
a CPU, where a token's numbers do not depend on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from groupgrad.batch import LEAST_SHARED, num_common, on_host, to_device
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.block_attention import BlockLayout
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.layout import ForwardInputs

_Run = tuple[int, int]
"""The first of consecutive tokens, and their number."""


class CopyingLayout(BlockLayout):
    """Attention layout of `spans`, whose tokens are copies of the T tokens of a pass."""

    def __init__(self, spans: Sequence[TokenSpan], copied: Sequence[_Run], kept: Sequence[_Run]):
        super().__init__(spans)
        self._copied = copied
        """Those of the T tokens that the tokens of the spans are, in order."""
        self._kept = kept
        """Those of the tokens of the spans whose outputs are the T outputs, in order."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        query, key, value = (_taken(x.transpose(0, 1), self._copied).transpose(0, 1) for x in (query, key, value))
        return _taken(super().attend(query, key, value, call), self._kept)


def _taken(values: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
    return _Runs.apply(values, runs)  # pyright: ignore[reportReturnType]


class _Runs(torch.autograd.Function):
    """Runs of a tensor's first dimension, end to end. Gradients of what is in several are added in float32."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
        ctx.runs, ctx.size = runs, len(values)
        return torch.cat([values[start : start + length] for start, length in runs])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = grad.new_zeros(ctx.size, *grad.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32))
        for (start, length), part in zip(ctx.runs, grad.split([length for _, length in ctx.runs])):
            total[start : start + length] += part
        return total.to(grad.dtype), None


def with_beginnings_once(inputs: ForwardInputs) -> ForwardInputs:
    """The flat `inputs` without tokens of prompts that, with all before them, another prompt has too."""
    assert inputs.positions is not None
    ids, spans = on_host(inputs.ids).numpy(), inputs.spans
    source = np.arange(len(ids))  # the token whose copy each token is
    prompts = {span.start: ids[span.start : span.start + span.length] for span in spans if span.row is None}
    # In this order each prompt begins with as much of the one before it as of any earlier one.
    for before, start in pairwise(sorted(prompts, key=lambda start: prompts[start].tobytes())):
        common = num_common(prompts[before], prompts[start])
        if common >= LEAST_SHARED:
            source[start : start + common] = source[before : before + common]
    kept = np.flatnonzero(source == np.arange(len(ids)))
    if len(kept) == len(ids):
        return inputs
    copied = np.searchsorted(kept, source)
    of_kept, of_copied = (torch.from_numpy(places) for places in (kept, copied))
    device = inputs.ids.device
    return replace(
        inputs,
        ids=to_device(on_host(inputs.ids)[of_kept], device),
        positions=to_device(on_host(inputs.positions)[of_kept], device),
        predictors=to_device(of_copied[on_host(inputs.predictors)], device),
        attention=CopyingLayout(spans, _runs(copied), _runs(kept)),
        spans=[],
        num_copied=len(copied) - len(kept),
    )


def _runs(places: np.ndarray) -> list[_Run]:
    bounds = [0, *(np.flatnonzero(np.diff(places) != 1) + 1), len(places)]
    return [(int(places[start]), int(end - start)) for start, end in pairwise(bounds)]
