"""A look at the user's own model before a run: does the flat layout give its numbers, and what does a token cost?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch, StepTotals, TokenScores
from groupgrad.modeling.quantized import rounds_to_int8
from groupgrad.modeling.scoring.attention import plannable
from groupgrad.modeling.scoring.forward import (
    ForwardOptions,
    Layout,
    evaluation_mode,
    output_head,
    score_tokens,
    unwrap,
)
from groupgrad.modeling.scoring.logit_transform import logit_transform
from groupgrad.modeling.vlm import is_multimodal, placeholder_ids
from groupgrad.types import Media, Prompt

# Rounding alone makes about 1e-5 (float32) and some 0.05 (half precision) between two orders of the same additions; a
# wrong mask or position makes several nats on a trained model and 0.01 or more on a random one.
TOLERANCE_FLOAT32, TOLERANCE_HALF = 1e-3, 0.25
"""Nats that a log-prob may differ by: the largest of all tokens in float32, their mean in half precision."""

TOLERANCE_HALF_BALANCE = 0.02
"""Share of the load-balancing loss that rounding may come to in half precision: a token's experts may change."""

_PROMPTS, _ROWS = (7, 12), ((0, 5), (1, 8), (0, 11), (1, 3), (0, 1))
"""Prompt lengths, and (prompt, completion length) of the rows that are tried."""

_COPIES_ON_GPU = 8
"""Times that there are prompts and rows of these lengths on a GPU: kernels for short inputs are others there."""

_ROWS_WITH_IMAGES = (4, 2)
"""Completion lengths of rows that continue an example prompt with images."""


@dataclass(slots=True, frozen=True)
class LayoutReport:
    """How a model will be run, and why."""

    layout: Layout
    """What the model is run in."""
    tiled_head: bool
    """Its output head is computed in tiles."""
    reason: str | None
    """Why it is not the flat layout with a tiled head; None if it is."""
    difference: float | None
    """Nats between that and the plain dense computation on random tokens; None if they were not compared."""
    weighs_balance: bool = False
    """The load-balancing loss of its experts can be had of shared prompts."""

    def options(self, options: ForwardOptions) -> ForwardOptions:
        """`options` for a model with this report."""
        return replace(
            options,
            layout="dense" if self.layout == "dense" else None,
            tiled_head=self.tiled_head,
            weighs_balance=self.weighs_balance,
        )


def check_layout(
    model: nn.Module,
    options: ForwardOptions,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    example: Prompt | None = None,
) -> LayoutReport:
    """How `model` can be run: in the best way whose numbers are those of the plain dense one on random tokens.

    A model that sees is tried on the images of the `example` too, a prompt made by the user's processor; ValueError if
    it fails at them. No state is touched: no random stream, no mode, no gradient.
    """
    reason = plannable(model)
    batch, reasons, difference = random_batch(model, example), [] if reason is None else [reason], None
    tiled = logit_transform(unwrap(model)) is not None
    if not tiled:
        reasons.append("it is not known what the model makes of its output head")
    elif not _calls_its_head(model, batch, options, precision):
        tiled = False
        reasons.append("it multiplies with its output head's weight itself")
    ways: list[tuple[Layout, bool]] = [("shared", True), ("shared", False), ("dense", True)]
    ways = [way for way in ways if (way[0] == "dense" or reason is None) and (tiled or not way[1])]
    with torch.no_grad(), evaluation_mode(model), precision():
        expected = _plain_scores(model, batch, options)
        for layout, tiled_head in ways:
            words = f"{layout} layout with the {'tiled' if tiled_head else 'plain'} head"
            try:
                way = replace(options, layout=layout, tiled_head=tiled_head, aux_loss=False)
                difference = logprob_difference(score_tokens(model, batch, way).logprobs, expected.logprobs, model)
            except Exception as error:  # whatever a model's own code raises, the dense layout is there
                reasons.append(f"the {words} failed: {type(error).__name__}: {error}")
                continue
            if difference <= tolerance(model):
                balance = layout == "shared" and options.aux_loss and _weighs_balance(model, batch, options)
                return LayoutReport(layout, tiled_head, "; ".join(reasons) or None, difference, balance)
            reasons.append(f"log-probs of the {words} differ by {difference:.2g} nats on random tokens")
    return LayoutReport("dense", False, "; ".join(reasons), difference)


def _calls_its_head(
    model: nn.Module, batch: Batch, options: ForwardOptions, precision: Callable[[], AbstractContextManager[Any]]
) -> bool:
    """True if a forward pass calls the output head as a module, where its work can be taken over."""
    head, calls = output_head(model), []
    assert head is not None  # there is a recipe
    handle = head.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        with torch.no_grad(), evaluation_mode(model), precision():
            _plain_scores(model, batch, options)
    finally:
        handle.remove()
    return bool(calls)


def _plain_scores(model: nn.Module, batch: Batch, options: ForwardOptions) -> TokenScores:
    try:
        return score_tokens(model, batch, replace(options, layout="dense", tiled_head=False, aux_loss=False))
    except Exception as error:  # models raise what their parts raise
        if batch.media is None:
            raise
        raise ValueError(
            f"{type(unwrap(model)).__name__} fails at a prompt with one small image as this processor makes it "
            f"({type(error).__name__}: {error}); use the processor that belongs to the model, or pass "
            "processing_class=processor.tokenizer to train on text alone"
        ) from error


