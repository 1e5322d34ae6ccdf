"""Recurrent layers over flat tokens: a prompt is computed once, and its final state is the initial state of its rows.

Each span (a shared prompt, or the tokens of a row) is cut into chunks. What happens inside a chunk is computed for
many chunks at once. The states then pass from chunk to chunk, and all spans take a step together until the shortest
has ended: a row costs its own chunks, whatever the length of the others. A state carries the gradients of all rows that
begin with it back to their prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from groupgrad.batch import to_device
from groupgrad.kernels.delta_rule import StateRows, state_rows
from groupgrad.scoring.blocks import TokenSpan, span_records

CHUNK_SIZES = (16, 32, 64)
"""Sizes of chunks to choose from; small ones waste less on short rows, large ones take fewer steps."""

_STATE_WIDTH = 128
"""State width assumed in choosing a chunk size: a token in a chunk of C costs about C + `_STATE_WIDTH` products."""

BLOCK_TOKENS = 2048
"""Number of tokens whose chunks are prepared at a time.

The results for more tokens would not fit into the processor's caches and would be allocated anew in each layer, so that
a token of a long row would cost more.
"""

Advance = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Initial states of the chunks of the next step -> (their outputs, their final states)."""

Zeros = Callable[[int], torch.Tensor]
"""Number of spans n -> (n, ...) states of zeros."""

Prepare = Callable[..., tuple[torch.Tensor, ...]]
"""Chunks (n, ...) of some inputs -> what the steps need of them, each (n, ...)."""


@dataclass(slots=True, frozen=True)
class _Level:
    """Spans that are computed side by side, the longest first."""

    counts: list[int]
    """Number of spans that still have a chunk, for each step."""
    sources: torch.Tensor
    """(n,) int64 index of each span's initial state: in the first level in `initial` of `scan`, else in the final
    states of the level before."""


@dataclass(slots=True, frozen=True)
class Chunks:
    """All flat tokens in chunks, in the order in which states pass through them."""

    places: torch.Tensor
    """(N, C) int64 flat places of the chunks' tokens; padding at the end of a chunk has the place T."""
    inverse: torch.Tensor
    """(T,) int64 index of each token in the flattened chunks."""
    levels: tuple[_Level, ...]
    ends: torch.Tensor
    """(m,) int64, the spans whose final states are wanted, in the order of the levels."""

    def split(self, flat: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) chunks of (T, ...) values, with zeros for padding."""
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self.places]

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """(T, ...) values of (N, C, ...) chunks."""
        return chunks.flatten(0, 1)[self.inverse]

    def steps(self, prepare: Prepare, *inputs: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Applies `prepare` to the chunks (N, ...) of `inputs`, and yields its results for each step of `scan`.

        `prepare` is called for a block of steps at a time. Each tensor is split by one call: the gradient of a slice is
        as large as the tensor, so with slices the cost of the backward pass would be quadratic in the number of steps.
        """
        blocks = self._blocks()
        split = [values.split([sum(counts) for counts in blocks]) for values in inputs]
        for counts, *values in zip(blocks, *split):
            yield from zip(*(part.split(counts) for part in prepare(*values)))

    def _blocks(self) -> list[list[int]]:
        """The number of chunks of each step, grouped into blocks of at most `BLOCK_TOKENS` tokens or one step."""
        size = self.places.shape[1]
        blocks: list[list[int]] = []
        room = 0
        for count in (count for level in self.levels for count in level.counts):
            if count * size > room:
                blocks.append([])
                room = BLOCK_TOKENS
            blocks[-1].append(count)
            room -= count * size
        return blocks

    def scan(self, initial: torch.Tensor, advance: Advance) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, ...) outputs of `advance` over all chunks from the states `initial`, and (m, ...) wanted final states."""
        outputs: list[torch.Tensor] = []
        finals: list[torch.Tensor] = []
        for level in self.levels:
            state = (finals[-1] if finals else initial).index_select(0, level.sources)
            ended: list[torch.Tensor] = []
            for count in level.counts:
                if count < len(state):
                    ended.append(state[count:])
                    state = state[:count]
                output, state = advance(state)
                outputs.append(output)
            finals.append(torch.cat([state, *reversed(ended)]))
        wanted = torch.cat(finals).index_select(0, self.ends) if len(self.ends) else initial[:0]
        return torch.cat(outputs), wanted


MOST_PADDING = 0.25
"""Fraction of a rectangle's row that may be padding."""


@dataclass(slots=True, frozen=True)
class Rectangle:
    """Spans of like length of a `PackedLevel`."""

    spans: torch.Tensor
    """(r,) int64 numbers of the spans in the level."""
    places: torch.Tensor
    """(r, L) int64 places of their tokens among the level's; padding repeats a span's last token."""
    is_token: torch.Tensor
    """(r, L) bool, False for padding."""


@dataclass(slots=True, frozen=True)
class Rectangles:
    """All spans of a `PackedLevel`, for kernels that need spans of equal length."""

    parts: tuple[Rectangle, ...]
    tokens: torch.Tensor
    """(t,) int64 place of each of the level's tokens in the flattened parts, end to end."""
    order: torch.Tensor
    """(n,) int64 place of each of the level's spans in the parts."""


