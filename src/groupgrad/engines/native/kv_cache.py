"""Keys and values of the tokens computed so far.

One buffer holds prompts, each once however many sequences share it; another holds the suffixes of sequences, all tokens
behind their prompts. Slots in use are always the first ones, so that a layer's keys are one contiguous tensor that
matrix products read as it is. Suffixes of finished sequences that another request will continue are offloaded from the
buffers into tensors of their own.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(slots=True, frozen=True)
class LayerShape:
    """Shape of one token's keys and values in a layer."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    source: int | None = None
    """The earlier layer whose keys and values this layer reads, as some layers of Gemma 4 do; None: it has its own."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value; 0 for a layer that reads those of another."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize if self.source is None else 0


@dataclass(slots=True, frozen=True)
class StateShape:
    """Shape of a sequence's state in a recurrent layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return math.prod(self.shape) * self.dtype.itemsize


class KVBuffer:
    """Keys, values and recurrent states, for every layer, of up to `num_slots` sequences of `slot_size` tokens."""

    def __init__(self, layers: dict[int, LayerShape], states: Sequence[StateShape] = ()):
        self._layers = layers
        self.num_slots, self.slot_size = 0, 0
        self.version = 0
        """Changes when the tensors are replaced."""
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of each layer, each (num_slots, Hkv, slot_size, D); layers that share them have the same."""
        self.states: list[torch.Tensor] = [torch.empty(0, *s.shape, dtype=s.dtype, device=s.device) for s in states]
        """States of each recurrent layer, (num_slots, ...), after the tokens that each slot has."""
        self.resize(0, 0)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the buffer."""
        return self.num_slots * self.slot_size

    @property
    def distinct_tensors(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """`tensors` of the layers that have keys and values of their own."""
        return {number: self.tensors[number] for number, layer in self._layers.items() if layer.source is None}

    def resize(self, num_slots: int, slot_size: int, keep_slots: int = 0, keep_tokens: int = 0) -> None:
        """Replaces the tensors; the first `keep_slots` slots keep their first `keep_tokens` tokens."""
        # Matrix products read unused places too, and mask them afterwards: they must be finite.
        for number, layer in self._layers.items():
            if layer.source is not None:
                self.tensors[number] = self.tensors[layer.source]
                continue
            new = []
            for i, dim in enumerate((layer.key_dim, layer.value_dim)):
                size = (num_slots, layer.num_heads, slot_size, dim)
                tensor = zeros_in_large_pages(size, layer.dtype, layer.device)
                if keep_slots:
                    kept = slice(keep_slots), slice(None), slice(keep_tokens)
                    tensor[kept] = self.tensors[number][i][kept]
                new.append(tensor)
            self.tensors[number] = (new[0], new[1])
        for number, old in enumerate(self.states):
            self.states[number] = old.new_zeros(num_slots, *old.shape[1:])
            self.states[number][:keep_slots] = old[:keep_slots]
        self.num_slots, self.slot_size = num_slots, slot_size
        self.version += 1

    def move(self, moves: Sequence[tuple[int, int]], num_tokens: int) -> None:
        """Copies the first `num_tokens` tokens of slots to others (from, to); no slot is both."""
        sources, targets = torch.tensor(moves).unbind(1)
        for pair in self.distinct_tensors.values():
            for tensor in pair:
                tensor[targets, :, :num_tokens] = tensor[sources, :, :num_tokens]
        for state in self.states:
            state[targets] = state[sources]


@dataclass(slots=True, eq=False)
class OffloadedKV:
    """Keys and values of the first suffix tokens of a sequence that has left its slot."""

    num_tokens: int
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, each (Hkv, num_tokens, D)."""
    states: list[torch.Tensor]
    """States of each recurrent layer after these tokens."""


@dataclass(slots=True, frozen=True)
class CacheRoom:
    """The room that a set of sequences takes in the cache."""

    num_suffixes: int
    suffix_length: int
    """Length of the longest suffix."""
    num_prompts: int
    prompt_length: int
    """Length of the longest prompt."""
    max_suffix_length: int = 0
    """Longest suffix that any of the sequences may reach in this turn."""
    prompt_tokens: int = 0
    """Tokens of all prompts, without padding."""
    num_kept: int = 0
    """Sequences that further turns may follow, with those that are away between two turns."""

    @property
    def num_tokens(self) -> int:
        """Tokens of buffers of exactly these sizes."""
        return self.num_suffixes * self.suffix_length + self.num_prompts * self.prompt_length

    def with_more_tokens(self, num_tokens: int) -> CacheRoom:
        """The room that these sequences take when each has `num_tokens` more."""
        return replace(self, suffix_length=self.suffix_length + num_tokens) if self.num_suffixes else self


class KVCache:
    """The buffers of prompts and suffixes, offloaded suffixes, and the bound on all of them together.

    With `is_recorded` buffers have few distinct sizes, because each size costs a recorded decode step (`cuda_graphs`).
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        max_bytes: int,
        *,
        states: Sequence[StateShape] = (),
        is_recorded: bool = False,
    ):
        self.bytes_per_token = max(1, sum(layer.bytes_per_token for layer in layers.values()))
        self.max_bytes, self.max_tokens = max_bytes, max_bytes // self.bytes_per_token
        self.state_tokens = -(-sum(state.num_bytes for state in states) // self.bytes_per_token)
        """Memory of one sequence's recurrent states, in tokens of keys and values, rounded up."""
        self.offloaded_tokens = 0
        """Tokens of offloaded suffixes, with `state_tokens` for each."""
        self.prompts, self.suffixes = KVBuffer(layers, states), KVBuffer(layers, states)
        # Adjacent suffixes are read faster, so slots have little spare room, unless steps are recorded.
        self._is_recorded = is_recorded
        self._spare_fraction = 1.0 if is_recorded else 0.125
        self.peak_tokens = 0

    @property
    def version(self) -> tuple[int, int]:
        """Changes when tensors of a buffer are replaced."""
        return self.suffixes.version, self.prompts.version

    def fits(self, need: CacheRoom, num_offloaded: int = 0) -> bool:
        """True if the bound allows `need` and `num_offloaded` tokens in addition to what is offloaded already."""
        num_states = need.num_suffixes + need.num_prompts + bool(num_offloaded)
        num_tokens = need.num_tokens + num_offloaded + num_states * self.state_tokens
        return num_tokens <= self.max_tokens - self.offloaded_tokens

    def offload(self, slot: int, num_tokens: int) -> OffloadedKV:
        """Copies the first tokens of a suffix out of its slot."""
        at = (slot, slice(None), slice(0, num_tokens))
        stored = self.suffixes.distinct_tensors.items()
        tensors = {number: (k[at].clone(), v[at].clone()) for number, (k, v) in stored}
        offloaded = OffloadedKV(num_tokens, tensors, [state[slot].clone() for state in self.suffixes.states])
        self.offloaded_tokens += num_tokens + self.state_tokens
        return offloaded

    def restore(self, offloaded: OffloadedKV, slot: int) -> None:
        """Copies an offloaded suffix into a slot that has room for it."""
        for number, pair in offloaded.tensors.items():
            for target, tensor in zip(self.suffixes.tensors[number], pair):
                target[slot, :, : offloaded.num_tokens] = tensor
        for state, saved in zip(self.suffixes.states, offloaded.states):
            state[slot] = saved

    def begin_suffixes(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies recurrent states for each pair (suffix slot, prompt slot): a suffix begins with its prompt's state."""
        slots, prompts = [slot for slot, _ in pairs], [prompt for _, prompt in pairs]
        for suffix, prompt in zip(self.suffixes.states, self.prompts.states):
            suffix[slots] = prompt[prompts]

    def drop(self, offloaded: OffloadedKV) -> None:
        """Frees an offloaded suffix."""
        self.offloaded_tokens -= offloaded.num_tokens + self.state_tokens
        offloaded.tensors, offloaded.states = {}, []

    def clear(self) -> None:
        """Frees all buffers. Offloaded suffixes count no longer; their owner frees them."""
        self.offloaded_tokens = 0
        for buffer in (self.suffixes, self.prompts):
            buffer.resize(0, 0)

    def reserve(self, need: CacheRoom, used: CacheRoom) -> bool:
        """Makes room for `need`, keeping the tokens of `used`; False, with nothing done, if the bound forbids it.

        Suffix slots get some spare places, so that buffers are seldom resized.
        """
        sizes = self._sizes(need)
        if sizes is None:
            return False
        buffers = [
            (self.suffixes, *sizes[:2], used.num_suffixes, used.suffix_length),
            (self.prompts, *sizes[2:], used.num_prompts, used.prompt_length),
        ]
        # A buffer that shrinks is resized first, to stay under the bound meanwhile.
        buffers.sort(key=lambda item: item[1] * item[2] - item[0].capacity)
        for buffer, num_slots, slot_size, keep_slots, keep_tokens in buffers:
            if (num_slots, slot_size) != (buffer.num_slots, buffer.slot_size):
                buffer.resize(num_slots, slot_size, keep_slots, min(keep_tokens, slot_size))
        num_states = self.suffixes.num_slots + self.prompts.num_slots
        num_tokens = self.suffixes.capacity + self.prompts.capacity + num_states * self.state_tokens
        num_tokens += self.offloaded_tokens
        self.peak_tokens = max(self.peak_tokens, num_tokens)
        return True

    def _sizes(self, need: CacheRoom) -> tuple[int, int, int, int] | None:
        """(slots, slot size) of suffixes, then of prompts, that cover `need`; None if the bound forbids them."""
        suffixes, prompts = self.suffixes, self.prompts
        num_suffixes, num_prompts, num_kept = need.num_suffixes, need.num_prompts, need.num_kept
        if self._is_recorded:
            num_suffixes, num_prompts, num_kept = padded(num_suffixes), padded(num_prompts), padded(num_kept)
        num_slots, slot_size = suffixes.num_slots, suffixes.slot_size
        if need.num_suffixes > num_slots or need.suffix_length > slot_size:
            # Sequences that are away come back: a slot less would be a resize more.
            num_slots = max(num_suffixes, min(num_slots, num_kept))
        if need.suffix_length > slot_size:
            spare = max(63, int(self._spare_fraction * need.suffix_length))
            slot_size = need.suffix_length + spare
            if not need.num_kept:  # next turns need more than this one
                slot_size = min(slot_size, need.max_suffix_length)
        prompt_slots, prompt_size = prompts.num_slots, prompts.slot_size
        if need.num_prompts > prompt_slots or need.prompt_length > prompt_size:
            prompt_slots, prompt_size = num_prompts, need.prompt_length
        room, of_state = self.max_tokens - self.offloaded_tokens, self.state_tokens
        if num_slots * (slot_size + of_state) + prompt_slots * (prompt_size + of_state) > room:
            num_slots, prompt_slots, prompt_size = need.num_suffixes, need.num_prompts, need.prompt_length
            room -= prompt_slots * (prompt_size + of_state)
            size_that_fits = room // num_slots - of_state if num_slots else 0
            slot_size = min(max(slot_size, need.suffix_length), need.max_suffix_length, size_that_fits)
            if room < 0 or slot_size < need.suffix_length:
                return None
        return num_slots, slot_size, prompt_slots, prompt_size


def padded(number: int) -> int:
    """Rounds up to a power of two, or to three quarters of one beyond 16: few sizes with little padding."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power > 16 and power * 3 // 4 >= number else power


LARGE_PAGE = 2 * 2**20
"""Bytes of a large page, and of the smallest tensor that gets one."""


def zeros_in_large_pages(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. A large one on a Linux CPU gets a mapping of its own, for which large pages are requested.

    A decode step reads all keys and values once. With pages of four kilobytes it looks up the address of a page every
    sixteen keys, and a virtual machine walks two tables for each. By default Linux gives large pages only to memory
    that asks for them (`/sys/kernel/mm/transparent_hugepage/enabled`).
    """
    num_bytes = math.prod(size) * dtype.itemsize
    mapped = _mapped(num_bytes) if device.type == "cpu" and num_bytes >= LARGE_PAGE else None
    return torch.zeros(*size, dtype=dtype, device=device) if mapped is None else mapped.view(dtype).view(*size)


def _mapped(num_bytes: int) -> torch.Tensor | None:
    """Bytes that begin at a large page, which the system clears when they are first written; None without support."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel has no large pages, or no memory, which torch will report
        return None
    every = torch.frombuffer(memory, dtype=torch.uint8)
    start = -every.data_ptr() % LARGE_PAGE
    return every[start : start + num_bytes]
