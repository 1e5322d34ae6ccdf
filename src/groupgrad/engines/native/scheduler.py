"""Decides which sequences run: admission, preemption when memory is full, retention of finished sequences.

Requests first gather, then wait, then run in a slot of the cache until they finish or are preempted. A finished
sequence may be retained for a request that continues it: its keys and values are offloaded from its slot, and its
prompt stays stored. Retained keys and values are dropped when room is needed; a continuation then computes them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakValueDictionary

from groupgrad.engines.base import Request
from groupgrad.engines.native.kv_cache import CacheRoom, KVCache, OffloadedKV
from groupgrad.engines.native.sequence import EngineSequence, Group, PromptKey, RetainedPrefix, image_key
from groupgrad.memory.oom import is_out_of_memory

T = TypeVar("T")

HEADROOM = 32
"""Admission leaves room for this many more tokens of every sequence, or for half of its length if that is more."""

PADDING = 8192
"""Prompt slots have the longest prompt's length. Admission accepts this many tokens of padding, or as many as there are
prompt tokens if that is more."""

CLAIMED_FRACTION = 0.5
"""Fraction of the cache that offloaded tokens of waiting sequences may keep while other sequences run.

Beyond it, admission drops them: computing them again costs less than running few sequences at a time.
"""

GATHERING = 8
"""New requests wait up to this many steps for further ones, until there is one for every `GATHERING` running sequences.

