"""Turns measured steps into the tables of `RESULTS.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from plumbing import Series, judged, shown, table, today
from workloads import Workload

if TYPE_CHECKING:
    from floor import Machine

MIB = 2**20
MEMORY_TARGET = 0.25
SAMPLING_TARGET = 0.6


@dataclass(slots=True, frozen=True)
class Result:
    """Measurements of one workload."""

    workload: Workload
    series: dict[str, Series]
    """Measured steps by trainer: `groupgrad`, and `trl` if it ran."""
    versions: dict[str, dict[str, str]]
    machine: Machine
    """As it was measured right after the workload."""

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


@dataclass(slots=True)
class Results:
    """Everything that a run measured."""

    machine: str
    repetitions: int
    date: str = field(default_factory=today)
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


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
    if results.failures:
        parts += ["## Not run", "\n".join(f"- {name}: {why}" for name, why in results.failures.items())]
    if notes:
        parts.append(notes.strip())
    return "\n\n".join(parts) + "\n"


_HOW = (
    "Both trainers run the same configuration through their common public API: float32, AdamW, on-policy, `beta=0`, "
    "no gradient checkpointing (slower for TRL here), transformers' own attention for TRL. Models are of the Qwen3 "
    "architecture with random weights; those of `demo` and `real` are trained. Seconds are those of a whole optimizer "
    "step, medians; the ratio is TRL's seconds over ours."
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
    "whichever takes longer at each decode step. Everything else counts as nothing. The rates are those of torch's "
    "products; more than 100 % means that groupgrad's own were faster. "
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
        sampling = result.ours.share_of_floor("sampling")
        target = SAMPLING_TARGET if result.workload.name == "uniform" else None
        rows.append(
            [
                result.workload.name,
                shown(result.ours.phase("sampling")),
                shown(result.ours.floor("sampling")),
                judged(sampling, target, at_least=True, show=lambda x: f"{x:.0%}"),
                shown(result.ours.phase("training")),
                shown(result.ours.floor("training")),
                shown(result.ours.share_of_floor("training"), ".0%"),
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


def checkout_table(results: Sequence[Result]) -> str:
    """A table of each workload: time of a token and peak memory, as ratios to those of an older checkout."""
    rows = []
    for result in results:
        ours, before = result.series["groupgrad"], result.series["before"]
        single = [
            Series((one,)).milliseconds_per_token / Series((other,)).milliseconds_per_token
            for one, other in zip(ours.steps, before.steps)
        ]
        rows.append(
            [
                result.workload.name,
                f"{ours.milliseconds_per_token / before.milliseconds_per_token:.3f}",
                f"{min(single):.3f} to {max(single):.3f}",
                f"{ours.peak_bytes / before.peak_bytes:.3f}",
                f"{ours.median_seconds:.2f}",
                f"{before.median_seconds:.2f}",
            ]
        )
    header = ["workload", "time of a token", "in the single steps", "peak memory", "ours, s", "before, s"]
    return table(header, rows)


def write_report(results: Results, output: Path | None, *, notes: Path) -> None:
    """Print the report, with the hand-written notes at its end, and write it to `output` if there is one."""
    text = render(results, notes.read_text() if notes.exists() else "")
    print(text)
    if output is not None:
        output.write_text(text)
        print(f"written to {output}", file=sys.stderr)
