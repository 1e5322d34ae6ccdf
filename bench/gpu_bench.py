"""The benchmark on one accelerator: Qwen3-0.6B and 4B shapes with random weights, bfloat16, ragged completions.

    python bench/gpu_bench.py [--models 0.6b,4b] [--trainers groupgrad,trl] [--output FOLDER]
    python bench/gpu_bench.py --merge FOLDER... [--output FOLDER]

Each model and trainer gets a process of its own and leaves `gpu-MODEL-TRAINER.json` in the output folder; the report,
`RESULTS-gpu.md`, is made of all such files there. Where one command may not take as long as everything takes, run each
model and trainer by a command of its own and let `--merge` make one report of their folders; it runs nothing else. A
trainer that is not installed, or a model that does not fit, is named in the report and the rest goes on. `--tiny` runs
a very small model on the CPU, to see that all of this works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Series, shown, table
from workloads import ModelShape, Workload

# Nothing here imports torch: the card belongs to the processes that are started.
GIB = 2**30
WORKER = Path(__file__).with_name("gpu_worker.py")
Answer = dict[str, Any]
"""One JSON object that `gpu_worker.py` writes."""


@dataclass(slots=True, frozen=True)
class Card:
    """One model, and the way it is trained here."""

    workload: Workload
    checkpointing: bool = True
    """Gradient checkpointing, for both trainers: TRL's default, without which its activations of 16 padded rows would
    hardly fit on a card."""


def qwen3_shape(hidden: int, layers: int, heads: int, intermediate: int) -> ModelShape:
    """A released Qwen3 size: 8 key-value heads of 128 and a tied head."""
    return ModelShape(151_936, hidden, layers, heads, 8, 128, intermediate, tied=True)


def reasoning_card(name: str, shape: ModelShape, batch_rows: int, micro_batches: int) -> Card:
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
    return Card(workload)


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
    )
)
CARDS: dict[str, Card] = {
    card.workload.name: card
    for card in (
        reasoning_card("0.6b", qwen3_shape(1024, 28, 16, 3072), batch_rows=128, micro_batches=8),
        reasoning_card("4b", qwen3_shape(2560, 36, 32, 9728), batch_rows=64, micro_batches=4),
        TINY,
    )
}


def run_one(name: str, trainer: str, answer: Path, *, steps: int, timeout_s: float) -> Answer:
    """Train in a process of its own; the answer, which is in the file too, with `failure` if it did not end well."""
    answer.unlink(missing_ok=True)
    if importlib.util.find_spec(trainer) is None:
        failure = f"{trainer} is not installed here"
    else:
        command = [sys.executable, str(WORKER), "--model", name, "--trainer", trainer]
        command += ["--steps", str(steps), "--answer", str(answer)]
        try:
            status = subprocess.run(command, check=False, timeout=timeout_s).returncode
            failure = None if status == 0 else f"ended with status {status}; its output is above"
        except subprocess.TimeoutExpired:
            failure = f"took more than {timeout_s:g} s"
    found: Answer = json.loads(answer.read_text()) if answer.exists() else {"model": name, "trainer": trainer}
    if failure is not None:
        found.setdefault("failure", failure)
        answer.write_text(json.dumps(found))
    return found


def read_answers(folders: Iterable[Path]) -> list[Answer]:
    """The answers in these folders, one for each model and trainer: the last that ended well, or that has steps."""
    files = {path.resolve() for folder in folders for path in folder.glob("gpu-*.json")}
    answers = [json.loads(path.read_text()) for path in sorted(files)]
    answers.sort(key=lambda answer: (bool(answer.get("steps")), "failure" not in answer, answer.get("date", "")))
    kept = {(answer["model"], answer["trainer"]): answer for answer in answers}
    order = list(CARDS)
    return sorted(kept.values(), key=lambda answer: (order.index(answer["model"]), answer["trainer"]))


def share_of_floor(series: Series, phase: str) -> float | None:
    """The least seconds that the machine allows over those measured, median over steps."""
    shares = [step["floors"][phase] / step["phases"][phase] for step in series.steps if step["phases"].get(phase)]
    return statistics.median(shares) if shares else None


def result_row(answer: Answer) -> list[str]:
    """The report's row for one model and trainer."""
    series = Series(tuple(answer["steps"]))
    sampling, tokens = series.phase("sampling"), sum(sum(step["lengths"]) for step in series.steps) / len(series.steps)
    return [
        f"{answer['model']} {answer['trainer']} {answer['version']}",
        str(len(series.steps)),
        f"{series.median_seconds:.2f}",
        shown(sampling),
        shown(share_of_floor(series, "sampling"), ".0%"),
        shown(tokens / sampling if sampling else None, ",.0f"),
        shown(series.phase("training")),
        shown(share_of_floor(series, "training"), ".0%"),
        f"{series.peak_bytes / GIB:.1f}",
        f"{series.steps[-1]['held_bytes'] / GIB:.1f}",
        f"{series.mean_length:.0f} / {series.mean_longest:.0f}",
        shown(series.phase("sampling/logp_mismatch"), ".1e"),
    ]


