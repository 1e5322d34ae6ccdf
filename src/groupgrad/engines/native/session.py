"""Sampling under way: prompts are computed once, rows come and go, each step adds a token."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from groupgrad.engines.base import Request, Sample
from groupgrad.engines.native.attention_plans import DecodeBatch, Place, PrefillPlan, Segment
from groupgrad.engines.native.logits import last_logits
from groupgrad.engines.native.runner import DecodeRunner, EagerStep, RecordedStep
from groupgrad.engines.native.sampler import Sampler
from groupgrad.engines.native.scheduler import Group, Scheduler, Sequence
from groupgrad.engines.stop_strings import StopStrings
from groupgrad.modeling.vlm import ImageSegment, PromptImages, flat_image_inputs, prompt_images

PREFILL_TOKENS = 8192
"""Tokens of prompts that go through the model at once, unless a single prompt has more."""

FIRST_ROWS = 64
"""Rows whose first tokens are chosen at once; the logits of their prompts are copied for each."""

RUN_SECONDS = 0.05
"""For about so long steps are made without a look in between at who comes or goes: a small model's step takes less than
that."""


@dataclass(slots=True)
class Statistics:
    """What happened in a session."""

    num_steps: int = 0
    num_decoded: int = 0
    """Tokens that went through the model one by one."""
    num_prefilled: int = 0
    """Tokens of prompts, of what came between turns, and of rows that had to be computed anew."""
    num_waited: int = 0
    """Times that rows had to wait for others to finish."""
    num_preempted: int = 0
    """Rows that gave way to others, to go on later."""
    num_restored: int = 0
    """Tokens of earlier turns that were stored still when their rows were continued."""
    peak_bytes: int = 0
    """Of keys and values, those kept between turns included."""


class NativeSession:
    """Requests under way in the native engine; see `engines.base.Session`.

    `end_ids` and `stops` end a row. `may_stretch` lets the memory bound grow for a row that could never fit.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        schedule: Scheduler,
        steps: DecodeRunner,
        *,
        end_ids: frozenset[int],
        stops: StopStrings,
        may_stretch: bool,
        statistics: Statistics,
    ):
        self._model, self._sampler, self._schedule, self._steps = model, sampler, schedule, steps
        self._store, self._device = schedule.store, sampler.device
        self._stops, self._end_ids = stops, end_ids
        self._end_tensor = self._tensor(sorted(end_ids))
        self._step_seconds = RUN_SECONDS
        self._may_stretch, self._statistics = may_stretch, statistics
        self._active: _Active | None = None
        self._ended: list[tuple[int, Sample]] = []
        self._num_submitted = self._num_open = 0
        self._is_closed = False

    # ------------------------------------------------------------------------------------ what callers do

    def submit(self, request: Request) -> int:
        """The ticket of a request that is sampled from now on.

        ValueError for a request that leaves nothing to sample, that can never fit into the memory bound, or whose
        `continues` names nothing that is kept or something that it does not begin with.
        """
        self._check_open()
        self.check([request])
        ticket = self._num_submitted
        self._schedule.add(ticket, request)
        self._num_submitted += 1
        self._num_open += 1
        return ticket

    @torch.no_grad()
    def advance(self) -> list[tuple[int, Sample]]:
        """Let rows enter and compute a token for each, or several in about `RUN_SECONDS`; those that ended by it, in
        ticket order.

        ValueError if log-probs are no finite numbers.
        """
        self._check_open()
        schedule, statistics = self._schedule, self._statistics
        if entering := schedule.admit():
            self._enter(entering)
        if schedule.active:
            self._make_room()
            self._step()
        statistics.peak_bytes = self._store.peak_tokens * self._store.bytes_per_token
        statistics.num_waited, statistics.num_preempted = schedule.num_waited, schedule.num_preempted
        ended, self._ended = sorted(self._ended, key=lambda pair: pair[0]), []
        self._num_open -= len(ended)
        _check_numbers([sample for _, sample in ended])
        return ended

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return self._num_open

    def release(self, ticket: int) -> None:
        """Forget what was kept of an ended request; nothing happens if nothing is."""
        self._schedule.release(ticket)

    def check(self, requests: Iterable[Request]) -> None:
        """ValueError if one of the requests could not be sampled whatever the others are."""
        for request in requests:
            if not request.prompt_ids:
                raise ValueError("a prompt without tokens gives nothing to continue; put at least a BOS token into it")
            if request.max_new_tokens < 1:
                raise ValueError(
                    f"max_new_tokens={request.max_new_tokens} behind a prompt of {len(request.prompt_ids)} tokens "
                    "leaves no room for a completion; take the prompt out or allow a longer context"
                )
        longest = max(requests, key=lambda request: len(request.prompt_ids) + request.max_new_tokens)
        need, store = len(longest.prompt_ids) + longest.max_new_tokens, self._store
        if need > store.max_tokens and self._may_stretch:
            store.max_tokens = need
        if need > store.max_tokens:
            raise ValueError(
                f"engine_kv_memory={store.max_bytes} bytes hold the keys and values of {store.max_tokens} tokens; a "
                f"prompt of {len(longest.prompt_ids)} tokens with {longest.max_new_tokens} new ones needs {need}: set "
                f"engine_kv_memory to at least {need * store.bytes_per_token} (better a multiple, so that rows are "
                "sampled together), or lower max_completion_length"
            )

    def close(self) -> None:
        """Nothing can be submitted or computed any more."""
        self._is_closed, self._active = True, None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this sampling session is closed, its memory given back; open another one")

    # ------------------------------------------------------------------------------------ rows come

    def _enter(self, rows: list[Sequence]) -> None:
        """Compute what the rows continue and is not stored, and first tokens for those that have none."""
        schedule, store = self._schedule, self._store
        new = list({id(row.group): row.group for row in rows if row.group.slot < 0}.values())
        groups = [*schedule.groups, *new]
        is_room = store.reserve(schedule.need(1, rows, groups), schedule.need())
        assert is_room, "rows are let in only if they fit"
        first_slot = len(schedule.active)
        schedule.enter(rows, groups)
        for group in new:
            if group.media is not None and group.prompt_images is None:
                group.prompt_images = prompt_images(self._model, torch.tensor(group.ids), group.media)
                if group.shift:
                    # The direct step takes a token's position for its place.
                    self._steps.leave_direct()
        self._statistics.num_restored += sum(row.num_restored for row in rows)
        beginning = [row for row in rows if row.index < 0]
        for row, index in zip(beginning, self._sampler.add([row.request for row in beginning])):
            row.index = index
        # Of a prompt that is stored, but not what follows it, the last token is enough.
        lacking = {id(row.group): row.group for row in rows if row.is_fresh and row.group.first_logits is None}
        known = [group for group in lacking.values() if group not in new]
        self._prefill_prompts([*((group, 0) for group in new), *((group, _last_place(group)) for group in known)])
        self._begin([row for row in rows if row.is_fresh])
        self._prefill_rows([(slot, row) for slot, row in enumerate(rows, first_slot) if row.num_stored])
        self._end([row for row in rows if row.reason is not None])

    def _prefill_prompts(self, groups: list[tuple[Group, int]]) -> None:
        """Compute prompts, each from a place on that it is stored up to."""
        for pack in _packs(groups, [len(group.ids) - start for group, start in groups]):
            ids = [group.ids[start:] for group, start in pack]
            places = [Place(self._store.prompts, group.slot, offset=start) for group, start in pack]
            logits = self._prefill(
                ids, [start for _, start in pack], places, [group.prompt_images for group, _ in pack]
            )
            for (group, _), row in zip(pack, logits):
                if group.num_fresh:
                    group.first_logits = row

    def _prefill_rows(self, rows: list[tuple[int, Sequence]]) -> None:
        """Compute what is missing of rows' own tokens, given behind an earlier turn or lost when they gave way."""
        for pack in _packs(rows, [row.num_stored - row.num_restored for _, row in rows]):
            prompt_lengths = [len(row.group.ids) for _, row in pack]
            places = [
                Place(self._store.own, slot, row.group.slot, length, offset=row.num_restored)
                for (slot, row), length in zip(pack, prompt_lengths)
            ]
            ids = [row.own_ids[row.num_restored : row.num_stored] for _, row in pack]
            starts = [length + row.num_restored for (_, row), length in zip(pack, prompt_lengths)]
            logits = self._prefill(ids, starts, places, [row.group.prompt_images for _, row in pack])
            first = [i for i, (_, row) in enumerate(pack) if not row.ids]
            if first:
                self._choose_first([pack[i][1] for i in first], logits[first])

    def _prefill(
        self, ids: list[list[int]], starts: list[int], places: list[Place], sights: list[PromptImages | None]
    ) -> torch.Tensor:
        """(sequences, V) logits of what follows each of some sequences, whose first tokens stand at `starts`."""
        flat = self._tensor([token for sequence in ids for token in sequence])
        positions = self._tensor([start + i for sequence, start in zip(ids, starts) for i in range(len(sequence))])
        lengths = [len(sequence) for sequence in ids]
        ends = list(itertools.accumulate(lengths))
        segments = [Segment(end - length, length, place) for length, end, place in zip(lengths, ends, places)]
        self._statistics.num_prefilled += len(flat)
        laid = [
            ImageSegment(segment.start, segment.length, start, seen)
            for segment, start, seen in zip(segments, starts, sights)
        ]
        view = flat_image_inputs(self._model, flat, positions, laid)
        plan, last = view.attention_plan(PrefillPlan(segments, self._store)), self._tensor([end - 1 for end in ends])
        with view.embedding_true_ids(self._model):
            positions = positions if view.rope is None else view.rope
            return last_logits(self._model, view.ids, positions, plan, last, **view.inputs)

    def _begin(self, rows: list[Sequence]) -> None:
        """First tokens right behind prompts; those of one prompt are drawn from the same logits."""
        for start in range(0, len(rows), FIRST_ROWS):
            part = rows[start : start + FIRST_ROWS]
            self._choose_first(part, torch.stack([row.group.first_logits for row in part]))  # pyright: ignore
        self._schedule.begun(rows)

    def _choose_first(self, rows: list[Sequence], logits: torch.Tensor) -> None:
        indices = self._tensor([row.index for row in rows])
        tokens = self._sampler.choose(logits.to(self._device), indices, torch.zeros_like(indices))
        self._take(rows, tokens[:, None].tolist())

    # ------------------------------------------------------------------------------------ a token for each

    def _step(self) -> None:
        rows = self._schedule.active
        version = self._version()
        if self._active is None or self._active.version != version:
            self._active = self._make_active(rows, version)
        active, started = self._active, time.perf_counter()
        tokens = self._next_tokens(active, self._num_free_steps(rows))
        self._step_seconds = (time.perf_counter() - started) / len(tokens)
        active.tokens = tokens[-1]
        active.counts += len(tokens)
        self._statistics.num_steps += len(tokens)
        self._statistics.num_decoded += tokens.numel()
        self._take(rows, tokens.T.tolist())
        self._end([row for row in rows if row.reason is not None])

    def _num_free_steps(self, rows: list[Sequence]) -> int:
        """Steps after which the rows need looking after, if none draws a token that ends it."""
        if self._stops or self._schedule.has_arrived:
            return 1
        left = min(row.request.max_new_tokens - len(row.ids) for row in rows)
        places = self._store.own.places - max(row.num_stored for row in rows)
        return max(1, min(left, places, int(RUN_SECONDS / self._step_seconds)))

    def _next_tokens(self, active: _Active, num_steps: int) -> torch.Tensor:
        """(steps, n) tokens of up to so many steps; rows end by the last one only."""
        positions = active.starts + active.counts - 1
        free = self._sampler.free(active.indices, active.counts, self._end_tensor) if num_steps > 1 else None
        if free is not None and isinstance(active.step, EagerStep):
            tokens = active.step.sample(active.tokens, positions, free, num_steps)
            if tokens is not None:
                return tokens
        logits = active.step.logits(active.tokens, positions).to(self._device)
        return self._sampler.choose(logits, active.indices, active.counts)[None]

    def _version(self) -> tuple[int, int, int]:
        return self._schedule.version, self._store.own.version, self._store.prompts.version

    def _make_active(self, rows: list[Sequence], version: tuple[int, int, int]) -> _Active:
        if self._active is not None and len(rows) > len(self._active.tokens):
            # How long a step of more rows takes has to be seen first.
            self._step_seconds = RUN_SECONDS
        prompt_lengths = [len(row.group.ids) for row in rows]
        standing = DecodeBatch([row.group.slot for row in rows], prompt_lengths, [row.num_stored for row in rows])
        return _Active(
            version=version,
            tokens=self._tensor([row.ids[-1] for row in rows]),
            counts=self._tensor([len(row.ids) for row in rows]),
            indices=self._tensor([row.index for row in rows]),
            starts=self._tensor(
                [length + row.group.shift + len(row.given) for length, row in zip(prompt_lengths, rows)]
            ),
            step=self._steps.make(standing),
        )

    def _take(self, rows: list[Sequence], tokens: list[list[int]]) -> None:
        """The rows' next tokens; marks those that end by their last one."""
        for row, next_tokens in zip(rows, tokens):
            row.ids.extend(next_tokens)
            if row.ids[-1] in self._end_ids or self._stops.is_end(row.ids):
                row.reason = "eos"
            elif len(row.ids) >= row.request.max_new_tokens:
                row.reason = "length"

    # ------------------------------------------------------------------------------------ rows go

    def _end(self, rows: list[Sequence]) -> None:
        """Take rows that have ended out of the batch; their slots go to the last rows."""
        if not rows:
            return
        found = self._sampler.take_out([row.index for row in rows], [len(row.ids) for row in rows])
        for row, numbers in zip(rows, found):
            assert row.reason is not None
            self._ended.append((row.ticket, Sample(row.ids, row.reason, numbers.logprobs, numbers.entropies)))
        self._schedule.end(rows)

    def _make_room(self) -> None:
        """Places for one more token of each row.

        If the bound forbids it, what is kept for later turns goes, and then the youngest rows give way.
        """
        schedule, store = self._schedule, self._store
        while not store.reserve(schedule.need(1), schedule.need()):
            if schedule.drop_parked(also_awaited=True):
                continue
            row = schedule.youngest()
            schedule.leave([row])
            schedule.wait(row)

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