def random_batch(model: nn.Module, example: Prompt | None = None) -> Batch:
    """Random tokens of the model's vocabulary as a small ragged batch on its device.

    Of a model that sees some rows continue the `example`, whose images are given, and have a placeholder of no image.
    """
    device = next(model.parameters()).device
    stream = torch.Generator().manual_seed(0)
    copies = _copies(device)
    prompt_lengths, lengths = list(_PROMPTS) * copies, [length for _, length in _ROWS] * copies
    owners = [group + copy * len(_PROMPTS) for copy in range(copies) for group, _ in _ROWS]
    num_tokens = sum(lengths) + sum(prompt_lengths)
    *completions, prompts = random_ids(model, num_tokens, stream).split([*lengths, sum(prompt_lengths)])
    groups = [prompt.tolist() for prompt in prompts.split(prompt_lengths)]
    rows, media = [row.tolist() for row in completions], None
    if example is not None and example.media is not None and is_multimodal(model):
        for ids in random_ids(model, sum(_ROWS_WITH_IMAGES), stream).split(list(_ROWS_WITH_IMAGES)):
            rows.append([*ids.tolist(), *_sampled_placeholder(model), int(ids[0])])
            owners.append(len(groups))
        groups.append(example.ids)
        media = (*[None] * len(prompt_lengths), example.media)
    return build_batch(groups, owners, rows, media).to(device)


def _copies(device: torch.device) -> int:
    return _COPIES_ON_GPU if device.type == "cuda" else 1


def _sampled_placeholder(model: nn.Module) -> list[int]:
    """A placeholder that the policy could sample, if there is one."""
    config = unwrap(model).config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return [token for token in placeholder_ids(model) if token < config.vocab_size][:1]


def random_ids(model: nn.Module, count: int, stream: torch.Generator) -> torch.Tensor:
    """(count,) token ids of the model's vocabulary that neither pad nor stand for images."""
    config = unwrap(model).config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    pad = getattr(config, "pad_token_id", None)
    ids = torch.randint(0, config.vocab_size, (count,), generator=stream)
    # Some models take the padding token for a hint that a mask is missing.
    special = torch.tensor([-1 if pad is None else pad, *placeholder_ids(model)])
    while bool((found := torch.isin(ids, special)).any()):
        ids = torch.where(found, (ids + 1) % config.vocab_size, ids)
    return ids


def build_batch(
    prompts: list[list[int]],
    prompt_of_row: Sequence[int],
    completions: list[list[int]],
    media: tuple[Media | None, ...] | None = None,
) -> Batch:
    """Completions and the prompts that they continue (places in `prompts`) as a batch on the CPU; all is trained."""
    lengths, prompt_lengths = (torch.tensor([len(ids) for ids in rows]) for rows in (completions, prompts))
    num_rows, num_tokens = len(completions), int(lengths.sum())
    return Batch(
        completion_ids=torch.tensor([token for ids in completions for token in ids], dtype=torch.int64),
        row_of_token=torch.arange(num_rows).repeat_interleave(lengths),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.int64),
        prompt_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), prompt_lengths.cumsum(0)]),
        prompt_of_row=torch.tensor(prompt_of_row),
        trained=torch.ones(num_tokens, dtype=torch.bool),
        advantages=torch.ones(num_rows),
        totals=StepTotals(rows=num_rows, tokens=num_tokens),
        media=media,
    )


def reversed_prompts(batch: Batch) -> Batch:
    """The same batch with its prompts reversed, so that none of them is shared with it."""
    bounds = batch.prompt_offsets.tolist()
    reversed_ids = [batch.prompt_ids[a:b].flip(0) for a, b in pairwise(bounds)]
    return replace(batch, prompt_ids=torch.cat(reversed_ids))


def _weighs_balance(model: nn.Module, batch: Batch, options: ForwardOptions) -> bool:
    """True if the load-balancing loss of shared prompts, each counted once a row, is that of rows with their own."""
    found = []
    for layout in ("packed", "shared"):
        try:
            found.append(score_tokens(model, batch, replace(options, layout=layout, aux_loss=True)).aux_loss)
        except Exception:  # whatever a model's own code raises, rows of their own are there
            return False
    if found[0] is None or found[1] is None:
        return False
    share = TOLERANCE_HALF_BALANCE if _is_half(model) else TOLERANCE_FLOAT32
    return bool((found[1] - found[0]).abs() <= share * found[0].abs())


def logprob_difference(found: torch.Tensor, expected: torch.Tensor, model: nn.Module) -> float:
    """Nats between two sets of log-probs, as `tolerance` bounds them; inf if one of them is not finite."""
    gaps = (found.float() - expected.float()).abs()
    gap = float(gaps.mean() if _is_half(model) else gaps.max())
    return gap if math.isfinite(gap) else math.inf


def tolerance(model: nn.Module) -> float:
    """Nats that rounding may come to on `model`."""
    return TOLERANCE_HALF if _is_half(model) else TOLERANCE_FLOAT32


def _is_half(model: nn.Module) -> bool:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if rounds_to_int8(model):
        return True
    # Offloaded weights are nowhere until they are used.
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return bool(dtypes - {torch.float32, torch.float64}) or any(map(torch.is_autocast_enabled, devices))
