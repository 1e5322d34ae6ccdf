"""Attention plans of sampling: prefill of prompts and suffixes, and decode of one token per row.

Decode reads the keys of a prompt once for all rows of its group, in one matrix product per group and head, and the keys
of suffixes in a second one. One softmax normalises the scores of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from groupgrad.engines.native.kv_cache import KVCache, KVSlab, LayerShape
from groupgrad.kernels.attend import OFFSET, Span, Stored, attend
from groupgrad.modeling.scoring.attention import AttentionCall
from groupgrad.modeling.scoring.block_attention import kernel_for

QUERY_TILE = 256
"""Queries whose scores are computed at a time where torch's attention kernel does not apply."""


class ProbePlan:
    """Records the attention calls of a model's layers, and the shapes of their keys and values, for one token."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(1, Hq, D) outputs: a single token attends to its own value alone."""
        self.calls[call.layer] = call
        self.layers[call.layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2], key.dtype, key.device)
        return value.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(0, 1)


@dataclass(slots=True, frozen=True)
class Place:
    """Slot in which a run of tokens is stored, and the stored tokens that precede it."""

    slab: KVSlab
    slot: int
    prefix_slot: int = 0
    prefix_length: int = 0
    """Tokens of the prompt in `prefix_slot` that precede the slot's own; 0: the slot holds the beginning."""
    offset: int = 0
    """Tokens of the slot that are stored already and precede the run."""


@dataclass(slots=True, frozen=True)
class Segment:
    """A run of consecutive flat tokens of one prompt or suffix."""

    start: int
    length: int
    place: Place


class PrefillPlan:
    """Stores the keys and values of runs of tokens.

    A run attends to its prompt, to the tokens that its slot holds already, and causally to itself.
    """

    def __init__(self, segments: Sequence[Segment], cache: KVCache):
        self._segments, self._prompts = segments, cache.prompts

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        for segment in self._segments:
            span = slice(segment.start, segment.start + segment.length)
            place, end = segment.place, segment.place.offset + segment.length
            place.slab.keys[call.layer][place.slot, :, place.offset : end] = key[:, span]
            place.slab.values[call.layer][place.slot, :, place.offset : end] = value[:, span]
        kernels = kernel_for(query, key, value)
        if kernels is not None and self._prompts.keys[call.layer].dtype == torch.float32:
            spans = torch.tensor([self._span(segment, call.layer).record() for segment in self._segments])
            return attend(kernels, query, spans, len(key), call)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for segment in self._segments:
            span = slice(segment.start, segment.start + segment.length)
            keys, values, place = key[:, span], value[:, span], segment.place
            before = self._before(place)
            if before:
                stored = [slab.keys[call.layer][at].to(keys.dtype) for slab, at in before]
                keys = torch.cat([*stored, keys], dim=1)
                stored = [slab.values[call.layer][at].to(values.dtype) for slab, at in before]
                values = torch.cat([*stored, values], dim=1)
            output[span] = causal_attention(query[:, span], keys, values, call).transpose(0, 1)
        return output

    def _span(self, segment: Segment, layer: int) -> Span:
        place, prompts = segment.place, self._prompts
        own = Stored(place.slab.keys[layer][place.slot], place.slab.values[layer][place.slot])
        prompt = Stored(prompts.keys[layer][place.prefix_slot], prompts.values[layer][place.prefix_slot])
        return Span(
            segment.start,
            segment.length,
            own,
            place.offset,
            prompt if place.prefix_length else None,
            place.prefix_length,
        )

    def _before(self, place: Place) -> list[tuple[KVSlab, tuple[int, slice, slice]]]:
        """Slabs and indices of the stored tokens before a run, in order."""
        parts = [(self._prompts, place.prefix_slot, place.prefix_length), (place.slab, place.slot, place.offset)]
        return [(slab, (slot, slice(None), slice(0, length))) for slab, slot, length in parts if length]


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """(Hq, T, D) outputs of the last T of S tokens, from query (Hq, T, D), key and value (Hkv, S, D)."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    is_plain = call.softcap is None and call.sinks is None and (call.window is None or call.window >= num_keys)
    if is_plain and num_queries == num_keys:
        grouped = query.shape[0] != key.shape[0]
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=call.scale, enable_gqa=grouped
        )[0]
    output = query.new_empty(query.shape[0], num_queries, value.shape[2])
    for start in range(0, num_queries, QUERY_TILE):
        tile = query[:, start : start + QUERY_TILE]
        first = num_keys - num_queries + start
        end = first + tile.shape[1]
        place = torch.arange(end, device=query.device)
        distance = torch.arange(first, end, device=query.device)[:, None] - place
        hidden = distance < 0
        if call.window is not None:
            hidden = hidden | (distance >= call.window)
        grouped = tile.unflatten(0, (key.shape[0], -1)).flatten(1, 2)  # (Hkv, rep * tile, D)
        scores = products(grouped, key[:, :end], call.scale).view(query.shape[0], tile.shape[1], end)
        scores = finish_scores(scores, call).masked_fill(hidden, float("-inf"))
        weights = softmax_with_sinks(scores, call.sinks, value.dtype).view(key.shape[0], -1, end)
        mixed = torch.bmm(weights, value[:, :end])
        output[:, start : start + QUERY_TILE] = mixed.view(query.shape[0], -1, value.shape[2])
    return output


def products(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """(B, T, S) float32 products of query (B, T, D) and key (B, S, D), times `scale`."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        # Training's kernels keep scores in float32; bfloat16 would round a score between 8 and 16 by up to 0.03.
        if "dtype" in torch.ops.aten.bmm.overloads():
            return torch.bmm(query, key.transpose(1, 2), out_dtype=torch.float32).mul_(scale)
        return torch.bmm(query.float(), key.float().transpose(1, 2)).mul_(scale)
    return torch.bmm(query * scale, key.transpose(1, 2)).float()


