"""Records decode steps as CUDA graphs and replays them: launching a small step's kernels costs more than running them.

Recorded operations read and write the same tensors at every replay, so a recorded step has fixed sizes (`StepShape`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupgrad.engines.native.attention_plans import DecodeBatch, DecodePlan, StepShape
from groupgrad.engines.native.kv_cache import KVCache, padded
from groupgrad.memory.oom import is_out_of_memory

Work = Callable[[], torch.Tensor]

Recorder = Callable[[Work, Iterable[torch.Tensor], Work], Work]
"""(work, tensors that it reads and that outlive the recording, the same work as a trial run) -> work that replays it.

The trial runs before the recording, so it must not change state that the first replay would change a second time.
"""


_streams: dict[torch.device, torch.cuda.Stream] = {}
"""The stream of each device on which work is recorded, shared by all sessions.

The allocator and cuBLAS keep memory for every stream that was ever used.
"""


@dataclass(slots=True)
class RecordedStep:
    """A decode step of fixed sizes that replays the recorded operations."""

    plan: DecodePlan
    ids: torch.Tensor
    """(padded n,)."""
    positions: torch.Tensor
    replay: Work

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits; overwritten by the next step."""
        self.ids[: len(tokens)] = tokens
        self.positions[: len(tokens)] = positions
        logits = self.replay()[: len(tokens)]
        self.plan.advance()
        return logits

    def sample(self, *_arguments: object) -> None:
        """Returns None: recorded steps run one at a time."""


