"""Sampling from the very modules that train: prompts are computed once, rows come and go, each step adds a token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native.attention import Place, PrefillPlan, ProbePlan, Segment, Standing
from groupgrad.engines.native.direct import direct_model
from groupgrad.engines.native.forward import last_logits
from groupgrad.engines.native.graphs import EagerStep, RecordedStep, Steps, cuda_recorder
from groupgrad.engines.native.linear import fast_linears
from groupgrad.engines.native.options import Choosing, read_options
from groupgrad.engines.native.sampling import Sampler
from groupgrad.engines.native.schedule import Group, Row, Schedule
from groupgrad.engines.native.stops import StopStrings
from groupgrad.engines.native.store import LayerShape, Store
from groupgrad.models.forward import evaluation_mode, unwrap
from groupgrad.models.memory import free_bytes

PREFILL_TOKENS = 8192
"""Tokens of prompts that go through the model at once, unless a single prompt has more."""

FIRST_ROWS = 64
"""Rows whose first tokens are chosen at once; the logits of their prompts are copied for each."""

MEMORY_SHARE = 0.5
"""Share of the free memory that keys and values may take if no bound is given."""


@dataclass(slots=True)
class Statistics:
    """What happened in the last call of `sample`."""

    num_steps: int = 0
    num_decoded: int = 0
    """Tokens that went through the model one by one."""
    num_prefilled: int = 0
    """Tokens of prompts and of rows that went on after having given way."""
    num_waited: int = 0
    """Times that rows had to wait for others to finish."""
    num_preempted: int = 0
    """Rows that gave way to others, to go on later."""
    peak_bytes: int = 0
    """Of keys and values."""


class NativeEngine:
    """Samples from `model` in process, under adapters too, in evaluation mode and without gradients.

    `kv_memory` bounds the keys and values in bytes (None: half of what is free on the device when sampling begins) and
    `max_rows` the rows computed at once (None: as many as fit). `pack_weights` trades memory for speed on a CPU: while
    sampling, float32 linear layers have a copy of their weights in the order that the kernel reads fastest. `precision`
    makes the context that training's mixed precision computes in. The model has to be one that
    `models.attention.plannable` accepts.
    """

    _recorder = staticmethod(cuda_recorder)
    exact = True
    """Its log-probs are those that training assigns."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        kv_memory: int | None = None,
        max_rows: int | None = None,
        pack_weights: bool = False,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        if kv_memory is not None and kv_memory <= 0:
            raise ValueError(f"engine_kv_memory={kv_memory} holds no keys and values; give bytes, or None to derive it")
        if max_rows is not None and max_rows <= 0:
            raise ValueError(f"max_rows={max_rows} lets no row be computed; set it to at least 1, or None")
        self._model, self._tokenizer = model, tokenizer
        self._kv_memory, self._max_rows, self._precision = kv_memory, max_rows, precision
        self._pack_weights = pack_weights
        self.statistics = Statistics()

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order, with log-probs and entropies.

        ConfigError for an option this engine lacks, ValueError for a row that can never fit into the memory bound.
        """
        choosing = read_options(options, self._tokenizer)
        self.statistics = Statistics()
        if not requests:
            return []
        _check(requests)
        model = unwrap(self._model)
        with evaluation_mode(self._model), self._precision(), fast_linears(model, pack=self._pack_weights):
            plan = ProbePlan()
            token = torch.zeros(1, dtype=torch.int64, device=input_device(model))
            last_logits(model, token, token, plan, token)
            store = self._make_store(plan, requests)
            stops = StopStrings(choosing.stop_strings, self._tokenizer)
            schedule = Schedule(requests, store, self._max_rows)
            record, direct = self._recorder(store.devices), direct_model(model, plan.calls)
            steps = Steps(model, store, token.device, record=record, direct=direct)
            samples = _Sampling(model, requests, choosing, stops, schedule, steps, self.statistics).run()
        _check_numbers(samples)
        return samples

    def _make_store(self, plan: ProbePlan, requests: Sequence[Request]) -> Store:
        longest = max(requests, key=lambda request: len(request.prompt_ids) + request.max_new_tokens)
        need = len(longest.prompt_ids) + longest.max_new_tokens
        bound = self._kv_memory
        if bound is None:
            # A bound that nobody set refuses nothing: one row at least may try.
            per_token = sum(layer.bytes_per_token for layer in plan.layers.values())
            bound = max(_tokens_that_fit(list(plan.layers.values())), need) * per_token
        store = Store(plan.layers, bound)
        if need > store.max_tokens:
            raise ValueError(
                f"engine_kv_memory={bound} bytes hold the keys and values of {store.max_tokens} tokens; a prompt of "
                f"{len(longest.prompt_ids)} tokens with {longest.max_new_tokens} new ones needs {need}: set "
                f"engine_kv_memory to at least {need * store.bytes_per_token} (better a multiple, so that rows are "
                "sampled together), or lower max_completion_length"
            )
        return store


def _check(requests: Sequence[Request]) -> None:
    for request in requests:
        if not request.prompt_ids:
            raise ValueError("a prompt without tokens gives nothing to continue; put at least a BOS token into it")
        if request.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens={request.max_new_tokens} behind a prompt of {len(request.prompt_ids)} tokens leaves "
                "no room for a completion; take the prompt out or allow a longer context"
            )


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go."""
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter is not None else None
    parameters = [*(embedding.parameters() if embedding is not None else ()), *model.parameters()]
    # Offloaded weights are nowhere until they are used.
    return next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))


