"""How a model that sees is given the images of a batch, whatever the layout of its tokens.

The model's own forward pass embeds the images and puts them at their placeholders. What is made here is what it is
given for that: the tensors of all prompts' images in the order in which the prompts lie, positions where these depend
on the images, and which tokens see each other in both directions.

A placeholder is an image's only where a prompt has it: a policy may sample any id. The model looks for placeholders in
its input ids, so all others are hidden from it there and put back where ids are embedded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn

from groupgrad.modeling.families import IMAGE_TOKEN_FIELDS, VIDEO_TOKEN_FIELDS, has_bidirectional_images
from groupgrad.modeling.scoring.attention import AttentionCall, AttentionPlan, arguments, pretrained
from groupgrad.types import Media


@dataclass(slots=True, frozen=True, eq=False)
class PromptImages:
    """How a model sees the images of one prompt."""

    media: Media
    num_tokens: int
    """P_i, of the prompt; images lie nowhere else."""
    places: torch.Tensor
    """(P_i,) bool, True for placeholders; on the CPU."""
    rope: torch.Tensor | None = None
    """(3, P_i) int64, the prompt's rotary positions where they depend on its images; on the CPU."""
    shift: int = 0
    """What is added to the places of tokens behind the prompt to get their positions."""
    spans: tuple[tuple[int, int], ...] = ()
    """(first, end) places of images whose tokens see each other in both directions."""

    def rope_at(self, first: int, length: int) -> torch.Tensor:
        """(3, length) positions of the tokens from place `first` on, behind the prompt too."""
        behind = torch.arange(max(first, self.num_tokens), first + length).expand(3, -1) + self.shift
        if self.rope is None:
            return torch.cat([torch.arange(first, min(first + length, self.num_tokens)).expand(3, -1), behind], dim=1)
        return torch.cat([self.rope[:, first : first + length], behind], dim=1)


@dataclass(slots=True, frozen=True)
class ImageSegment:
    """Consecutive tokens of a row, or of a prompt, in the input of a model."""

    start: int
    """Where the first of them lies in the flattened input."""
    length: int
    first: int
    """Its place in the row, the prompt counted."""
    prompt_images: PromptImages | None
    """Of the row's prompt; None if it has no image."""


@dataclass(slots=True)
class ModelInputs:
    """What a model is given to see the images of an input."""

    ids: torch.Tensor
    """Input ids without placeholders that are no image's, in the shape of the input."""
    true_ids: torch.Tensor
    """As they are."""
    hidden: torch.Tensor | None
    """bool, where `ids` is not `true_ids`; None if nowhere."""
    inputs: dict[str, torch.Tensor]
    """Further arguments of the model."""
    rope: torch.Tensor | None
    """(3, *shape) positions; None where they are the tokens' places in their rows."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, first, end) flat places: of the row's first token, and of tokens that see each other in both directions."""

    def attention_plan(self, plan: AttentionPlan) -> AttentionPlan:
        """The attention plan in which images see themselves as the model asks."""
        return BidirectionalImagePlan(plan, self.spans) if self.spans else plan

    @contextmanager
    def embedding_true_ids(self, model: nn.Module) -> Iterator[None]:
        """The true ids reach the model's input embedding inside."""
        if self.hidden is None:
            yield
            return
        true_ids, hidden = self.true_ids, self.hidden

        def embed(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            ids = inputs[0]
            if ids.numel() != true_ids.numel():
                return None
            true, where = (tensor.view(ids.shape).to(ids.device) for tensor in (true_ids, hidden))
            return (torch.where(where, true, ids), *inputs[1:])

        handle = _embedding(model).register_forward_pre_hook(torch.compiler.disable(embed))  # pyright: ignore
        try:
            yield
        finally:
            handle.remove()


class BidirectionalImagePlan:
    """An attention plan in which the tokens of an image see each other in both directions."""

    def __init__(self, plan: AttentionPlan, spans: Sequence[tuple[int, int, int]]):
        self._plan, self._spans = plan, spans
        self._places = torch.cat([torch.arange(first, end) for _, first, end in spans])

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        output = self._plan.attend(query, key, value, call)
        seen = [_two_way(query, key, value, span, call).to(output.dtype) for span in self._spans]
        # Layers of a spread model may lie on several devices.
        self._places = self._places.to(output.device)
        return output.index_copy(0, self._places, torch.cat(seen))


def _two_way(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: tuple[int, int, int], call: AttentionCall
) -> torch.Tensor:
    """(n, Hq, D) outputs of the tokens of a span, which see their row up to the span's end."""
    row, first, end = span
    heads, width = key.shape[0], end - row
    grouped = (query[:, first:end] * call.scale).unflatten(0, (heads, -1)).flatten(1, 2)
    scores = torch.bmm(grouped, key[:, row:end].transpose(1, 2)).float().view(query.shape[0], -1, width)
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    if call.window is not None:
        place = torch.arange(width, device=scores.device)
        scores = scores.masked_fill(place[first - row :, None] - place >= call.window, float("-inf"))
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :width].to(value.dtype)
    mixed = torch.bmm(weights.view(heads, -1, width), value[:, row:end])
    return mixed.view(query.shape[0], -1, value.shape[2]).transpose(0, 1)


