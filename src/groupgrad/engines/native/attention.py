"""The attention plans of sampling: prompts and resumed rows as a whole, and one token for each row.

Keys of a prompt are read once for all rows that continue it, in one matrix product for each group and head; the rows'
own keys are read in a second product, and one softmax goes over the scores of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from groupgrad.engines.native.store import LayerShape, Slab, Store
from groupgrad.models.attention import AttentionCall

QUERY_TILE = 256
"""Queries whose scores are computed at a time where the library's kernel does not fit."""


class ProbePlan:
    """Notes what each layer would keep of a token."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """A token alone sees its own value, whatever the scores."""
        self.layers[call.layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2], key.dtype, key.device)
        return value.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(0, 1)


@dataclass(slots=True, frozen=True)
class Place:
    """Where the keys and values of a sequence go, and what comes before it."""

    slab: Slab
    slot: int
    prefix_slot: int = 0
    prefix_length: int = 0
    """Tokens of the prompt store's `prefix_slot` that come before the sequence; 0: it is the beginning."""


@dataclass(slots=True, frozen=True)
class Segment:
    """Consecutive flat tokens of one sequence."""

    start: int
    length: int
    place: Place


class PrefillPlan:
    """Stores the keys and values of whole sequences; each sequence attends to its prompt and causally to itself."""

    def __init__(self, segments: Sequence[Segment], store: Store):
        self._segments, self._prompts = segments, store.prompts

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for segment in self._segments:
            span = slice(segment.start, segment.start + segment.length)
            keys, values = key[:, span], value[:, span]
            place = segment.place
            place.slab.keys[call.layer][place.slot, :, : segment.length] = keys
            place.slab.values[call.layer][place.slot, :, : segment.length] = values
            if place.prefix_length:
                prefix = (place.prefix_slot, slice(None), slice(0, place.prefix_length))
                keys = torch.cat([self._prompts.keys[call.layer][prefix].to(keys.dtype), keys], dim=1)
                values = torch.cat([self._prompts.values[call.layer][prefix].to(values.dtype), values], dim=1)
            output[span] = causal_attention(query[:, span], keys, values, call).transpose(0, 1)
        return output


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
        grouped = (tile * call.scale).unflatten(0, (key.shape[0], -1)).flatten(1, 2)  # (Hkv, rep * tile, D)
        scores = torch.bmm(grouped, key[:, :end].transpose(1, 2)).view(query.shape[0], tile.shape[1], end)
        scores = finish_scores(scores, call).masked_fill(hidden, float("-inf"))
        weights = softmax_with_sinks(scores, call.sinks, value.dtype).view(key.shape[0], -1, end)
        mixed = torch.bmm(weights, value[:, :end])
        output[:, start : start + QUERY_TILE] = mixed.view(query.shape[0], -1, value.shape[2])
    return output


def finish_scores(scores: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Scaled scores in float32, capped as the layer asks."""
    scores = scores.float()
    return scores if call.softcap is None else scores.div_(call.softcap).tanh_().mul_(call.softcap)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Weights over the keys from float32 scores (Hq, T, S); sinks (Hq,) take a share that goes nowhere."""
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].to(dtype)


@dataclass(slots=True)
class _Places:
    """Where rows and heads stand among the groups, for the row-major and the group-major order of (row, head) pairs."""

    of_group: torch.Tensor
    """(groups * Hkv * R,) which row-major pair each group-major place holds; pair 0 where there is none."""
    of_row: torch.Tensor
    """(n * Hkv,) the group-major place of each row-major pair."""


@dataclass(slots=True)
class _Masks:
    """True: hidden. None: everything is seen."""

    prompt: torch.Tensor | None
    """(n * Hkv, 1, P)."""
    own: torch.Tensor | None
    """(n * Hkv, 1, T)."""


