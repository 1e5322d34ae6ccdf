"""Runs the recurrent layers of sampling passes, which read their states from slots of the cache and write them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch

from groupgrad.engines.native.kv_cache import KVBuffer, StateShape
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.recurrence import Recurrence, Zeros, inputs_at


class ProbeRecurrence(Recurrence):
    """Records the states of a model's recurrent layers, for one token."""

    def __init__(self) -> None:
        super().__init__([TokenSpan(0, 1)])
        self.states: list[StateShape] = []
        """In the order in which a pass computes them."""

    def begin_pass(self) -> None:
        """Drops the states that an earlier pass recorded."""
        self.states = []

    def initial_states(self, zeros: Zeros) -> None:
        """Records the state of a layer, which begins with zeros."""
        self._record(zeros(1)[0])

    def inputs_before(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """Zeros, as the inputs before a convolution's; its state is recorded: the last `width` - 1 inputs of a row."""
        self._record(values.new_zeros(len(values), width - 1))
        return super().inputs_before(values, width)

    def _record(self, state: torch.Tensor) -> None:
        self.states.append(StateShape(tuple(state.shape), state.dtype, state.device))


@dataclass(slots=True, frozen=True)
class StateSource:
    """Slots whose states some runs of tokens begin with."""

    runs: list[int]
    buffer: KVBuffer
    slots: list[int]


class SlotRecurrence(Recurrence):
    """Runs of tokens, which are the flat tokens in this order; each writes its final states into a slot of `buffer`.

    A run that is in no source begins with zeros.
    """

    def __init__(self, lengths: Sequence[int], buffer: KVBuffer, slots: list[int], sources: Sequence[StateSource]):
        ends = accumulate(lengths)
        super().__init__([TokenSpan(end - length, length) for end, length in zip(ends, lengths)])
        self._buffer, self._slots, self._sources = buffer, slots, sources
        self._continuing = self._left = list(range(len(slots)))
        # The rows of a decode step have the first slots, one after the other, and keep their own states.
        in_place = slots == list(range(len(slots)))
        is_decoded = in_place and [(s.buffer, s.slots) for s in sources] == [(buffer, slots)]
        self._is_in_place = is_decoded and set(lengths) == {1}
        self._is_trial = False
        self._num_computed = 0
        self._ends: dict[tuple[int, torch.device], torch.Tensor] = {}

    @property
    def is_step(self) -> bool:
        """True in a decode step."""
        return self._is_in_place

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Makes decode steps inside the context leave the stored states unchanged."""
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False

    def states_in_place(self) -> torch.Tensor:
        """(n, ...) states of the next layer, or a copy in a trial."""
        self._num_computed += 1
        states = self._buffer.states[self._num_computed - 1][: len(self._slots)]
        return states.clone() if self._is_trial else states

    def begin_pass(self) -> None:
        """The next layer is the first one."""
        self._num_computed = 0

    def initial_states(self, zeros: Zeros) -> torch.Tensor:
        """(n, ...) states that the runs begin with in the next layer."""
        initial, self._write = self._next_states()
        return initial

    def keep_states(self, finals: torch.Tensor) -> None:
        """Writes the final states of the runs."""
        self._write(torch.arange(len(finals), device=finals.device), finals)

    def inputs_before(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """(D, n * (width - 1)) stored inputs of a convolution before the runs; stores the runs' last inputs instead."""
        initial, write = self._next_states()
        before = initial.to(values.dtype).transpose(0, 1).flatten(1).clone()  # the states are written below
        last = self._last_places(width - 1, values.device)
        write(torch.arange(len(last), device=values.device), inputs_at(values, before, last).transpose(0, 1))
        return before

    def _places_before(self, number: int, span: TokenSpan, count: int) -> list[int]:
        first = self._num_tokens + number * count
        return list(range(first, first + count))

    def _last_places(self, count: int, device: torch.device) -> torch.Tensor:
        """(n, count) places of the last inputs of each run, numbered as in `heads`."""
        if (count, device) not in self._ends:
            rows = []
            for number, span in enumerate(self._spans):
                tokens_of_run = range(span.start, span.start + span.length)
                rows.append([*self._places_before(number, span, count), *tokens_of_run][-count:])
            self._ends[count, device] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._ends[count, device]

    def _next_states(self) -> tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor], None]]:
        """(n, ...) initial states of the runs in the next layer, and a function that stores final states of runs."""
        index = self._num_computed
        self._num_computed += 1
        target = self._buffer.states[index]
        slots = torch.tensor(self._slots, device=target.device)
        initial = target.new_zeros(len(slots), *target.shape[1:])
        for source in self._sources:
            initial[source.runs] = source.buffer.states[index][source.slots]

        def write(runs: torch.Tensor, states: torch.Tensor) -> None:
            target[slots[runs.to(slots.device)]] = states.to(target.dtype)

        return initial, write
