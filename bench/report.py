"""Turns measured steps into the tables of `RESULTS.md`. Pure, but for reading what machine this is."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import Workload

if TYPE_CHECKING:
    from floor import Machine

MIB = 2**20
MEMORY_TARGET = 0.25
SAMPLING_TARGET = 0.6
VLLM_TARGET = 2.0


@dataclass(slots=True, frozen=True)
class Series:
    """The measured steps of one trainer on one workload, as its worker sent them."""

    steps: tuple[dict[str, Any], ...]

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step."""
        return [step["seconds"] for step in self.steps]

    @property
    def median_seconds(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def peak_bytes(self) -> float:
        """Median over steps of the most memory above what is in use between steps."""
        return statistics.median(step["peak_bytes"] for step in self.steps)

    @property
    def milliseconds_per_token(self) -> float:
        """All steps' time over all their completion tokens."""
        return 1e3 * sum(self.seconds) / sum(sum(step["lengths"]) for step in self.steps)

    @property
    def mean_length(self) -> float:
        """Tokens of the mean completion."""
        return statistics.fmean(length for step in self.steps for length in step["lengths"])

    @property
    def mean_longest(self) -> float:
        """Tokens of a step's longest completion, averaged over steps."""
        return statistics.fmean(max(step["lengths"]) for step in self.steps)

    def phase(self, name: str) -> float | None:
        """Median seconds of a part of the step; None if it was not measured."""
        values = [step["phases"][name] for step in self.steps if name in step["phases"]]
        return statistics.median(values) if values else None


@dataclass(slots=True, frozen=True)
class Result:
    """Measurements of one workload."""

    workload: Workload
    series: dict[str, Series]
    """Measured steps by trainer: `groupgrad`, and `trl` if it ran."""
    versions: dict[str, dict[str, str]]
    machine: Machine
    """As it was measured right after the workload."""
    sampling_floors: tuple[float, ...] = ()
    """Least seconds for each of groupgrad's steps."""
    training_floors: tuple[float, ...] = ()

    @property
    def ours(self) -> Series:
        """groupgrad's steps."""
        return self.series["groupgrad"]

    @property
    def theirs(self) -> Series | None:
        """TRL's steps."""
        return self.series.get("trl")

    @property
    def ratio(self) -> float | None:
        """TRL's median step time over ours; None if TRL did not run."""
        return self.theirs.median_seconds / self.ours.median_seconds if self.theirs else None

    @property
    def ratio_per_token(self) -> float | None:
        """The same for the time of all steps over all completion tokens, which evens out lengths drawn by chance."""
        return self.theirs.milliseconds_per_token / self.ours.milliseconds_per_token if self.theirs else None

    @property
    def memory_share(self) -> float | None:
        """Our peak memory as a share of TRL's."""
        return self.ours.peak_bytes / self.theirs.peak_bytes if self.theirs else None

    def share_of_floor(self, phase: str, floors: Sequence[float]) -> float | None:
        """Floor over measured seconds of a phase, median over steps; 1 would be the machine's limit."""
        pairs = [(f, step["phases"].get(phase, 0.0)) for f, step in zip(floors, self.ours.steps)]
        return statistics.median(f / s for f, s in pairs) if pairs and all(s > 0 for _, s in pairs) else None


@dataclass(slots=True, frozen=True)
class EngineSpeeds:
    """Tokens a second of repeated sampling, in turn with vLLM."""

    ours: tuple[float, ...]
    vllm: tuple[float, ...]
    versions: dict[str, str]

    @property
    def ratio(self) -> float:
        """Our median over vLLM's."""
        return statistics.median(self.ours) / statistics.median(self.vllm)


@dataclass(slots=True)
class Results:
    """Everything that a run measured."""

    machine: str
    repetitions: int
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    vllm: EngineSpeeds | None = None

    def add(self, result: Result) -> None:
        """One workload more."""
        self.results.append(result)


def describe_machine() -> str:
    """Processor, cores, memory and system."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.1f} before the run"
    return f"{name}, {cores} cores, {memory:.0f} GiB, {system}, {load}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def judged(value: float | None, target: float | None, *, at_least: bool, show: Callable[[float], str]) -> str:
    """A value, with a mark where a target is missed."""
    if value is None:
        return "-"
    missed = target is not None and (value < target if at_least else value > target)
    return show(value) + (" (missed)" if missed else "")


def render(results: Results, notes: str = "") -> str:
    """The whole report as markdown."""
    parts = [
        "# Benchmark results",
        f"Written by `make bench`, {results.date}; each trainer took {results.repetitions} steps in turn after "
        "warm-up, or fewer where steps are long (a range of one value is one step).",
        f"Machine: {results.machine}.",
    ]
    if results.results:
        parts += [_versions(results.results), _HOW, "## Speed", _speed_table(results.results)]
        parts += ["## Memory", _MEMORY, _memory_table(results.results)]
        parts += [
            "## The machine's floor",
            results.results[0].machine.describe(),
            _FLOOR,
            _floor_table(results.results),
        ]
        parts += ["## The work", _work_table(results.results), _LENGTHS]
    if results.vllm:
        parts += ["## Sampling beside vLLM", _vllm(results.vllm)]
    if results.failures:
        parts += ["## Not run", "\n".join(f"- {name}: {why}" for name, why in results.failures.items())]
    if notes:
        parts.append(notes.strip())
    return "\n\n".join(parts) + "\n"


_HOW = (
    "Both trainers run the same configuration through their common public API: float32, AdamW, on-policy, `beta=0`, "
    "no gradient checkpointing (slower for TRL here), transformers' own attention for TRL. Models are of the Qwen3 "
    "architecture with random weights, the demo's apart. Seconds are those of a whole optimizer step, medians; "
    "the ratio is TRL's seconds over ours."
)
_MEMORY = (
    "The most resident memory during a step above what stays in use between steps (weights, optimizer state, the "
    "libraries: the last column, measured after the warm-up, so that nothing kept for later steps hides there). "
    "Gradients, which both need, are counted; their size is given beside it. "
    f"Target: at most {MEMORY_TARGET:.0%} of TRL's."
)
_FLOOR = (
    "A floor counts the multiplications of exact GRPO (each prompt once a group, no padding, no work for groups whose "
    "rewards are all equal) at the measured rate, or the bytes of weights, keys and values at the measured bandwidth, "
    "whichever takes longer at each decode step. Everything else counts as nothing. "
    f"Target: sampling of `uniform` at {SAMPLING_TARGET:.0%} or more."
)
_LENGTHS = (
    "Lengths are drawn by each trainer from the same distribution; where they vary, the ratio per completion token in "
    "the first table evens out chance."
)


def _versions(results: Sequence[Result]) -> str:
    merged: dict[str, set[str]] = {}
    for result in results:
        for trainer, versions in result.versions.items():
            for name, version in versions.items():
                label = name if name in result.versions else f"{name} ({'beside TRL' if trainer == 'trl' else 'ours'})"
                merged.setdefault(label, set()).add(version)
    return "Versions: " + ", ".join(f"{name} {' / '.join(sorted(found))}" for name, found in merged.items()) + "."


def _speed_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        target = result.workload.target
        theirs = result.theirs
        rows.append(
            [
                result.workload.name,
                f"{result.ours.median_seconds:.2f} ({_range(result.ours)})",
                f"{theirs.median_seconds:.2f} ({_range(theirs)})" if theirs else "-",
                judged(result.ratio, target, at_least=True, show=lambda x: f"{x:.2f}×"),
                shown(result.ratio_per_token, unit="×"),
                shown(target, "g", "×"),
                _parts(result.ours),
                _parts(theirs) if theirs else "-",
            ]
        )
    header = ["workload", "groupgrad, s (range)", "TRL, s (range)", "ratio", "per token", "target"]
    return table([*header, "ours: sampling + rest, s", "TRL: sampling + rest, s"], rows)


def _range(series: Series) -> str:
    return f"{min(series.seconds):.2f}-{max(series.seconds):.2f}"


def _parts(series: Series) -> str:
    sampling = series.phase("sampling")
    return "-" if sampling is None else f"{sampling:.2f} + {series.median_seconds - sampling:.2f}"


def _memory_table(results: Sequence[Result]) -> str:
    return table(
        ["workload", "groupgrad, MiB", "TRL, MiB", "share", "gradients, MiB", "between steps, ours / TRL, MiB"],
        [
            [
                result.workload.name,
                f"{result.ours.peak_bytes / MIB:,.0f}",
                f"{result.theirs.peak_bytes / MIB:,.0f}" if result.theirs else "-",
                judged(result.memory_share, MEMORY_TARGET, at_least=False, show=lambda x: f"{x:.0%}"),
                f"{4 * result.workload.model.num_parameters / MIB:,.0f}",
                _both(result, lambda series: series.steps[-1]["held_bytes"] / MIB, ",.0f"),
            ]
            for result in results
        ],
    )


def _floor_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        sampling = result.share_of_floor("sampling", result.sampling_floors)
        target = SAMPLING_TARGET if result.workload.name == "uniform" else None
        rows.append(
            [
                result.workload.name,
                shown(result.ours.phase("sampling")),
                shown(statistics.median(result.sampling_floors)),
                judged(sampling, target, at_least=True, show=lambda x: f"{x:.0%}"),
                shown(result.ours.phase("training")),
                shown(statistics.median(result.training_floors)),
                shown(result.share_of_floor("training", result.training_floors), ".0%"),
                f"{result.machine.gflops:.0f}",
                f"{result.machine.gigabytes_per_second:.1f}",
            ]
        )
    header = ["workload", "sampling, s", "floor, s", "of floor", "training, s", "floor, s", "of floor"]
    return table([*header, "GFLOP/s then", "GB/s then"], rows)


def _work_table(results: Sequence[Result]) -> str:
    return table(
        ["workload", "a step", "model", "mean length, ours / TRL", "longest of a step, ours / TRL"],
        [
            [
                result.workload.name,
                result.workload.describe(),
                result.workload.model.describe(),
                _both(result, lambda series: series.mean_length),
                _both(result, lambda series: series.mean_longest),
            ]
            for result in results
        ],
    )


def _both(result: Result, number: Callable[[Series], float], form: str = ".1f") -> str:
    return " / ".join(shown(number(series) if series else None, form) for series in (result.ours, result.theirs))


def _vllm(speeds: EngineSpeeds) -> str:
    ours, theirs = statistics.median(speeds.ours), statistics.median(speeds.vllm)
    ratio = judged(speeds.ratio, VLLM_TARGET, at_least=True, show=lambda x: f"{x:.2f}×")
    return (
        f"The batch of `uniform` (4 prompts of 64 tokens, 8 completions of 128 tokens each), float32, in turn, "
        f"{len(speeds.ours)} times each: groupgrad {ours:,.0f} tokens/s, with the log-prob of each token; vLLM "
        f"{theirs:,.0f} tokens/s, without log-probs. Ratio {ratio}, target {VLLM_TARGET:g}×. "
        f"Versions: {', '.join(f'{name} {version}' for name, version in speeds.versions.items())}."
    )


def checkout_table(results: Sequence[Result]) -> str:
    """A table of each workload: time of a token and peak memory, as ratios to those of an older checkout."""
    lines = [
        "| workload | time of a token | in the single steps | peak memory | ours, s | before, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        ours, before = result.series["groupgrad"], result.series["before"]
        single = [
            Series((one,)).milliseconds_per_token / Series((other,)).milliseconds_per_token
            for one, other in zip(ours.steps, before.steps)
        ]
        lines.append(
            f"| {result.workload.name} | {ours.milliseconds_per_token / before.milliseconds_per_token:.3f} "
            f"| {min(single):.3f} to {max(single):.3f} | {ours.peak_bytes / before.peak_bytes:.3f} "
            f"| {ours.median_seconds:.2f} | {before.median_seconds:.2f} |"
        )
    return "\n".join(lines)


def write_report(results: Results, output: Path | None, *, notes: Path) -> None:
    """Print the report, with the hand-written notes at its end, and write it to `output` if there is one."""
    text = render(results, notes.read_text() if notes.exists() else "")
    print(text)
    if output is not None:
        output.write_text(text)
        print(f"written to {output}", file=sys.stderr)