def finish_scores(scores: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Applies the layer's soft cap to float32 scores, in place."""
    return scores if call.softcap is None else scores.div_(call.softcap).tanh_().mul_(call.softcap)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Softmax over the keys of float32 scores (Hq, T, S); sinks (Hq,) add a logit whose weight is discarded."""
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].to(dtype)


@dataclass(slots=True, frozen=True)
class DecodeBatch:
    """Slots and lengths of the n rows of a decode step, as lists of n."""

    groups: list[int]
    """Slots of their prompts."""
    prompt_lengths: list[int]
    lengths: list[int]
    """Suffix tokens stored before the step."""

    @property
    def rows_per_group(self) -> int:
        """Rows of the largest group."""
        return max(Counter(self.groups).values())


@dataclass(slots=True, frozen=True)
class StepShape:
    """Fixed sizes of a recorded step. Results beyond the actual rows are computed and ignored."""

    num_rows: int
    num_groups: int
    rows_per_group: int
    prompt_size: int
    """Tokens of a prompt slot."""
    suffix_size: int


@dataclass(slots=True)
class _GroupOrder:
    """Permutations between row-major (row, head) pairs and group-major (group, head, row) places."""

    to_groups: torch.Tensor
    """(groups * Hkv * R,) the row-major pair of each group-major place; pair 0 for padding."""
    to_rows: torch.Tensor
    """(n * Hkv,) the group-major place of each row-major pair; place 0 for padding."""


@dataclass(slots=True)
class _Masks:
    """Masks of keys, True for hidden ones; None if no key is hidden."""

    prompt: torch.Tensor | None
    """(n * Hkv, 1, P)."""
    suffix: torch.Tensor | None
    """(n * Hkv, 1, T)."""


class DecodePlan:
    """Attention of one new token for each of n rows, which have the first n suffix slots of the cache.

    A plan serves one set of rows; `advance` moves it to the next step. With a `shape` sizes are fixed and the plan's
    tensors keep their memory, so that the operations of a step can be recorded; `change` then replaces the rows.
    """

    def __init__(self, cache: KVCache, batch: DecodeBatch, shape: StepShape | None = None):
        self._cache, self._batch, self._shape = cache, batch, shape
        self._orders: dict[tuple[int, torch.device], _GroupOrder] = {}
        self._masks: dict[tuple[int | None, int, torch.device], _Masks] = {}
        self._row_tensors: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._spans: torch.Tensor | None = None
        longest, prompt = max(batch.lengths), max(batch.prompt_lengths)
        self._num_steps = 0
        self._is_even = shape is None and min(batch.lengths) == longest
        self._prompts_are_even = shape is None and min(batch.prompt_lengths) == prompt
        self._num_rows = shape.num_rows if shape else len(batch.groups)
        self._num_groups = shape.num_groups if shape else max(batch.groups) + 1
        self._rows_per_group = shape.rows_per_group if shape else batch.rows_per_group
        self._num_prompt = shape.prompt_size if shape else prompt
        self._num_suffix = shape.suffix_size if shape else longest + 1

    def advance(self, num_tokens: int = 1) -> None:
        """Moves on to the step after `num_tokens` more tokens of each row."""
        self._num_steps += num_tokens
        if self._shape is None:
            self._num_suffix += num_tokens
        for (name, _), tensor in self._row_tensors.items():
            if name == "lengths":
                tensor.add_(num_tokens)
        if self._spans is not None:
            self._spans[:, OFFSET] += num_tokens
        # Masks of prompts stay valid unless a window moves over them.
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] is None and masks.suffix is None}

    def change(self, batch: DecodeBatch) -> None:
        """Replaces the rows by others that the shape covers, in the same tensors."""
        self._batch, self._num_steps = batch, 0
        for (name, _), tensor in self._row_tensors.items():
            tensor.copy_(self._row_numbers(name))
        for (heads, _), order in self._orders.items():
            new = self._make_order(heads)
            order.to_groups.copy_(new.to_groups)
            order.to_rows.copy_(new.to_rows)

    def drop_masks(self) -> None:
        """Lets the next step compute its masks itself."""
        self._masks = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(n, Hq, D) outputs from query (Hq, n, D), key and value (Hkv, n, D)."""
        cache, rows, heads = self._cache, self._num_rows, key.shape[0]
        pairs, num_prompt = self._num_groups * heads, self._num_prompt
        suffixes, prompts = cache.suffixes, cache.prompts
        own_keys, own_values = suffixes.keys[call.layer][:rows], suffixes.values[call.layer][:rows]
        self._write(own_keys, own_values, key, value)
        kernels = None if self._shape is not None or own_keys.dtype != torch.float32 else kernel_for(query, key, value)
        if kernels is not None:
            return attend(kernels, query, self._spans_of(call.layer), heads, call)
        own_keys = own_keys.flatten(0, 1)[:, : self._num_suffix]
        own_values = own_values.flatten(0, 1)[:, : self._num_suffix]
        prompt_keys = prompts.keys[call.layer].flatten(0, 1)[:pairs, :num_prompt]
        prompt_values = prompts.values[call.layer].flatten(0, 1)[:pairs, :num_prompt]
        order = self._order_on(heads, query.device)
        queries = query.transpose(0, 1).reshape(rows * heads, -1, query.shape[2]).to(own_keys.dtype)
        grouped = queries.index_select(0, order.to_groups).view(pairs, -1, query.shape[2])
        scores = products(grouped, prompt_keys, call.scale).view(len(order.to_groups), -1, num_prompt)
        own_scores = products(queries, own_keys, call.scale)
        scores = torch.cat([scores.index_select(0, order.to_rows), own_scores], dim=-1)
        weights = self._weights(scores, call, heads).to(own_values.dtype)
        grouped = weights[..., :num_prompt].index_select(0, order.to_groups).view(pairs, -1, num_prompt)
        mixed = torch.bmm(grouped, prompt_values).view(len(order.to_groups), -1, own_values.shape[2])
        own_weights = weights[..., num_prompt : num_prompt + self._num_suffix]
        mixed = torch.baddbmm(mixed.index_select(0, order.to_rows), own_weights, own_values)
        return mixed.view(rows, -1, own_values.shape[2]).to(query.dtype)

    def _spans_of(self, layer: int) -> torch.Tensor:
        """(n, 10) the rows' records for the kernels, a span of one token each (see `kernels.attend.Span`)."""
        suffixes, prompts, batch = self._cache.suffixes, self._cache.prompts, self._batch
        if self._spans is None:
            # Rows of a group are adjacent, so that their prompt is read once for all of them.
            rows = torch.tensor(sorted(range(len(batch.groups)), key=batch.groups.__getitem__))
            groups, one = torch.tensor(batch.groups)[rows], torch.ones_like(rows)
            lengths, prompt_lengths = (torch.tensor(x)[rows] for x in (batch.lengths, batch.prompt_lengths))
            counts = (rows, one, lengths + self._num_steps, prompt_lengths)
            self._spans = torch.stack([*counts, one, one, groups, groups, rows, rows], dim=1)
        tensors = (prompts.keys[layer], prompts.values[layer], suffixes.keys[layer], suffixes.values[layer])
        strides = [1, 1, 1, 1, tensors[0].stride(1), tensors[2].stride(1), *(4 * x.stride(0) for x in tensors)]
        return self._spans * torch.tensor(strides) + torch.tensor([0] * 6 + [x.data_ptr() for x in tensors])

    def _weights(self, scores: torch.Tensor, call: AttentionCall, heads: int) -> torch.Tensor:
        scores = finish_scores(scores, call)
        masks = self._masks_for(call.window, heads, scores.device)
        if masks.prompt is not None:
            scores[..., : self._num_prompt].masked_fill_(masks.prompt, float("-inf"))
        if masks.suffix is not None:
            scores[..., self._num_prompt :].masked_fill_(masks.suffix, float("-inf"))
        if call.sinks is None:
            return torch.softmax(scores, dim=-1)
        column = call.sinks.float().view(1, heads, -1, 1).expand(self._num_rows, -1, -1, 1).flatten(0, 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._is_even:
            keys[:, :, self._num_suffix - 1] = key.transpose(0, 1)
            values[:, :, self._num_suffix - 1] = value.transpose(0, 1)
            return
        at = (self._row_tensor("rows", keys.device), slice(None), self._row_tensor("lengths", keys.device))
        keys[at] = key.transpose(0, 1).to(keys.dtype)
        values[at] = value.transpose(0, 1).to(values.dtype)

    def _row_tensor(self, name: Literal["rows", "lengths", "prompt_lengths"], device: torch.device) -> torch.Tensor:
        """(n,) row numbers, suffix tokens stored before this step, or prompt lengths."""
        if (name, device) not in self._row_tensors:
            self._row_tensors[name, device] = self._row_numbers(name).to(device)
        return self._row_tensors[name, device]

    def _row_numbers(self, name: str) -> torch.Tensor:
        if name == "rows":
            return torch.arange(self._num_rows)
        numbers = torch.zeros(self._num_rows, dtype=torch.int64)
        source = self._batch.lengths if name == "lengths" else self._batch.prompt_lengths
        numbers[: len(source)] = torch.tensor(source)
        return numbers + self._num_steps if name == "lengths" else numbers

    def _order_on(self, heads: int, device: torch.device) -> _GroupOrder:
        """The order for all layers with this many key heads."""
        if (heads, device) not in self._orders:
            order = self._make_order(heads)
            self._orders[heads, device] = _GroupOrder(order.to_groups.to(device), order.to_rows.to(device))
        return self._orders[heads, device]

    def _make_order(self, heads: int) -> _GroupOrder:
        num_taken = [0] * self._num_groups
        places = []
        for group in self._batch.groups:
            places.append(num_taken[group])
            num_taken[group] += 1
        group, place = torch.tensor(self._batch.groups)[:, None], torch.tensor(places)[:, None]
        pairs = ((group * heads + torch.arange(heads)) * self._rows_per_group + place).flatten()
        to_rows = torch.zeros(self._num_rows * heads, dtype=torch.int64)
        to_rows[: len(pairs)] = pairs
        to_groups = torch.zeros(self._num_groups * heads * self._rows_per_group, dtype=torch.int64)
        to_groups[pairs] = torch.arange(len(pairs))
        return _GroupOrder(to_groups, to_rows)

    def _masks_for(self, window: int | None, heads: int, device: torch.device) -> _Masks:
        """The masks for all layers of a step with the same window."""
        if window is not None and self._num_prompt + self._num_suffix <= window:
            window = None
        if (window, heads, device) not in self._masks:
            self._masks[window, heads, device] = self._make_masks(window, heads, device)
        return self._masks[window, heads, device]

    def _make_masks(self, window: int | None, heads: int, device: torch.device) -> _Masks:
        prompt = suffix = None
        if not self._prompts_are_even or window is not None:
            lengths = self._row_tensor("prompt_lengths", device)[:, None]
            place = torch.arange(self._num_prompt, device=device)
            prompt = place >= lengths
            if window is not None:
                prompt = prompt | (lengths + self._row_tensor("lengths", device)[:, None] - place >= window)
        if not self._is_even or window is not None:
            newest = self._row_tensor("lengths", device)[:, None]
            place = torch.arange(self._num_suffix, device=device)
            suffix = place > newest
            if window is not None:
                suffix = suffix | (newest - place >= window)
        return _Masks(_by_head(prompt, heads), _by_head(suffix, heads))


def _by_head(mask: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Repeats a mask (n, S) for each head, as (n * Hkv, 1, S)."""
    return None if mask is None else mask.repeat_interleave(heads, dim=0)[:, None]