class DecodePlan:
    """One new token for each of n rows, over a store whose first n own slots are theirs.

    Made anew when the set of rows changes; `advance` between steps. `group_of_row` gives the prompt slots.
    """

    def __init__(
        self, store: Store, group_of_row: Sequence[int], prompt_lengths: Sequence[int], lengths: Sequence[int]
    ):
        self._store = store
        self._num_rows, self._num_groups = len(group_of_row), max(group_of_row) + 1
        self._group_of_row, self._prompt_lengths = group_of_row, prompt_lengths
        self._longest_prompt = max(prompt_lengths)
        self._lengths = list(lengths)
        self._places: dict[tuple[int, torch.device], _Places] = {}
        self._masks: dict[tuple[int | None, int, torch.device], _Masks] = {}
        self._length_tensors: dict[torch.device, torch.Tensor] = {}
        self._own_longest, self._equal = max(lengths), min(lengths) == max(lengths)
        self._all_prompts_long = min(prompt_lengths) == self._longest_prompt

    def advance(self) -> None:
        """The rows have one more token each."""
        self._own_longest += 1
        for tensor in self._length_tensors.values():
            tensor.add_(1)
        # Masks of prompts outlive a step unless a window moves over them.
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] is None and masks.own is None}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(n, Hq, D) outputs from query (Hq, n, D), key and value (Hkv, n, D)."""
        store, rows, heads = self._store, self._num_rows, key.shape[0]
        num_own, num_prompt = self._own_longest + 1, self._longest_prompt
        own_keys, own_values = store.own.keys[call.layer][:rows], store.own.values[call.layer][:rows]
        self._write(own_keys, own_values, key, value)
        prompt_keys = store.prompts.keys[call.layer][: self._num_groups, :, :num_prompt].flatten(0, 1)
        prompt_values = store.prompts.values[call.layer][: self._num_groups, :, :num_prompt].flatten(0, 1)
        own_keys, own_values = own_keys.flatten(0, 1)[:, :num_own], own_values.flatten(0, 1)[:, :num_own]
        places = self._places_of(heads, query.device)
        queries = (query.transpose(0, 1) * call.scale).reshape(rows * heads, -1, query.shape[2]).to(own_keys.dtype)
        grouped = queries.index_select(0, places.of_group).view(self._num_groups * heads, -1, query.shape[2])
        prompt_scores = torch.bmm(grouped, prompt_keys.transpose(1, 2))
        prompt_scores = prompt_scores.view(len(places.of_group), -1, num_prompt).index_select(0, places.of_row)
        scores = torch.cat([prompt_scores, torch.bmm(queries, own_keys.transpose(1, 2))], dim=-1)
        weights = self._weights(scores, call, heads).to(own_values.dtype)
        prompt_weights = weights[..., :num_prompt].index_select(0, places.of_group)
        mixed = torch.bmm(prompt_weights.view(self._num_groups * heads, -1, num_prompt), prompt_values)
        mixed = mixed.view(len(places.of_group), -1, mixed.shape[-1]).index_select(0, places.of_row)
        own_weights = weights[..., num_prompt : num_prompt + num_own]
        mixed = torch.baddbmm(mixed, own_weights, own_values)
        return mixed.view(rows, -1, mixed.shape[-1]).to(query.dtype)

    def _weights(self, scores: torch.Tensor, call: AttentionCall, heads: int) -> torch.Tensor:
        scores = finish_scores(scores, call)
        masks = self._masks_for(call.window, heads, scores.device)
        if masks.prompt is not None:
            scores[..., : self._longest_prompt].masked_fill_(masks.prompt, float("-inf"))
        if masks.own is not None:
            scores[..., self._longest_prompt :].masked_fill_(masks.own, float("-inf"))
        if call.sinks is None:
            return torch.softmax(scores, dim=-1)
        column = call.sinks.float().view(1, heads, -1, 1).expand(self._num_rows, -1, -1, 1).flatten(0, 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._equal:
            keys[:, :, self._own_longest] = key.transpose(0, 1)
            values[:, :, self._own_longest] = value.transpose(0, 1)
            return
        at = self._lengths_on(keys.device)
        rows = torch.arange(len(at), device=keys.device)
        keys[rows, :, at] = key.transpose(0, 1).to(keys.dtype)
        values[rows, :, at] = value.transpose(0, 1).to(values.dtype)

    def _lengths_on(self, device: torch.device) -> torch.Tensor:
        """(n,) own tokens stored before this step."""
        if device not in self._length_tensors:
            behind = self._own_longest - max(self._lengths)
            self._length_tensors[device] = torch.tensor(self._lengths, device=device) + behind
        return self._length_tensors[device]

    def _places_of(self, heads: int, device: torch.device) -> _Places:
        """The same for all layers that have as many heads."""
        if (heads, device) not in self._places:
            taken = [0] * self._num_groups
            place_of_row = []
            for group in self._group_of_row:
                place_of_row.append(taken[group])
                taken[group] += 1
            group, place = torch.tensor(self._group_of_row)[:, None], torch.tensor(place_of_row)[:, None]
            head = torch.arange(heads)
            of_row = ((group * heads + head) * max(taken) + place).flatten()
            of_group = torch.zeros(self._num_groups * heads * max(taken), dtype=torch.int64)
            of_group[of_row] = torch.arange(len(of_row))
            self._places[heads, device] = _Places(of_group.to(device), of_row.to(device))
        return self._places[heads, device]

    def _masks_for(self, window: int | None, heads: int, device: torch.device) -> _Masks:
        """The same for all layers of a step that ask for the same window."""
        if window is not None and self._longest_prompt + self._own_longest < window:
            window = None
        if (window, heads, device) not in self._masks:
            self._masks[window, heads, device] = self._make_masks(window, heads, device)
        return self._masks[window, heads, device]

    def _make_masks(self, window: int | None, heads: int, device: torch.device) -> _Masks:
        prompt = own = None
        if not self._all_prompts_long or window is not None:
            lengths = torch.tensor(self._prompt_lengths, device=device)[:, None]
            place = torch.arange(self._longest_prompt, device=device)
            prompt = place >= lengths
            if window is not None:
                prompt = prompt | (lengths + self._lengths_on(device)[:, None] - place >= window)
        if not self._equal or window is not None:
            newest = self._lengths_on(device)[:, None]
            place = torch.arange(self._own_longest + 1, device=device)
            own = place > newest
            if window is not None:
                own = own | (newest - place >= window)
        return _Masks(_by_head(prompt, heads), _by_head(own, heads))


def _by_head(mask: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """(n, S) as (n * Hkv, 1, S)."""
    return None if mask is None else mask.repeat_interleave(heads, dim=0)[:, None]
