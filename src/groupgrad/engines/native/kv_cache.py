"""Keys and values of the tokens computed so far.

Two slabs of one kind: one holds prompts, each once however many rows continue it, the other the rows' own tokens. A
slab is a rectangle of slots by places for every layer; slots in use are always the first ones, so that a layer's keys
are one contiguous tensor that matrix products can read as it is. What a row leaves for another that will continue it is
parked outside, in tensors of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class LayerShape:
    """What a layer keeps of a token."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


class KVSlab:
    """Keys and values of up to `slots` sequences of up to `places` tokens, for every layer."""

    def __init__(self, layers: dict[int, LayerShape]):
        self._layers = layers
        self.slots, self.places = 0, 0
        self.version = 0
        """Changes when the tensors do."""
        self.keys: dict[int, torch.Tensor] = {}
        """By layer, (slots, Hkv, places, D)."""
        self.values: dict[int, torch.Tensor] = {}
        self.resize(0, 0)

    @property
    def area(self) -> int:
        """Tokens there is room for."""
        return self.slots * self.places

    def resize(self, slots: int, places: int, keep_slots: int = 0, keep_places: int = 0) -> None:
        """Room for `slots` times `places` tokens; the first `keep_slots` slots keep `keep_places` tokens."""
        # What no token was written to is masked, not skipped, by the products that read it: it has to be finite.
        for number, layer in self._layers.items():
            for tensors, width in ((self.keys, layer.key_width), (self.values, layer.value_width)):
                new = torch.empty(slots, layer.heads, places, width, dtype=layer.dtype, device=layer.device)
                kept = new[:keep_slots, :, :keep_places]
                if kept.numel():
                    kept.copy_(tensors[number][:keep_slots, :, :keep_places])
                new[:keep_slots, :, keep_places:].zero_()
                new[keep_slots:].zero_()
                tensors[number] = new
        self.slots, self.places = slots, places
        self.version += 1

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` tokens of one slot to another."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[target, :, :used] = tensor[source, :, :used]


@dataclass(slots=True, eq=False)
class OffloadedKV:
    """The first own tokens of a row that has left its slot."""

    num_tokens: int
    keys: dict[int, torch.Tensor]
    """By layer, (Hkv, num_tokens, D)."""
    values: dict[int, torch.Tensor]


class KVCache:
    """The slabs of prompts and of rows, what is parked, and the bound that all together stay under.

    `is_recorded`: slabs have few sizes, for decode steps that are recorded (see `graphs`).
    """

    def __init__(self, layers: dict[int, LayerShape], max_bytes: int, *, is_recorded: bool = False):
        self.bytes_per_token = max(1, sum(layer.bytes_per_token for layer in layers.values()))
        self.max_bytes, self.max_tokens = max_bytes, max_bytes // self.bytes_per_token
        self.parked_tokens = 0
        self.devices = {layer.device for layer in layers.values()}
        self.prompts, self.own = KVSlab(layers), KVSlab(layers)
        # Rows that lie close together are read faster; but where steps are recorded, each size costs a recording.
        self._is_recorded = is_recorded
        self._spare = 1.0 if is_recorded else 0.125
        self.peak_tokens = 0

    def fits(self, rows: int, length: int, prompts: int, prompt_length: int, parked: int = 0) -> bool:
        """True if so many rows and prompts of such lengths can be stored, beside what is parked and `parked` more."""
        return rows * length + prompts * prompt_length + parked <= self.max_tokens - self.parked_tokens

    def park(self, slot: int, num_tokens: int) -> OffloadedKV:
        """A copy of the first own tokens in a slot."""
        own = self.own
        keys, values = (
            {number: tensor[slot, :, :num_tokens].clone() for number, tensor in tensors.items()}
            for tensors in (own.keys, own.values)
        )
        self.parked_tokens += num_tokens
        return OffloadedKV(num_tokens, keys, values)

    def restore(self, parked: OffloadedKV, slot: int) -> None:
        """Put what was parked into a slot that has the places for it."""
        for tensors, stored in ((self.own.keys, parked.keys), (self.own.values, parked.values)):
            for number, tensor in stored.items():
                tensors[number][slot, :, : parked.num_tokens] = tensor

    def drop(self, parked: OffloadedKV) -> None:
        """Forget what was parked."""
        self.parked_tokens -= parked.num_tokens
        parked.keys, parked.values = {}, {}

    def reserve(self, need: Need, kept: Need) -> bool:
        """Make room for `need`, keeping what `kept` says is in use; False, and nothing done, if the bound forbids it.

        Rows get some more places than they need at present, so that room is seldom made.
        """
        own, prompts = self.own, self.prompts
        rows, groups = (padded(x) if self._is_recorded else x for x in (need.rows, need.prompts))
        slots, places = rows if need.rows > own.slots else own.slots, own.places
        if need.length > places:
            slots = rows
            places = min(need.longest, need.length + max(63, int(self._spare * need.length)))
        prompt_slots, prompt_places = prompts.slots, prompts.places
        if need.prompts > prompt_slots or need.prompt_length > prompt_places:
            prompt_slots, prompt_places = groups, need.prompt_length
        room = self.max_tokens - self.parked_tokens
        if slots * places + prompt_slots * prompt_places > room:
            slots, prompt_slots, prompt_places = need.rows, need.prompts, need.prompt_length
            left = room - prompt_slots * prompt_places
            places = min(max(places, need.length), left // max(slots, 1))
            if places < need.length:
                return False
        # The slab that shrinks goes first.
        changes = [(own, slots, places, kept.rows, min(kept.length, places))]
        changes.append((prompts, prompt_slots, prompt_places, kept.prompts, min(kept.prompt_length, prompt_places)))
        changes.sort(key=lambda change: change[1] * change[2] - change[0].area)
        for slab, new_slots, new_places, keep_slots, keep_places in changes:
            if (new_slots, new_places) != (slab.slots, slab.places):
                slab.resize(new_slots, new_places, keep_slots, keep_places)
        self.peak_tokens = max(self.peak_tokens, own.area + prompts.area + self.parked_tokens)
        return True


@dataclass(slots=True, frozen=True)
class Need:
    """Tokens to be stored."""

    rows: int
    length: int
    """Of the longest row's own tokens."""
    prompts: int
    prompt_length: int
    """Of the longest prompt."""
    longest: int = 0
    """Own tokens that the longest row may come to have."""


def padded(number: int) -> int:
    """The next power of two, or one and a half of the one before if that is enough: few sizes, little padding."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power > 16 and power * 3 // 4 >= number else power
