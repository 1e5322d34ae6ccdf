"""Inputs of the forward pass that scores a batch: flat with shared prompts, or dense with padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.modeling.scoring.attention import AttentionPlan, run_planned
from groupgrad.modeling.scoring.blocks import Segment
from groupgrad.modeling.scoring.layout import flat_layout
from groupgrad.modeling.vlm import ImageSegment, PromptImages, flat_image_inputs, padded_image_inputs, prompt_images


@dataclass(slots=True)
class ForwardInputs:
    """Arguments of a model's forward pass, and the places in them that predict the completion tokens."""

    ids: torch.Tensor
    """(B, T) int64 with padding on the right, or (T,) flat tokens."""
    rows: torch.Tensor
    """(L,) int64, the input row that predicts each completion token."""
    positions: torch.Tensor
    """(L,) int64, the place in that input row."""
    arguments: dict[str, Any]
    """Further arguments of the model."""
    position_ids: torch.Tensor | None = None
    """(T,) positions of flat tokens in their rows, (3, T) or (3, B, T) where they depend on images, or None."""
    plan: AttentionPlan | None = None
    """Attention of flat tokens; None for dense rows."""
    segments: list[Segment] = field(default_factory=list)
    """All flat tokens."""

    @property
    def shape(self) -> torch.Size:
        """(B, T), or (1, T) for flat tokens."""
        return torch.Size((1, len(self.ids))) if self.ids.dim() == 1 else self.ids.shape

    def run(self, model: nn.Module) -> Any:
        """The model's output."""
        if self.plan is not None and self.position_ids is not None:
            return run_planned(model, self.ids, self.position_ids, self.plan, **self.arguments)
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        return model(input_ids=self.ids, use_cache=False, **positions, **self.arguments)


def dense_inputs(batch: Batch, pad_id: int, *, aux_loss: bool) -> ForwardInputs:
    """One row per completion, padded on the right. Causal models need no mask; the auxiliary loss does."""
    device = batch.completion_ids.device
    prompt_lengths = batch.prompt_offsets.diff()[batch.prompt_of_row]
    lengths = prompt_lengths + batch.offsets.diff()
    num_rows, width = batch.num_rows, int(lengths.max()) if batch.num_rows else 0
    place = torch.arange(width, device=device).expand(num_rows, width)
    mask, is_prompt = place < lengths[:, None], place < prompt_lengths[:, None]
    ids = torch.full((num_rows, width), pad_id, dtype=torch.int64, device=device)
    source = batch.prompt_offsets[batch.prompt_of_row][:, None] + place
    ids[is_prompt] = batch.prompt_ids[source[is_prompt]]
    ids[mask & ~is_prompt] = batch.completion_ids
    rows = batch.row_of_token
    place_in_completion = torch.arange(batch.num_tokens, device=device) - batch.offsets[rows]
    arguments = {"attention_mask": mask.long(), "output_router_logits": True} if aux_loss else {}
    return ForwardInputs(ids, rows, prompt_lengths[rows] + place_in_completion - 1, arguments)


def flat_inputs(batch: Batch, *, share: bool, aux_loss: bool) -> ForwardInputs:
    """All rows end to end, with each distinct prompt once (`share`) or once per row."""
    flat = flat_layout(batch, share=share, keep_last=aux_loss)
    arguments: dict[str, Any] = {"output_router_logits": True} if aux_loss else {}
    if aux_loss and share:
        # The plan replaces the mask in attention, so the mask is free to weigh the tokens of the auxiliary loss.
        arguments["attention_mask"] = _rows_per_token(flat.segments).to(flat.ids.device)[None]
    return ForwardInputs(
        ids=flat.ids,
        rows=torch.zeros_like(flat.predictors),
        positions=flat.predictors,
        arguments=arguments,
        position_ids=flat.positions,
        plan=flat.plan,
        segments=flat.segments,
    )


def _rows_per_token(segments: list[Segment]) -> torch.Tensor:
    """(T,) float: the number of rows that have each flat token, more than 1 for shared prompts alone."""
    num_rows = Counter(segment.prompt for segment in segments if segment.shared is not None)
    counts = [float(num_rows[s.prompt]) if s.row is None else 1.0 for s in segments]
    return torch.tensor(counts).repeat_interleave(torch.tensor([s.length for s in segments], dtype=torch.int64))


@contextmanager
def with_images(model: nn.Module, batch: Batch, inputs: ForwardInputs) -> Iterator[ForwardInputs]:
    """The inputs together with the batch's images. The model has to run inside, where its embedding is hooked."""
    of_prompts = _images_of_prompts(model, batch)
    of_rows = _images_of_rows(model, batch, of_prompts)
    if inputs.plan is None or inputs.position_ids is None:
        view = padded_image_inputs(model, inputs.ids, of_rows)
        plan = None
    else:
        segments = [
            ImageSegment(s.start, s.length, s.position, of_prompts[s.prompt] if s.row is None else of_rows[s.row])
            for s in inputs.segments
        ]
        view = flat_image_inputs(model, inputs.ids, inputs.position_ids, segments)
        plan = view.attention_plan(inputs.plan)
    position_ids = inputs.position_ids if view.rope is None else view.rope
    arguments = {**view.inputs, **inputs.arguments}
    with view.embedding_true_ids(model):
        yield replace(inputs, ids=view.ids, arguments=arguments, position_ids=position_ids, plan=plan)


def _images_of_prompts(model: nn.Module, batch: Batch) -> list[PromptImages | None]:
    """(Q,) images of each distinct prompt as the model gets them."""
    media = batch.media or (None,) * batch.num_prompts
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in batch.prompts()]
    return [None if item is None else prompt_images(model, ids, item) for ids, item in zip(prompts, media)]


def _images_of_rows(model: nn.Module, batch: Batch, of_prompts: list[PromptImages | None]) -> list[PromptImages | None]:
    """(B,) images of each row: those of its prompt, or more where tools returned some."""
    images = [of_prompts[prompt] for prompt in batch.prompt_of_row.tolist()]
    for row, media in enumerate(batch.row_media or ()):
        if media is not None:
            prompt = int(batch.prompt_of_row[row])
            prompt_ids = batch.prompt_ids[batch.prompt_offsets[prompt] : batch.prompt_offsets[prompt + 1]]
            ids = torch.cat([prompt_ids, batch.completion_ids[batch.offsets[row] : batch.offsets[row + 1]]])
            num_known = min((len(types) for types in media.token_tensors.values()), default=len(ids))
            images[row] = prompt_images(model, ids[:num_known], media)
    return images