An admission's prefill takes about as long as a step, however few sequences it has.
"""


@dataclass(slots=True, frozen=True)
class Admission:
    """Sequences that run from now on, in the last slots."""

    sequences: list[EngineSequence]
    new_groups: list[Group]
    """Groups whose prompts have been given a slot and must still be computed."""


class Scheduler:
    """Requests and sequences of a session, from their arrival to their release."""

    def __init__(self, cache: KVCache, max_sequences: int | None):
        self.cache, self._max_sequences = cache, max_sequences
        self.gathering: list[EngineSequence] = []
        """New requests that wait for others, to be admitted together."""
        self._num_gathering_steps = 0
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        """In the order of their slots in the cache's suffix buffer."""
        self.groups: list[Group] = []
        """Stored prompts, in the order of their slots."""
        self._groups_by_key: WeakValueDictionary[PromptKey, Group] = WeakValueDictionary()
        """Groups of all sequences and retained prefixes, which new requests join."""
        self._retained: dict[int, RetainedPrefix] = {}
        """Prefixes by the tickets of their sequences, in the order in which these finished."""
        self._slots_version = 0
        self._is_admission_due = True
        """False from an admission or a preemption until requests arrive, a sequence ends, or a prefix is released."""
        self._num_groups = self._num_admitted = 0
        self.num_waited = self.num_preempted = 0
        self.num_tried = 0
        """Sequences that the last admission let run at once."""

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when sequences or prompts change slots, or buffers their tensors."""
        return self._slots_version, *self.cache.version

    # ------------------------------------------------------------------------------------ arrival

    def add(self, ticket: int, request: Request) -> None:
        """Accepts a request. ValueError if the sequence it continues is not retained or is no prefix of its prompt."""
        if request.continues is not None and self._brings_new_images(request.continues, request):
            # Retained keys and values contain none of the new images, so the whole context is a new prompt.
            self.release(request.continues)
            request = replace(request, continues=None)
        if request.continues is None:
            group = self._group(request)
            group.num_fresh += 1
            sequence = EngineSequence(ticket, request, group)
        else:
            retained = self._claim(request.continues, request.prompt_ids)
            history_ids = request.prompt_ids[len(retained.group.prompt_ids) :]
            sequence = EngineSequence(ticket, request, retained.group, history_ids)
        self.gathering.append(sequence)

    def _group(self, request: Request) -> Group:
        """The group of the request's prompt, created if no sequence or retained prefix is in it."""
        key = tuple(request.prompt_ids), image_key(request.media)
        group = self._groups_by_key.get(key)
        if group is None:
            group = self._groups_by_key[key] = Group(request.prompt_ids, self._num_groups, media=request.media)
            self._num_groups += 1
        return group

    def _unclaimed(self, ticket: int) -> RetainedPrefix | None:
        retained = self._retained.get(ticket)
        return None if retained is None or retained.is_claimed else retained

    def _brings_new_images(self, ticket: int, request: Request) -> bool:
        """True if the request has other images than the retained prefix of `ticket`."""
        retained = self._unclaimed(ticket)
        return retained is not None and image_key(retained.group.media) != image_key(request.media)

    def _claim(self, ticket: int, prompt_ids: list[int]) -> RetainedPrefix:
        """Claims the retained prefix that a new request continues; no other request may continue it then."""
        retained = self._unclaimed(ticket)
        if retained is None:
            raise ValueError(
                f"continues={ticket}, but nothing is kept of such a request; a request is continued once, after it has "
                "ended and before it is released, and has keep=True"
            )
        expected = [*retained.group.prompt_ids, *retained.suffix_ids]
        if prompt_ids[: len(expected)] != expected:
            raise ValueError(
                f"continues={ticket}, but prompt_ids does not begin with that request's prompt and all its sampled "
                "tokens; leave out `continues`"
            )
        retained.is_claimed = True
        return retained

    # ------------------------------------------------------------------------------------ admission

    def admit(self) -> Admission:
        """Gives slots to the waiting sequences that fit. Does nothing if nothing has changed since the last call."""
        self._enqueue_arrivals()
        sequences: list[EngineSequence] = []
        if self._is_admission_due:
            sequences = self._take_fitting()
            self._is_admission_due = False
            self.num_waited += bool(self.waiting)
        self.num_tried = len(self.running) + len(sequences)
        if not sequences:
            return Admission([], [])
        try:
            return self._admit(sequences)
        except Exception:  # also of a device out of memory: the session tries again with fewer
            self.waiting.extendleft(s for s in reversed(sequences) if s not in self.running)
            raise

    def _admit(self, sequences: list[EngineSequence]) -> Admission:
        new_groups = _new_groups(sequences)
        is_reserved = self.cache.reserve(self._need(sequences).with_more_tokens(1), self._need())
        assert is_reserved, "only sequences that fit are admitted"
        for group in new_groups:
            group.slot = len(self.groups)
            self.groups.append(group)
        for sequence in sequences:
            sequence.group.ref_count += 1
        for sequence in sequences:
            self._run(sequence)
        self._slots_version += 1
        return Admission(sequences, new_groups)

    def _enqueue_arrivals(self) -> None:
        """Moves gathered requests to the queue, in which sequences that have tokens come before fresh ones."""
        arrived = self.gathering
        if not arrived:
            return
        self._num_gathering_steps += 1
        if GATHERING * len(arrived) < len(self.running) and self._num_gathering_steps <= GATHERING:
            return
        # Prompts of similar length next to each other need little padding; results do not depend on the order.
        fresh = sorted((s for s in arrived if s.is_fresh), key=lambda s: (-len(s.group.prompt_ids), s.group.number))
        self.waiting = deque(
            [
                *(s for s in self.waiting if not s.is_fresh),
                *(s for s in arrived if not s.is_fresh),
                *(s for s in self.waiting if s.is_fresh),
                *fresh,
            ]
        )
        self.gathering, self._num_gathering_steps = [], 0
        self._is_admission_due = True

    def _take_fitting(self) -> list[EngineSequence]:
        """Takes sequences off the queue while they fit, dropping retained keys and values for them."""
        admitted: list[EngineSequence] = []
        need = self._need(self.waiting)
        if (self._max_sequences is None or need.num_suffixes <= self._max_sequences) and self._fits(need):
            admitted, self.waiting = list(self.waiting), deque()
            return admitted
        need, new_groups = self._need(), set[int]()
        while self.waiting and need.num_suffixes != self._max_sequences:
            sequence = self.waiting[0]
            while not (is_room := self._fits(larger := _with_sequence(need, sequence, new_groups))):
                if not self._drop_for_admission([*admitted, sequence], need.num_suffixes):
                    break
                # A dropped prefix may have been the last user of a stored prompt.
                need, new_groups = self._need(admitted), {group.number for group in _new_groups(admitted)}
            # A sequence that runs alone needs no headroom.
            if not is_room and need.num_suffixes:
                break
            admitted.append(self.waiting.popleft())
            need = larger
            if sequence.group.slot < 0:
                new_groups.add(sequence.group.number)
        return admitted

    def _run(self, sequence: EngineSequence) -> None:
        """Appends an admitted sequence to the running ones and restores what is offloaded of it."""
        slot = len(self.running)
        self.running.append(sequence)
        self._num_admitted += 1
        sequence.admission, sequence.num_restored = self._num_admitted, 0
        retained = None if sequence.request.continues is None else self._retained.pop(sequence.request.continues, None)
        if retained is not None and retained.offloaded is not None:
            sequence.num_restored = retained.offloaded.num_tokens
            self.cache.restore(retained.offloaded, slot)
            self._drop(retained)

    def started(self, sequences: Collection[EngineSequence]) -> None:
        """Notes that fresh sequences have their first tokens; frees logits that no other fresh sequence needs."""
        for sequence in sequences:
            sequence.group.num_fresh -= 1
            if not sequence.group.num_fresh:
                sequence.group.first_logits = None

    # ------------------------------------------------------------------------------------ room

    def make_room(self) -> None:
        """Reserves room for one more token of each running sequence.

        If the bound forbids it, retained keys and values are dropped, then the latest admitted sequences preempted.
        """
        while not self.cache.reserve((need := self._need()).with_more_tokens(1), need):
            if not (self._drop_unclaimed() or self._drop_claimed()):
                self._preempt(max(self.running, key=lambda sequence: sequence.admission))

    def _preempt(self, sequence: EngineSequence) -> None:
        """Puts a running sequence back at the head of the queue with its tokens, whose keys and values it loses."""
        self._leave([sequence])
        self.waiting.appendleft(sequence)
        self.num_preempted += 1
        # Otherwise the next admission would give the freed slot back to the same sequence.
        self._is_admission_due = False

    def retreat(self, max_sequences: int, max_tokens: int) -> None:
        """Puts all running sequences back into the queue, drops all keys and values, and lowers both bounds."""
        for retained in self._retained.values():
            retained.offloaded = None
        for group in self.groups:
            group.slot, group.ref_count, group.first_logits = -1, 0, None
        self.cache.clear()
        self._max_sequences, self.cache.max_tokens = max_sequences, max_tokens
        self.num_preempted += len(self.running)
        queue = [*self.running, *self.waiting]
        self.waiting = deque([*(s for s in queue if not s.is_fresh), *(s for s in queue if s.is_fresh)])
        self.running, self.groups = [], []
        self._slots_version += 1
        self._is_admission_due = True

    def _need(self, admitted: Collection[EngineSequence] = ()) -> CacheRoom:
        """Room of the running and the admitted sequences."""
        need = _need([*self.running, *admitted], [*self.groups, *_new_groups(admitted)])
        return replace(need, num_kept=need.num_kept + len(self._retained))

    def _fits(self, need: CacheRoom) -> bool:
        """True if the padding of prompts is acceptable and the bound leaves headroom for every sequence."""
        if need.num_prompts * need.prompt_length > 2 * need.prompt_tokens + PADDING:
            return False
        length = need.suffix_length + max(HEADROOM, need.suffix_length // 2)
        return self.cache.fits(replace(need, suffix_length=min(length, need.max_suffix_length)))

    # ------------------------------------------------------------------------------------ retention

    def finish(self, sequences: Collection[EngineSequence]) -> None:
        """Removes finished sequences; a sequence whose request has `keep` becomes a retained prefix."""
        has_offloaded = any(sequence.request.keep for sequence in sequences) and self._retain(sequences)
        self._leave(sequences)
        if has_offloaded:
            # Offloaded tokens may take the room of the slots that are free now.
            need = self._need()
            is_reserved = self.cache.reserve(need.with_more_tokens(1), need)
            assert is_reserved, "offloaded tokens fit beside the remaining sequences"

    def _retain(self, sequences: Collection[EngineSequence]) -> bool:
        """Retains prefixes of the finished sequences with `keep`; True if keys and values were offloaded."""
        slots = {id(sequence): slot for slot, sequence in enumerate(self.running)}
        finished = {id(sequence) for sequence in sequences}
        others = [sequence for sequence in self.running if id(sequence) not in finished]
        need = _need(others, self.groups).with_more_tokens(1)
        has_offloaded = False
        for sequence in sequences:
            if not sequence.request.keep:
                continue
            retained = self._retained[sequence.ticket] = RetainedPrefix(sequence.group, sequence.suffix_ids)
            num_tokens = sequence.num_stored
            while not (is_room := self.cache.fits(need, num_tokens)) and self._drop_unclaimed():
                need = _need(others, self.groups).with_more_tokens(1)
            if is_room and (offloaded := self._offloaded(slots[id(sequence)], num_tokens)) is not None:
                retained.offloaded = offloaded
                retained.group.ref_count += 1
                has_offloaded = True
        return has_offloaded

    def _offloaded(self, slot: int, num_tokens: int) -> OffloadedKV | None:
        """The suffix in this slot, offloaded; None where the device has no memory for it."""
        try:
            return self.cache.offload(slot, num_tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def release(self, ticket: int) -> None:
        """Frees the retained prefix of a finished sequence, unless a request has claimed it."""
        retained = self._unclaimed(ticket)
        if retained is not None:
            del self._retained[ticket]
            self._drop(retained)
            self._is_admission_due = True

    def abort(self, tickets: Collection[int]) -> list[EngineSequence]:
        """Removes the sequences of these tickets, wherever they are, and the prefixes that they claimed."""
        running = [sequence for sequence in self.running if sequence.ticket in tickets]
        others = [sequence for sequence in [*self.gathering, *self.waiting] if sequence.ticket in tickets]
        self.gathering = [sequence for sequence in self.gathering if sequence.ticket not in tickets]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.ticket not in tickets)
        self.started([sequence for sequence in others if sequence.is_fresh])
        continued = {sequence.request.continues for sequence in others}
        for ticket in [ticket for ticket in self._retained if ticket in continued]:
            self._drop(self._retained.pop(ticket))
        self._leave(running)
        return [*running, *others]

    def _drop_for_admission(self, candidates: Collection[EngineSequence], num_others: int) -> bool:
        """Drops retained keys and values so that the last of `candidates` fits beside `num_others` sequences.

        False if none may be dropped. Keys and values that the candidates will restore are dropped only if no other
        sequence runs.
        """
        if self._drop_unclaimed():
            return True
        if num_others and self.cache.offloaded_tokens <= CLAIMED_FRACTION * self.cache.max_tokens:
            return False
        continued = [s.request.continues for s in candidates if s.request.continues is not None]
        return self._drop_claimed(spared=continued) or (not num_others and self._drop_claimed())

    def _drop_unclaimed(self) -> bool:
        """Drops the oldest keys and values that no request has claimed; False if there are none."""
        return self._drop_first(r for r in self._retained.values() if not r.is_claimed)

    def _drop_claimed(self, spared: Collection[int] = ()) -> bool:
        """Drops the newest claimed keys and values, which are needed last; False if only `spared` tickets have any."""
        newest = reversed(self._retained.items())
        return self._drop_first(r for ticket, r in newest if r.is_claimed and ticket not in spared)

    def _drop_first(self, prefixes: Iterable[RetainedPrefix]) -> bool:
        retained = next((retained for retained in prefixes if retained.offloaded is not None), None)
        if retained is not None:
            self._drop(retained)
        return retained is not None

    def _drop(self, retained: RetainedPrefix) -> None:
        """Frees the offloaded keys and values of a prefix, if any."""
        if retained.offloaded is not None:
            self.cache.drop(retained.offloaded)
            retained.offloaded = None
            retained.group.ref_count -= 1
            self._free_unused_prompts()

    # ------------------------------------------------------------------------------------ slots

    def _leave(self, sequences: Collection[EngineSequence]) -> None:
        """Frees the slots of running sequences and of prompts that nothing needs any more."""
        leaving = {id(sequence) for sequence in sequences}
        for sequence in sequences:
            sequence.group.ref_count -= 1
        moves = compact(self.running, [id(sequence) in leaving for sequence in self.running])
        if moves:
            self.cache.suffixes.move(moves, max(self.running[target].num_stored for _, target in moves))
        self._free_unused_prompts()
        self._slots_version += 1
        self._is_admission_due = True

    def _free_unused_prompts(self) -> None:
        """Frees the slots of prompts without running sequences and offloaded prefixes."""
        unused = [group for group in self.groups if not group.ref_count]
        if not unused:
            return
        moves = compact(self.groups, [not group.ref_count for group in self.groups])
        if moves:
            self.cache.prompts.move(moves, max(len(self.groups[target].prompt_ids) for _, target in moves))
        for group in unused:
            group.slot, group.first_logits = -1, None
        for slot, group in enumerate(self.groups):
            group.slot = slot
        self._slots_version += 1


def _new_groups(sequences: Collection[EngineSequence]) -> list[Group]:
    """The distinct groups of sequences whose prompts are not stored."""
    return list({id(s.group): s.group for s in sequences if s.group.slot < 0}.values())


def _need(sequences: Collection[EngineSequence], groups: Collection[Group]) -> CacheRoom:
    prompt_lengths = [len(group.prompt_ids) for group in groups]
    # Called in each step: `num_stored` and `max_length` without their calls.
    longest = max([len(s.history_ids) + len(s.sampled_ids) for s in sequences], default=1)
    most = max([len(s.history_ids) + s.request.max_new_tokens for s in sequences], default=0)
    return CacheRoom(
        num_suffixes=len(sequences),
        suffix_length=max(0, longest - 1),
        num_prompts=len(groups),
        prompt_length=max(prompt_lengths, default=0),
        max_suffix_length=most,
        prompt_tokens=sum(prompt_lengths),
        num_kept=sum(s.request.keep for s in sequences),
    )


def _with_sequence(need: CacheRoom, sequence: EngineSequence, new_groups: Collection[int]) -> CacheRoom:
    """`need` with one sequence more. `new_groups` are the numbers of groups in it whose prompts are not stored yet."""
    is_new = sequence.group.slot < 0 and sequence.group.number not in new_groups
    prompt_length = len(sequence.group.prompt_ids) if is_new else 0
    return CacheRoom(
        num_suffixes=need.num_suffixes + 1,
        suffix_length=max(need.suffix_length, sequence.num_stored),
        num_prompts=need.num_prompts + is_new,
        prompt_length=max(need.prompt_length, prompt_length),
        max_suffix_length=max(need.max_suffix_length, sequence.max_length),
        prompt_tokens=need.prompt_tokens + prompt_length,
    )


def compact(items: list[T], is_removed: list[bool]) -> list[tuple[int, int]]:
    """Removes items and moves the last ones into the gaps; returns the moves (from, to), each item at most once."""
    num_left = is_removed.count(False)
    gaps = [slot for slot in range(num_left) if is_removed[slot]]
    movers = [slot for slot in range(num_left, len(items)) if not is_removed[slot]]
    moves = list(zip(movers, gaps))
    for source, target in moves:
        items[target] = items[source]
    del items[num_left:]
    return moves