@dataclass(slots=True, frozen=True)
class PackedLevel:
    """Spans that are computed side by side, end to end without padding."""

    places: torch.Tensor
    """(t,) int64 flat places of their tokens."""
    bounds: torch.Tensor
    """(n + 1,) int64 bounds of the spans in `places`."""
    sources: torch.Tensor
    """(n,) int64 index of each span's initial state: in the first level in the given states followed by zeros, else
    in the final states of the level before."""


@dataclass(slots=True, frozen=True)
class Packed:
    """All flat tokens for kernels that take spans of unlike length: prompts first, then the rows that share them."""

    levels: tuple[PackedLevel, ...]
    inverse: torch.Tensor
    """(T,) int64, the place of each token in the levels' tokens."""
    ends: torch.Tensor
    """(m,) int64, the spans whose final states are wanted, in the order of the levels."""


def inputs_at(values: torch.Tensor, before: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(D, ...) inputs at `places`: of the flat `values` (D, T), or for places from T on, of `before` (D, E)."""
    num_tokens = values.shape[1]
    inside = values[:, places.clamp(max=num_tokens - 1)]
    return torch.where(places < num_tokens, inside, before[:, (places - num_tokens).clamp(min=0)])


class Recurrence:
    """The order of flat tokens in recurrent layers: which token follows which, and where states come from."""

    def __init__(self, spans: Sequence[TokenSpan]):
        self._spans = [span for span in spans if span.length]
        self._num_tokens = sum(span.length for span in self._spans)
        self._chunks: dict[tuple[int, torch.device], Chunks] = {}
        self._packed: dict[torch.device, Packed] = {}
        self._rectangles: dict[torch.device, list[Rectangles]] = {}
        self._heads: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self._continuing: list[int] = []
        """Spans (by number) that begin with `initial_states`; others with zeros or their prompt's final state."""
        self._left: list[int] = []
        """Numbers of spans of which `keep_states` gets the final states."""

    @property
    def spans(self) -> list[TokenSpan]:
        """The spans that have tokens."""
        return self._spans

    @property
    def is_step(self) -> bool:
        """True if states of the flat tokens, one for each, can be updated in place (`states_in_place`)."""
        return False

    def begin_pass(self) -> None:
        """Called before the model computes the tokens."""

    def scan(self, chunks: Chunks, zeros: Zeros, advance: Advance) -> torch.Tensor:
        """(N, ...) outputs of `advance` over all chunks of a layer."""
        initial = self.initial_states(zeros)
        if initial is None:
            initial = zeros(1)
        elif len(self._continuing) < len(self._spans):
            initial = torch.cat([initial, zeros(1)])
        output, finals = chunks.scan(initial, advance)
        self.keep_states(finals)
        return output

    def initial_states(self, zeros: Zeros) -> torch.Tensor | None:
        """(k, ...) initial states of the continuing spans in the layer's next scan; None if no span continues.

        A scan calls this once before its first step, and `keep_states` once after its last one.
        """

    def keep_states(self, finals: torch.Tensor) -> None:
        """Stores the (m, ...) final states of the spans in `_left`."""

    def inputs_before(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """(D, E) inputs of a convolution over `width` tokens that `heads` places after the flat ones (D, T)."""
        return values.new_zeros(len(values), 1)

    def states_in_place(self) -> torch.Tensor:
        """(n, ...) states of the next layer, which the caller reads and overwrites; only if `is_step`."""
        raise RuntimeError("only a pass with one token a row has states that can be updated in place")

    def chunks(self, device: torch.device) -> Chunks:
        """The tokens in chunks of the cheapest of `CHUNK_SIZES`; made once for all layers."""
        is_step = max(span.length for span in self._spans) == 1
        size = 1 if is_step else min(CHUNK_SIZES, key=self._cost)
        if (size, device) not in self._chunks:
            self._chunks[size, device] = self._make_chunks(size, device)
        return self._chunks[size, device]

    def packed(self, device: torch.device) -> Packed:
        """The tokens by whole spans; made once for all layers."""
        if device not in self._packed:
            self._packed[device] = self._make_packed(device)
        return self._packed[device]

    def rectangles(self, device: torch.device) -> list[Rectangles]:
        """The spans of each level of `packed`; made once for all layers."""
        if device not in self._rectangles:
            lengths = [level.bounds.diff().tolist() for level in self.packed(device).levels]
            self._rectangles[device] = [_rectangles(level, device) for level in lengths]
        return self._rectangles[device]

    def _levels(self, *, longest_first: bool = False) -> tuple[list[tuple[list[TokenSpan], list[int]]], list[int]]:
        """Prompts, and the spans behind them, each level with the indices of its initial states; the ends wanted."""
        given = {self._spans[index].start: rank for rank, index in enumerate(self._continuing)}
        number_of: dict[int, int] = {}
        """First place of a span -> its number over all levels."""
        levels = []
        for is_behind in (False, True):
            level = [span for span in self._spans if (span.shared is not None) == is_behind]
            if longest_first:
                level.sort(key=lambda span: -span.length)
            if level:
                # Prompts are the first level, so their numbers there are those over all levels.
                sources = [number_of[s.shared.start] if s.shared else given.get(s.start, len(given)) for s in level]
                levels.append((level, sources))
                number_of |= {span.start: len(number_of) + rank for rank, span in enumerate(level)}
        return levels, [number_of[self._spans[index].start] for index in self._left]

    def _make_packed(self, device: torch.device) -> Packed:
        def tensor(numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        spans_of_levels, ends = self._levels()
        levels: list[PackedLevel] = []
        places: list[np.ndarray] = []
        for level, sources in spans_of_levels:
            flat = np.concatenate([np.arange(s.start, s.start + s.length) for s in level])
            bounds = np.cumsum([0, *(span.length for span in level)])
            levels.append(PackedLevel(tensor(flat), tensor(bounds), tensor(sources)))
            places.append(flat)
        return Packed(tuple(levels), tensor(np.argsort(np.concatenate(places))), tensor(ends))

    @cached_property
    def state_rows(self) -> StateRows:
        """The spans as the compiled kernels take them."""
        places = [[self._spans[index].start for index in found] for found in (self._continuing, self._left)]
        return state_rows(span_records(self._spans), *places)

    def _cost(self, size: int) -> int:
        return sum(-(-span.length // size) * size * (size + _STATE_WIDTH) for span in self._spans)

    def _make_chunks(self, size: int, device: torch.device) -> Chunks:
        spans_of_levels, ends = self._levels(longest_first=True)
        starts: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        levels: list[_Level] = []
        for level, sources in spans_of_levels:
            start = np.array([span.start for span in level])
            length = np.array([span.length for span in level])
            counts = [int((length > done).sum()) for done in range(0, int(length[0]), size)]
            for step, count in enumerate(counts):
                starts.append(start[:count] + step * size)
                lengths.append(np.minimum(length[:count] - step * size, size))
            levels.append(_Level(counts, torch.tensor(sources, device=device)))
        offset = np.arange(size)
        begin, count = np.concatenate(starts)[:, None], np.concatenate(lengths)[:, None]
        places = np.where(offset < count, begin + offset, self._num_tokens)
        inverse = np.empty(self._num_tokens, dtype=np.int64)
        inverse[places[offset < count]] = np.flatnonzero(offset < count)
        return Chunks(
            to_device(torch.from_numpy(places.astype(np.int64)), device),
            to_device(torch.from_numpy(inverse), device),
            tuple(levels),
            torch.tensor(ends, dtype=torch.int64, device=device),
        )

    def heads(self, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens of spans, whose last `width` tokens in their row are not consecutive flat tokens.

        Returns the (M,) int64 ascending places of these tokens, and the (M, width) places of each one's last `width`
        tokens, itself last. A place of T + i is column i of `inputs_before`.
        """
        if (width, device) not in self._heads:
            places, windows = [], []
            for number, span in sorted(enumerate(self._spans), key=lambda entry: entry[1].start):
                before = self._places_before(number, span, width - 1)
                for index in range(min(width - 1, span.length)):
                    here = range(span.start, span.start + index + 1)
                    places.append(span.start + index)
                    windows.append([*before, *here][-width:])
            self._heads[width, device] = (
                torch.tensor(places, dtype=torch.int64, device=device),
                torch.tensor(windows, dtype=torch.int64, device=device).view(-1, width),
            )
        return self._heads[width, device]

    def _places_before(self, number: int, span: TokenSpan, count: int) -> list[int]:
        """Places of the last `count` inputs before a span in its row, numbered as in `heads`."""
        shared = span.shared
        places = [] if shared is None else list(range(shared.start, shared.start + shared.length))[-count:]
        return [self._num_tokens] * (count - len(places)) + places


def _rectangles(lengths: Sequence[int], device: torch.device) -> Rectangles:
    """The spans of these lengths, which lie end to end, in rectangles as tall as `MOST_PADDING` lets them be."""
    length, start = np.array(lengths), np.cumsum([0, *lengths[:-1]])
    left = np.argsort(-length, kind="stable")
    order, parts, tokens, size = left, [], np.zeros(sum(lengths), dtype=np.int64), 0
    while len(left):
        width = int(length[left[0]])
        count = int((length[left] >= (1.0 - MOST_PADDING) * width).sum())
        numbers, left = left[:count], left[count:]
        token, rows = np.arange(width), length[numbers][:, None]
        places, is_token = start[numbers][:, None] + np.minimum(token, rows - 1), token < rows
        tokens[places[is_token]] = size + np.flatnonzero(is_token)
        size += is_token.size
        parts.append(Rectangle(*(to_device(torch.from_numpy(array), device) for array in (numbers, places, is_token))))
    return Rectangles(tuple(parts), *(to_device(torch.from_numpy(x), device) for x in (tokens, np.argsort(order))))
