"""Records work as CUDA graphs and replays it: launching a small decode step's kernels costs more than running them.

Recorded operations read and write the same tensors at every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
