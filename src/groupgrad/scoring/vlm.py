"""Vision-language models (VLMs): the model inputs that carry a batch's images, for any layout of its tokens.

The model's own forward pass embeds the images and puts the features at the placeholder tokens. This module prepares
its inputs: the tensors of all prompts' images in the order of the prompts, rotary positions that depend on images, and
the spans of tokens that attend to each other in both directions.

Only the placeholders of a prompt stand for its images; a policy may sample the same token ids. The model finds
placeholders by token id, so sampled ones are replaced in its input ids and restored at its input embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.models.families import has_bidirectional_images
from groupgrad.models.unwrapping import arguments, placeholder_ids, pretrained
from groupgrad.scoring.attention_layout import AttentionCall, AttentionLayout
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.layout import ForwardInputs
from groupgrad.scoring.recurrence import Recurrence
from groupgrad.types import Media


@dataclass(slots=True, frozen=True, eq=False)
class PromptImages:
    """The images of one prompt with their token positions."""

    media: Media
    mask: torch.Tensor
    """(P_i,) bool for the prompt's P_i tokens, True for placeholders; on the CPU."""
    rope: torch.Tensor | None = None
    """(3, P_i) int64, the prompt's rotary positions; on the CPU. None if they do not depend on its images."""
    shift: int = 0
    """Added to the index of a completion token in its row to get its rotary position."""
    image_spans: tuple[tuple[int, int], ...] = ()
    """(first, end) of each image whose tokens attend to each other in both directions."""

    def rope_at(self, first: int, length: int) -> torch.Tensor:
        """(3, length) rotary positions of the row's tokens from index `first` on, completion tokens included."""
        end, num_prompt = first + length, len(self.mask)
        prompt = torch.arange(num_prompt).expand(3, -1) if self.rope is None else self.rope
        completion = torch.arange(max(first, num_prompt), end).expand(3, -1) + self.shift
        return torch.cat([prompt[:, first:end], completion], dim=1)


