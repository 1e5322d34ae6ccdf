"""Runs stages on one accelerator, each within its own time, and writes a report after each; `bench/gpu.sh` calls it.

    python bench/gpu_bench.py first|second|STAGE... [--output FOLDER] [--tiny]

The output folder gets `gpu.json` (all that was measured), `gpu.log` (all that was printed) and `RESULTS-gpu.md`, whole
after each stage. The status is the number of failures: stages that did not end well, and checks that failed inside one.
`--tiny` runs every stage with very small models on the CPU, to see that all of this works.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbing import Series, shown, table, today
from workloads import ModelShape, Workload

# Nothing here imports torch: the card belongs to the processes that are started.
GIB = 2**30
HERE = Path(__file__).resolve().parent
OVERDUE = "ended after its"
Answer = dict[str, Any]
"""What a stage left: `seconds`, `limit`, `status`, `date`, and `found`, the JSON object that its process wrote."""


@dataclass(slots=True, frozen=True)
class Card:
    """One model, and the way it is trained here."""

    workload: Workload
    lora_rank: int | None = None
    """None trains all parameters."""
    is_checked: bool = False
    """Its last step is checked: which path sampled, and what was left in memory."""


def qwen3_shape(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = True) -> ModelShape:
    """A released Qwen3 size: 8 key-value heads of 128."""
    return ModelShape(151_936, hidden, layers, heads, 8, 128, intermediate, tied=tied)


def reasoning(name: str, shape: ModelShape, rows: int, micro_batches: int, *, limit: int, mean: float) -> Workload:
    """Completions of ragged lengths in groups of 16, as in training a model to reason."""
    return Workload(
        name,
        shape,
        prompt_tokens=512,
        limit=limit,
        mean_length=mean,
        num_generations=16,
        batch_rows=rows,
        micro_batches=micro_batches,
    )


SMALL, LARGE = qwen3_shape(1024, 28, 16, 3072), qwen3_shape(4096, 36, 32, 12288, tied=False)
CARDS: dict[str, Card] = {
    "smoke": Card(
        Workload(
            "smoke",
            qwen3_shape(1024, 4, 16, 3072),
            prompt_tokens=128,
            limit=256,
            mean_length=96,
            num_generations=8,
            batch_rows=32,
        ),
        is_checked=True,
    ),
    "0.6b": Card(reasoning("0.6b", SMALL, 128, 8, limit=2048, mean=512)),
    # What TRL can do in a minute; ours is run at the same, and shorter than it would choose.
    "0.6b-short": Card(reasoning("0.6b-short", SMALL, 32, 2, limit=512, mean=128)),
    "8b": Card(reasoning("8b", LARGE, 64, 4, limit=1024, mean=256), lora_rank=16),
    "tiny": Card(
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
        is_checked=True,
    ),
}


@dataclass(slots=True, frozen=True)
class Stage:
    """One process of a call."""

    limit: int
    """Seconds after which it is ended."""
    command: tuple[str, ...]
    """Arguments of Python; `ANSWER` stands for the file that it writes, `TESTS` for the files of `gpu_tests`."""
    tiny: tuple[str, ...] = ("--tiny",)
    """What makes it small."""


def _training(name: str, trainer: str, limit: int) -> Stage:
    command = (f"{HERE}/gpu_worker.py", "--model", name, "--trainer", trainer, "--seconds", str(limit))
    return Stage(limit, (*command, "--answer", "ANSWER"), ("--model", "tiny"))


def gpu_tests() -> list[str]:
    """The files of the suite with tests for a GPU; others may need what is not here."""
    files = sorted((HERE.parent / "tests").glob("**/test_*.py"))
    return [str(file) for file in files if "\n@pytest.mark.gpu\n" in file.read_text(encoding="utf-8")]


STAGES: dict[str, Stage] = {
    # Reading torch from a cold disk may take half a minute.
    "check": Stage(40, (f"{HERE}/gpu_check.py",), ()),
    "smoke": _training("smoke", "groupgrad", 60),
    "kernels": Stage(50, (f"{HERE}/gpu_kernels.py", "--answer", "ANSWER")),
    "decode": Stage(80, (f"{HERE}/gpu_decode.py", "--answer", "ANSWER")),
    "steps": _training("0.6b", "groupgrad", 150),
    "trl": _training("0.6b-short", "trl", 65),
    "beside-trl": _training("0.6b-short", "groupgrad", 65),
    "8b": _training("8b", "groupgrad", 180),
    "tests": Stage(190, ("-m", "pytest", "-m", "gpu", "-v", "--continue-on-collection-errors", "TESTS"), ()),
}
CALLS = {"first": ("check", "smoke", "kernels", "decode", "steps", "trl", "beside-trl"), "second": ("tests",)}
"""Stages of the two calls that a quarter of an hour allows; others run by name."""


def run_stage(name: str, output: Path, *, tiny: bool = False) -> Answer:
    """Runs one stage to its end or its limit; what it printed goes to the terminal and to the log as it comes."""
    stage, answer, started = STAGES[name], output / f".{name}.json", time.monotonic()
    answer.unlink(missing_ok=True)
    command = [sys.executable]
    for word in stage.command:
        command += gpu_tests() if word == "TESTS" else [str(answer) if word == "ANSWER" else word]
    command += stage.tiny if tiny else ()
    _say(output, f"== {name}: at most {stage.limit} s")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True, errors="replace"
    )
    ended_by_us = threading.Event()

    def end() -> None:
        ended_by_us.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(stage.limit, end)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        _say(output, line.rstrip("\n"))
    status = process.wait()
    timer.cancel()
    found = json.loads(answer.read_text()) if answer.exists() else {}
    answer.unlink(missing_ok=True)
    problem = f"{OVERDUE} {stage.limit} s" if ended_by_us.is_set() else f"ended with status {status}"
    return {
        "seconds": time.monotonic() - started,
        "limit": stage.limit,
        "status": "" if status == 0 else problem,
        "date": today(),
        "found": found,
    }


def write_answer(file: Path, found: Answer) -> None:
    """Writes what a stage has found so far. Whoever ends its process meanwhile finds a whole file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(file)


