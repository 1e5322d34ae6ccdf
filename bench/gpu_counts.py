"""Counts what sampling asks of a GPU, on the simulated device through the real trainer; writes bench/GPU-COUNTS.md.

    PYTHONPATH=tests/helpers python bench/gpu_counts.py [--compiled RELEASE=FILE ...]

Counts are those of a run in bfloat16 with two generation batches of ragged rows: launches of a decode step, waits for
the device, recordings of steps, keys and values held and needed, memory that a generation batch leaves. Triton's
kernels are stood for by `tests/helpers/triton_twins.py`, which says how many launches a call is. Nothing is timed
except the host, whose time is counted without the simulation's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import simulated_cuda
import torch
from materials import make_model, make_words, random_rows, set_ending
from plumbing import table
from simulated_cuda import Graph, SimulatedTensor, to_cuda, trainers_on_simulated_cuda
from triton_twins import LAUNCHES, triton_twins
from worker import config_fields, random_reward
from workloads import ModelShape, Workload

VIEWS = ("view", "_unsafe_view", "expand", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze")
VIEWS += ("as_strided", "alias", "detach", "split", "split_with_sizes", "unbind", "unfold", "_reshape_alias", "narrow")
"""Operations that launch nothing."""
ROUNDS = 2


def shape(layers: int) -> ModelShape:
    """Qwen3's kind of layers, very small ones."""
    return ModelShape(512, 64, layers, 4, 2, 16, 128, tied=True)


@dataclass(slots=True)
class Round:
    """What one generation batch asked for."""

    recordings: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    """Launches of a recorded step -> replays of such steps."""
    eager: int = 0
    """Launches outside of recorded steps."""
    waits: int = 0
    """Times that the host waited for a result of the device."""
    uploads: int = 0
    tokens: int = 0
    """Longest completion: the decode steps that any engine would need."""
    sampled: int = 0
    bytes_held: int = 0
    """Most keys and values that buffers had room for."""
    bytes_needed: int = 0
    """Those of all tokens, prompts once a group."""
    left: int = 0
    """Bytes of the device in use after the batch, above those before it."""
    host_seconds: float = 0.0

    @property
    def launches(self) -> int:
        """Those of the recorded step that ran most often; of a decode step without recordings 0."""
        return self.steps.most_common(1)[0][0] if self.steps else 0


