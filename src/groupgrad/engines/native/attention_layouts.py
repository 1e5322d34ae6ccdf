"""Attention layouts of sampling: prefill of prompts and suffixes, and decode of one token per row.

Decode reads the keys of a prompt once for all rows of its group, in one matrix product per group and head, and the keys
of suffixes in a second one. One softmax normalises the scores of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from groupgrad.engines.native.decode_kernels import DecodeTables, has_attention_kernels
from groupgrad.engines.native.kv_cache import KVBuffer, KVCache, LayerShape, StateShape
from groupgrad.engines.native.recurrent_states import ProbeRecurrence, SlotRecurrence, StateSource
from groupgrad.kernels.attend import OFFSET, attend, slot_spans, span_table
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.block_attention import kernel_for, wide_products
from groupgrad.scoring.blocks import QUERY_TILE
from groupgrad.scoring.vlm import PromptImages

_MOST_WIDTH = 256
"""Largest width of a head that torch's kernels of attention take on a GPU."""


class ProbeLayout:
    """Records the attention calls of a model's layers, and the shapes of their keys and values, for one token."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.calls: dict[int, AttentionCall] = {}
        self.recurrence = ProbeRecurrence()
        """Records the states of recurrent layers."""

    @property
    def states(self) -> list[StateShape]:
        """Shapes of the states of recurrent layers, in the order in which a pass computes them."""
        return self.recurrence.states

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(1, Hq, D) outputs: a single token attends to its own value alone."""
        self.calls[call.layer] = call
        sizes = key.shape[0], key.shape[2], value.shape[2]
        self.layers[call.layer] = LayerShape(*sizes, key.dtype, key.device, call.source)
        return value.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(0, 1)


@dataclass(slots=True, frozen=True)
class PrefillRun:
    """Consecutive tokens of a prompt or a suffix that a prefill pass computes."""

    ids: list[int]
    slot: int
    """Slot in the buffer in which they are stored."""
    offset: int
    """Number of tokens that the slot holds already, before the run."""
    prefix_slot: int = 0
    prefix_length: int = 0
    """Number of tokens of the prompt in `prefix_slot` that come before the slot's; 0 if the run belongs to a prompt."""
    images: PromptImages | None = None
    """Images of the prompt."""

    @property
    def position(self) -> int:
        """Tokens of the sequence before the run."""
        return self.prefix_length + self.offset