def _say(output: Path, line: str) -> None:
    print(line, flush=True)
    with (output / "gpu.log").open("a") as log:
        log.write(line + "\n")


def num_failures(answers: Iterable[Answer]) -> int:
    """Checks that failed, and stages that failed without naming a check or a step that they did."""
    total = 0
    for answer in answers:
        checks = sum(not check["ok"] for check in answer["found"].get("checks", ()))
        stopped_early = bool(answer["status"]) and not answer["found"].get("steps")
        total += checks or int(stopped_early or "failure" in answer["found"])
    return total


def training_row(found: Answer) -> list[str]:
    """The report's row for one model and trainer."""
    series = Series(tuple(found["steps"]))
    sampling, tokens = series.phase("sampling"), sum(sum(step["lengths"]) for step in series.steps) / len(series.steps)
    training, rate = series.share_of_floor("training"), found["machine"]["gflops"] / 1e3
    return [
        f"{found['model']} {found['trainer']} {found['version']}",
        str(len(series.steps)),
        f"{series.median_seconds:.2f}",
        shown(sampling),
        shown(series.share_of_floor("sampling"), ".0%"),
        shown(tokens / sampling if sampling else None, ",.0f"),
        shown(series.phase("training")),
        shown(training, ".0%"),
        shown(None if training is None else training * rate, ".0f"),
        f"{series.peak_bytes / GIB:.1f}",
        " / ".join(f"{step['held_bytes'] / GIB:.2f}" for step in (series.steps[0], series.steps[-1])),
        f"{series.mean_length:.0f} / {series.mean_longest:.0f}",
        shown(series.phase("sampling/logp_mismatch"), ".1e"),
    ]


