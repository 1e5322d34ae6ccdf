"""Measures how much sampling `rollout_ahead` hides behind training, with a server that is slowed down on purpose.

    python bench/vllm_ahead.py --output FILE [--table bench/RESULTS-vllm-ahead.md] [--rounds 14]

A proxy in front of a vLLM server delays each generation batch without computing anything, so that sampling takes
about as long as the rest of a batch, which trains on it four times. One setting delays all batches equally, the other
by between nothing and twice that. The same delays are used for every `rollout_ahead`, and for
`vllm_in_flight_updates`, where weights are pushed for each generation batch, whatever is being sampled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from vllm_server import set_environment

    set_environment()

from datasets import Dataset
from report import describe_machine
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from vllm_models import OVERLAP_SHAPE, random_base
from vllm_report import render, taken
from vllm_server import SlowFront, vllm_server
from workloads import scattered_reward

from groupgrad import GRPOConfig, GRPOTrainer

PROMPT_TOKENS, COMPLETION_TOKENS, NUM_GENERATIONS, NUM_ROWS, NUM_ITERATIONS = 16, 8, 8, 64, 4
COMMAND = "python bench/vllm_ahead.py --output FILE --table bench/RESULTS-vllm-ahead.md"
WARM_UP = 3
"""First generation batches, which are not counted: until some were sampled ahead and all code has run once."""
SETTINGS = ((0, False), (1, False), (2, False), (2, True))
"""`rollout_ahead` and `vllm_in_flight_updates` of each run."""
LEAST_DELAY_S = 0.3
SERVER_OPTIONS = ("--max-model-len", "128", "--max-num-seqs", str(NUM_ROWS), "--enforce-eager")


@dataclass(slots=True, frozen=True)
class Run:
    """Times of the counted generation batches of one setting."""

    ahead: int
    in_flight: bool
    delays: str
    """`even` or `uneven`."""
    seconds: float
    """Wall time of a generation batch."""
    waiting: float
    """Part of it spent waiting for rollouts."""
    training: float
    weights: float
    ideal: float
    """A generation batch whose sampling and training do not slow each other down, by `seconds_a_batch`."""
    lag: float
    """Mean over sampled tokens of the steps between the weights that sampled them and those that train."""
    most_lag: float
    mixed: float
    """Share of rows whose tokens are of several weights."""


def seconds_a_batch(
    sampling: Sequence[float], rest: float, ahead: int, *, skip: int = 0, in_flight: bool = False
) -> float:
    """Mean seconds of a generation batch if number i is sampled in `sampling[i]` seconds, and the rest takes `rest`.

    Batches are started as in the trainer: in order, up to `ahead` of them when none is being sampled, or always with
    `in_flight`. The first `skip` are not counted.
    """
    now = sampler_is_free = counted_from = 0.0
    done: dict[int, float] = {}
    for number, seconds in enumerate(sampling):
        if number == skip:
            counted_from = now
        now = max(now, done[number]) if number in done else now + seconds
        if in_flight or all(end <= now for end in done.values()):
            for later in range(number + 1, min(number + 1 + ahead, len(sampling))):
                if later in done:
                    continue
                sampler_is_free = max(sampler_is_free, now) + sampling[later]
                done[later] = sampler_is_free
        now += rest
    return (now - counted_from) / (len(sampling) - skip)


def delays(kind: str, mean: float) -> Iterator[float]:
    """Endless delays in seconds of consecutive generation batches, with this mean."""
    if kind == "even":
        return itertools.repeat(mean)
    rng = random.Random(0)
    return (rng.uniform(0, 2 * mean) for _ in itertools.count())


def scattered(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A pseudo-random reward, so that no group has equal rewards."""
    return [scattered_reward(ids) for ids in completion_ids]


class Clock(TrainerCallback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())


