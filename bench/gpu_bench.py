"""The benchmark on one accelerator: Qwen3-0.6B and 4B shapes with random weights, bfloat16, ragged completions.

    python bench/gpu_bench.py [--models 0.6b,4b] [--trainers groupgrad,trl] [--output FOLDER]

Each model and trainer gets a process of its own; the report is `RESULTS-gpu.md` in the output folder. A trainer that
is not installed, or a model that does not fit, is named in the report and the rest goes on. `--tiny` runs a very small
model on the CPU, to see that all of this works.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import transformers
from datasets import Dataset
from materials import make_model, make_words, random_rows, set_ending
from report import Series, shown, table
from transformers import TrainerCallback
from worker import Recorder, config_fields, random_reward, time_calls
from workloads import ModelShape, Workload

GIB = 2**30
Phases = Callable[[dict[str, float]], dict[str, float]]
"""Seconds of a step's parts, from what was logged after it."""


@dataclass(slots=True, frozen=True)
class Card:
    """What is run of one model."""

    workload: Workload
    checkpointing: bool
    """Gradient checkpointing, for both trainers."""


def qwen3_shape(hidden: int, layers: int, heads: int, intermediate: int) -> ModelShape:
    """A released Qwen3 size: 8 key-value heads of 128 and a tied head."""
    return ModelShape(151_936, hidden, layers, heads, 8, 128, intermediate, tied=True)


def reasoning_card(name: str, shape: ModelShape, batch_rows: int, micro_batches: int, checkpointing: bool) -> Card:
    """Long completions of ragged lengths in groups of 16, as in training a model to reason."""
    workload = Workload(
        name,
        shape,
        prompt_tokens=512,
        limit=2048,
        mean_length=512,
        num_generations=16,
        batch_rows=batch_rows,
        micro_batches=micro_batches,
    )
    return Card(workload, checkpointing)


CARDS: dict[str, Card] = {
    card.workload.name: card
    for card in (
        reasoning_card("0.6b", qwen3_shape(1024, 28, 16, 3072), batch_rows=128, micro_batches=8, checkpointing=False),
        reasoning_card("4b", qwen3_shape(2560, 36, 32, 9728), batch_rows=64, micro_batches=4, checkpointing=True),
    )
}
TINY = Card(
    Workload(
        "tiny",
        ModelShape(512, 64, 2, 4, 2, 16, 128, tied=True),
        prompt_tokens=16,
        limit=24,
        mean_length=8,
        num_generations=4,
        batch_rows=8,
        micro_batches=2,
    ),
    checkpointing=False,
)


class Measuring(TrainerCallback):
    """Seconds, peak memory, lengths and parts of each step."""

    def __init__(
        self, recorder: Recorder, phases: Callable[[dict[str, float]], dict[str, float]], on_gpu: bool
    ) -> None:
        self.recorder, self.phases, self.on_gpu = recorder, phases, on_gpu
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
        peak = torch.cuda.max_memory_allocated() - self.held if self.on_gpu else 0
        seconds = time.perf_counter() - self.started
        self.steps.append(
            {"seconds": seconds, "peak_bytes": peak, "held_bytes": self.held, "lengths": self.recorder.lengths}
        )
        self.steps[-1]["phases"] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.steps and logs and "reward" in logs:
            self.steps[-1]["phases"] = self.phases(logs)


def our_phases(logs: dict[str, float]) -> dict[str, float]:
    """The parts of a step that groupgrad logs, and how far sampling's log-probs are from training's."""
    kept = {key.removeprefix("time/"): value for key, value in logs.items() if key.startswith("time/")}
    return kept | {key: logs[key] for key in ("sampling/logp_mismatch",) if key in logs}


def measure(card: Card, trainer_name: str, *, steps: int, on_gpu: bool) -> dict[str, Any]:
    """Train for a warm-up step and `steps` more; what was measured, as the report reads it."""
    workload = card.workload
    library = importlib.import_module(trainer_name)
    tokenizer = make_words(workload.model.vocab_size)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = make_model(workload.model, tokenizer)
    model = model.to(torch.bfloat16 if on_gpu else torch.float32).eval()
    set_ending(model, tokenizer.eos_token_id, 1 / (workload.mean_length or 1))
    phases = our_phases
    if trainer_name == "trl":
        sampling_seconds = time_calls(model, "generate")

        def phases(logs: dict[str, float]) -> dict[str, float]:
            return {"sampling": sampling_seconds()}

    recorder = Recorder()
    measuring = Measuring(recorder, phases, on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            **config_fields(workload, folder),
            "max_steps": steps + 1,
            "use_cpu": not on_gpu,
            "bf16": on_gpu,
            "gradient_checkpointing": card.checkpointing,
        }
        trainer = library.GRPOTrainer(
            model=model,
            reward_funcs=recorder.wrap(random_reward),
            args=library.GRPOConfig(**fields),
            train_dataset=Dataset.from_list(random_rows(workload)),
            processing_class=tokenizer,
            callbacks=[measuring],
        )
        trainer.train()
    return {"steps": measuring.steps[1:], "version": library.__version__}