@dataclass(slots=True)
class ModelInputs:
    """Arguments of a forward pass. `ModelInputs(ids)` is the input of text alone."""

    ids: torch.Tensor
    """Input ids; placeholders that stand for no image are replaced by another token."""
    true_ids: torch.Tensor | None = None
    """Input ids with those placeholders, same shape as `ids`; None if `ids` has all of them."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Further arguments of the model."""
    rope: torch.Tensor | None = None
    """(3, *shape) rotary positions; None where a token's position is its index in its row."""
    image_spans: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(row, first, end): flat indices of a row's first token, and of tokens that attend in both directions."""

    def with_bidirectional_images(self, attention: AttentionLayout) -> AttentionLayout:
        """`attention`, with bidirectional attention within images where the model has it."""
        return BidirectionalImageLayout(attention, self.image_spans) if self.image_spans else attention

    @contextmanager
    def embedding_true_ids(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's input embedding receives the true ids."""
        if self.true_ids is None:
            yield
            return
        true_ids, is_replaced = self.true_ids, self.true_ids != self.ids

        def restore(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            ids = inputs[0]
            if ids.numel() != true_ids.numel():
                return None
            # The model may have replaced placeholders of images itself, so only the others are restored.
            true, where = (tensor.view(ids.shape).to(ids.device) for tensor in (true_ids, is_replaced))
            return (torch.where(where, true, ids), *inputs[1:])

        inner = pretrained(model)
        assert inner is not None
        embedding: Any = inner.get_input_embeddings()
        handle = embedding.register_forward_pre_hook(torch.compiler.disable(restore))
        try:
            yield
        finally:
            handle.remove()


class BidirectionalImageLayout:
    """An attention layout in which the tokens of one image attend to each other in both directions."""

    def __init__(self, attention: AttentionLayout, spans: Sequence[tuple[int, int, int]]):
        self._attention, self._spans = attention, spans
        self._indices = torch.cat([torch.arange(first, end) for _, first, end in spans])

    @property
    def recurrence(self) -> Recurrence:
        """The order of the tokens in recurrent layers, which images do not change."""
        return self._attention.recurrence

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        output = self._attention.attend(query, key, value, call)
        in_spans = [_attend_in_span(query, key, value, span, call).to(output.dtype) for span in self._spans]
        # The layers of a model with a device map lie on several devices.
        self._indices = self._indices.to(output.device)
        return output.index_copy(0, self._indices, torch.cat(in_spans))


def _attend_in_span(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: tuple[int, int, int], call: AttentionCall
) -> torch.Tensor:
    """(n, Hq, D) outputs of the tokens of a span, which attend to their row up to the end of the span."""
    row, first, end = span
    heads, width = key.shape[0], end - row
    grouped = (query[:, first:end] * call.scale).unflatten(0, (heads, -1)).flatten(1, 2)
    scores = torch.bmm(grouped, key[:, row:end].transpose(1, 2)).float().view(query.shape[0], -1, width)
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    if call.window is not None:
        index = torch.arange(width, device=scores.device)
        scores = scores.masked_fill(index[first - row :, None] - index >= call.window, float("-inf"))
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :width].to(value.dtype)
    output = torch.bmm(weights.view(heads, -1, width), value[:, row:end])
    return output.view(query.shape[0], -1, value.shape[2]).transpose(0, 1)


def prompt_images(model: nn.Module, ids: torch.Tensor, media: Media) -> PromptImages:
    """The images `media` of a prompt with the token ids `ids` (P_i,), as `model` positions them.

    Without token types from the processor all placeholder ids stand for images.
    """
    ids = ids.cpu()
    mask = torch.isin(ids, torch.tensor(placeholder_ids(model)))
    types = media.token_tensors.get("mm_token_type_ids", media.token_tensors.get("token_type_ids"))
    if types is not None and bool(types.any()):
        mask[: len(types)] &= types.cpu()[: len(ids)] != 0
        mask[len(types) :] = False
    rope, shift = None, 0
    rope_owner: Any = next((m for m in model.modules() if hasattr(type(m), "get_rope_index")), None)
    if rope_owner is not None:
        parameters = inspect.signature(rope_owner.get_rope_index).parameters
        tensors = {name: value for name, value in media.tensors.items() if name in parameters}
        if "mm_token_type_ids" in parameters:
            tensors["mm_token_type_ids"] = mask.int()[None]
        rope = rope_owner.get_rope_index(ids[None], **tensors)[0][:, 0].cpu()
        shift = int(rope.max()) + 1 - len(ids)
    return PromptImages(media, mask, rope, shift, _bidirectional_spans(model, media))


def _bidirectional_spans(model: nn.Module, media: Media) -> tuple[tuple[int, int], ...]:
    types = media.token_tensors.get("token_type_ids")
    model_type = str(getattr(getattr(pretrained(model), "config", None), "model_type", ""))
    if types is None or not has_bidirectional_images(model_type):
        return ()
    spans, end = [], 0
    for value, run in groupby(types.tolist()):
        start, end = end, end + len(list(run))
        if value == 1:
            spans.append((start, end))
    return tuple(spans)


def flat_image_inputs(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, spans: Sequence[tuple[TokenSpan, PromptImages]]
) -> ModelInputs:
    """Model inputs for tokens `ids`, flat (T,) or rows (B, T), with the indices `positions` in their rows.

    `spans` are the tokens of rows with images, with the images of the row's prompt. A span counts tokens from
    the first of all rows.
    """
    result = _with_image_tensors(model, ids, spans)
    if any(images.rope is not None for _, images in spans):
        rope = positions.cpu().flatten().repeat(3, 1)
        for span, images in spans:
            rope[:, span.start : span.start + span.length] = images.rope_at(span.position, span.length)
        result.rope = rope.view(3, *ids.shape).to(ids.device)
    for span, images in spans:
        if not span.position:
            result.image_spans += [(span.start, span.start + a, span.start + b) for a, b in images.image_spans]
    return result


def padded_image_inputs(
    model: nn.Module, ids: torch.Tensor, row_images: Sequence[PromptImages | None], starts: Sequence[int] | None = None
) -> ModelInputs:
    """Model inputs for rows of token ids (B, T); row i begins at column `starts[i]` (0) with its prompt."""
    num_rows, width = ids.shape
    starts = starts or [0] * num_rows
    spans = [
        (TokenSpan(i * width + start, width - start), images)
        for i, (start, images) in enumerate(zip(starts, row_images))
        if images is not None
    ]
    positions = (torch.arange(width) - torch.tensor(starts)[:, None]).clamp(min=0)
    result = flat_image_inputs(model, ids, positions, spans)
    for name in {name for _, images in spans for name in images.media.token_tensors} & arguments(model):
        types = torch.zeros(num_rows * width, dtype=torch.int64)
        for span, images in spans:
            if name in images.media.token_tensors:
                prompt_types = images.media.token_tensors[name][: len(images.mask)]
                types[span.start : span.start + len(prompt_types)] = prompt_types
        result.inputs[name] = types.view(ids.shape).to(ids.device)
    return result


def _with_image_tensors(
    model: nn.Module, ids: torch.Tensor, spans: Sequence[tuple[TokenSpan, PromptImages]]
) -> ModelInputs:
    """Input ids and image tensors; the images are in the order in which their prompts begin."""
    media = [images.media for span, images in spans if not span.position]
    if not media:
        # Without images the model does not search its input ids for placeholders.
        return ModelInputs(ids)
    of_image = torch.zeros(ids.numel(), dtype=torch.bool)
    for span, images in spans:
        mask = images.mask[span.position : span.position + span.length]
        of_image[span.start : span.start + len(mask)] = mask
    special = placeholder_ids(model)
    is_placeholder = torch.isin(ids, torch.tensor(special, device=ids.device))
    is_sampled = is_placeholder & ~of_image.view(ids.shape).to(ids.device)
    taken = arguments(model)
    tensors = concat_media_tensors(media)
    inputs = {name: value.to(ids.device, non_blocking=True) for name, value in tensors.items() if name in taken}
    if not bool(is_sampled.any()):
        return ModelInputs(ids, inputs=inputs)
    substitute = next(token for token in range(len(special) + 1) if token not in special)
    return ModelInputs(torch.where(is_sampled, substitute, ids), ids, inputs)


def with_images(model: nn.Module, batch: Batch, inputs: ForwardInputs) -> ForwardInputs:
    """The inputs together with the batch's images."""
    of_prompts = _images_of_prompts(model, batch)
    of_rows = _images_of_rows(model, batch, of_prompts)
    if inputs.attention is None or inputs.positions is None:
        view = padded_image_inputs(model, inputs.ids, of_rows)
        attention = None
    else:
        images = [of_prompts[s.prompt] if s.row is None else of_rows[s.row] for s in inputs.spans]
        spans = [(span, found) for span, found in zip(inputs.spans, images) if found is not None]
        view = flat_image_inputs(model, inputs.ids, inputs.positions, spans)
        attention = view.with_bidirectional_images(inputs.attention)
    positions = inputs.positions if view.rope is None else view.rope
    arguments = {**view.inputs, **inputs.arguments}
    hooks = view.embedding_true_ids
    return replace(inputs, ids=view.ids, arguments=arguments, positions=positions, attention=attention, hooks=hooks)


def _images_of_prompts(model: nn.Module, batch: Batch) -> list[PromptImages | None]:
    """(Q,) images of each distinct prompt as the model gets them."""
    media = batch.media or (None,) * batch.num_prompts
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in batch.prompts()]
    return [None if item is None else prompt_images(model, ids, item) for ids, item in zip(prompts, media)]