@dataclass(slots=True)
class _Active:
    """The rows under way, in the order of their slots, each tensor (n,)."""

    version: tuple[int, int, int]
    """Of the slots and the slabs that it was made for."""
    tokens: torch.Tensor
    """Chosen last and not yet stored."""
    counts: torch.Tensor
    """Tokens chosen so far."""
    indices: torch.Tensor
    """In the sampler's tables."""
    starts: torch.Tensor
    """Positions of the first ones chosen."""
    step: EagerStep | RecordedStep


def _last_place(group: Group) -> int:
    """From where on a stored prompt is computed to know what follows it: its last token, unless that is an image's."""
    last = len(group.ids) - 1
    return 0 if group.prompt_images is not None and bool(group.prompt_images.mask[last]) else last


def _packs(items: list[Any], lengths: list[int]) -> Iterator[list[Any]]:
    """Runs of items of at most `PREFILL_TOKENS` tokens together."""
    pack, size = [], 0
    for item, length in zip(items, lengths):
        if pack and size + length > PREFILL_TOKENS:
            yield pack
            pack, size = [], 0
        pack.append(item)
        size += length
    if pack:
        yield pack


def _check_numbers(samples: list[Sample]) -> None:
    broken = sum(not all(map(math.isfinite, sample.logprobs or ())) for sample in samples)
    if broken:
        raise ValueError(
            f"{broken} of {len(samples)} rows got log-probs that are no finite numbers: the model's weights or logits "
            "are NaN or infinite, or every token was suppressed; look at the gradient norms before this step, and "
            "lower learning_rate or set max_grad_norm"
        )
