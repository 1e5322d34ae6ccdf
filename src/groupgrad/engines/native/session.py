"""A sampling session: prompts are computed once, sequences come and go, each step adds a token to all of them."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from groupgrad.activity import sign_of_life
from groupgrad.batch import LEAST_SHARED
from groupgrad.engines.base import Request, Sample
from groupgrad.engines.native.attention_layouts import DecodeBatch, PrefillLayout, PrefillRun
from groupgrad.engines.native.kv_cache import KVBuffer
from groupgrad.engines.native.logits import last_logits
from groupgrad.engines.native.run_ahead import Pace, run_ahead
from groupgrad.engines.native.runner import DecodeRunner, DecodeStep, RunningRows
from groupgrad.engines.native.sampler import Sampler
from groupgrad.engines.native.scheduler import Admission, Scheduler
from groupgrad.engines.native.sequence import EngineSequence, Group
from groupgrad.engines.stop_strings import StopStrings
from groupgrad.memory.oom import collect_what_failed, is_out_of_memory
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.vlm import flat_image_inputs, prompt_images

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Tokens per prefill pass, unless a single prompt has more."""

FIRST_TOKEN_ROWS = 64
"""First tokens sampled at once; the logits of a prompt are copied for each of its sequences."""

RUN_SECONDS = 0.05
"""Decode steps run for about this long between calls of the scheduler; a small model's step takes less."""


class _PromptPass(NamedTuple):
    """A prompt to be computed from a token on."""

    group: Group
    source: Group
    """The prompt in whose slot the tokens before are stored, perhaps `group` itself."""
    start: int
    """The number of these tokens."""


@dataclass(slots=True)
class Statistics:
    """Counters of a session."""

    num_steps: int = 0
    num_decoded: int = 0
    """Tokens computed one by one."""
    num_prefilled: int = 0
    """Tokens of prompts, of replies between turns, and of preempted sequences and dropped prefixes computed again."""
    num_waited: int = 0
    """Admissions that left sequences waiting."""
    num_preempted: int = 0
    num_restored: int = 0
    """Tokens of earlier turns whose keys and values were still stored when their sequences were continued."""
    peak_bytes: int = 0
    """Largest memory of keys and values, offloaded ones included."""
    num_recorded: int = 0
    """Decode steps that were recorded as CUDA graphs."""
    steps_by_path: Counter[str] = field(default_factory=Counter)
    """Decode steps by how they ran (`DecodeStep.path`)."""
    left_bytes: int = 0
    """Memory in use on a CUDA device after the session, beyond that in use before it."""


