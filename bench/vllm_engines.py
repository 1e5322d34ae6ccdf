"""Trains the demo's task with the native engine and both modes of vLLM, and compares accuracies and times.

    python bench/vllm_engines.py [--steps 200] [--seed 0] [--quick]

Writes `bench/RESULTS-vllm.md` and `docs/vllm-engines.png`; with `--quick` everything is short, and printed only. It
needs an environment with vLLM and matplotlib: `make bench-vllm` makes it. Exit status 1 if held-out accuracies lie more
than 5 points apart.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from plumbing import BENCH, LOGS, MODELS, Worker, describe_machine, table, today

ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    # Waiting threads that spin would take cores from working ones.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
"""Defaults of this process and of those that it starts, which inherit them."""
ENGINES = {
    "native": "native engine",
    "colocate": "vLLM in the training process (colocate)",
    "server": "vLLM server",
}
COLORS = {"native": "#2563a8", "colocate": "#b4552d", "server": "#2e7d32"}
PHASES = ("sampling", "weights", "scoring", "training")
ACCURACY = "rewards/correctness_reward/mean"
WITHIN = 0.05
"""Largest accepted difference between held-out accuracies."""
STARTS_IN_S = 300.0
Measured = dict[str, Any]


def demo_base(seed: int, *, warm_up_steps: int = 800) -> Path:
    """The demo's base model with 2 attention heads of 32 channels in place of 4 of 16, and the same size.

    32 channels are the least for vLLM's attention on a CPU. The model is made once.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from groupgrad.apps.demo import task

    folder = MODELS / f"vllm-demo-{seed}-{warm_up_steps}"
    if not (folder / "model.safetensors").exists():  # which is written last
        print(f"making {folder.name} ...", file=sys.stderr, flush=True)
        tokenizer = task.make_tokenizer()
        config = task.make_model(tokenizer, seed).config
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 2, 32
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        task.warm_up(model, tokenizer, task.make_splits(seed).warm_up, num_steps=warm_up_steps, seed=seed)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


@contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """URL of a server of the model in this folder, in float32, while the context is open.

    RuntimeError, with the end of its output, if it exits before it is up.
    """
    from groupgrad.integrations.vllm.http import Address, wait_until_up

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [str(Path(sys.executable).parent / "groupgrad"), "vllm-serve", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "256"]
    LOGS.mkdir(exist_ok=True)
    log = LOGS / "vllm-server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTS_IN_S
        while True:
            try:
                wait_until_up(Address("127.0.0.1", port), timeout_s=2.0)
                break
            except TimeoutError:
                if process.poll() is not None or time.monotonic() > deadline:
                    end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                    raise RuntimeError(f"the vLLM server did not come up; the end of {log}:\n{end}") from None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def measure(options: argparse.Namespace) -> Measured:
    """Results of all engines on the demo's task; they take turns of a few steps."""
    from demo_accuracy import evaluate
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groupgrad.apps.demo import task

    machine, folder = describe_machine(), demo_base(options.seed)
    held_out = task.make_splits(options.seed).held_out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = evaluate(AutoModelForCausalLM.from_pretrained(folder), tokenizer, held_out, seed=options.seed)
    print(f"before: {before.accuracy:.1%} of {len(held_out)} held-out prompts", flush=True)
    workers: dict[str, Worker] = {}
    results: dict[str, Measured] = {}
    with ExitStack() as stack:
        url = stack.enter_context(vllm_server(folder))
        for engine in ENGINES:
            workers[engine] = launch(engine, folder, url, options)
            stack.callback(workers[engine].stop)
        for worker in workers.values():
            worker.versions = worker.read("ready")["versions"]
        for number in range(-(-options.steps // options.chunk)):
            names = list(workers)
            # Rotate the order, so that no engine is always first.
            for engine in names[number % 3 :] + names[: number % 3]:
                answer = workers[engine].ask("steps")
                print_progress(engine, answer)
                if "result" in answer:
                    results[engine] = answer["result"]
    return {
        "seed": options.seed,
        "steps": options.steps,
        "chunk": options.chunk,
        "num_held_out": len(held_out),
        "before": {"accuracy": before.accuracy, "format": before.format_rate},
        "results": {engine: results[engine] for engine in workers},
        "date": today(),
        "machine": machine,
        "versions": workers["server"].versions,
    }


def launch(engine: str, folder: Path, url: str, options: argparse.Namespace) -> Worker:
    """Start the process that trains with this engine."""
    output = BENCH.parent / "runs" / "vllm-engines" / engine
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(BENCH / "vllm_worker.py"), "--engine", engine, "--folder", str(folder)]
    command += ["--output", str(output), "--url", url, "--steps", str(options.steps)]
    command += ["--chunk", str(options.chunk), "--seed", str(options.seed)]
    return Worker.launch(engine, command, LOGS / f"vllm-engines-{engine}.log")


def print_progress(engine: str, answer: Measured) -> None:
    """Print the progress of an engine's run."""
    logged = answer["logged"]
    phases = ", ".join(f"{key[5:]} {logged[key]:.2f}" for key in logged if key.startswith("time/"))
    done = f"  held-out {answer['result']['accuracy']:.1%}" if "result" in answer else ""
    seconds = f"{logged['step_time']:.2f} s ({phases})"
    print(f"  {engine:9} step {answer['step']:4}  right {logged[ACCURACY]:6.1%}  {seconds}{done}", flush=True)


def medians(log_history: Sequence[Mapping[str, Any]], *, skip: int = 2) -> dict[str, float]:
    """Median seconds of a step (`step`) and of its phases; a phase that is not logged counts as 0.

    The first steps, in which all code runs for the first time, are left out.
    """
    events = [event for event in log_history if "step_time" in event][skip:]
    phases = {phase: statistics.median(event.get(f"time/{phase}", 0.0) for event in events) for phase in PHASES}
    return {"step": statistics.median(event["step_time"] for event in events), **phases}


def accuracy_gap(results: Mapping[str, Measured]) -> float:
    """Largest difference between two engines' held-out accuracies."""
    accuracies = [result["accuracy"] for result in results.values()]
    return max(accuracies) - min(accuracies)


def logprob_gap(log_history: Sequence[Mapping[str, Any]]) -> str:
    """Mean over steps of the logged difference between the log-probs of sampling and of training."""
    keys = ("sampling/sampling_logp_difference/mean", "sampling/logp_mismatch")
    values = [event[key] for event in log_history for key in keys if key in event]
    return f"{statistics.fmean(values):.1e}" if values else "-"


def render(measured: Measured) -> str:
    """The report as markdown."""
    results, before = measured["results"], measured["before"]
    rows, times = [], []
    for name, result in results.items():
        now = medians(result["log_history"])
        shares = before["accuracy"], result["accuracy"], result["greedy"], result["format"]
        rows.append([ENGINES[name], *(f"{share:.1%}" for share in shares), logprob_gap(result["log_history"])])
        times.append([ENGINES[name], f"{now['step']:.3f}", *(f"{now[phase]:.3f}" for phase in PHASES)])
    apart = accuracy_gap(results)
    verdict = "within" if apart <= WITHIN else "NOT within"
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    text = [
        "# vLLM",
        "Written by `make bench-vllm`. The machine is shared with other work, whose load changes: compare within a "
        "table, not between tables, nor with other pages. Everything is float32 on a CPU, where vLLM is not at its "
        "best; no GPU was measured.",
        "## The demo's task with each engine",
        f"The task and the settings of `groupgrad demo`: seed {measured['seed']}, {measured['steps']} steps of 256 "
        "completions. All three start from the same base model, the demo's but for its attention heads (2 of 32 "
        "channels for 4 of 16: vLLM's attention on a CPU knows no smaller ones). They take steps in turn, "
        f"{measured['chunk']} at a time, so that a change in the machine's load meets all.",
        f"Accuracy on {measured['num_held_out']} held-out prompts, one completion each at temperature 1, sampled by "
        "`generate` from the saved model. The difference is the mean over steps of `sampling_logp_difference/mean`, "
        "between vLLM's log-probs and those of the trainer (native: `sampling/logp_mismatch`, the largest of all "
        "tokens).",
        table(["", "before", "after", "after, greedy", "after, format", "log-prob difference"], rows),
        f"The accuracies after training lie {100 * apart:.1f} points apart: {verdict} {100 * WITHIN:.0f}.",
        "![Share of right answers while training](../docs/vllm-engines.png)",
        "Median seconds of a step and of its phases, as logged (`step_time`, `time/...`); `weights` is the push.",
        table(["", "step", *PHASES], times),
        f"Taken {measured['date']} on {measured['machine']}. Versions: {versions}.",
    ]
    return "\n\n".join(text) + "\n"


def draw(results: Mapping[str, Measured], path: Path) -> None:
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


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; returns 1 if the engines' accuracies differ too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=200, help="GRPO steps with each engine (default 200)")
    parser.add_argument("--chunk", type=int, default=10, help="steps that an engine takes at a time (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 steps, and nothing is written")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps = 20
    for name, value in {**ENVIRONMENT, "VLLM_API_KEY": secrets.token_hex()}.items():
        os.environ.setdefault(name, value)  # before torch comes
    measured = measure(options)
    text = render(measured)
    print(text)
    if options.quick:
        return 0
    (BENCH / "RESULTS-vllm.md").write_text(text)
    draw(measured["results"], BENCH.parent / "docs" / "vllm-engines.png")
    return 0 if accuracy_gap(measured["results"]) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