def is_multimodal(model: nn.Module) -> bool:
    """True if the model takes images beside its token ids."""
    return "pixel_values" in arguments(model) and bool(placeholder_ids(model))


def placeholder_ids(model: nn.Module) -> tuple[int, ...]:
    """The token ids for which the model looks in its input ids; empty for a model that does not see."""
    config = getattr(pretrained(model), "config", None)
    found = [getattr(config, name, None) for name in IMAGE_TOKEN_FIELDS + VIDEO_TOKEN_FIELDS]
    return tuple(sorted({int(value) for value in found if value is not None}))


def prompt_images(model: nn.Module, ids: torch.Tensor, media: Media) -> PromptImages:
    """How `model` sees a prompt of the token ids `ids` (P_i,)."""
    ids = ids.cpu()
    places = image_token_mask(model, ids, media)
    rope, shift = None, 0
    owner: Any = next((m for m in model.modules() if hasattr(type(m), "get_rope_index")), None)
    if owner is not None:
        asked = inspect.signature(owner.get_rope_index).parameters
        given = {name: value for name, value in media.tensors.items() if name in asked}
        if "mm_token_type_ids" in asked:
            given["mm_token_type_ids"] = places.int()[None]
        rope = owner.get_rope_index(ids[None], **given)[0][:, 0].cpu()
        shift = int(rope.max()) + 1 - len(ids)
    return PromptImages(media, len(ids), places, rope, shift, _spans(model, media))


def image_token_mask(model: nn.Module, ids: torch.Tensor, media: Media) -> torch.Tensor:
    """(T,) bool: which of the token ids `ids` (T,) are placeholders of images, of a prompt with tokens behind it.

    Where the processor says nothing of tokens, all placeholders are.
    """
    ids = ids.cpu()
    places = torch.isin(ids, torch.tensor(placeholder_ids(model)))
    types = media.token_tensors.get("mm_token_type_ids", media.token_tensors.get("token_type_ids"))
    if types is not None and bool(types.any()):
        places[: len(types)] &= types.cpu()[: len(ids)] != 0
        places[len(types) :] = False
    return places


def _spans(model: nn.Module, media: Media) -> tuple[tuple[int, int], ...]:
    types = media.token_tensors.get("token_type_ids")
    kind = str(getattr(getattr(pretrained(model), "config", None), "model_type", ""))
    if types is None or not has_bidirectional_images(kind):
        return ()
    spans, end = [], 0
    for value, run in groupby(types.tolist()):
        start, end = end, end + len(list(run))
        if value == 1:
            spans.append((start, end))
    return tuple(spans)


