"""Trains with ONE trainer on one of `gpu_bench.py`'s models, and writes what it measured to a file after each step.

    python bench/gpu_worker.py --model 0.6b|0.6b-short|8b|tiny --trainer groupgrad|trl --seconds S --answer FILE

As many steps as fit into the seconds, five at most, after one that warms up. The file is JSON: `device`, `versions`,
`machine` (what the device was measured to do before anything else), `steps`, and `failure` if it did not come to its
end. `tiny` runs on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from datasets import Dataset
from floor import Machine, measure_accelerator, sampling_floor, training_floor
from gpu_bench import CARDS, GIB, Card, write_answer
from materials import make_model, make_words, random_rows, set_ending
from transformers import TrainerCallback
from worker import Recorder, config_fields, random_reward, time_calls
from workloads import Workload, groups_of

STARTED = time.monotonic()
STEPS = 6
"""Steps at most, the one that warms up included."""
SPARE = 5
"""Seconds that stay free at the end."""
Phases = Callable[[dict[str, float], float], dict[str, float]]
"""Seconds of a step's parts, from what was logged after it and the seconds of the whole."""


class Measuring(TrainerCallback):
    """Seconds, peak memory, lengths, parts and floors of each step but the first, which warms up."""

    def __init__(self, recorder: Recorder, phases: Phases, on_gpu: bool, seconds: float) -> None:
        self.recorder, self.phases, self.on_gpu, self.seconds = recorder, phases, on_gpu, seconds
        self.floors: Callable[[dict[str, Any]], dict[str, float]] = lambda step: {}
        self.save: Callable[[list[dict[str, Any]]], None] = lambda steps: None
        self.steps: list[dict[str, Any]] = []
        self.started, self.held = 0.0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.recorder.clear()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        peak = torch.cuda.max_memory_allocated() - self.held if self.on_gpu else 0
        self.steps.append({"seconds": seconds, "peak_bytes": peak, "held_bytes": self.held, "phases": {}})
        self.steps[-1] |= vars(self.recorder)
        if time.monotonic() - STARTED + seconds + SPARE > self.seconds:
            control.should_training_stop = True  # another one would not fit

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.steps and logs and "reward" in logs:
            step = self.steps[-1]
            step["phases"] = self.phases(logs, step["seconds"])
            step["floors"] = self.floors(step)
            print(f"  step {len(self.steps)}: {step['seconds']:.2f} s, {sum(step['lengths']):,} tokens", flush=True)
            for key in sorted(key for key in logs if key.startswith("sampling/")):
                print(f"    {key} {logs[key]}", flush=True)
            self.save(self.steps[1:])


def our_phases(logs: dict[str, float], seconds: float) -> dict[str, float]:
    """The parts of a step that groupgrad logs, and how far sampling's log-probs are from training's.

    Training is the rest of the step, as for TRL: passes that the device has still to run when `time/training` ends, and
    the optimizer, are in none of the logged parts.
    """
    kept = {key.removeprefix("time/"): value for key, value in logs.items() if key.startswith("time/")}
    kept |= {key: logs[key] for key in ("sampling/logp_mismatch",) if key in logs}
    return kept | {"training": seconds - kept["sampling"]}


def their_phases(model: Any, method: str) -> Phases:
    """`generate` or `generate_batch` (continuous batching) of this model, and the rest of the step."""
    sampling_seconds = time_calls(model, method)

    def phases(_logs: dict[str, float], seconds: float) -> dict[str, float]:
        sampling = sampling_seconds()
        return {"sampling": sampling, "training": seconds - sampling}

    return phases


def floors_of(workload: Workload, machine: Machine, step: dict[str, Any]) -> dict[str, float]:
    """The least seconds of a step's parts on this machine."""
    groups = groups_of(step, workload.num_generations)
    return {
        "sampling": sampling_floor(workload.model, machine, groups),
        "training": training_floor(workload.model, machine, groups),
    }


def measure_device(on_gpu: bool) -> Machine:
    """Speed of the device that trains, in the dtype that it trains in."""
    if not on_gpu:
        return measure_accelerator("cpu", torch.float32, 0.1, square=512, megabytes=64)
    machine = measure_accelerator("cuda", torch.bfloat16, square=8192, megabytes=4096)
    torch.cuda.empty_cache()
    return machine


def train(card: Card, trainer_name: str, measuring: Measuring, *, on_gpu: bool) -> None:
    """Train until `measuring` has seen enough."""
    workload = card.workload
    library = importlib.import_module(trainer_name)
    tokenizer = make_words(workload.model.vocab_size)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = make_model(workload.model, tokenizer, dtype=torch.bfloat16 if on_gpu else torch.float32).eval()
    eos_id: Any = tokenizer.eos_token_id
    set_ending(model, eos_id, 1 / (workload.mean_length or 1))
    if trainer_name == "trl":
        measuring.phases = their_phases(model, "generate_batch" if on_gpu else "generate")
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            **config_fields(workload, folder),
            "max_steps": STEPS,
            "use_cpu": not on_gpu,
            "bf16": on_gpu,
        }
        del fields["gradient_checkpointing"]  # each trainer's own default
        if trainer_name == "trl":
            fields["use_transformers_continuous_batching"] = on_gpu
        trainer = library.GRPOTrainer(
            model=model,
            reward_funcs=measuring.recorder.wrap(random_reward),
            args=library.GRPOConfig(**fields),
            train_dataset=Dataset.from_list(random_rows(workload)),
            processing_class=tokenizer,
            callbacks=[measuring],
            peft_config=adapters(card),
        )
        trainer.train()


def adapters(card: Card) -> Any:
    """The configuration of the card's adapters; None if all parameters are trained."""
    if card.lora_rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=card.lora_rank, lora_alpha=2 * card.lora_rank, target_modules="all-linear")


def measure(name: str, trainer_name: str, answer: Path, *, seconds: float) -> bool:
    """Train and write `answer`; False, with the failure written, if it did not come to its end."""
    card, on_gpu = CARDS[name], name != "tiny"
    found: dict[str, Any] = {
        "model": name,
        "trainer": trainer_name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {library: version(library) for library in ("torch", "transformers", "accelerate")},
        "steps": [],
    }

    def save(measured: list[dict[str, Any]]) -> None:
        found["steps"] = measured
        write_answer(answer, found)

    try:
        found["device"] = describe_device(on_gpu)
        machine = measure_device(on_gpu)
        found["machine"] = {"gflops": machine.gflops, "gigabytes_per_second": machine.gigabytes_per_second}
        found["version"] = importlib.import_module(trainer_name).__version__
        measuring = Measuring(Recorder(), our_phases, on_gpu, seconds)
        measuring.save, measuring.floors = save, lambda step: floors_of(card.workload, machine, step)
        train(card, trainer_name, measuring, on_gpu=on_gpu)
    except Exception as error:
        traceback.print_exc()
        found["failure"] = describe_failure(error)
    save(found["steps"])
    return "failure" not in found


def describe_failure(error: Exception) -> str:
    """One line."""
    line = next(iter(str(error).splitlines()), "")
    return f"out of memory: {line}" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {line}"


def describe_device(on_gpu: bool) -> str:
    """The accelerator."""
    if not on_gpu:
        return "CPU"
    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, {card.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=tuple(CARDS), required=True)
    parser.add_argument("--trainer", choices=("groupgrad", "trl"), required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of this process in all")
    parser.add_argument("--answer", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    return 0 if measure(options.model, options.trainer, options.answer, seconds=options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