def describe(on_gpu: bool) -> str:
    """The accelerator and the versions."""
    device = "CPU"
    if on_gpu:
        card = torch.cuda.get_device_properties(0)
        device = f"{card.name}, {card.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"{date}. {device}; torch {torch.__version__}, transformers {transformers.__version__}."


def render(device: str, measured: dict[tuple[str, str], dict[str, Any]], failures: dict[str, str]) -> str:
    """The report as markdown; `measured` by (model, trainer)."""
    rows = []
    for (name, trainer), found in measured.items():
        series = Series(tuple(found["steps"]))
        sampling, tokens = series.phase("sampling"), sum(sum(s["lengths"]) for s in series.steps) / len(series.steps)
        training = series.phase("training")
        if training is None and sampling is not None:
            training = series.median_seconds - sampling
        rows.append(
            [
                f"{name} {trainer} {found['version']}",
                f"{series.median_seconds:.2f}",
                shown(sampling),
                shown(tokens / sampling if sampling else None, ",.0f"),
                shown(training),
                f"{series.peak_bytes / GIB:.1f}",
                f"{found['steps'][-1]['held_bytes'] / GIB:.1f}",
                f"{series.mean_length:.0f} / {series.mean_longest:.0f}",
                shown(series.phase("sampling/logp_mismatch"), ".1e"),
            ]
        )
    parts = ["# Benchmark results on one accelerator", device]
    for card in (TINY, *CARDS.values()):
        if any(name == card.workload.name for name, _ in measured):
            extra = ", gradient checkpointing" if card.checkpointing else ""
            parts.append(f"- {card.workload.name}: {card.workload.describe()}{extra}; {card.workload.model.describe()}")
    header = ["model and trainer", "step, s", "sampling, s", "sampled tokens/s", "training, s", "peak above, GiB"]
    parts.append(table([*header, "held between steps, GiB", "mean / longest", "sampling against training, nats"], rows))
    parts.append(
        "Medians over steps, after a warm-up step. Peak: allocated during a step above what is held between steps "
        "(weights and optimizer state). TRL's training seconds are its step without `generate`."
    )
    if failures:
        parts.append("Not run:\n\n" + "\n".join(f"- {name}: {why}" for name, why in failures.items()))
    return "\n\n".join(parts) + "\n"


def run_all(options: argparse.Namespace) -> int:
    """Each model and trainer in a process; 1 if groupgrad failed anywhere."""
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name in ["tiny"] if options.tiny else options.models.split(","):
        for trainer in options.trainers.split(","):
            label = f"{name} {trainer}"
            if importlib.util.find_spec(trainer) is None:
                failures[label] = f"{trainer} is not installed here"
                continue
            with tempfile.TemporaryDirectory() as folder:
                answer = Path(folder) / "answer.json"
                command = [sys.executable, __file__, "--one", name, trainer, str(answer)]
                command += ["--steps", str(options.steps), *(["--tiny"] if options.tiny else [])]
                print(f"{label} ...", flush=True)
                try:
                    status = subprocess.run(command, check=False, timeout=options.timeout_s).returncode
                except subprocess.TimeoutExpired:
                    failures[label] = f"took more than {options.timeout_s} s"
                    continue
                if status == 0:
                    measured[name, trainer] = json.loads(answer.read_text())
                else:
                    failures[label] = f"ended with status {status}; its output is above"
            text = render(describe(not options.tiny), measured, failures)
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "RESULTS-gpu.md").write_text(text)  # after each run, in case time runs out
    print(render(describe(not options.tiny), measured, failures))
    return int(any("groupgrad" in label for label in failures))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", default="0.6b,4b", help="of 0.6b and 4b, comma-separated")
    parser.add_argument("--trainers", default="groupgrad,trl", help="comma-separated")
    parser.add_argument("--steps", type=int, default=3, help="steps that count, after one that does not (default 3)")
    parser.add_argument("--timeout_s", type=float, default=1800, help="most seconds for one model and trainer")
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for RESULTS-gpu.md")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "TRAINER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        name, trainer, file = options.one
        card = TINY if options.tiny else CARDS[name]
        Path(file).write_text(json.dumps(measure(card, trainer, steps=options.steps, on_gpu=not options.tiny)))
        return 0
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
