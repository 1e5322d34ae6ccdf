"""Times agent training with groupgrad and TRL and writes `bench/RESULTS-agents.md`.

    python bench/agents.py [--repetitions 3] [--quick] [--without_trl] [--keep_trl]

A step is 64 rollouts of 4 turns. In one workload each tool call sleeps 0.2 seconds or not at all, at random; in the
other tools return at once. TRL is the newest release, in a virtual environment of its own. Each trainer is a process
that takes one optimizer step on command and otherwise waits, so that changes in the machine's speed affect both alike.
Before the first run the task's model is trained to call tools, which takes some minutes once.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported; importers keep their own environment
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")

from agents_task import NUM_GENERATIONS, NUM_ROLLOUTS, NUM_TURNS, SHAPE, SLEEP_S, TEMPERATURE, prepare
from environments import make_trl_environment
from report import describe_machine, judged, shown, table
from run import BENCH, Worker

KINDS = ("free", "sleeping")
TARGETS = {"free": 2.0, "sleeping": 4.0}
"""Target of the speed of a step relative to TRL, by workload."""
HIDDEN_TARGET = 0.8


@dataclass(slots=True, frozen=True)
class Steps:
    """The measured steps of one trainer on one workload, as its worker sent them."""

    steps: tuple[dict[str, Any], ...]

    @property
    def seconds(self) -> float:
        """Seconds of the median step."""
        return statistics.median(step["seconds"] for step in self.steps)

    @property
    def range(self) -> str:
        """Seconds of the fastest and the slowest step, as text."""
        return f"{min(s['seconds'] for s in self.steps):.2f}-{max(s['seconds'] for s in self.steps):.2f}"

    def logged(self, name: str) -> float | None:
        """Median of a metric that the trainer logs; None if it logs none of this name."""
        values = [step["logged"][name] for step in self.steps if name in step["logged"]]
        return statistics.median(values) if values else None

    def mean(self, number: Callable[[dict[str, Any]], float]) -> float:
        """Mean over the steps of a number of each."""
        return statistics.fmean(number(step) for step in self.steps)

    @property
    def turns(self) -> float:
        """Mean turns a rollout."""
        return self.mean(lambda step: statistics.fmean(step["turns"]))

    @property
    def calls(self) -> float:
        """Mean tool calls a rollout."""
        return self.mean(lambda step: step["num_calls"] / len(step["turns"]))

    @property
    def finished(self) -> float:
        """Share of rollouts that took all turns and ended with an answer."""
        return self.mean(lambda step: statistics.fmean(step["finished"]))

    @property
    def tokens(self) -> float:
        """Mean tokens a completion, tool tokens included."""
        return self.mean(lambda step: statistics.fmean(step["tokens"]))

    @property
    def slept_s(self) -> float:
        """Sum of the seconds that the calls of a step slept."""
        return self.mean(lambda step: step["slept_s"])

    @property
    def seconds_per_token(self) -> float:
        """Seconds of all steps over their completion tokens, which evens out random lengths."""
        return sum(step["seconds"] for step in self.steps) / sum(sum(step["tokens"]) for step in self.steps)


Measured = dict[str, dict[str, Steps]]
"""Steps by workload and trainer."""


def measure(
    pythons: dict[str, Path],
    folder: Path,
    *,
    repetitions: int,
    warm_up: int,
    minutes: float = math.inf,
    extra: Sequence[str] = (),
) -> tuple[Measured, dict[str, dict[str, str]]]:
    """Run the trainers alternately after a warm-up; return their steps and the versions of their libraries.

    No further repetition is begun after `minutes`.
    """
    workers: dict[str, Worker] = {}
    for trainer, python in pythons.items():
        command = [str(python), str(BENCH / "agents_worker.py"), "--trainer", trainer, "--folder", str(folder)]
        own = extra if trainer == "groupgrad" else ()
        workers[trainer] = Worker.launch(trainer, [*command, *own], BENCH / ".logs" / f"agents-{trainer}.log")
    steps: dict[str, dict[str, list[Any]]] = {kind: {trainer: [] for trainer in workers} for kind in KINDS}
    try:
        for worker in workers.values():
            worker.versions = worker.read("ready")["versions"]
        started = time.monotonic()
        for number in range(-warm_up, repetitions):
            if number >= 1 and time.monotonic() - started > 60 * minutes:
                break
            order = list(workers.values()) if number % 2 == 0 else list(workers.values())[::-1]
            # A free step warms up everything that a sleeping one uses.
            for kind in KINDS if number >= 0 else ("free",):
                for worker in order:
                    step = worker.ask(f"step {kind}")
                    print_step(number, kind, worker.trainer, step)
                    if number >= 0:
                        steps[kind][worker.trainer].append(step)
    finally:
        for worker in workers.values():
            worker.stop()
    measured = {kind: {name: Steps(tuple(taken)) for name, taken in of.items()} for kind, of in steps.items()}
    return measured, {trainer: worker.versions for trainer, worker in workers.items()}


def print_step(number: int, kind: str, trainer: str, step: dict[str, Any]) -> None:
    """Print a step."""
    hidden = step["logged"].get("tools/wait_hidden")
    print(
        f"  {'warm-up' if number < 0 else f'step {number + 1}':8} {kind:8} {trainer:9} {step['seconds']:7.2f} s"
        f" (of processors {step['cpu_s']:.2f} s)"
        f"  {sum(step['turns'])} turns  {step['num_calls']} calls  {sum(step['tokens']):,} tokens"
        f"  slept {step['slept_s']:.1f} s" + (f"  hidden {hidden:.0%}" if hidden is not None else ""),
        flush=True,
    )


def render(measured: Measured, versions: dict[str, dict[str, str]], machine: str, *, warm_up: int) -> str:
    """The report as markdown."""
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    libraries = "; ".join(
        f"{trainer}: {', '.join(f'{k} {v}' for k, v in of.items())}" for trainer, of in versions.items()
    )
    count = len(measured["free"]["groupgrad"].steps)
    parts = [
        "# Agents",
        f"Written by `make bench-agents`, {date}; steps of each kind and trainer, in turn: {count}, "
        f"{'after a warm-up' if warm_up else 'without a warm-up'}.",
        f"Machine: {machine}; {os.environ.get('OMP_NUM_THREADS', 'all')} threads a trainer.",
        f"Versions: {libraries}.",
        f"A step is {NUM_ROLLOUTS} rollouts, {NUM_GENERATIONS} a prompt, of {NUM_TURNS} turns: in each but the last "
        "the model says some words (their number is geometric) and calls a tool. Model: "
        f"Qwen3's architecture and chat template, {SHAPE.describe()}, taught to do so. Where tools sleep, a call "
        f"sleeps {SLEEP_S} s or not at all, half of all calls each, decided by its arguments; the tool is a plain "
        "function. Both trainers run the same configuration through their common public API: float32, AdamW, "
        f"on-policy, `beta=0`, temperature {TEMPERATURE}.",
        "## Speed",
        "Seconds of a whole optimizer step, medians; the ratio is TRL's over ours. Per token: all steps' seconds over "
        "all completion tokens. Hidden: the share of the rollouts' waiting for tools during which the engine sampled "
        f"others; target {HIDDEN_TARGET:.0%}.",
        _speed_table(measured),
        "## The same work",
        "Means over all steps. Slept: what a step's calls slept, one after the other. Processors: the "
        "time that a trainer's process used of all cores together, which other work on the machine changes little.",
        _work_table(measured),
    ]
    return "\n\n".join(parts) + "\n"


def _speed_table(measured: Measured) -> str:
    rows = []
    for kind, series in measured.items():
        ours, theirs = series["groupgrad"], series.get("trl")
        times = theirs.seconds / ours.seconds if theirs else None
        per_token = theirs.seconds_per_token / ours.seconds_per_token if theirs else None
        target = HIDDEN_TARGET if kind == "sleeping" else None
        rows.append(
            [
                f"tools {kind}" if kind == "sleeping" else f"{kind} tools",
                f"{ours.seconds:.2f} ({ours.range})",
                f"{theirs.seconds:.2f} ({theirs.range})" if theirs else "-",
                judged(times, TARGETS[kind], at_least=True, show=lambda x: f"{x:.2f}×"),
                shown(per_token, ".2f", "×"),
                f"{TARGETS[kind]:g}×",
                judged(ours.logged("tools/wait_hidden"), target, at_least=True, show=lambda x: f"{x:.0%}"),
                f"{shown(ours.logged('time/sampling'))} + {shown(ours.logged('time/training'))}",
                f"{statistics.median(s['generate_s'] for s in theirs.steps):.2f}" if theirs else "-",
            ]
        )
    header = ["", "groupgrad, s (range)", "TRL, s (range)", "ratio", "per token", "target", "wait hidden"]
    return table([*header, "ours: sampling + training, s", "TRL: in `generate`, s"], rows)


def _work_table(measured: Measured) -> str:
    rows = []
    for kind, series in measured.items():
        for trainer, steps in series.items():
            rows.append(
                [
                    f"{kind}, {trainer}",
                    f"{steps.turns:.2f}",
                    f"{steps.calls:.2f}",
                    f"{steps.finished:.0%}",
                    f"{steps.tokens:.0f}",
                    f"{shown(steps.logged('completions/mean_length'), '.0f')}",
                    f"{shown(steps.logged('tools/failure_frequency'), '.1%')}",
                    f"{steps.slept_s:.1f}",
                    f"{steps.mean(lambda step: step['cpu_s']):.1f}",
                ]
            )
    header = ["", "turns a rollout", "calls a rollout", "took all turns", "tokens a completion", "of them sampled"]
    return table([*header, "calls that failed", "slept a step, s", "processors, s a step"], rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repetitions", type=int, default=3, help="steps of each kind and trainer (default 3)")
    parser.add_argument("--minutes", type=float, default=6.0, help="begin no further repetition after them (default 6)")
    parser.add_argument("--quick", action="store_true", help="one step of each kind and trainer, no warm-up")
    parser.add_argument("--without_trl", action="store_true", help="groupgrad alone: no ratio, no report file")
    parser.add_argument("--keep_trl", action="store_true", help="do not look for a newer TRL")
    parser.add_argument("--teaching_steps", type=int, default=150, help="steps in which the model learns to call")
    parser.add_argument("--profile", type=Path, help="write a Python profile of each of groupgrad's steps to FILE.N")
    parser.add_argument("--output", type=Path, help="file for the report (default: bench/RESULTS-agents.md)")
    options = parser.parse_args(arguments)
    options.warm_up = 0 if options.quick else 1
    options.repetitions = 1 if options.quick else options.repetitions
    if options.output is None and not (options.without_trl or options.profile):
        options.output = BENCH / "RESULTS-agents.md"
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    options = parse(arguments)
    machine = describe_machine()
    pythons = {"groupgrad": Path(sys.executable)}
    if not options.without_trl:
        there = BENCH / ".venv-trl" / "bin" / "python"
        pythons["trl"] = there if options.keep_trl and there.exists() else make_trl_environment(BENCH / ".venv-trl")
    folder = prepare(BENCH / ".models", num_steps=options.teaching_steps)
    extra = ["--profile", str(options.profile)] if options.profile else []
    counts: dict[str, Any] = {
        "repetitions": options.repetitions,
        "warm_up": options.warm_up,
        "minutes": options.minutes,
    }
    measured, versions = measure(pythons, folder, **counts, extra=extra)
    report = render(measured, versions, machine, warm_up=options.warm_up)
    print(report)
    if options.output is not None:
        options.output.write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