class NativeSession:
    """A session of the native engine; see `engines.base.Session`.

    With `may_exceed_bound` the memory bound grows for a sequence that could never fit.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        scheduler: Scheduler,
        runner: DecodeRunner,
        stop_strings: StopStrings,
        statistics: Statistics,
        *,
        may_exceed_bound: bool,
    ):
        self._model, self._sampler, self._scheduler, self._runner = model, sampler, scheduler, runner
        self._cache, self._device = scheduler.cache, sampler.device
        self._stop_strings, self._eos_ids = stop_strings, frozenset(sampler.params.eos_ids)
        self._own_stops: dict[int, StopStrings] = {}
        """Stop strings of open requests that have some of their own, by ticket."""
        self._pace = Pace(RUN_SECONDS, step_seconds=RUN_SECONDS)
        self._may_exceed_bound, self._statistics = may_exceed_bound, statistics
        self._prefill_tokens, self._least_tokens, self._most_tokens = PREFILL_TOKENS, 0, self._cache.max_tokens
        self._batch: _RunningBatch | None = None
        self._finished: list[tuple[int, Sample]] = []
        self._num_submitted = self._num_open = 0
        self._is_closed = False

    # ------------------------------------------------------------------------------------ interface

    def submit(self, request: Request) -> int:
        """Accepts a request; returns its ticket.

        ValueError for a request that leaves nothing to sample, that can never fit into the memory bound, or whose
        `continues` names no retained request or one that `prompt_ids` does not begin with.
        """
        self._check_open()
        self._check(request)
        ticket = self._num_submitted
        self._scheduler.add(ticket, request)
        if request.stops:
            self._own_stops[ticket] = self._stop_strings.with_more(request.stops)
        self._num_submitted += 1
        self._num_open += 1
        return ticket

    @torch.no_grad()
    def advance(self) -> list[tuple[int, Sample]]:
        """Admits sequences and samples a token for each, or several within about `RUN_SECONDS`.

        Returns the samples that finished, in ticket order. ValueError if log-probs are not finite. When memory runs
        out, half as many sequences run from then on and draw the same tokens; RuntimeError if one alone does not fit.
        """
        self._check_open()
        scheduler, statistics = self._scheduler, self._statistics
        try:
            self._admit_and_decode()
            is_out = False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if scheduler.num_tried < 2:
                raise _does_not_fit(error) from error
            is_out = True
        if is_out:  # the traceback, which holds tensors of the failed pass, is gone now
            self._retreat()
        statistics.peak_bytes = self._cache.peak_tokens * self._cache.bytes_per_token
        statistics.num_waited, statistics.num_preempted = scheduler.num_waited, scheduler.num_preempted
        finished, self._finished = sorted(self._finished, key=lambda pair: pair[0]), []
        self._num_open -= len(finished)
        _check_finite([sample for _, sample in finished])
        return finished

    def _admit_and_decode(self) -> None:
        scheduler, started = self._scheduler, time.perf_counter()
        admission = scheduler.admit()
        if admission.sequences:
            self._start(admission)
        if scheduler.running:
            scheduler.make_room()
            decode_seconds = self._decode()
            if not admission.sequences:
                self._pace.host_seconds = time.perf_counter() - started - decode_seconds

    def _retreat(self) -> None:
        """Frees all keys and values after a step without memory; its sequences wait, and fewer run from now on."""
        self._batch = None
        self._runner.drop_recordings()
        collect_what_failed()
        scheduler = self._scheduler
        self._finish(scheduler.running)
        _warn_once()
        scheduler.retreat(scheduler.num_tried // 2, max(self._least_tokens, self._cache.max_tokens // 2))
        self._prefill_tokens = max(1, self._prefill_tokens // 2)
        collect_what_failed()

    @property
    def num_open(self) -> int:
        """Requests submitted that have not finished."""
        return self._num_open

    def release(self, ticket: int) -> None:
        """Frees what is retained of a finished request, if anything."""
        if not self._is_closed:
            self._scheduler.release(ticket)

    def abort(self, tickets: Iterable[int]) -> None:
        """Stops sampling these requests, which then never finish; does nothing for those that have finished."""
        self._check_open()
        aborted = self._scheduler.abort(set(tickets))
        self._sampler.free([sequence.table_row for sequence in aborted if sequence.table_row >= 0])
        self._num_open -= len(aborted)
        for sequence in aborted:
            self._own_stops.pop(sequence.ticket, None)

    def _check(self, request: Request) -> None:
        """ValueError if the request could not be sampled even alone."""
        if not request.prompt_ids:
            raise ValueError("a prompt without tokens gives nothing to continue; put at least a BOS token into it")
        if request.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens={request.max_new_tokens} behind a prompt of {len(request.prompt_ids)} tokens "
                "leaves no room for a completion; take the prompt out or allow a longer context"
            )
        cache = self._cache
        num_tokens = len(request.prompt_ids) + request.max_new_tokens + 2 * cache.state_tokens
        self._least_tokens = max(self._least_tokens, num_tokens)
        if num_tokens > cache.max_tokens and (self._may_exceed_bound or num_tokens <= self._most_tokens):
            cache.max_tokens = num_tokens
        if num_tokens > cache.max_tokens:
            raise ValueError(
                f"engine_kv_memory={cache.max_bytes} bytes hold the keys and values of {cache.max_tokens} tokens; a "
                f"prompt of {len(request.prompt_ids)} tokens with {request.max_new_tokens} new ones needs {num_tokens}:"
                f" set engine_kv_memory to at least {num_tokens * cache.bytes_per_token} (better a multiple, so that "
                "rows are sampled together), or lower max_completion_length"
            )

    def close(self) -> None:
        """Ends the session and frees its memory, also if something still refers to the session.

        Later calls of `submit` and `advance` raise.
        """
        if not self._is_closed:
            self._is_closed, self._batch = True, None
            del self._runner, self._scheduler, self._sampler, self._cache

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this sampling session is closed, its memory given back; open another one")

    # ------------------------------------------------------------------------------------ prefill

    def _start(self, admission: Admission) -> None:
        """Computes the tokens of admitted sequences that are not stored, and samples missing first tokens."""
        fresh = [sequence for sequence in admission.sequences if sequence.is_fresh]
        unsampled = [sequence for sequence in admission.sequences if not sequence.sampled_ids]
        try:
            self._compute_start(admission, fresh)
        except Exception:  # also of a device out of memory
            for sequence in unsampled:  # admitted again, they draw the same tokens
                sequence.sampled_ids.clear()
                sequence.finish_reason = None
                self._sampler.restart(sequence.table_row, sequence.request)
            raise
        self._scheduler.started(fresh)
        self._finish(admission.sequences)

    def _compute_start(self, admission: Admission, fresh: list[EngineSequence]) -> None:
        sequences, new_groups = admission.sequences, admission.new_groups
        for group in new_groups:
            if group.media is not None and group.prompt_images is None:
                group.prompt_images = prompt_images(self._model, torch.tensor(group.prompt_ids), group.media)
                if group.position_shift:
                    # The direct step assumes that a token's position is the number of tokens before it.
                    self._runner.disable_direct()
        self._statistics.num_restored += sum(sequence.num_restored for sequence in sequences)
        unseen = [sequence for sequence in sequences if sequence.table_row < 0]
        for sequence, table_row in zip(unseen, self._sampler.add([sequence.request for sequence in unseen])):
            sequence.table_row = table_row
        without_logits = {id(s.group): s.group for s in fresh if s.group.first_logits is None}.values()
        stored = [group for group in without_logits if group not in new_groups]
        has_states = bool(self._cache.state_tokens)
        # What prompts begin with alike is computed once; images and states belong to whole prompts.
        whole = [g for g in new_groups if g.media is not None or has_states]
        lists = self._in_order([g for g in new_groups if g not in whole], len(new_groups)) or [[]]
        lists[0] += [_PromptPass(g, g, _start_of_last_pass(g, has_states)) for g in stored]
        lists[0] += [_PromptPass(g, g, 0) for g in whole]
        for passes in lists:
            self._prefill_prompts(passes)
        first_slot = len(self._scheduler.running) - len(sequences)
        slots = list(enumerate(sequences, first_slot))
        self._cache.begin_suffixes([(slot, s.group.slot) for slot, s in slots if not s.num_stored])
        self._sample_first_tokens(fresh)
        self._prefill_suffixes([(slot, s) for slot, s in slots if s.num_stored])

    def _in_order(self, groups: list[Group], num_new: int) -> list[list[_PromptPass]]:
        """New prompts, in lists to be computed one after the other.

        A prompt that has more in common with another new one than with those stored, such as a system prompt, comes
        in a later list than that one.
        """
        waiting, lists = [self._behind_stored(group, num_new) for group in groups], []
        # In this order a prompt begins with as much of the one before it as of any earlier one.
        waiting.sort(key=lambda one: one.group.prompt_ids)
        while waiting:
            now, later = waiting[:1], []
            for one in waiting[1:]:
                last = now[-1].group
                common = _num_common(one.group.prompt_ids[:-1], last.prompt_ids, one.start + LEAST_SHARED)
                if common:
                    later.append(_PromptPass(one.group, last, common))
                else:
                    now.append(one)
            lists.append(now)
            waiting = later
        return lists

    def _behind_stored(self, group: Group, num_new: int) -> _PromptPass:
        """The pass of a new prompt behind what it has in common with a stored one, the one that shares most.

        An agent that rewrites its history, or opens a sub-agent, sends a new prompt that begins as an earlier one.
        """
        # The last token is computed, for the logits after it.
        most, ids, source = 0, group.prompt_ids[:-1], group
        for other in self._scheduler.groups[:-num_new]:  # new ones are the last
            if most < len(ids) and other.media is None:
                common = _num_common(ids, other.prompt_ids, max(LEAST_SHARED, most + 1))
                most, source = (common, other) if common else (most, source)
        return _PromptPass(group, source, most)

    def _prefill_prompts(self, passes: list[_PromptPass]) -> None:
        """Computes prompts, each from its start on; the tokens before it are stored."""
        for group, source, start in passes:
            if source is not group:
                self._cache.prompts.move([(source.slot, group.slot)], start)
        runs = [(g, PrefillRun(g.prompt_ids[start:], g.slot, start, images=g.prompt_images)) for g, _, start in passes]
        for pack in _packs(runs, self._prefill_tokens):
            for (group, _), row in zip(pack, self._prefill([run for _, run in pack], self._cache.prompts)):
                if group.num_fresh:
                    group.first_logits = row

    def _prefill_suffixes(self, sequences: list[tuple[int, EngineSequence]]) -> None:
        """Computes the suffix tokens of each (slot, sequence) that have no stored keys and values.

        They are replies between turns, and tokens whose keys and values preemption or dropping freed.
        """
        runs = []
        for slot, s in sequences:
            ids, group = s.suffix_ids[s.num_restored : s.num_stored], s.group
            run = PrefillRun(ids, slot, s.num_restored, group.slot, len(group.prompt_ids), group.prompt_images)
            runs.append((s, run))
        for pack in _packs(runs, self._prefill_tokens):
            logits = self._prefill([run for _, run in pack], self._cache.suffixes)
            first = [i for i, (s, _) in enumerate(pack) if not s.sampled_ids]
            if first:
                self._sample_first([pack[i][0] for i in first], logits[first])

    def _prefill(self, runs: list[PrefillRun], buffer: KVBuffer) -> torch.Tensor:
        """(N, V) logits behind N runs of tokens, whose keys and values are stored in `buffer`."""
        ids = self._tensor([token for run in runs for token in run.ids])
        positions = self._tensor([run.position + i for run in runs for i in range(len(run.ids))])
        attention = PrefillLayout(runs, buffer, self._cache.prompts)
        last = self._tensor([span.stop - 1 for span in attention.spans])
        self._statistics.num_prefilled += len(ids)
        with_images = [
            (TokenSpan(span.start, len(run.ids), run.position), run.images)
            for run, span in zip(runs, attention.spans)
            if run.images is not None
        ]
        if not with_images:
            return last_logits(self._model, ids, positions, attention, last)
        view = flat_image_inputs(self._model, ids, positions, with_images)
        with view.embedding_true_ids(self._model):
            positions = positions if view.rope is None else view.rope
            return last_logits(
                self._model, view.ids, positions, view.with_bidirectional_images(attention), last, **view.inputs
            )

    def _sample_first_tokens(self, sequences: list[EngineSequence]) -> None:
        """Samples the first tokens of fresh sequences from the logits behind their prompts."""
        for start in range(0, len(sequences), FIRST_TOKEN_ROWS):
            part = sequences[start : start + FIRST_TOKEN_ROWS]
            self._sample_first(part, torch.stack([s.group.first_logits for s in part]))  # pyright: ignore

    def _sample_first(self, sequences: list[EngineSequence], logits: torch.Tensor) -> None:
        table_rows = self._tensor([sequence.table_row for sequence in sequences])
        tokens = self._sampler.choose(logits.to(self._device), table_rows, torch.zeros_like(table_rows))
        self._append(sequences, tokens[:, None].tolist())

    # ------------------------------------------------------------------------------------ decode

    def _decode(self) -> float:
        """Samples one or several tokens of each running sequence; returns the seconds that the steps took."""
        running = self._scheduler.running
        if self._batch is None or self._batch.version != self._scheduler.version:
            self._batch = self._make_batch(running)
        sign_of_life()
        batch, started = self._batch, time.perf_counter()
        # A recurrent state that may be continued has to be the one at the stop.
        has_stops = bool(self._stop_strings) or bool(self._own_stops and self._cache.state_tokens)
        ahead = run_ahead(self._scheduler, self._pace, has_stops=has_stops)
        tokens = batch.step.run(batch.rows, self._sampler, ahead)
        sampled = tokens.T.tolist()  # where the host waits for a GPU
        seconds = time.perf_counter() - started
        self._pace.step_seconds = seconds / len(tokens)
        batch.rows.tokens = tokens[-1]
        batch.rows.counts += len(tokens)
        self._statistics.num_steps += len(tokens)
        self._statistics.num_recorded = self._runner.num_recorded
        self._statistics.steps_by_path[batch.step.path] += len(tokens)
        self._statistics.num_decoded += self._append(running, sampled)
        self._finish(running)
        return seconds

    def _make_batch(self, running: list[EngineSequence]) -> _RunningBatch:
        if self._batch is not None and len(running) > len(self._batch.rows.tokens):
            # The duration of a step with more rows has to be measured first.
            self._pace.step_seconds = self._pace.run_seconds
        prompt_lengths = [len(s.group.prompt_ids) for s in running]
        starts = [n + s.group.position_shift + len(s.history_ids) for n, s in zip(prompt_lengths, running)]
        rows = RunningRows(
            tokens=self._tensor([s.sampled_ids[-1] for s in running]),
            counts=self._tensor([len(s.sampled_ids) for s in running]),
            table_rows=self._tensor([s.table_row for s in running]),
            starts=self._tensor(starts),
        )
        batch = DecodeBatch([s.group.slot for s in running], prompt_lengths, [s.num_stored for s in running])
        return _RunningBatch(self._scheduler.version, rows, self._runner.step_for(batch))

    def _append(self, sequences: list[EngineSequence], tokens: list[list[int]]) -> int:
        """Appends sampled tokens to sequences up to their ends, sets `finish_reason`; returns the number appended."""
        eos_ids, num_appended = self._eos_ids, 0
        for sequence, new_ids in zip(sequences, tokens):
            ids, before = sequence.sampled_ids, len(sequence.sampled_ids)
            if not eos_ids.isdisjoint(new_ids):
                new_ids = new_ids[: next(i for i, token in enumerate(new_ids, 1) if token in eos_ids)]
                sequence.finish_reason = "eos"
            ids.extend(new_ids)
            stops = self._own_stops.get(sequence.ticket, self._stop_strings)
            if stops and (length := stops.end(ids, before)) is not None:
                del ids[length:]
                sequence.finish_reason = "eos"
            elif sequence.finish_reason is None and len(ids) >= sequence.request.max_new_tokens:
                sequence.finish_reason = "length"
            num_appended += len(ids) - before
        return num_appended

    def _finish(self, sequences: list[EngineSequence]) -> None:
        """Turns sequences that have ended into samples and frees their slots."""
        ended = [sequence for sequence in sequences if sequence.finish_reason is not None]
        if not ended:
            return
        scores = self._sampler.take_out([s.table_row for s in ended], [len(s.sampled_ids) for s in ended])
        for sequence, (logprobs, entropies) in zip(ended, scores):
            assert sequence.finish_reason is not None
            sample = Sample(sequence.sampled_ids, sequence.finish_reason, logprobs, entropies)
            self._finished.append((sequence.ticket, sample))
            self._own_stops.pop(sequence.ticket, None)
        self._scheduler.finish(ended)

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


@dataclass(slots=True)
class _RunningBatch:
    """The running sequences, as decode steps take them."""

    version: tuple[int, ...]
    """The scheduler's version that the batch was made for."""
    rows: RunningRows
    step: DecodeStep


