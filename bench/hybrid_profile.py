"""Times sampling and training of a hybrid workload apart, and lists the operations that take the time.

    python bench/hybrid_profile.py [--workload hybrid_uniform] [--rounds 3] [--operations 15]

Groupgrad's parts run alone, without a trainer: the native engine samples a batch, then the batch is scored and its
gradients are computed. Each is timed without the profiler first; the floors are those of `floor.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
from floor import measure_machine, sampling_floor, training_floor
from materials import NEVER, make_model, make_words, set_ending
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, GroupWork, Workload

from groupgrad.batch import Batch
from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native.engine import NativeEngine
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens


def make_requests(workload: Workload) -> list[Request]:
    """Random prompts, a request for each row."""
    assert workload.prompt_tokens is not None
    generator = torch.Generator().manual_seed(0)
    size = (workload.num_groups, workload.prompt_tokens)
    prompts = torch.randint(2, workload.model.vocab_size, size, generator=generator).tolist()
    rows = range(workload.num_generations)
    return [Request(prompt, 1000 * i + row, workload.limit) for i, prompt in enumerate(prompts) for row in rows]


def train(model: torch.nn.Module, batch: Batch, options: ForwardOptions) -> None:
    """Forward and backward over a batch."""
    model.zero_grad()
    scores = score_tokens(model, batch, options)
    (scores.logprobs * torch.linspace(-1, 1, batch.num_tokens)).sum().backward()


def timed(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of the process's wall clock and of its processor time."""
    walls, processor = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        function()
        walls.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return sorted(walls)[rounds // 2], sorted(processor)[rounds // 2]


def main() -> None:
    """Print the times, their shares of the floor, and the operations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="hybrid_uniform", choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--operations", type=int, default=15, help="lines of the profile; 0: none")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    workload = WORKLOADS[options.workload]
    tokenizer = make_words(workload.model.vocab_size)
    model = make_model(workload.model, tokenizer)
    set_ending(model, 1, 1 / workload.mean_length if workload.mean_length else NEVER)
    engine, requests = NativeEngine(model.eval()), make_requests(workload)
    sampling = SamplingOptions(max_new_tokens=workload.limit, eos_ids=(1,))
    samples = engine.sample(requests, sampling)
    lengths = [len(sample.ids) for sample in samples]
    size, prompts = workload.num_generations, [request.prompt_ids for request in requests[:: workload.num_generations]]
    groups = [
        GroupWork(len(prompt), tuple(lengths[i * size : (i + 1) * size]), not workload.half_flat or i % 2 == 0)
        for i, prompt in enumerate(prompts)
    ]
    live = [i for i, group in enumerate(groups) if group.live]
    rows = [(number, row) for number, i in enumerate(live) for row in range(i * size, (i + 1) * size)]
    batch = build_batch([prompts[i] for i in live], [n for n, _ in rows], [samples[row].ids for _, row in rows])
    machine = measure_machine(0.5)
    print(machine.describe(), f"Load {os.getloadavg()[0]:.1f}.")
    parts = {
        "sampling": (lambda: engine.sample(requests, sampling), sampling_floor(workload.model, machine, groups)),
        "training": (
            lambda: train(model.train(), batch, ForwardOptions(layout="shared")),
            training_floor(workload.model, machine, groups),
        ),
    }
    for name, (function, floor) in parts.items():
        wall, processor = timed(function, options.rounds)
        print(f"{name}: {wall:.2f} s ({processor:.2f} s of processors), floor {floor:.2f} s, {floor / wall:.0%} of it")
        if options.operations:
            with profile(activities=[ProfilerActivity.CPU]) as found:
                function()
            print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.operations))


if __name__ == "__main__":
    main()