def _images_of_rows(model: nn.Module, batch: Batch, of_prompts: list[PromptImages | None]) -> list[PromptImages | None]:
    """(B,) images of each row: its prompt's images, and images that tools returned."""
    images = [of_prompts[prompt] for prompt in batch.prompt_of_row.tolist()]
    for row, media in enumerate(batch.row_media or ()):
        if media is not None:
            prompt = int(batch.prompt_of_row[row])
            prompt_ids = batch.prompt_ids[batch.prompt_offsets[prompt] : batch.prompt_offsets[prompt + 1]]
            ids = torch.cat([prompt_ids, batch.completion_ids[batch.offsets[row] : batch.offsets[row + 1]]])
            num_known = min((len(types) for types in media.token_tensors.values()), default=len(ids))
            images[row] = prompt_images(model, ids[:num_known], media)
    return images


def concat_media_tensors(media: Sequence[Media]) -> dict[str, torch.Tensor]:
    """Image tensors of several prompts concatenated along dimension 0, other dimensions padded with zeros."""
    names = dict.fromkeys(name for item in media for name in item.tensors)
    return {name: _concat_padded([item.tensors[name] for item in media if name in item.tensors]) for name in names}


def _concat_padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    sizes = [max(tensor.shape[d] for tensor in tensors) for d in range(1, tensors[0].dim())]
    padded = []
    for tensor in tensors:
        padding = [n for d in range(tensor.dim() - 1, 0, -1) for n in (0, sizes[d - 1] - tensor.shape[d])]
        padded.append(nn.functional.pad(tensor, padding) if any(padding) else tensor)
    return torch.cat(padded)
