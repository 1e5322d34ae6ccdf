"""Cuts the flat tokens of recurrent layers into stretches that a layer computes one after the other.

Everything but the convolutions and states of such a layer treats each token alone. A stretch begins with the last
inputs and the states of the stretches before it, gradients included, so the result is the same as without cuts. The
tensors of a long row stay as small as a short row's: they fit into the processor's caches, and none is so large that
the C library returns its memory to the system and maps new pages for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.recurrence import CHUNK_SIZES, Recurrence, Zeros, inputs_at

Carried = list[dict[int, torch.Tensor]]
"""Inputs and states that a layer's earlier stretches pass on to later ones.

There is a dict for each convolution and each scan of the layer, in the order of the layer's calls. It maps the number
of a span to the span's last inputs or to its state.
"""


@dataclass(slots=True, frozen=True)
class _Piece:
    """Consecutive tokens of a span, all in one stretch."""

    number: int
    """The span's number."""
    span: TokenSpan
    """The tokens, with their places in the stretch; `shared` is its prompt if that ends in the same stretch."""
    source: int | None
    """Number of the span whose tokens come before these, if they are in earlier stretches."""


class Stretch(Recurrence):
    """The order of the tokens in one stretch; see `cut`."""

    def __init__(self, pieces: Sequence[_Piece], wanted: frozenset[int]):
        super().__init__([piece.span for piece in pieces])
        self._numbers = [piece.number for piece in pieces]
        self._sources = [piece.source for piece in pieces]
        self._continuing = [index for index, source in enumerate(self._sources) if source is not None]
        self._index_of = {piece.span.start: index for index, piece in enumerate(pieces)}
        self._left = [index for index, number in enumerate(self._numbers) if number in wanted]
        self._carried: Carried = []
        self._num_computed = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the stretch."""
        return self._num_tokens

    def begin_layer(self, carried: Carried) -> None:
        """Prepares for a layer, whose stretches share `carried`: empty before the first one, filled by each."""
        self._carried, self._num_computed = carried, 0

    def initial_states(self, zeros: Zeros) -> torch.Tensor | None:
        """(k, ...) final states of earlier stretches, with which spans continue here."""
        carried = self._next()
        states = [carried[source] for source in self._sources if source is not None]
        return torch.stack(states) if states else None

    def keep_states(self, finals: torch.Tensor) -> None:
        """Stores the (m, ...) final states that later stretches begin with."""
        carried = self._carried[self._num_computed - 1]
        carried.update(zip((self._numbers[index] for index in self._left), finals.unbind()))

    def inputs_before(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """(D, 1 + n * (width - 1)) inputs of a convolution before the stretch: a zero, then the last inputs of the n
        spans that continue here."""
        carried = self._next()
        continued = [carried[source] for source in self._sources if source is not None]
        before = torch.cat([super().inputs_before(values, width), *continued], dim=1)
        for index in self._left:
            places = self._last_places(index, self._spans[index], width - 1)
            places = torch.tensor(places, dtype=torch.int64, device=values.device)
            carried[self._numbers[index]] = inputs_at(values, before, places)
        return before

    def _places_before(self, number: int, span: TokenSpan, count: int) -> list[int]:
        if span.shared is not None:
            return self._last_places(self._index_of[span.shared.start], span.shared, count)
        if self._sources[number] is None:
            return super()._places_before(number, span, count)
        first = self._num_tokens + 1 + self._continuing.index(number) * count
        return list(range(first, first + count))

    def _last_places(self, number: int, span: TokenSpan, count: int) -> list[int]:
        """Places of the last `count` inputs up to the end of a span."""
        tokens_of_span = range(max(span.start, span.start + span.length - count), span.start + span.length)
        return [*self._places_before(number, span, count), *tokens_of_span][len(tokens_of_span) :]

    def _next(self) -> dict[int, torch.Tensor]:
        if self._num_computed == len(self._carried):
            self._carried.append({})
        self._num_computed += 1
        return self._carried[self._num_computed - 1]


def cut(spans: Sequence[TokenSpan], most: int) -> list[Stretch]:
    """Stretches of at most `most` tokens, in flat order, over spans that are in flat order.

    A span that does not fit into its stretch is cut at the end of a whole chunk.
    """
    number_of = {span.start: number for number, span in enumerate(spans)}
    stretches: list[list[_Piece]] = [[]]
    ends: dict[int, TokenSpan] = {}
    """The last piece of each span in the present stretch."""
    room, chunk = most, CHUNK_SIZES[-1]
    for number, span in enumerate(spans):
        done = 0
        while done < span.length:
            length = span.length - done
            if length > room:
                length = room // chunk * chunk
            if not length:
                stretches.append([])
                room, ends = most, {}
                continue
            before = number if done else None if span.shared is None else number_of[span.shared.start]
            shared = None if before is None else ends.get(before)
            piece = TokenSpan(most - room, length, shared=shared)
            stretches[-1].append(_Piece(number, piece, before if shared is None else None))
            ends[number] = piece
            room, done = room - length, done + length
    wanted = frozenset(piece.source for pieces in stretches for piece in pieces if piece.source is not None)
    return [Stretch(pieces, wanted) for pieces in stretches]