def render(answers: dict[str, Answer]) -> str:
    """The report as markdown."""
    parts = ["# Results on one accelerator", _setting(answers)]
    rows = [
        [name, f"{answer['seconds']:.0f} of {answer['limit']}", answer["status"] or "to its end", answer["date"]]
        for name, answer in answers.items()
    ]
    parts.append(table(["stage", "seconds", "ended", "when"], rows))
    found = {name: answer["found"] for name, answer in answers.items()}
    if checks := [check for answer in found.values() for check in answer.get("checks", ())]:
        parts += ["## Checks", table(["check", "passed", "found"], map(check_row, checks))]
    if steps := found.get("decode", {}).get("steps"):
        parts += ["## Decode steps", table(_DECODE_HEADER, [decode_row(step) for step in steps]), _DECODE_HOW]
    trained = [answer for answer in found.values() if answer.get("trainer") and answer.get("steps")]
    if trained:
        parts += [
            "## Whole steps",
            table(_TRAINING_HEADER, [training_row(answer) for answer in trained]),
            _TRAINING_HOW,
        ]
        names = dict.fromkeys(answer["model"] for answer in trained)
        parts.append("\n".join(f"- {name}: {_described(CARDS[name])}" for name in names))
    failed = [f"- {name}: {answer['failure']}" for name, answer in found.items() if "failure" in answer]
    if failed:
        parts.append("Not to the end:\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def _setting(answers: dict[str, Answer]) -> str:
    machines = {
        f"{found['device']}; {', '.join(f'{name} {number}' for name, number in found['versions'].items())}"
        for answer in answers.values()
        if (found := answer["found"]).get("device")
    }
    return "\n".join(sorted(machines)) or "No stage has named its machine."


def _described(card: Card) -> str:
    adapters = "" if card.lora_rank is None else f", LoRA of rank {card.lora_rank} on all linear layers"
    return f"{card.workload.describe()}{adapters}; {card.workload.model.describe()}"


def check_row(check: dict[str, Any]) -> list[str]:
    """The report's row for a check."""
    return [check["name"], "yes" if check["ok"] else "**no**", check["text"].replace("|", "\\|")]


def decode_row(step: dict[str, Any]) -> list[str]:
    """The report's row for one model and number of rows."""
    layers = CARDS[step["model"]].workload.model.num_layers
    longest = "; ".join(f"{name} {us:.0f} us in {count}" for name, count, us in step["longest"][:3])
    return [
        step["model"],
        str(step["rows"]),
        f"{step['path']}, {step['direct']}",
        f"{step['milliseconds']:.2f}",
        f"{step['tokens_per_second']:,.0f}",
        f"{step['of_floor']:.0%}",
        f"{step['launches'] / layers:.1f}",
        longest or "-",
    ]


_DECODE_HEADER = ["model", "rows", "path", "ms a step", "tokens/s", "of floor", "launches a layer", "longest kernels"]
_DECODE_HOW = "Of floor: the seconds that reading weights, keys and values once takes, over those measured."
_TRAINING_HEADER = [
    "model and trainer",
    "steps",
    "step, s",
    "sampling, s",
    "of floor",
    "sampled tokens/s",
    "training, s",
    "of floor",
    "TFLOP/s needed",
    "peak above, GiB",
    "held, first / last step, GiB",
    "mean / longest",
    "sampling against training, nats",
]
_TRAINING_HOW = (
    "Medians over steps, after a warm-up step. TRL samples by transformers' continuous batching, its fastest way "
    "without vLLM; training is the rest of the step, optimizer included. Peak: allocated during a step above what is "
    "held between steps. Of floor: the least seconds that the machine allows, over those measured. A floor counts the "
    "multiplications of exact GRPO (each prompt once a group, no padding, nothing recomputed) at the rate of large "
    "matrix products, or, at each decode step, the bytes of weights, keys and values at the speed of reading memory, "
    "if that takes longer."
)


def write_report(answers: dict[str, Answer], output: Path) -> None:
    """Writes `gpu.json` and the report made of it."""
    (output / "gpu.json").write_text(json.dumps(answers))
    (output / "RESULTS-gpu.md").write_text(render(answers))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"first, second, or of {', '.join(STAGES)}")
    parser.add_argument("--tiny", action="store_true", help="very small models on the CPU")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for results, log and report")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    names = [name for word in options.stages or ["first"] for name in CALLS.get(word, (word,))]
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"unknown: {', '.join(unknown)}; say first, second, or some of {', '.join(STAGES)}")
    (output := options.output).joinpath("gpu.log").unlink(missing_ok=True)
    answers: dict[str, Answer] = {}
    for name in names:
        answers[name] = run_stage(name, output, tiny=options.tiny)
        write_report(answers, output)  # after each, in case time runs out
        problem = answers[name]["status"]
        if name == "check" and problem and not problem.startswith(OVERDUE):
            break  # it said why nothing can run
    print(render(answers), flush=True)
    return min(num_failures(answers.values()), 100)


if __name__ == "__main__":
    sys.exit(main())