def _start_of_last_pass(group: Group, has_states: bool = False) -> int:
    """Index of the first token of a stored prompt to compute again for the logits after it.

    The last token is enough, unless it belongs to an image, whose features need the whole prompt, or the model has
    states, which are stored behind the last token only.
    """
    last = len(group.prompt_ids) - 1
    is_image = group.prompt_images is not None and bool(group.prompt_images.mask[last])
    return 0 if is_image or has_states else last


def _num_common(some: list[int], others: list[int], least: int) -> int:
    """Number of tokens with which both begin; 0 if there are fewer than `least`."""
    low, high = least, min(len(some), len(others))
    if high < low or some[:low] != others[:low]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if some[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _packs(items: list[tuple[Any, PrefillRun]], max_tokens: int) -> Iterator[list[tuple[Any, PrefillRun]]]:
    """Splits items into lists whose runs have at most `max_tokens` tokens together."""
    pack, size = [], 0
    for item in items:
        length = len(item[1].ids)
        if pack and size + length > max_tokens:
            yield pack
            pack, size = [], 0
        pack.append(item)
        size += length
    if pack:
        yield pack


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "sampling so many rows at once does not fit into memory, so that fewer run at a time, with the same texts; a "
        "lower engine_kv_memory or per_device_train_batch_size avoids that"
    )


def _does_not_fit(error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"sampling one row alone does not fit into memory ({error}); lower max_completion_length, shorten the prompts, "
        "use a smaller model, or sample with vLLM on other devices (use_vllm=True, vllm_mode='server')"
    )


def _check_finite(samples: list[Sample]) -> None:
    num_broken = sum(not all(map(math.isfinite, sample.logprobs or ())) for sample in samples)
    if num_broken:
        raise ValueError(
            f"{num_broken} of {len(samples)} rows got log-probs that are no finite numbers: the model's weights or "
            "logits are NaN or infinite, or every token was suppressed; look at the gradient norms before this step, "
            "and lower learning_rate or set max_grad_norm"
        )