class PrefillLayout:
    """Attention of a prefill pass; stores the keys and values of its runs in `buffer`.

    The flat tokens are the runs' tokens, in this order. A run attends to its prompt, to the tokens that its slot holds
    already, and causally to itself.
    """

    def __init__(self, runs: Sequence[PrefillRun], buffer: KVBuffer, prompts: KVBuffer):
        self._runs, self._buffer, self._prompts = runs, buffer, prompts
        self._recurrence: SlotRecurrence | None = None
        ends = accumulate(len(run.ids) for run in runs)
        self.spans = [slice(end - len(run.ids), end) for run, end in zip(runs, ends)]
        """The flat tokens of each run."""
        rows = [
            (span.start, len(run.ids), run.offset, run.prefix_length, run.prefix_slot, run.slot)
            for span, run in zip(self.spans, runs)
        ]
        table = torch.tensor(rows)
        self._table = span_table(table)
        starts, lengths, offsets, slots = table[:, [0, 1, 2, 5]].unbind(1)
        places = torch.arange(int(lengths.sum())) - (starts - offsets).repeat_interleave(lengths)
        # (2, T) the slot in which each token is stored, and its place there.
        self._stored_at = torch.stack([slots.repeat_interleave(lengths), places])

    @property
    def recurrence(self) -> SlotRecurrence:
        """Runs continue from their slot's states, or, if the slot has no tokens, from their prompt's final states."""
        if self._recurrence is None:
            continued = [(i, run.slot) for i, run in enumerate(self._runs) if run.offset]
            after_prompt = [
                (i, run.prefix_slot) for i, run in enumerate(self._runs) if run.prefix_length and not run.offset
            ]
            sources = [
                StateSource([i for i, _ in pairs], buffer, [slot for _, slot in pairs])
                for pairs, buffer in ((continued, self._buffer), (after_prompt, self._prompts))
                if pairs
            ]
            lengths, slots = [len(run.ids) for run in self._runs], [run.slot for run in self._runs]
            self._recurrence = SlotRecurrence(lengths, self._buffer, slots, sources)
        return self._recurrence

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D)."""
        tensors, prompts = self._buffer.tensors[call.layer], self._prompts.tensors[call.layer]
        slots, places = self._stored_at.to(tensors[0].device)
        for tensor, new in zip(tensors, (key, value)):
            tensor[slots, :, places] = new.transpose(0, 1).to(tensor.dtype)
        kernels = kernel_for(query, key, value)
        if kernels is not None and tensors[0].dtype == torch.float32:
            return attend(kernels, query, slot_spans(self._table, prompts, tensors), len(key), call)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for span, run in zip(self.spans, self._runs):
            keys, values = key[:, span], value[:, span]
            if run.position:
                keys, values = (
                    torch.cat(
                        [
                            prompt[run.prefix_slot, :, : run.prefix_length].to(new.dtype),
                            stored[run.slot, :, : run.offset].to(new.dtype),
                            new,
                        ],
                        dim=1,
                    )
                    for prompt, stored, new in zip(prompts, tensors, (keys, values))
                )
            output[span] = causal_attention(query[:, span], keys, values, call).transpose(0, 1)
        return output


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """(Hq, T, D) outputs of the last T of S tokens, from query (Hq, T, D), key and value (Hkv, S, D)."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    is_plain = call.softcap is None and call.sinks is None and (call.window is None or call.window >= num_keys)
    # On a GPU torch's kernels also take queries behind earlier tokens, without the scores of all pairs.
    fits = query.is_cuda and query.shape[2] == value.shape[2] <= _MOST_WIDTH
    if is_plain and (num_queries == num_keys or fits):
        grouped = query.shape[0] != key.shape[0]
        if grouped and query.is_cuda and query.dtype == torch.float32:  # for which no kernel takes grouped heads
            key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], dim=0) for x in (key, value))
            grouped = False
        order: Any = {"is_causal": True}
        if num_queries != num_keys:
            order = {"attn_mask": causal_lower_right(num_queries, num_keys)}
        tensors = query[None], key[None], value[None]
        return F.scaled_dot_product_attention(*tensors, **order, scale=call.scale, enable_gqa=grouped)[0]
    output = query.new_empty(query.shape[0], num_queries, value.shape[2])
    for start in range(0, num_queries, QUERY_TILE):
        tile = query[:, start : start + QUERY_TILE]
        first = num_keys - num_queries + start
        end = first + tile.shape[1]
        # On a GPU tokens before the tile's window are left out. On CPUs they stay, and with them the order of sums.
        begin = max(0, first + 1 - call.window) if call.window is not None and query.is_cuda else 0
        place = torch.arange(begin, end, device=query.device)
        distance = torch.arange(first, end, device=query.device)[:, None] - place
        hidden = distance < 0
        if call.window is not None:
            hidden = hidden | (distance >= call.window)
        grouped = tile.unflatten(0, (key.shape[0], -1)).flatten(1, 2)  # (Hkv, rep * tile, D)
        scores = products(grouped, key[:, begin:end], call.scale).view(query.shape[0], tile.shape[1], -1)
        scores = finish_scores(scores, call).masked_fill(hidden, float("-inf"))
        weights = softmax_with_sinks(scores, call.sinks, value.dtype).view(key.shape[0], -1, end - begin)
        mixed = torch.bmm(weights, value[:, begin:end])
        output[:, start : start + QUERY_TILE] = mixed.view(query.shape[0], -1, value.shape[2])
    return output


