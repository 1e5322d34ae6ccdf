"""Trains the demo's task with the native engine and both modes of vLLM; times pushes and sampling ahead.

    python bench/vllm_engines.py [--only engines,ahead,pushes] [--steps 200] [--seed 0] [--quick]

Writes `bench/RESULTS-vllm.md` and `docs/vllm-engines.png`; with `--only` the other parts keep their last
measurement on this machine. With `--quick` everything is short, and printed only. It needs an environment with vLLM and
matplotlib: `make bench-vllm` makes it. Exit status 1 if held-out accuracies lie more than 5 points apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from vllm_server import set_environment

    set_environment()

from materials import import_demo_task
from report import describe_machine
from run import BENCH, Worker
from vllm_models import demo_base
from vllm_report import ACCURACY, WITHIN, accuracy_gap, draw, render, taken
from vllm_server import LOGS, vllm_server

COMMAND = "make bench-vllm"
PARTS = ("engines", "ahead", "pushes")
MEASURED = LOGS / "vllm-measured.json"
RUNS = BENCH.parent / "runs" / "vllm-engines"


def measure_engines(options: argparse.Namespace) -> dict[str, Any]:
    """Results of all engines on the demo's task; they take turns of a few steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_base(options.seed)
    task = import_demo_task()
    held_out = task.make_splits(options.seed).held_out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = task.evaluate(AutoModelForCausalLM.from_pretrained(folder), tokenizer, held_out, seed=options.seed)
    print(f"before: {before.accuracy:.1%} of {len(held_out)} held-out prompts", flush=True)
    workers: dict[str, Worker] = {}
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        url = stack.enter_context(vllm_server(folder, "vllm-engines-server-side", "--max-num-seqs", "256"))
        for engine in ("native", "colocate", "server"):
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
    }


def launch(engine: str, folder: Path, url: str, options: argparse.Namespace) -> Worker:
    """Start the process that trains with this engine."""
    output = RUNS / engine
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(BENCH / "vllm_worker.py"), "--engine", engine, "--folder", str(folder)]
    command += ["--output", str(output), "--url", url, "--steps", str(options.steps)]
    command += ["--chunk", str(options.chunk), "--seed", str(options.seed)]
    return Worker.launch(engine, command, LOGS / f"vllm-engines-{engine}.log")


def print_progress(engine: str, answer: dict[str, Any]) -> None:
    """Print the progress of an engine's run."""
    logged = answer["logged"]
    phases = ", ".join(f"{key[5:]} {logged[key]:.2f}" for key in logged if key.startswith("time/"))
    done = f"  held-out {answer['result']['accuracy']:.1%}" if "result" in answer else ""
    seconds = f"{logged['step_time']:.2f} s ({phases})"
    print(f"  {engine:9} step {answer['step']:4}  right {logged[ACCURACY]:6.1%}  {seconds}{done}", flush=True)


def measure_by(script: str, *arguments: str) -> dict[str, Any]:
    """Results of another benchmark script in this folder."""
    output = LOGS / f"{script}.json"
    subprocess.run([sys.executable, str(BENCH / f"{script}.py"), "--output", str(output), *arguments], check=True)
    return json.loads(output.read_text())


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part of the report, with its date, machine and versions."""
    machine = describe_machine()
    if part == "engines":
        results = measure_engines(options)
    elif part == "ahead":
        results = measure_by("vllm_ahead", "--rounds", "5" if options.quick else "9")
    else:
        results = measure_by("vllm_pushes", "--repetitions", "1" if options.quick else "5")
    return taken(results, machine)


def measured_before() -> dict[str, Any]:
    """The last measurements of all parts on this machine."""
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}, with commas between them; default: all")
    parser.add_argument("--steps", type=int, default=200, help="GRPO steps with each engine (default 200)")
    parser.add_argument("--chunk", type=int, default=10, help="steps that an engine takes at a time (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 steps, few repetitions, nothing is written")
    options = parser.parse_args(arguments)
    options.parts = options.only.split(",") if options.only else list(PARTS)
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"--only has {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.quick:
        options.steps = 20
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; returns 1 if the engines' accuracies differ too much."""
    options = parse(arguments)
    LOGS.mkdir(exist_ok=True)
    known: dict[str, Any] = {}
    for part in options.parts:
        print(f"{part}:", flush=True)
        results = {part: measure(part, options)}
        # Read the file again: another process may have measured another part meanwhile.
        known = {**(known if options.quick else measured_before()), **results}
        if not options.quick:
            MEASURED.write_text(json.dumps(known))
    text = render(known, COMMAND)
    print(text)
    if not options.quick:
        (BENCH / "RESULTS-vllm.md").write_text(text)
        if "engines" in known:
            draw(known["engines"]["results"], BENCH.parent / "docs" / "vllm-engines.png")
    if "engines" not in options.parts or options.quick:
        return 0
    return 0 if accuracy_gap(known["engines"]["results"]) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