def _check_numbers(samples: Sequence[Sample]) -> None:
    broken = sum(not all(map(math.isfinite, sample.logprobs or ())) for sample in samples)
    if broken:
        raise ValueError(
            f"{broken} of {len(samples)} rows got log-probs that are no finite numbers: the model's weights or logits "
            "are NaN or infinite, or every token was suppressed; look at the gradient norms before this step, and "
            "lower learning_rate or set max_grad_norm"
        )


def _tokens_that_fit(layers: list[LayerShape]) -> int:
    """Tokens whose keys and values take a share of what is free on the device that has least room for its layers."""
    devices = {layer.device for layer in layers}
    return min(
        int(MEMORY_SHARE * free_bytes(device)) // sum(x.bytes_per_token for x in layers if x.device == device)
        for device in devices
    )


class _Sampling:
    """One call of `sample` under way."""

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[Request],
        choosing: Choosing,
        stops: StopStrings,
        schedule: Schedule,
        steps: Steps,
        statistics: Statistics,
    ):
        self._model = model
        self._schedule, self._store = schedule, schedule.store
        self._stops, self._end_ids = stops, frozenset(choosing.eos_ids)
        self._statistics = statistics
        self._device = input_device(model)
        self._sampler = Sampler(requests, choosing, self._device)
        self._done: dict[int, Row] = {}
        self._reasons: dict[int, Literal["eos", "length"]] = {}
        self._steps = steps
        self._active: _Active | None = None

    def run(self) -> list[Sample]:
        """Rounds of: let rows enter, make room, one token for each."""
        while self._schedule.waiting or self._schedule.active:
            if entering := self._schedule.admit():
                self._enter(entering)
            if self._schedule.active:
                self._make_room()
                self._step()
        self._statistics.peak_bytes = self._store.peak_tokens * self._store.bytes_per_token
        self._statistics.num_waited = self._schedule.num_waited
        self._statistics.num_preempted = self._schedule.num_preempted
        return self._collect()

    # ------------------------------------------------------------------------------------ rows come

    def _enter(self, rows: list[Row]) -> None:
        """Compute what the rows continue; those that go on after having given way, and first tokens for the others."""
        schedule, store = self._schedule, self._store
        new = list({id(row.group): row.group for row in rows if row.group.slot < 0}.values())
        groups = [*schedule.groups, *new]
        is_room = store.reserve(schedule.need(1, rows, groups), schedule.need())
        assert is_room, "rows are let in only if they fit"
        first_slot = len(schedule.active)
        schedule.enter(rows, groups)
        self._prefill_prompts(new)
        self._prefill_rows([(first_slot + i, row) for i, row in enumerate(rows) if row.num_stored])
        self._active = None
        self._begin([row for row in rows if not row.ids])

    def _prefill_prompts(self, groups: list[Group]) -> None:
        for pack in _packs(groups, [len(group.ids) for group in groups]):
            segments = _segments(
                [len(group.ids) for group in pack], [Place(self._store.prompts, group.slot) for group in pack]
            )
            logits = self._prefill([group.ids for group in pack], [0] * len(pack), segments)
            for group, row in zip(pack, logits):
                if group.num_fresh:
                    group.first_logits = row

    def _prefill_rows(self, rows: list[tuple[int, Row]]) -> None:
        """Compute anew what rows that gave way had stored."""
        for pack in _packs(rows, [row.num_stored for _, row in rows]):
            places = [Place(self._store.own, slot, row.group.slot, len(row.group.ids)) for slot, row in pack]
            segments = _segments([row.num_stored for _, row in pack], places)
            ids = [row.ids[:-1] for _, row in pack]
            self._prefill(ids, [len(row.group.ids) for _, row in pack], segments)

    def _prefill(self, ids: list[list[int]], starts: list[int], segments: list[Segment]) -> torch.Tensor:
        """(sequences, V) logits of what follows each of some sequences, whose first tokens stand at `starts`."""
        flat = [token for sequence in ids for token in sequence]
        positions = [start + i for sequence, start in zip(ids, starts) for i in range(len(sequence))]
        last = torch.tensor([segment.start + segment.length - 1 for segment in segments], device=self._device)
        self._statistics.num_prefilled += len(flat)
        plan = PrefillPlan(segments, self._store)
        return last_logits(self._model, self._tensor(flat), self._tensor(positions), plan, last)

    def _begin(self, rows: list[Row]) -> None:
        """First tokens; those of one prompt are drawn from the same logits."""
        for start in range(0, len(rows), FIRST_ROWS):
            part = rows[start : start + FIRST_ROWS]
            logits = torch.stack([row.group.first_logits for row in part]).to(self._device)  # pyright: ignore
            indices = self._tensor([row.index for row in part])
            self._take(part, self._sampler.choose(logits, indices, torch.zeros_like(indices)).tolist())
        for group in {id(row.group): row.group for row in rows}.values():
            self._schedule.forget_logits(group)
        self._release([row for row in rows if row.is_done])

    # ------------------------------------------------------------------------------------ a token for each

    def _step(self) -> None:
        rows = self._schedule.active
        active = self._active = self._active or self._make_active(rows)
        positions = active.prompt_lengths + active.counts - 1
        logits = active.step.logits(active.tokens, positions).to(self._device)
        active.tokens = self._sampler.choose(logits, active.indices, active.counts)
        active.counts += 1
        self._statistics.num_steps += 1
        self._statistics.num_decoded += len(rows)
        self._take(rows, active.tokens.tolist())
        self._release([row for row in rows if row.is_done])

    def _make_active(self, rows: list[Row]) -> _Active:
        prompt_lengths = [len(row.group.ids) for row in rows]
        standing = Standing([row.group.slot for row in rows], prompt_lengths, [row.num_stored for row in rows])
        return _Active(
            tokens=self._tensor([row.ids[-1] for row in rows]),
            counts=self._tensor([len(row.ids) for row in rows]),
            indices=self._tensor([row.index for row in rows]),
            prompt_lengths=self._tensor(prompt_lengths),
            step=self._steps.make(standing),
        )

    def _take(self, rows: Sequence[Row], tokens: list[int]) -> None:
        """The rows' next tokens; marks those that end."""
        for row, token in zip(rows, tokens):
            row.ids.append(token)
            if token in self._end_ids or self._stops.is_end(row.ids):
                row.is_done, self._reasons[row.index] = True, "eos"
            elif len(row.ids) >= row.budget:
                row.is_done, self._reasons[row.index] = True, "length"

    # ------------------------------------------------------------------------------------ rows go

    def _release(self, rows: list[Row]) -> None:
        """Take rows out of the batch; their slots go to the last rows."""
        if not rows:
            return
        for row in rows:
            if row.is_done:
                self._done[row.index] = row
        self._schedule.leave(rows)
        self._active = None

    def _make_room(self) -> None:
        """Places for one more token of each row; if the bound forbids it, the youngest rows give way."""
        schedule, store = self._schedule, self._store
        version = store.own.version
        while not store.reserve(schedule.need(1), schedule.need()):
            row = schedule.youngest()
            self._release([row])
            schedule.wait(row)
        if store.own.version != version:
            self._active = None

    def _collect(self) -> list[Sample]:
        logprobs, entropies = self._sampler.logprobs.tolist(), self._sampler.entropies.tolist()
        return [
            Sample(row.ids, self._reasons[i], logprobs[i][: len(row.ids)], entropies[i][: len(row.ids)])
            for i, row in sorted(self._done.items())
        ]

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


@dataclass(slots=True)
class _Active:
    """The rows under way, in the order of their slots, each tensor (n,)."""

    tokens: torch.Tensor
    """Chosen last and not yet stored."""
    counts: torch.Tensor
    """Tokens chosen so far."""
    indices: torch.Tensor
    """Of the requests."""
    prompt_lengths: torch.Tensor
    step: EagerStep | RecordedStep


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


def _segments(lengths: list[int], places: list[Place]) -> list[Segment]:
    starts = itertools.accumulate(lengths, initial=0)
    return [Segment(start, length, place) for start, length, place in zip(starts, lengths, places)]
