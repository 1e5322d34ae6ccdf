"""The attention plans of sampling: prompts and resumed rows as a whole, and one token for each row.

Keys of a prompt are read once for all rows that continue it, in one matrix product for each group and head; the rows'
own keys are read in a second product, and one softmax goes over the scores of both.
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
"""Queries whose scores are computed at a time where the library's kernel does not fit."""


class ProbePlan:
    """Notes what each layer would keep of a token."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """A token alone sees its own value, whatever the scores."""
        self.calls[call.layer] = call
        self.layers[call.layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2], key.dtype, key.device)
        return value.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(0, 1)


@dataclass(slots=True, frozen=True)
class Place:
    """Where the keys and values of a sequence go, and what comes before it."""

    slab: KVSlab
    slot: int
    prefix_slot: int = 0
    prefix_length: int = 0
    """Tokens of the prompt store's `prefix_slot` that come before the slot's own; 0: they are the beginning."""
    offset: int = 0
    """Tokens of the slot that are stored already and come before the sequence."""


@dataclass(slots=True, frozen=True)
class Segment:
    """Consecutive flat tokens of one sequence."""

    start: int
    length: int
    place: Place


class PrefillPlan:
    """Stores the keys and values of sequences as a whole.

    Each attends to its prompt, to the tokens that its slot holds already, and causally to itself.
    """

    def __init__(self, segments: Sequence[Segment], store: KVCache):
        self._segments, self._prompts = segments, store.prompts

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
        """Where the tokens before a sequence lie, in order."""
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
        # Rounded to bfloat16, a score between 8 and 16 would be off by up to 0.03, which training's kernels don't do.
        if "dtype" in torch.ops.aten.bmm.overloads():
            return torch.bmm(query, key.transpose(1, 2), out_dtype=torch.float32).mul_(scale)
        return torch.bmm(query.float(), key.float().transpose(1, 2)).mul_(scale)
    return torch.bmm(query * scale, key.transpose(1, 2)).float()


def finish_scores(scores: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The float32 scores, capped as the layer asks; in place."""
    return scores if call.softcap is None else scores.div_(call.softcap).tanh_().mul_(call.softcap)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Weights over the keys from float32 scores (Hq, T, S); sinks (Hq,) take a share that goes nowhere."""
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].to(dtype)


@dataclass(slots=True, frozen=True)
class DecodeBatch:
    """Where the n rows of a decode step stand, each a list of n."""

    groups: list[int]
    """Slots of their prompts."""
    prompt_lengths: list[int]
    lengths: list[int]
    """Own tokens stored before the step."""

    @property
    def rows_of_group(self) -> int:
        """Of the group with the most rows."""
        return max(Counter(self.groups).values())


@dataclass(slots=True, frozen=True)
class StepShape:
    """Sizes that a step keeps whatever the rows are. What is beyond the rows is computed and never looked at."""

    rows: int
    groups: int
    rows_of_group: int
    prompt_places: int
    own_places: int


@dataclass(slots=True)
class _Places:
    """Where rows and heads stand among the groups, for the row-major and the group-major order of (row, head) pairs."""

    of_group: torch.Tensor
    """(groups * Hkv * R,) which row-major pair each group-major place holds; pair 0 where there is none."""
    of_row: torch.Tensor
    """(n * Hkv,) the group-major place of each row-major pair; place 0 for rows that are none."""


@dataclass(slots=True)
class _Masks:
    """True: hidden. None: everything is seen."""

    prompt: torch.Tensor | None
    """(n * Hkv, 1, P)."""
    own: torch.Tensor | None
    """(n * Hkv, 1, T)."""


class DecodePlan:
    """One new token for each of n rows, over a store whose first n own slots are theirs.

    Made anew when the rows change; `advance` between steps. With a `shape` all sizes are fixed and every tensor made
    here stays where it is, so that the operations of a step can be recorded and repeated; `change` then tells of other
    rows.
    """

    def __init__(self, store: KVCache, standing: DecodeBatch, shape: StepShape | None = None):
        self._store, self._standing, self._shape = store, standing, shape
        self._places: dict[tuple[int, torch.device], _Places] = {}
        self._masks: dict[tuple[int | None, int, torch.device], _Masks] = {}
        self._row_tensors: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._spans: torch.Tensor | None = None
        longest, prompt = max(standing.lengths), max(standing.prompt_lengths)
        self._num_steps = 0
        self._is_even = shape is None and min(standing.lengths) == longest
        self._prompts_are_even = shape is None and min(standing.prompt_lengths) == prompt
        self._num_rows = shape.rows if shape else len(standing.groups)
        self._num_groups = shape.groups if shape else max(standing.groups) + 1
        self._rows_of_group = shape.rows_of_group if shape else standing.rows_of_group
        self._num_prompt = shape.prompt_places if shape else prompt
        self._num_own = shape.own_places if shape else longest + 1

    def advance(self, num_tokens: int = 1) -> None:
        """The rows have so many more tokens each."""
        self._num_steps += num_tokens
        if self._shape is None:
            self._num_own += num_tokens
        for (name, _), tensor in self._row_tensors.items():
            if name == "lengths":
                tensor.add_(num_tokens)
        if self._spans is not None:
            self._spans[:, OFFSET] += num_tokens
        # Masks of prompts outlive a step unless a window moves over them.
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] is None and masks.own is None}

    def change(self, standing: DecodeBatch) -> None:
        """Other rows, of sizes that the shape covers; tensors are overwritten where they lie."""
        self._standing, self._num_steps = standing, 0
        for (name, _), tensor in self._row_tensors.items():
            tensor.copy_(self._row_numbers(name))
        for (heads, _), places in self._places.items():
            new = self._make_places(heads)
            places.of_group.copy_(new.of_group)
            places.of_row.copy_(new.of_row)

    def forget_masks(self) -> None:
        """The next step makes its masks itself."""
        self._masks = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(n, Hq, D) outputs from query (Hq, n, D), key and value (Hkv, n, D)."""
        store, rows, heads = self._store, self._num_rows, key.shape[0]
        pairs, num_prompt = self._num_groups * heads, self._num_prompt
        own_keys, own_values = store.own.keys[call.layer][:rows], store.own.values[call.layer][:rows]
        self._write(own_keys, own_values, key, value)
        kernels = None if self._shape is not None or own_keys.dtype != torch.float32 else kernel_for(query, key, value)
        if kernels is not None:
            return attend(kernels, query, self._spans_of(call.layer), heads, call)
        own_keys = own_keys.flatten(0, 1)[:, : self._num_own]
        own_values = own_values.flatten(0, 1)[:, : self._num_own]
        prompt_keys = store.prompts.keys[call.layer].flatten(0, 1)[:pairs, :num_prompt]
        prompt_values = store.prompts.values[call.layer].flatten(0, 1)[:pairs, :num_prompt]
        places = self._places_on(heads, query.device)
        queries = query.transpose(0, 1).reshape(rows * heads, -1, query.shape[2]).to(own_keys.dtype)
        grouped = queries.index_select(0, places.of_group).view(pairs, -1, query.shape[2])
        scores = products(grouped, prompt_keys, call.scale).view(len(places.of_group), -1, num_prompt)
        own_scores = products(queries, own_keys, call.scale)
        scores = torch.cat([scores.index_select(0, places.of_row), own_scores], dim=-1)
        weights = self._weights(scores, call, heads).to(own_values.dtype)
        grouped = weights[..., :num_prompt].index_select(0, places.of_group).view(pairs, -1, num_prompt)
        mixed = torch.bmm(grouped, prompt_values).view(len(places.of_group), -1, own_values.shape[2])
        own_weights = weights[..., num_prompt : num_prompt + self._num_own]
        mixed = torch.baddbmm(mixed.index_select(0, places.of_row), own_weights, own_values)
        return mixed.view(rows, -1, own_values.shape[2]).to(query.dtype)

    def _spans_of(self, layer: int) -> torch.Tensor:
        """(n, 10) the rows' records for the kernels, a span of one token each (see `kernels.attend.Span`)."""
        own, prompts, standing = self._store.own, self._store.prompts, self._standing
        if self._spans is None:
            # Rows of a group one after the other: their prompt is then read once for all.
            rows = torch.tensor(sorted(range(len(standing.groups)), key=standing.groups.__getitem__))
            groups, one = torch.tensor(standing.groups)[rows], torch.ones_like(rows)
            lengths, prompt_lengths = (torch.tensor(x)[rows] for x in (standing.lengths, standing.prompt_lengths))
            counts = (rows, one, lengths + self._num_steps, prompt_lengths)
            self._spans = torch.stack([*counts, one, one, groups, groups, rows, rows], dim=1)
        tensors = (prompts.keys[layer], prompts.values[layer], own.keys[layer], own.values[layer])
        strides = [1, 1, 1, 1, tensors[0].stride(1), tensors[2].stride(1), *(4 * x.stride(0) for x in tensors)]
        return self._spans * torch.tensor(strides) + torch.tensor([0] * 6 + [x.data_ptr() for x in tensors])

    def _weights(self, scores: torch.Tensor, call: AttentionCall, heads: int) -> torch.Tensor:
        scores = finish_scores(scores, call)
        masks = self._masks_for(call.window, heads, scores.device)
        if masks.prompt is not None:
            scores[..., : self._num_prompt].masked_fill_(masks.prompt, float("-inf"))
        if masks.own is not None:
            scores[..., self._num_prompt :].masked_fill_(masks.own, float("-inf"))
        if call.sinks is None:
            return torch.softmax(scores, dim=-1)
        column = call.sinks.float().view(1, heads, -1, 1).expand(self._num_rows, -1, -1, 1).flatten(0, 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._is_even:
            keys[:, :, self._num_own - 1] = key.transpose(0, 1)
            values[:, :, self._num_own - 1] = value.transpose(0, 1)
            return
        at = (self._row_tensor("rows", keys.device), slice(None), self._row_tensor("lengths", keys.device))
        keys[at] = key.transpose(0, 1).to(keys.dtype)
        values[at] = value.transpose(0, 1).to(values.dtype)

    def _row_tensor(self, name: Literal["rows", "lengths", "prompt_lengths"], device: torch.device) -> torch.Tensor:
        """(n,) numbers of the rows, their own tokens stored before this step, or the lengths of their prompts."""
        if (name, device) not in self._row_tensors:
            self._row_tensors[name, device] = self._row_numbers(name).to(device)
        return self._row_tensors[name, device]

    def _row_numbers(self, name: str) -> torch.Tensor:
        if name == "rows":
            return torch.arange(self._num_rows)
        numbers = torch.zeros(self._num_rows, dtype=torch.int64)
        source = self._standing.lengths if name == "lengths" else self._standing.prompt_lengths
        numbers[: len(source)] = torch.tensor(source)
        return numbers + self._num_steps if name == "lengths" else numbers

    def _places_on(self, heads: int, device: torch.device) -> _Places:
        """The same for all layers that have as many heads."""
        if (heads, device) not in self._places:
            places = self._make_places(heads)
            self._places[heads, device] = _Places(places.of_group.to(device), places.of_row.to(device))
        return self._places[heads, device]

    def _make_places(self, heads: int) -> _Places:
        taken = [0] * self._num_groups
        place_of_row = []
        for group in self._standing.groups:
            place_of_row.append(taken[group])
            taken[group] += 1
        group, place = torch.tensor(self._standing.groups)[:, None], torch.tensor(place_of_row)[:, None]
        pairs = ((group * heads + torch.arange(heads)) * self._rows_of_group + place).flatten()
        of_row = torch.zeros(self._num_rows * heads, dtype=torch.int64)
        of_row[: len(pairs)] = pairs
        of_group = torch.zeros(self._num_groups * heads * self._rows_of_group, dtype=torch.int64)
        of_group[pairs] = torch.arange(len(pairs))
        return _Places(of_group, of_row)

    def _masks_for(self, window: int | None, heads: int, device: torch.device) -> _Masks:
        """The same for all layers of a step that ask for the same window."""
        if window is not None and self._num_prompt + self._num_own <= window:
            window = None
        if (window, heads, device) not in self._masks:
            self._masks[window, heads, device] = self._make_masks(window, heads, device)
        return self._masks[window, heads, device]

    def _make_masks(self, window: int | None, heads: int, device: torch.device) -> _Masks:
        prompt = own = None
        if not self._prompts_are_even or window is not None:
            lengths = self._row_tensor("prompt_lengths", device)[:, None]
            place = torch.arange(self._num_prompt, device=device)
            prompt = place >= lengths
            if window is not None:
                prompt = prompt | (lengths + self._row_tensor("lengths", device)[:, None] - place >= window)
        if not self._is_even or window is not None:
            newest = self._row_tensor("lengths", device)[:, None]
            place = torch.arange(self._num_own, device=device)
            own = place > newest
            if window is not None:
                own = own | (newest - place >= window)
        return _Masks(_by_head(prompt, heads), _by_head(own, heads))


def _by_head(mask: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """(n, S) as (n * Hkv, 1, S)."""
    return None if mask is None else mask.repeat_interleave(heads, dim=0)[:, None]