def products(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """(B, T, S) float32 products of query (B, T, D) and key (B, S, D), times `scale`."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return wide_products(query, key.transpose(1, 2)).mul_(scale)  # as training's kernels keep scores
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
    def shape(self) -> StepShape:
        """The smallest sizes that hold the rows."""
        rows_per_group = max(Counter(self.groups).values())
        num_groups, prompt_size = max(self.groups) + 1, max(self.prompt_lengths)
        return StepShape(len(self.groups), num_groups, rows_per_group, prompt_size, max(self.lengths) + 1)


@dataclass(slots=True, frozen=True)
class StepShape:
    """Sizes of a step. In a recorded step they are fixed; results beyond the actual rows are computed and ignored."""

    num_rows: int
    num_groups: int
    rows_per_group: int
    prompt_size: int
    """Tokens of a prompt slot."""
    suffix_size: int


class DecodeLayout:
    """Attention of one new token for each of n rows, which have the first n suffix slots of the cache.

    A layout serves one set of rows; `advance` moves it to the next step. With a `shape` sizes are fixed and its tensors
    keep their memory, so that the operations of a step can be recorded; `change` then replaces the rows. On a GPU
    attention runs in Triton's kernels where there are some, unless `uses_triton` is false.
    """

    def __init__(self, cache: KVCache, batch: DecodeBatch, shape: StepShape | None = None, *, uses_triton: bool = True):
        self._cache, self._batch, self._shape, self._uses_triton = cache, batch, shape, uses_triton
        self._orders: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        self._masks: dict[tuple[int | None, int, torch.device], list[torch.Tensor | None]] = {}
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._members: dict[torch.device, torch.Tensor] = {}
        self._spans: torch.Tensor | None = None
        self._recurrence: SlotRecurrence | None = None
        self._num_steps = 0
        self._is_even = shape is None and min(batch.lengths) == max(batch.lengths)
        self._prompts_are_even = shape is None and min(batch.prompt_lengths) == max(batch.prompt_lengths)
        sizes = batch.shape if shape is None else shape
        self._num_rows, self._num_groups, self._rows_per_group = sizes.num_rows, sizes.num_groups, sizes.rows_per_group
        self._num_prompt, self._num_suffix = sizes.prompt_size, sizes.suffix_size

    @property
    def recurrence(self) -> SlotRecurrence:
        """One token of each row, whose states are in the first suffix slots."""
        if self._recurrence is None:
            buffer, slots = self._cache.suffixes, list(range(self._num_rows))
            self._recurrence = SlotRecurrence([1] * len(slots), buffer, slots, [StateSource(slots, buffer, slots)])
        return self._recurrence

    def advance(self, num_tokens: int = 1) -> None:
        """Prepares the next step, after each row got `num_tokens` more tokens."""
        self._num_steps += num_tokens
        if self._shape is None:
            self._num_suffix += num_tokens
        for table in self._tables.values():
            table[1].add_(num_tokens)
        if self._spans is not None:
            self._spans[:, OFFSET] += num_tokens
        # Masks of prompts stay valid unless a window moves over them.
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] is None and masks[1] is None}

    def change(self, batch: DecodeBatch) -> None:
        """Replaces the rows by others within the same shape; the layout's tensors keep their memory."""
        self._batch, self._num_steps = batch, 0
        for table in self._tables.values():
            table.copy_(self._make_table())
        for members in self._members.values():
            members.copy_(self._make_members())
        for (heads, _), order in self._orders.items():
            for tensor, new in zip(order, self._make_order(heads)):
                tensor.copy_(new)

    def drop_masks(self) -> None:
        """Drops the masks, so that the next step computes them."""
        self._masks = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(n, Hq, D) outputs from query (Hq, n, D), key and value (Hkv, n, D)."""
        if not (self._uses_triton and has_attention_kernels(query)):
            return self._products(query, key, value, call)
        from groupgrad.engines.native import triton_attention  # Triton is there on machines with a GPU

        stored = self._cache.suffixes.tensors[call.layer], self._cache.prompts.tensors[call.layer]
        with torch.cuda.device_of(query):  # where Triton launches, unlike torch, if another device is the current one
            tables = self._device_tables(query.device)
            return triton_attention.decode_attention(query, (key, value), *stored, tables, call)

    def _products(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """The same by matrix products over rectangles of keys, or by the compiled kernels of the CPU."""
        rows, heads, num_prompt = self._num_rows, key.shape[0], self._num_prompt
        pairs = self._num_groups * heads
        suffix_keys, suffix_values = (stored[:rows] for stored in self._cache.suffixes.tensors[call.layer])
        self._write((suffix_keys, key), (suffix_values, value))
        kernels = (
            None if self._shape is not None or suffix_keys.dtype != torch.float32 else kernel_for(query, key, value)
        )
        if kernels is not None:
            return attend(kernels, query, self._spans_of(call.layer), heads, call)
        suffix_keys, suffix_values = (x.flatten(0, 1)[:, : self._num_suffix] for x in (suffix_keys, suffix_values))
        prompts = self._cache.prompts.tensors[call.layer]
        prompt_keys, prompt_values = (x.flatten(0, 1)[:pairs, :num_prompt] for x in prompts)
        to_groups, to_rows = self._order_on(heads, query.device)
        queries = query.transpose(0, 1).reshape(rows * heads, -1, query.shape[2]).to(suffix_keys.dtype)
        grouped = queries.index_select(0, to_groups).view(pairs, -1, query.shape[2])
        scores = products(grouped, prompt_keys, call.scale).view(len(to_groups), -1, num_prompt)
        suffix_scores = products(queries, suffix_keys, call.scale)
        scores = torch.cat([scores.index_select(0, to_rows), suffix_scores], dim=-1)
        weights = self._weights(scores, call, heads).to(suffix_values.dtype)
        grouped = weights[..., :num_prompt].index_select(0, to_groups).view(pairs, -1, num_prompt)
        mixed = torch.bmm(grouped, prompt_values).view(len(to_groups), -1, suffix_values.shape[2])
        suffix_weights = weights[..., num_prompt : num_prompt + self._num_suffix]
        mixed = torch.baddbmm(mixed.index_select(0, to_rows), suffix_weights, suffix_values)
        return mixed.view(rows, -1, suffix_values.shape[2]).to(query.dtype)

    def _spans_of(self, layer: int) -> torch.Tensor:
        """(n, 10) records of the rows for the kernels (see `kernels.attend`), each a span of one token."""
        if self._spans is None:
            batch = self._batch
            # Rows of a group are adjacent, so that their prompt is read once for all of them.
            rows = torch.tensor(sorted(range(len(batch.groups)), key=batch.groups.__getitem__))
            groups, lengths, prompt_lengths = (
                torch.tensor(numbers)[rows] for numbers in (batch.groups, batch.lengths, batch.prompt_lengths)
            )
            columns = (rows, torch.ones_like(rows), lengths + self._num_steps, prompt_lengths, groups, rows)
            self._spans = span_table(torch.stack(columns, dim=1))
        return slot_spans(self._spans, self._cache.prompts.tensors[layer], self._cache.suffixes.tensors[layer])

    def _weights(self, scores: torch.Tensor, call: AttentionCall, heads: int) -> torch.Tensor:
        scores = finish_scores(scores, call)
        masks = self._masks_for(call.window, heads, scores.device)
        for mask, part in zip(masks, (scores[..., : self._num_prompt], scores[..., self._num_prompt :])):
            if mask is not None:
                part.masked_fill_(mask, float("-inf"))
        if call.sinks is None:
            return torch.softmax(scores, dim=-1)
        column = call.sinks.float().view(1, heads, -1, 1).expand(self._num_rows, -1, -1, 1).flatten(0, 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)

    def _write(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Stores new keys and values; each pair is a cache tensor (n, Hkv, places, D) and what to write (Hkv, n, D)."""
        for stored, new in pairs:
            if self._is_even:
                stored[:, :, self._num_suffix - 1] = new.transpose(0, 1)
            else:
                rows, lengths, _ = self._table_on(stored.device)
                stored[rows, :, lengths] = new.transpose(0, 1).to(stored.dtype)

    def _table_on(self, device: torch.device) -> torch.Tensor:
        """(3, n) int64 row numbers, suffix tokens stored before this step, and prompt lengths."""
        if device not in self._tables:
            self._tables[device] = self._make_table().to(device)
        return self._tables[device]

    def _make_table(self) -> torch.Tensor:
        table = torch.arange(self._num_rows).repeat(3, 1)
        table[1:] = 0
        table[1:, : len(self._batch.groups)] = torch.tensor([self._batch.lengths, self._batch.prompt_lengths])
        table[1] += self._num_steps
        return table

    def _device_tables(self, device: torch.device) -> DecodeTables:
        if device not in self._members:
            self._members[device] = self._make_members().to(device)
        _, lengths, prompt_lengths = self._table_on(device)
        return DecodeTables(lengths, prompt_lengths, self._members[device], self._num_suffix, self._num_prompt)

    def _make_members(self) -> torch.Tensor:
        """(groups, 1 + rows per group) int64: each group's prompt length, then the numbers of its rows, -1 for none."""
        table = torch.full((self._num_groups, 1 + self._rows_per_group), -1)
        table[:, 0] = 0
        num_taken = Counter[int]()
        for row, (group, length) in enumerate(zip(self._batch.groups, self._batch.prompt_lengths)):
            num_taken[group] += 1
            table[group, 0], table[group, num_taken[group]] = length, row
        return table

    def _order_on(self, heads: int, device: torch.device) -> list[torch.Tensor]:
        """Permutations between (row, head) pairs and (group, head, row in the group), for `heads` key heads.

        Returns two index tensors: (groups * Hkv * R,), the pair at each place, and (n * Hkv,), the place of each pair.
        Padding has index 0 in both.
        """
        if (heads, device) not in self._orders:
            self._orders[heads, device] = [tensor.to(device) for tensor in self._make_order(heads)]
        return self._orders[heads, device]

    def _make_order(self, heads: int) -> list[torch.Tensor]:
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
        return [to_groups, to_rows]

    def _masks_for(self, window: int | None, heads: int, device: torch.device) -> list[torch.Tensor | None]:
        """Masks (n * Hkv, 1, keys) of prompts and suffixes for layers with this window, True for hidden keys.

        None if no key is hidden.
        """
        if window is not None and self._num_prompt + self._num_suffix <= window:
            window = None
        if (window, heads, device) not in self._masks:
            self._masks[window, heads, device] = self._make_masks(window, heads, device)
        return self._masks[window, heads, device]

    def _make_masks(self, window: int | None, heads: int, device: torch.device) -> list[torch.Tensor | None]:
        prompt = suffix = None
        _, newest, lengths = self._table_on(device)[..., None]
        if not self._prompts_are_even or window is not None:
            place = torch.arange(self._num_prompt, device=device)
            prompt = place >= lengths
            if window is not None:
                prompt = prompt | (lengths + newest - place >= window)
        if not self._is_even or window is not None:
            place = torch.arange(self._num_suffix, device=device)
            suffix = place > newest
            if window is not None:
                suffix = suffix | (newest - place >= window)
        return [None if mask is None else mask.repeat_interleave(heads, dim=0)[:, None] for mask in (prompt, suffix)]