class Counting:
    """Counts launches, waits and recordings of the simulated device while it is entered."""

    def __init__(self) -> None:
        self.round, self.simulated = Round(), 0.0
        self._depth = 0

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Counts until the end."""
        with ExitStack() as stack:
            dispatch = SimulatedTensor.__torch_dispatch__.__func__  # pyright: ignore
            wait, replay, end = simulated_cuda._synchronise, Graph.replay, Graph.capture_end

            def dispatched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if Graph.recording is None:
                    self.round.eager += launches_of(func)
                return self._timed(lambda: dispatch(cls, func, types, args, kwargs))

            def waited(operation: str) -> None:
                if Graph.recording is None:
                    is_upload = operation == "a copy to the GPU"
                    self.round.uploads += is_upload
                    self.round.waits += not is_upload
                wait(operation)

            def replayed(graph: Any) -> None:
                self.round.steps[sum(launches_of(call[0]) for call in graph.calls)] += 1
                self._timed(lambda: replay(graph))

            def ended(graph: Any) -> None:
                end(graph)
                self.round.recordings += 1

            patch = mock.patch.object
            stack.enter_context(patch(SimulatedTensor, "__torch_dispatch__", classmethod(dispatched)))
            stack.enter_context(patch(simulated_cuda, "_synchronise", waited))
            stack.enter_context(patch(Graph, "replay", replayed))
            stack.enter_context(patch(Graph, "capture_end", ended))
            yield

    def _timed(self, call: Callable[[], Any]) -> Any:
        self._depth += 1
        started = time.perf_counter()
        try:
            return call()
        finally:
            self._depth -= 1
            if not self._depth:
                self.simulated += time.perf_counter() - started


def launches_of(function: Any) -> int:
    """Launches of one operation; an operation of several kernels counts as one."""
    if not hasattr(function, "_schema"):  # the simulation's own form of an operation
        return 1
    name = function._schema.name
    if name in LAUNCHES:
        return LAUNCHES[name]
    return int(name.partition("::")[2] not in VIEWS)


def rounds(layers: int, *, direct: bool = True) -> list[Round]:
    """Trains two steps, each on a generation batch of its own."""
    from datasets import Dataset

    from groupgrad import GRPOConfig, GRPOTrainer
    from groupgrad.engines.native import kv_cache, session
    from groupgrad.rollout.collector import ExperienceCollector

    workload = Workload(
        "counts", shape(layers), prompt_tokens=24, limit=512, mean_length=128, num_generations=8, batch_rows=16
    )
    words = make_words(workload.model.vocab_size)
    model: Any = make_model(workload.model, words).eval()
    set_ending(model, int(words.eos_token_id), 1 / 128)  # pyright: ignore
    counting, found = Counting(), list[Round]()
    collect, reserve = ExperienceCollector.__call__, kv_cache.KVCache.reserve

    def reserved(cache: Any, *needs: Any) -> Any:
        result = reserve(cache, *needs)
        counting.round.bytes_held = max(counting.round.bytes_held, held_by(cache))
        return result

    def collected(collector: Any, *arguments: Any, **named: Any) -> Any:
        before, counting.round, counting.simulated = in_use(), Round(), 0.0
        started = time.perf_counter()
        result = collect(collector, *arguments, **named)
        this = counting.round
        this.host_seconds = time.perf_counter() - started - counting.simulated
        counting.round = Round()
        this.left = in_use() - before
        batch = result.batch
        lengths = batch.offsets.diff().tolist()
        this.tokens, this.sampled = max(lengths), sum(lengths)
        numbers = 2 * layers * workload.model.num_kv_heads * workload.model.head_dim
        this.bytes_needed = numbers * 2 * (sum(lengths) + len(batch.prompt_ids))
        found.append(this)
        return result

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(trainers_on_simulated_cuda())
        if direct:
            stack.enter_context(triton_twins())
        stack.enter_context(mock.patch.object(ExperienceCollector, "__call__", collected))
        stack.enter_context(mock.patch.object(kv_cache.KVCache, "reserve", reserved))
        # The simulation's steps are slow; a card's are quick enough for any number of them between two looks.
        stack.enter_context(mock.patch.object(session, "RUN_SECONDS", 1e6))
        fields = {**config_fields(workload, folder), "max_steps": ROUNDS, "use_cpu": False, "bf16": True}
        trainer = GRPOTrainer(
            model=to_cuda(model.to(torch.bfloat16)),
            reward_funcs=random_reward,
            args=GRPOConfig(**fields),
            train_dataset=Dataset.from_list(random_rows(workload)),
            processing_class=words,
        )
        stack.enter_context(counting.patched())
        trainer.train()
    return found


def held_by(cache: Any) -> int:
    """Bytes that the buffers of keys and values have room for."""
    return sum(x.nbytes for buffer in (cache.prompts, cache.suffixes) for pair in buffer.tensors.values() for x in pair)


def in_use() -> int:
    """Bytes of the storages on the device that something refers to, in cycles too, as no collection runs."""
    import gc

    storages = {
        tensor.inner.untyped_storage().data_ptr(): tensor.inner.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, SimulatedTensor)
    }
    return sum(storages.values())


def compile_table(files: list[str]) -> str:
    """A row for each release of Triton and architecture, from `RELEASE=FILE` of `compile_decode_kernels.py`."""
    rows = []
    for release, _, file in (word.partition("=") for word in files):
        lines = [line.split() for line in Path(file).read_text().splitlines()]
        for architecture in dict.fromkeys(line[0] for line in lines):
            found = [line for line in lines if line[0] == architecture]
            registers, shared = (max(int(line[column]) for line in found) for column in (3, 5))
            spilled = [f"{line[1]} {line[2]}: {line[4]} bytes" for line in found if int(line[4])]
            rows.append(
                [release, architecture, str(len(found)), str(registers), f"{shared:,}", ", ".join(spilled) or "none"]
            )
    return table(["Triton", "architecture", "kernels", "most registers", "most shared bytes", "spilled"], rows)


def render(compiled: list[str]) -> str:
    """The page."""
    direct, modules = ([rounds(layers, direct=form) for layers in (1, 2)] for form in (True, False))
    rows = []

    def row(name: str, value: Callable[[list[Round], list[Round]], str]) -> None:
        rows.append([name, value(*direct), value(*modules)])

    last = ROUNDS - 1
    row("launches a layer of a decode step", lambda a, b: str(b[last].launches - a[last].launches))
    row("launches of the rest of a step", lambda a, b: f"{2 * a[last].launches - b[last].launches}")
    row("launches outside of recorded steps, a token", lambda a, b: f"{b[last].eager / b[last].tokens:.1f}")
    row("waits for the device, a token", lambda a, b: f"{b[last].waits / b[last].tokens:.3f}")
    row("copies to the device, a token", lambda a, b: f"{b[last].uploads / b[last].tokens:.3f}")
    for number in range(ROUNDS):
        row(f"recordings, generation batch {number + 1}", lambda a, b, number=number: str(b[number].recordings))
    row("keys and values held / needed", lambda a, b: f"{b[last].bytes_held / b[last].bytes_needed:.2f}")
    row("bytes that a generation batch leaves", lambda a, b: f"{b[last].left:,}")
    row("host microseconds, a decode step", lambda a, b: f"{1e6 * b[last].host_seconds / b[last].tokens:,.0f}")
    counted = direct[1][last]
    lengths = f"{counted.sampled} tokens in 16 rows, the longest of {counted.tokens}"
    counts = table(["", "direct form", "through the modules"], rows)
    return _PAGE.format(lengths=lengths, table=counts, compiled=compile_table(compiled))


_PAGE = """# What sampling asks of a GPU

`make gpu-counts` writes this page. Nothing here ran on a card: the real trainer ran on the simulated device
(`tests/helpers/simulated_cuda.py`) in bfloat16, and its second generation batch was counted: {lengths}.
The direct form is what runs where Triton is; without it, or where a model has none, the model's modules run.

{table}

A token is one decode step of all rows. An operation of torch counts as one launch, as a CPU runs it (a norm that CUDA
has one kernel for is several), and views as none. Waits are copies from the device and whatever else makes the host
wait, those of the batch's beginning and end included. The host's time is that of this machine without the simulation's.

## Triton's kernels compiled ahead of time

Six kernels for six kinds of calls (`tests/engines/native/compile_decode_kernels.py`); a kind is type, width of a head,
query heads for each key head, and whether there are a soft cap, a window and sinks.

{compiled}
"""


def main() -> None:
    """Writes the page and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("GPU-COUNTS.md"))
    parser.add_argument("--compiled", nargs="*", default=[], metavar="RELEASE=FILE", help="output of the compiler")
    options = parser.parse_args()
    text = render(options.compiled)
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
