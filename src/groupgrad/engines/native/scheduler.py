"""Which rows are computed: those that wait, those under way, who gives way when memory is full, and what is kept.

A row that ends may be kept for another that continues it: its own keys and values are parked outside its slot, and its
prompt stays stored for their sake. When room is needed parked ones go first; a row whose parked ones are gone is
computed anew when it is continued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from groupgrad.engines.base import Request
from groupgrad.engines.native.kv_cache import KVCache, Need, OffloadedKV
from groupgrad.modeling.vlm import PromptImages
from groupgrad.types import Media

HEADROOM = 32
"""A row enters only if all rows could still grow by this many tokens, or by half if that is more."""

PADDING = 8192
"""Prompts are stored side by side at the longest one's length; this many tokens of padding are always accepted, beyond
that as many as there are tokens."""

AWAITED_SHARE = 0.5
"""Share of the bound that is left to what waiting rows have parked while other rows could enter in its place: computing
it anew costs less than computing few rows at a time."""

GATHERING = 8
"""What rows bring is computed in a pass of its own, which costs about a step however few they are: they wait for each
other for this many steps, or until there is one for so many active rows."""


@dataclass(slots=True, eq=False)
class Group:
    """A distinct prompt and the rows that continue it."""

    ids: list[int]
    number: int
    """Groups are numbered as they come."""
    slot: int = -1
    """In the prompt store; -1: not stored."""
    num_holders: int = 0
    """Active rows and parked ones, for whose sake it is stored."""
    num_users: int = 0
    """Rows that wait, are active or are kept, parked or not."""
    num_fresh: int = 0
    """Rows that begin right behind it and have no token yet."""
    first_logits: torch.Tensor | None = None
    """(V,) logits of what follows the prompt, while it is stored and fresh rows are left."""
    media: Media | None = None
    prompt_images: PromptImages | None = None
    """How the model sees its images; found when it is first computed."""

    @property
    def identity(self) -> tuple[tuple[int, ...], str]:
        """Requests with equal ones continue the same prompt."""
        return _identity(self.ids, self.media)

    @property
    def shift(self) -> int:
        """Added to the places of the tokens behind it to get their positions."""
        return 0 if self.prompt_images is None else self.prompt_images.shift


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """What an ended row leaves for the one that continues it."""

    group: Group
    own_ids: list[int]
    """All tokens behind the group's prompt, the last of which was never computed."""
    parked: OffloadedKV | None = None
    """None: to be computed anew."""
    is_awaited: bool = False
    """The row that continues it is waiting."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion under way."""

    ticket: int
    request: Request
    group: Group
    given: list[int] = field(default_factory=list)
    """Tokens behind the group's prompt that the request came with."""
    kept: RetainedPrefix | None = None
    """What it continues, while it waits."""
    ids: list[int] = field(default_factory=list)
    """Tokens chosen so far. The last one's keys and values are not stored yet."""
    index: int = -1
    """In the sampler's tables; -1: in none yet."""
    reason: Literal["eos", "length"] | None = None
    """Why it ended."""
    age: int = 0
    """Rows are numbered as they enter."""
    num_restored: int = 0
    """Own tokens that were stored already when it entered."""

    @property
    def is_fresh(self) -> bool:
        """True if it begins right behind the group's prompt and has no token yet."""
        return not self.given and not self.ids

    @property
    def num_stored(self) -> int:
        """Own tokens whose keys and values are stored while the row is active."""
        return len(self.given) + max(0, len(self.ids) - 1)

    @property
    def longest(self) -> int:
        """Own tokens that it may come to have."""
        return len(self.given) + self.request.max_new_tokens

    @property
    def own_ids(self) -> list[int]:
        """All tokens behind the group's prompt."""
        return [*self.given, *self.ids]


@dataclass(slots=True, frozen=True)
class _Crowd:
    """What a number of rows would take up together."""

    rows: int
    length: int
    longest: int
    groups: int
    prompt_length: int
    prompt_tokens: int
    new: frozenset[int]
    """Numbers of the groups that are not stored."""

    def beside(self, row: Sequence) -> _Crowd:
        """The same with one row more."""
        crowd = replace(
            self,
            rows=self.rows + 1,
            length=max(self.length, row.num_stored),
            longest=max(self.longest, row.longest),
        )
        if row.group.slot >= 0 or row.group.number in self.new:
            return crowd
        size = len(row.group.ids)
        return replace(
            crowd,
            groups=self.groups + 1,
            prompt_length=max(self.prompt_length, size),
            prompt_tokens=self.prompt_tokens + size,
            new=self.new | {row.group.number},
        )


