"""Which rows are computed: those that wait, those under way, and who gives way when memory is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad.engines.base import Request
from groupgrad.engines.native.store import Need, Store

HEADROOM = 32
"""A row enters only if all rows could still grow by this many tokens, or by half if that is more."""

PADDING = 8192
"""Prompts are stored side by side at the longest one's length; this many tokens of padding are always accepted, beyond
that as many as there are tokens."""


@dataclass(slots=True, eq=False)
class Group:
    """A distinct prompt and the rows that continue it."""

    ids: list[int]
    slot: int = -1
    """In the prompt store; -1: not stored."""
    num_active: int = 0
    num_fresh: int = 0
    """Rows without a token."""
    first_logits: torch.Tensor | None = None
    """(V,) logits of what follows the prompt, while it is stored and rows without a token are left."""


@dataclass(slots=True, eq=False)
class Row:
    """One completion under way."""

    index: int
    """Of its request."""
    group: Group
    budget: int
    ids: list[int] = field(default_factory=list)
    """Tokens chosen so far. The last one's keys and values are not stored yet."""
    is_done: bool = False

    @property
    def num_stored(self) -> int:
        """Own tokens whose keys and values are stored while the row is active."""
        return max(0, len(self.ids) - 1)


class Schedule:
    """Rows in the order in which they wait, and the active ones in the order of their slots."""

    def __init__(self, requests: Sequence[Request], store: Store, max_rows: int | None):
        self.store, self._max_rows = store, max_rows
        groups: dict[tuple[int, ...], Group] = {}
        rows = []
        for index, request in enumerate(requests):
            group = groups.setdefault(tuple(request.prompt_ids), Group(request.prompt_ids))
            group.num_fresh += 1
            rows.append(Row(index, group, request.max_new_tokens))
        # Prompts of like length beside each other waste no memory; the results do not depend on the order.
        order = {id(group): (-len(group.ids), number) for number, group in enumerate(groups.values())}
        self.waiting = deque(sorted(rows, key=lambda row: order[id(row.group)]))
        self.active: list[Row] = []
        self.groups: list[Group] = []
        """Those with active rows, in the order of their slots."""
        self._ages: dict[int, int] = {}
        self._num_entered = 0
        self.num_waited = self.num_preempted = 0
        self._may_enter = True

    def admit(self) -> list[Row]:
        """Waiting rows for which there is room now, taken off the queue; looks again only after rows have left."""
        entering: list[Row] = []
        if not self._may_enter:
            return entering
        groups = list(self.groups)
        longest = max((row.num_stored for row in self.active), default=0)
        while self.waiting and len(self.active) + len(entering) != self._max_rows:
            row = self.waiting[0]
            if row.group.num_active == 0 and not any(row.group is group for group in groups[len(self.groups) :]):
                beside = [*groups, row.group]
            else:
                beside = groups
            longest_here = max(longest, row.num_stored)
            if not self._fits(beside, [*self.active, *entering, row], longest_here):
                break
            longest, groups = longest_here, beside
            entering.append(self.waiting.popleft())
        self._may_enter = False
        self.num_waited += bool(self.waiting)
        return entering

    def _fits(self, groups: list[Group], rows: list[Row], longest: int) -> bool:
        lengths = [len(group.ids) for group in groups]
        if len(groups) * max(lengths) > 2 * sum(lengths) + PADDING:
            return False
        room = min(longest + max(HEADROOM, longest // 2), max(row.budget for row in rows))
        return self.store.fits(len(rows), room, len(groups), max(lengths)) or len(rows) == 1

    def enter(self, rows: Sequence[Row], groups: Sequence[Group]) -> None:
        """The rows are active from now on, in the next slots, and `groups` are those stored."""
        self.groups = list(groups)
        for slot, group in enumerate(groups):
            group.slot = slot
        for row in rows:
            row.group.num_active += 1
            self._num_entered += 1
            self._ages[row.index] = self._num_entered
            self.active.append(row)

    def wait(self, row: Row) -> None:
        """A row that has left waits again, before all others, and keeps its tokens."""
        self.num_preempted += 1
        self.waiting.appendleft(row)
        self._may_enter = False

    def forget_logits(self, group: Group) -> None:
        """First tokens of `group` have been chosen; its logits are kept if rows are left that need them."""
        group.num_fresh = sum(not row.ids for row in self.waiting if row.group is group)
        if not group.num_fresh:
            group.first_logits = None

    def need(self, extra: int = 0, entering: Sequence[Row] = (), groups: Sequence[Group] | None = None) -> Need:
        """What the active and the entering rows take up, with `extra` more tokens each."""
        rows = [*self.active, *entering]
        groups = self.groups if groups is None else groups
        return Need(
            rows=len(rows),
            length=max((row.num_stored for row in rows), default=0) + extra,
            prompts=len(groups),
            prompt_length=max((len(group.ids) for group in groups), default=0),
            longest=max((row.budget for row in rows), default=0),
        )

    def youngest(self) -> Row:
        """The active row that entered last."""
        return max(self.active, key=lambda row: self._ages[row.index])

    def leave(self, gone: Sequence[Row]) -> None:
        """Take rows out of the active ones, and groups without rows out of the store; the last ones fill the gaps."""
        leaving = {id(row) for row in gone}
        for row in gone:
            row.group.num_active -= 1
        for source, target in _compact(self.active, [id(row) in leaving for row in self.active]):
            self.store.own.move(source, target, self.active[target].num_stored)
        left = [group for group in self.groups if group.num_active == 0]
        for source, target in _compact(self.groups, [group.num_active == 0 for group in self.groups]):
            self.store.prompts.move(source, target, len(self.groups[target].ids))
        for group in left:
            group.slot, group.first_logits = -1, None
        for slot, group in enumerate(self.groups):
            group.slot = slot
        self._may_enter = True


def _compact(items: list[Any], gone: list[bool]) -> list[tuple[int, int]]:
    """Remove the items that are gone and move the last ones into the gaps; the moves (from, to), each item once."""
    num_left = gone.count(False)
    gaps = [slot for slot in range(num_left) if gone[slot]]
    movers = [slot for slot in range(num_left, len(items)) if not gone[slot]]
    moves = list(zip(movers, gaps))
    for source, target in moves:
        items[target] = items[source]
    del items[num_left:]
    return moves
