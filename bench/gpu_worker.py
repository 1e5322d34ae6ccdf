"""Trains with ONE trainer on one of `gpu_bench.py`'s models, and writes what it measured to a file after each step.

    python bench/gpu_worker.py --model smoke|0.6b|0.6b-short|8b|tiny --trainer groupgrad|trl --seconds S --answer FILE

As many steps as fit into the seconds, five at most, after one that warms up. The file is JSON: `device`, `versions`,
`machine` (what the device was measured to do before anything else), `steps`, and `failure` if it did not come to its
end. `smoke` and `tiny`, which runs on the CPU, add `checks`: that the fast path was taken and leaves nothing behind.
The status is the number of checks that failed.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from datasets import Dataset
from floor import Machine, floors_of, measure_accelerator
from gpu_bench import CARDS, GIB, Card, write_answer
from materials import make_model, make_words, random_rows, set_ending
from plumbing import today
from transformers import TrainerCallback
from worker import Recorder, config_fields, random_reward, time_calls
from workloads import Workload

STARTED = time.monotonic()
STEPS = 6
"""Steps at most, the one that warms up included."""
SPARE = 5
"""Seconds that stay free at the end."""
HELD = 64
"""MiB that a generation batch may leave behind."""
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
        self.logs: dict[str, float] = {}
        """Logs of the last step."""

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
            step, self.logs = self.steps[-1], logs
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


def measure_device(on_gpu: bool) -> Machine:
    """Speed of the device that trains, in the dtype that it trains in."""
    if not on_gpu:
        return measure_accelerator("cpu", torch.float32, 0.1, square=512, megabytes=64)
    machine = measure_accelerator("cuda", torch.bfloat16, square=8192, megabytes=4096)
    torch.cuda.empty_cache()
    return machine


def build_model(workload: Workload, tokenizer: Any, *, on_gpu: bool) -> Any:
    """The workload's model, made where it trains: on the processor it would take minutes."""
    with torch.device("cuda" if on_gpu else "cpu"):
        return make_model(workload.model, tokenizer, dtype=torch.bfloat16 if on_gpu else torch.float32).eval()


def train(card: Card, trainer_name: str, measuring: Measuring, *, on_gpu: bool) -> None:
    """Train until `measuring` has seen enough."""
    workload = card.workload
    library = importlib.import_module(trainer_name)
    tokenizer = make_words(workload.model.vocab_size)
    model = build_model(workload, tokenizer, on_gpu=on_gpu)
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


class Warnings(logging.Handler):
    """Keeps what groupgrad warns of: no fast path falls back without a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def checks_of(logs: dict[str, float], warnings: list[str], *, on_gpu: bool) -> list[dict[str, Any]]:
    """Checks of the last step: finite numbers, the fast path, and the memory that its generation batch left."""
    paths = {key.rpartition("/")[2]: value for key, value in logs.items() if key.startswith("sampling/path/")}
    fast, shares = ("direct" if on_gpu else "compiled"), ", ".join(f"{name} {x:.0%}" for name, x in paths.items())
    is_finite = math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"])
    found = [
        ("numbers", is_finite, f"loss {logs['loss']:.3g}, norm of the gradient {logs['grad_norm']:.3g}"),
        ("path", paths.get(fast, 0.0) == 1.0, shares or "not logged"),
        ("fallbacks", not warnings, "; ".join(warnings) or "none was warned of"),
    ]
    if on_gpu:
        recordings, left = logs["sampling/recordings"], logs["sampling/memory_left"]
        found += [
            ("recordings", recordings > 0, f"{recordings:g} in the last generation batch"),
            ("memory", left <= HELD, f"{left:.1f} MiB left by a generation batch (bound {HELD})"),
            ("fallbacks of kernels", logs["sampling/fallbacks"] == 0, f"{logs['sampling/fallbacks']:g}"),
        ]
    for name, ok, text in found:
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {text}", flush=True)
    return [{"name": name, "ok": ok, "text": text} for name, ok, text in found]


def adapters(card: Card) -> Any:
    """The configuration of the card's adapters; None if all parameters are trained."""
    if card.lora_rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=card.lora_rank, lora_alpha=2 * card.lora_rank, target_modules="all-linear")


def measure(name: str, trainer_name: str, answer: Path, *, seconds: float) -> int:
    """Train and write `answer`; the number of failed checks, or 1, with the failure written, if it did not end well."""
    card, on_gpu = CARDS[name], name != "tiny"
    found: dict[str, Any] = {
        "model": name,
        "trainer": trainer_name,
        "date": today(),
        "versions": {library: version(library) for library in ("torch", "transformers", "accelerate")},
        "steps": [],
        "checks": [],
    }
    warnings = Warnings()
    logging.getLogger("groupgrad").addHandler(warnings)

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
        if card.is_checked and trainer_name == "groupgrad":
            found["checks"] = checks_of(measuring.logs, warnings.lines, on_gpu=on_gpu)
    except Exception as error:
        traceback.print_exc()
        found["failure"] = describe_failure(error)
    finally:
        logging.getLogger("groupgrad").removeHandler(warnings)
    save(found["steps"])
    return sum(not check["ok"] for check in found["checks"]) or int("failure" in found)


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
    return measure(options.model, options.trainer, options.answer, seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