def train(
    folder: Path, url: str, *, ahead: int, in_flight: bool, num_batches: int
) -> tuple[float, list[dict[str, float]]]:
    """Seconds of a counted generation batch, and the log events of all that are counted (means over their steps)."""
    rng = random.Random(1)
    words = [f"w{i}" for i in range(2, OVERLAP_SHAPE.vocab_size)]
    rows = [{"prompt": " ".join(rng.choices(words, k=PROMPT_TOKENS))} for _ in range(256)]
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=scattered,
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                max_steps=NUM_ITERATIONS * num_batches,
                num_iterations=NUM_ITERATIONS,
                per_device_train_batch_size=NUM_ROWS,
                num_generations=NUM_GENERATIONS,
                max_completion_length=COMPLETION_TOKENS,
                learning_rate=1e-6,
                logging_steps=NUM_ITERATIONS,
                save_strategy="no",
                report_to="none",
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=url,
                rollout_ahead=ahead,
                vllm_in_flight_updates=in_flight,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        )
        trainer.train()
    events = [event for event in trainer.state.log_history if "step_time" in event]
    began = clock.ends[NUM_ITERATIONS * WARM_UP - 1]
    return (clock.ends[-1] - began) / (num_batches - WARM_UP), events[WARM_UP:]


def of_a_batch(events: Sequence[dict[str, float]], key: str) -> float:
    """Mean seconds of a phase in a generation batch."""
    return NUM_ITERATIONS * statistics.fmean(event[key] for event in events)


def staleness(events: Sequence[dict[str, float]]) -> tuple[float, float, float]:
    """Mean and largest lag in steps, and the share of mixed rows; zeros without sampling ahead."""
    keys = ("sampling/policy_lag_mean", "sampling/policy_lag", "sampling/frac_mixed_rows")
    lag, most, mixed = ([event.get(key, 0.0) for event in events] for key in keys)
    return statistics.fmean(lag), max(most), statistics.fmean(mixed)


def measure(num_batches: int) -> dict[str, Any]:
    """Runs of all settings, in sequence on one server."""
    folder = random_base("overlap", OVERLAP_SHAPE)
    runs: list[Run] = []
    with vllm_server(folder, "vllm-ahead", *SERVER_OPTIONS) as url:
        front = SlowFront(int(url.rpartition(":")[2]))
        try:
            seconds, events = train(folder, front.url, ahead=0, in_flight=False, num_batches=WARM_UP + 4)
            own, rest = of_a_batch(events, "time/sampling"), seconds - of_a_batch(events, "time/sampling")
            delay = max(LEAST_DELAY_S, rest - own)
            summary = f"sampling takes {own:.2f} s, the rest of a batch {rest:.2f} s; each waits {delay:.2f} s more"
            print(summary, flush=True)
            for kind in ("even", "uneven"):
                base: Run | None = None
                for ahead, in_flight in SETTINGS:
                    front.delays.clear()
                    waits = delays(kind, delay)
                    front.delay = lambda waits=waits: next(waits)
                    seconds, events = train(
                        folder, front.url, ahead=ahead, in_flight=in_flight, num_batches=num_batches
                    )
                    waited = of_a_batch(events, "time/sampling")
                    # Without sampling ahead neither sampling nor training slows the other down.
                    alone = base.waiting - statistics.fmean(front.delays[WARM_UP:num_batches]) if base else 0.0
                    training_alone = base.seconds - base.waiting if base else 0.0
                    planned = [alone + wait for wait in itertools.islice(delays(kind, delay), num_batches)]
                    ideal = seconds
                    if base:
                        ideal = seconds_a_batch(planned, training_alone, ahead, skip=WARM_UP, in_flight=in_flight)
                    phases = (of_a_batch(events, "time/training"), of_a_batch(events, "time/weights"))
                    runs.append(Run(ahead, in_flight, kind, seconds, waited, *phases, ideal, *staleness(events)))
                    base = base or runs[-1]
                    print(runs[-1], f"generation batches asked for: {len(front.delays)}", flush=True)
        finally:
            front.close()
    work = f"{OVERLAP_SHAPE.describe()}; {NUM_ROWS} completions of {COMPLETION_TOKENS} tokens a generation batch"
    measured = {
        "work": work,
        "delay": delay,
        "own": own,
        "rest": rest,
        "rounds": num_batches - WARM_UP,
        "iterations": NUM_ITERATIONS,
    }
    return {**measured, "runs": [asdict(run) for run in runs]}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the numbers, JSON")
    parser.add_argument(
        "--rounds", type=int, default=14, help=f"generation batches of a setting, {WARM_UP} of them not counted"
    )
    parser.add_argument("--table", type=Path, help="file for the table of these runs alone")
    options = parser.parse_args()
    machine = describe_machine()
    results = measure(options.rounds)
    options.output.write_text(json.dumps(results))
    if options.table is not None:
        options.table.write_text(render({"ahead": taken(results, machine)}, COMMAND))


if __name__ == "__main__":
    sys.exit(main())