class Scheduler:
    """Rows in the order in which they wait, the active ones in the order of their slots, and what ended ones left."""

    def __init__(self, store: KVCache, max_rows: int | None):
        self.store, self._max_rows = store, max_rows
        self.waiting: deque[Sequence] = deque()
        self._arrived: list[Sequence] = []
        self._num_gathering = 0
        """Steps that those who arrived have waited for others."""
        self.active: list[Sequence] = []
        self.groups: list[Group] = []
        """Those that are stored, in the order of their slots."""
        self.version = 0
        """Changes when the slots of rows or prompts do."""
        self._joinable: dict[tuple[tuple[int, ...], str], Group] = {}
        self._kept: dict[int, RetainedPrefix] = {}
        self._parked: dict[int, RetainedPrefix] = {}
        """By the tickets of the rows that ended, in that order."""
        self._num_groups = self._num_entered = 0
        self.num_waited = self.num_preempted = 0
        self._may_enter = True

    @property
    def has_arrived(self) -> bool:
        """True if requests wait for others to come, so that they enter together."""
        return bool(self._arrived)

    # ------------------------------------------------------------------------------------ requests come

    def add(self, ticket: int, request: Request) -> None:
        """A request waits. ValueError if what it continues is not kept or is no beginning of it.

        One that brings new images is computed as a whole: what was kept holds none of them.
        """
        if request.continues is not None and self._has_new_images(request):
            self.release(request.continues)
            request = replace(request, continues=None)
        if request.continues is None:
            key = _identity(request.prompt_ids, request.media)
            group = self._joinable.get(key)
            if group is None:
                group = self._joinable[key] = Group(request.prompt_ids, self._num_groups, media=request.media)
                self._num_groups += 1
            group.num_users += 1
            group.num_fresh += 1
            row = Sequence(ticket, request, group)
        else:
            kept = self._take(request.continues, request.prompt_ids)
            given = request.prompt_ids[len(kept.group.ids) :]
            row = Sequence(ticket, request, kept.group, given, kept)
        self._arrived.append(row)

    def _has_new_images(self, request: Request) -> bool:
        kept = None if request.continues is None else self._kept.get(request.continues)
        return kept is not None and kept.group.identity[1] != _identity([], request.media)[1]

    def _take(self, ticket: int, prompt_ids: list[int]) -> RetainedPrefix:
        kept = self._kept.get(ticket)
        if kept is None:
            is_open = any(row.ticket == ticket for row in [*self.active, *self.waiting, *self._arrived])
            raise ValueError(
                f"continues={ticket}, but "
                + ("that request has not ended" if is_open else "nothing is kept of such a request")
                + "; a request is continued once, after it has ended and before it is released, and has keep=True"
            )
        expected = [*kept.group.ids, *kept.own_ids]
        if prompt_ids[: len(expected)] != expected:
            pairs = zip([*prompt_ids, None], expected)
            place = next(i for i, (found, wanted) in enumerate(pairs) if found != wanted)
            found = f"token {prompt_ids[place]}" if place < len(prompt_ids) else "the end"
            raise ValueError(
                f"continues={ticket}, but prompt_ids has {found} at position {place} where that request has token "
                f"{expected[place]}; it must begin with that request's prompt and all that was sampled for it, or "
                "leave out `continues`"
            )
        del self._kept[ticket]
        kept.is_awaited = True
        return kept

    def release(self, ticket: int) -> None:
        """Nothing will continue this row; what it left goes."""
        kept = self._kept.pop(ticket, None)
        if kept is None:
            return
        self._forget(ticket)
        self._leave_group(kept.group)
        self._may_enter = True

    # ------------------------------------------------------------------------------------ rows enter

    def admit(self) -> list[Sequence]:
        """Waiting rows for which there is room now, taken off the queue; looks again only after something changed."""
        self._queue()
        entering: list[Sequence] = []
        if not self._may_enter:
            return entering
        crowd = self._crowd(entering)
        while self.waiting and crowd.rows != self._max_rows:
            row = self.waiting[0]
            while not (is_room := self._fits(more := crowd.beside(row))):
                if not self._drop_for([*entering, row], crowd.rows):
                    break
                crowd = self._crowd(entering)
            if not is_room and crowd.rows:
                break
            crowd = more
            entering.append(self.waiting.popleft())
        self._may_enter = False
        self.num_waited += bool(self.waiting)
        return entering

    def _drop_for(self, coming: list[Sequence], num_rows: int) -> bool:
        """Make some room for rows to enter beside `num_rows` others; False if nothing parked may go for them."""
        if num_rows and self.store.parked_tokens <= AWAITED_SHARE * self.store.max_tokens:
            return self.drop_parked()
        spared = [row.request.continues for row in coming if row.request.continues is not None]
        if self.drop_parked(also_awaited=True, spared=spared):
            return True
        return not num_rows and self.drop_parked(also_awaited=True)

    def _queue(self) -> None:
        """Put those that came last into the line: rows that go on before those that begin."""
        self._num_gathering += bool(self._arrived)
        if GATHERING * len(self._arrived) < len(self.active) and self._num_gathering <= GATHERING:
            return
        self._num_gathering = 0
        self._may_enter |= bool(self._arrived)
        begun = [row for row in self.waiting if not row.is_fresh]
        fresh = [row for row in self.waiting if row.is_fresh]
        # Prompts of like length beside each other waste no memory; the results do not depend on the order.
        coming = sorted(
            (row for row in self._arrived if row.is_fresh), key=lambda row: (-len(row.group.ids), row.group.number)
        )
        self.waiting = deque([*begun, *(row for row in self._arrived if not row.is_fresh), *fresh, *coming])
        self._arrived = []

    def _crowd(self, entering: list[Sequence]) -> _Crowd:
        rows, lengths = self.active, [len(group.ids) for group in self.groups]
        crowd = _Crowd(
            rows=len(rows),
            length=max((row.num_stored for row in rows), default=0),
            longest=max((row.longest for row in rows), default=0),
            groups=len(lengths),
            prompt_length=max(lengths, default=0),
            prompt_tokens=sum(lengths),
            new=frozenset(),
        )
        for row in entering:
            crowd = crowd.beside(row)
        return crowd

    def _fits(self, crowd: _Crowd) -> bool:
        if crowd.groups * crowd.prompt_length > 2 * crowd.prompt_tokens + PADDING:
            return False
        room = min(crowd.length + max(HEADROOM, crowd.length // 2), crowd.longest)
        return self.store.fits(crowd.rows, room, crowd.groups, crowd.prompt_length)

    def enter(self, rows: list[Sequence], groups: list[Group]) -> None:
        """The rows are active from now on, in the next slots, and `groups` are those stored; room has been reserved.

        What rows had parked is back in their slots.
        """
        self.groups = list(groups)
        for slot, group in enumerate(groups):
            group.slot = slot
        first_slot = len(self.active)
        for row in rows:
            row.group.num_holders += 1
            self._num_entered += 1
            row.age, row.num_restored = self._num_entered, 0
            self.active.append(row)
        for slot, row in enumerate(rows, first_slot):
            if row.kept is not None and row.kept.parked is not None and row.request.continues is not None:
                row.num_restored = row.kept.parked.num_tokens
                self.store.restore(row.kept.parked, slot)
                self._forget(row.request.continues)
            row.kept = None
        self.version += 1

    def begun(self, rows: list[Sequence]) -> None:
        """First tokens of fresh rows have been chosen; logits of prompts that no other row needs go."""
        for row in rows:
            row.group.num_fresh -= 1
            if not row.group.num_fresh:
                row.group.first_logits = None

    def need(self, extra: int = 0, entering: Iterable[Sequence] = (), groups: list[Group] | None = None) -> Need:
        """What the active and the entering rows take up, with `extra` more tokens each."""
        return _need([*self.active, *entering], self.groups if groups is None else groups, extra)

    # ------------------------------------------------------------------------------------ rows go

    def youngest(self) -> Sequence:
        """The active row that entered last."""
        return max(self.active, key=lambda row: row.age)

    def wait(self, row: Sequence) -> None:
        """A row that has left waits again, before all others, and keeps its tokens."""
        self.num_preempted += 1
        self.waiting.appendleft(row)
        self._may_enter = False

    def end(self, rows: list[Sequence]) -> None:
        """Take rows that have ended out of the active ones; of those to be kept, what they stored is parked."""
        ending = {id(row) for row in rows}
        slots = {id(row): slot for slot, row in enumerate(self.active) if id(row) in ending}
        left = [row for row in self.active if id(row) not in ending]
        for row in rows:
            if not row.request.keep:
                self._leave_group(row.group)
                continue
            kept = self._kept[row.ticket] = RetainedPrefix(row.group, row.own_ids)
            if self._finds_room(row.num_stored, left):
                kept.parked = self.store.park(slots[id(row)], row.num_stored)
                row.group.num_holders += 1
                self._parked[row.ticket] = kept
        self.leave(rows)
        if any(row.ticket in self._parked for row in rows):
            # The slots that are free now make up for what was parked, if the bound asks for it.
            is_room = self.store.reserve(self.need(1), self.need())
            assert is_room, "what is parked fits beside the rows that are left"

    def _finds_room(self, num_tokens: int, left: list[Sequence]) -> bool:
        """True if so many tokens can be parked beside the rows that are left; what was parked first goes for it."""
        while True:
            need = _need(left, self.groups, 1)
            if self.store.fits(need.rows, need.length, need.prompts, need.prompt_length, parked=num_tokens):
                return True
            if not self.drop_parked():
                return False

    def drop_parked(self, *, also_awaited: bool = False, spared: Collection[int] = ()) -> bool:
        """Forget what was parked first, to be computed anew; False if there is none but what is `spared`.

        What waiting rows are about to take back stays, unless `also_awaited`, and then what was parked last goes first:
        it is needed last.
        """
        tickets = [ticket for ticket, kept in self._parked.items() if not kept.is_awaited]
        if also_awaited and not tickets:
            tickets = [ticket for ticket in reversed(self._parked) if ticket not in spared]
        if tickets:
            self._forget(tickets[0])
        return bool(tickets)

    def leave(self, gone: list[Sequence]) -> None:
        """Take rows out of the active ones, and groups without rows out of the store; the last ones fill the gaps."""
        leaving = {id(row) for row in gone}
        for row in gone:
            row.group.num_holders -= 1
        for source, target in _compact(self.active, [id(row) in leaving for row in self.active]):
            self.store.own.move(source, target, self.active[target].num_stored)
        self._sweep()
        self.version += 1
        self._may_enter = True

    def _forget(self, ticket: int) -> None:
        """What a row has parked goes, if anything."""
        kept = self._parked.pop(ticket, None)
        if kept is None or kept.parked is None:
            return
        self.store.drop(kept.parked)
        kept.parked = None
        kept.group.num_holders -= 1
        self._sweep()

    def _sweep(self) -> None:
        """Take groups that nothing holds out of the store."""
        left = [group for group in self.groups if group.num_holders == 0]
        if not left:
            return
        for source, target in _compact(self.groups, [group.num_holders == 0 for group in self.groups]):
            self.store.prompts.move(source, target, len(self.groups[target].ids))
        for group in left:
            group.slot, group.first_logits = -1, None
        for slot, group in enumerate(self.groups):
            group.slot = slot
        self.version += 1

    def _leave_group(self, group: Group) -> None:
        """A row of the group is no more; when it was the last, nobody joins the group again."""
        group.num_users -= 1
        if not group.num_users:
            self._joinable.pop(group.identity, None)


def _identity(ids: list[int], media: Media | None) -> tuple[tuple[int, ...], str]:
    return tuple(ids), "" if media is None else media.key


def _need(rows: list[Sequence], groups: list[Group], extra: int) -> Need:
    return Need(
        rows=len(rows),
        length=max(row.num_stored for row in rows) + extra if rows else 0,
        prompts=len(groups),
        prompt_length=max((len(group.ids) for group in groups), default=0),
        longest=max((row.longest for row in rows), default=0),
    )


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