def flat_inputs(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, laid: Sequence[ImageSegment]
) -> ModelInputs:
    """What `model` is given for the flat tokens `ids` (T,) at the places `positions` (T,) of their rows.

    `laid` has at least those tokens whose rows have images.
    """
    if not any(part.prompt_images for part in laid):
        return ModelInputs(ids, ids, None, {}, None)
    view = _view(model, ids, laid)
    if any(part.prompt_images is not None and part.prompt_images.rope is not None for part in laid):
        rope = positions.cpu().repeat(3, 1)
        for part in laid:
            if part.prompt_images is not None:
                rope[:, part.start : part.start + part.length] = part.prompt_images.rope_at(part.first, part.length)
        view.rope = rope.to(ids.device)
    for part in laid:
        if part.prompt_images is not None and not part.first:
            view.spans += [(part.start, part.start + a, part.start + b) for a, b in part.prompt_images.spans]
    return view


def padded_inputs(
    model: nn.Module, ids: torch.Tensor, sights: Sequence[PromptImages | None], starts: Sequence[int] | None = None
) -> ModelInputs:
    """What `model` is given for rows of token ids (B, T): from place `starts[i]` (0) on a prompt and more behind it."""
    if not any(sights):
        return ModelInputs(ids, ids, None, {}, None)
    num_rows, width = ids.shape
    starts = starts or [0] * num_rows
    laid = [ImageSegment(i * width + starts[i], width - starts[i], 0, seen) for i, seen in enumerate(sights)]
    view = _view(model, ids, laid)
    present = [seen for seen in sights if seen is not None]
    if any(seen.rope is not None for seen in present):
        rope = torch.zeros(3, num_rows, width, dtype=torch.int64)
        for i, (start, seen) in enumerate(zip(starts, sights)):
            places = torch.arange(width - start).expand(3, -1)
            rope[:, i, start:] = places if seen is None else seen.rope_at(0, width - start)
        view.rope = rope.to(ids.device)
    names = {name for seen in present for name in seen.media.token_tensors} & arguments(model)
    for name in names:
        types = torch.zeros(num_rows, width, dtype=torch.int64)
        for i, (start, seen) in enumerate(zip(starts, sights)):
            if seen is not None and name in seen.media.token_tensors:
                own = seen.media.token_tensors[name][: seen.num_tokens]
                types[i, start : start + len(own)] = own
        view.inputs[name] = types.to(ids.device)
    return view


def _view(model: nn.Module, ids: torch.Tensor, laid: Sequence[ImageSegment]) -> ModelInputs:
    """Ids and images; each prompt's images in the order in which the prompts begin."""
    images = [part.prompt_images.media for part in laid if part.prompt_images is not None and not part.first]
    if not images:
        # Without images the model does not look at its input ids.
        return ModelInputs(ids, ids, None, {}, None)
    flat = torch.zeros(ids.numel(), dtype=torch.bool)
    for part in laid:
        if part.prompt_images is not None and part.first < part.prompt_images.num_tokens:
            shown = part.prompt_images.places[part.first : part.first + part.length]
            flat[part.start : part.start + len(shown)] = shown
    special = torch.tensor(placeholder_ids(model), device=ids.device)
    hidden = torch.isin(ids, special) & ~flat.view(ids.shape).to(ids.device)
    inputs = {
        name: value.to(ids.device, non_blocking=True)
        for name, value in concat_media_tensors(images).items()
        if name in arguments(model)
    }
    if not bool(hidden.any()):
        return ModelInputs(ids, ids, None, inputs, None)
    plain = next(i for i in range(len(special) + 1) if i not in special.tolist())
    return ModelInputs(torch.where(hidden, plain, ids), ids, hidden, inputs, None)


def concat_media_tensors(media: Sequence[Media]) -> dict[str, torch.Tensor]:
    """The tensors of several prompts' images one after another, filled with zeros where their shapes differ."""
    names = dict.fromkeys(name for item in media for name in item.tensors)
    return {name: _joined([item.tensors[name] for item in media if name in item.tensors]) for name in names}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].dim())]
    filled = []
    for part in parts:
        padding = [n for d in range(part.dim() - 1, 0, -1) for n in (0, sizes[d - 1] - part.shape[d])]
        filled.append(nn.functional.pad(part, padding) if any(padding) else part)
    return torch.cat(filled)


def _embedding(model: nn.Module) -> nn.Module:
    inner = pretrained(model)
    assert inner is not None
    return inner.get_input_embeddings()