class StepForms(Protocol):
    """Computes the steps that are recorded: logits (padded n, V) from ids and positions (padded n,)."""

    def recorded(self, tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        """What is recorded."""
        ...

    def trial(self, tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan, num_rows: int) -> torch.Tensor:
        """The same before the recording; rows behind the first `num_rows` are padding."""
        ...


class StepRecorder:
    """Records decode steps, one for each `StepShape`."""

    def __init__(self, cache: KVCache, device: torch.device, record: Recorder):
        self._cache, self._device, self._record = cache, device, record
        self._rows_per_group = 1
        self.num_recorded = 0
        self._steps: dict[StepShape, RecordedStep] = {}
        self._version = (0, 0)

    def drop(self) -> None:
        """Drops the recorded steps. The memory of the newest one is kept, and later steps are recorded into it."""
        self._steps = {}

    def step_for(self, batch: DecodeBatch, forms: StepForms) -> RecordedStep:
        """A step for these rows, computed by `forms` and recorded if there is none of their shape."""
        suffixes, prompts = self._cache.suffixes, self._cache.prompts
        if self._version != self._cache.version:
            # The tensors that these steps were recorded with are gone.
            self._steps, self._version = {}, self._cache.version
        # It never shrinks: a smaller value would save a few queries and cost recordings.
        exact = batch.shape
        self._rows_per_group = max(self._rows_per_group, padded(exact.rows_per_group))
        shape = StepShape(
            num_rows=min(padded(exact.num_rows), suffixes.num_slots),
            num_groups=min(padded(exact.num_groups), prompts.num_slots),
            rows_per_group=self._rows_per_group,
            prompt_size=prompts.slot_size,
            suffix_size=suffixes.slot_size,
        )
        if shape in self._steps:
            self._steps[shape].plan.change(batch)
        else:
            self._steps[shape] = self._record_step(batch, shape, forms)
        return self._steps[shape]

    def _record_step(self, batch: DecodeBatch, shape: StepShape, forms: StepForms) -> RecordedStep:
        plan = DecodePlan(self._cache, batch, shape)
        ids, positions = (torch.zeros(shape.num_rows, dtype=torch.int64, device=self._device) for _ in range(2))
        # The trial compares logits, and at position 0 rotary embeddings would turn nothing.
        real = [prompt + own for prompt, own in zip(batch.prompt_lengths, batch.lengths)]
        positions[: len(real)] = torch.tensor(real, device=self._device)

        def work() -> torch.Tensor:
            # Masks depend on lengths, so the recording has to include their computation.
            plan.drop_masks()
            return forms.recorded(ids, positions, plan)

        def trial() -> torch.Tensor:
            # The first replay writes the same keys and values again, but would update recurrent states a second time.
            with plan.recurrence.trial():
                plan.drop_masks()
                return forms.trial(ids, positions, plan, len(batch.groups))

        buffers = (self._cache.suffixes, self._cache.prompts)
        stored = [tensor for buffer in buffers for pair in buffer.tensors.values() for tensor in pair]
        stored += self._cache.suffixes.states
        step = RecordedStep(plan, ids, positions, self._record(work, stored, trial))
        self.num_recorded += 1
        return step


def cuda_recorder(devices: set[torch.device]) -> Recorder | None:
    """Records work as CUDA graphs that share their memory; None if the model is not on one CUDA device.

    Of graphs that share memory only the one replayed last has a valid result.
    """
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    device = next(iter(devices))
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    pool, side = torch.cuda.graph_pool_handle(), _streams[device]
    newest: _Replay | None = None

    def record(work: Work, owned: Iterable[torch.Tensor], trial: Work) -> Work:
        nonlocal pool, newest
        current, stored = torch.cuda.current_stream(device), list(owned)
        side.wait_stream(current)
        with torch.cuda.device(device), torch.cuda.stream(side):
            # Libraries initialise themselves in a first run, which a graph must not contain.
            trial()
            current.wait_stream(side)
            replay = _capture_if_it_fits(work, pool, stored)
            if replay is None:
                # While a graph is recorded, the allocator gives no cached memory back to the device.
                torch.cuda.empty_cache()
                pool = torch.cuda.graph_pool_handle()
                replay = _capture(work, pool, _InputCollector(stored))
        # A pool whose graphs are all gone cannot be recorded into again.
        newest = replay
        return newest

    return record


@dataclass(slots=True, frozen=True)
class _Replay:
    """Recorded work; a call replays it."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    inputs: list[torch.Tensor]
    """Tensors that the graph reads, kept alive as long as the graph."""

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


def _capture_if_it_fits(work: Work, pool: Any, owned: Iterable[torch.Tensor]) -> _Replay | None:
    """Records `work` as `_capture` does; None if there is no memory for the recording."""
    try:
        return _capture(work, pool, _InputCollector(owned))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None  # the traceback, which holds tensors of the recording, is gone now


def _capture(work: Work, pool: Any, collector: _InputCollector) -> _Replay:
    """Records what `work` does on the current stream, without running it.

    `torch.cuda.graph` does not restore stream and memory pool if the work fails.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with collector:
            output = work()
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        _leave_failed_capture(pool)
        raise
    return _Replay(graph, output, list(collector.inputs.values()))


def _leave_failed_capture(pool: Any) -> None:
    """Undoes what a failed capture leaves behind on the current device."""
    device = torch.cuda.current_device()
    # Its pool stays open, and cached memory could not be freed any more. The pool also counts as used by the graph for
    # good, and its memory could never be freed.
    close, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if close is not None and release is not None:
        with suppress(RuntimeError):  # if the pool is closed already, the graph releases it itself
            close(device, pool)
            release(device, pool)
    # Before torch 2.13 the random stream counts as captured from then on, and dropout raises. A copy of it does not.
    for generator in torch.cuda.default_generators[device : device + 1]:
        generator.graphsafe_set_state(generator.clone_state())


class _InputCollector(TorchDispatchMode):
    """Collects the tensors that operations read, except `owned` tensors and results of earlier operations.

    Some of these tensors have no other owner that lives as long as the graph: weights cast by mixed precision are freed
    when any thread leaves autocast.
    """

    def __init__(self, owned: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.inputs: dict[int, torch.Tensor] = {}
        self._others = {_memory(tensor) for tensor in owned}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            if (key := _memory(tensor)) not in self._others:
                self.inputs.setdefault(key, tensor)
        output = func(*args, **(kwargs or {}))
        self._others.update(key for tensor in _tensors(output) if (key := _memory(tensor)) not in self.inputs)
        return output


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