def setting(answer: Answer) -> str:
    """The device and the versions that both trainers share."""
    return ", ".join([answer["device"], *(f"{name} {found}" for name, found in answer["versions"].items())])


def render(answers: list[Answer]) -> str:
    """The report as markdown: a table for each machine that steps were measured on."""
    measured = [answer for answer in answers if answer.get("steps")]
    parts = ["# Benchmark results on one accelerator"]
    for name, card in CARDS.items():
        if any(answer["model"] == name for answer in measured):
            extra = ", gradient checkpointing" if card.checkpointing else ""
            parts.append(f"- {name}: {card.workload.describe()}{extra}; {card.workload.model.describe()}")
    for here in dict.fromkeys(setting(answer) for answer in measured):
        found = [answer for answer in measured if setting(answer) == here]
        rates = [f"{answer['machine']['gflops'] / 1e3:.3g}" for answer in found]
        speeds = [f"{answer['machine']['gigabytes_per_second']:,.0f}" for answer in found]
        parts += [f"## {here}", table(_HEADER, [result_row(answer) for answer in found])]
        parts.append(
            f"From {min(answer['date'] for answer in found)} on. The machine, measured before each row: large matrix "
            f"products at {' / '.join(rates)} TFLOP/s, memory read at {' / '.join(speeds)} GB/s."
        )
    if measured:
        parts.append(_HOW)
    failed = [
        f"- {answer['model']} {answer['trainer']}: {answer['failure']}" for answer in answers if "failure" in answer
    ]
    if failed:
        parts.append("Not run, or not to the end:\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


_HEADER = [
    "model and trainer",
    "steps",
    "step, s",
    "sampling, s",
    "of floor",
    "sampled tokens/s",
    "training, s",
    "of floor",
    "peak above, GiB",
    "held between steps, GiB",
    "mean / longest",
    "sampling against training, nats",
]
_HOW = (
    "Medians over steps, after a warm-up step. Both trainers run the same configuration, gradient checkpointing (TRL's "
    "default) included. TRL's sampling is its `generate`; training is the rest of the step, optimizer included. "
    "Peak: allocated during a step above what is held between steps (weights and optimizer state). "
    "Of floor: the least seconds that the machine allows, over those measured. A floor counts the multiplications of "
    "exact GRPO (each prompt once a group, no padding, nothing recomputed) at the rate of large matrix products, or, "
    "at each decode step, the bytes of weights, keys and values at the speed of reading memory, if that takes longer; "
    "everything else counts as nothing."
)


def write_report(folders: Iterable[Path], output: Path) -> list[Answer]:
    """Make the report of these folders' answers, which come back, and write it into `output`."""
    answers = read_answers(folders)
    (output / "RESULTS-gpu.md").write_text(render(answers))
    return answers


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if groupgrad failed anywhere, or if there is nothing to merge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", default="0.6b,4b", help="of 0.6b and 4b, comma-separated")
    parser.add_argument("--trainers", default="groupgrad,trl", help="comma-separated")
    parser.add_argument("--steps", type=int, default=3, help="steps that count, after one that does not (default 3)")
    parser.add_argument("--timeout_s", type=float, default=1800, help="most seconds for one model and trainer")
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for answers and report")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FOLDER", help="only make the report of these folders")
    options = parser.parse_args(arguments)
    models, trainers = ["tiny"] if options.tiny else options.models.split(","), options.trainers.split(",")
    if unknown := [*(set(models) - set(CARDS)), *(set(trainers) - {"groupgrad", "trl"})]:
        parser.error(f"unknown: {', '.join(unknown)}; models are {', '.join(CARDS)}, trainers groupgrad and trl")
    options.output.mkdir(parents=True, exist_ok=True)
    if options.merge:
        answers = write_report(options.merge, options.output)
        print(render(answers))
        return int(not answers)
    failed = False
    for name in models:
        for trainer in trainers:
            print(f"{name} {trainer} ...", flush=True)
            answer = options.output / f"gpu-{name}-{trainer}.json"
            found = run_one(name, trainer, answer, steps=options.steps, timeout_s=options.timeout_s)
            failed |= trainer == "groupgrad" and "failure" in found
            answers = write_report([options.output], options.output)  # after each, in case time runs out
    print(render(answers))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
