"""Times groupgrad and TRL on the same work, in turn, and writes `bench/RESULTS.md`.

    python bench/run.py [--only uniform,ragged] [--repetitions 5] [--quick] [--against CHECKOUT]

TRL is installed into an environment of its own, the newest that the package index has. Each trainer is a process that
takes one optimizer step when it is told to and otherwise waits; the steps of both alternate, so that a change in the
machine's speed meets both. With `--only`, `--quick` or `--without_trl` the report is printed and written to `--output`
only, so that RESULTS.md always shows whole runs. `--against` takes turns with an older checkout of groupgrad instead of
TRL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from plumbing import BENCH, LOGS, MODELS, Series, Worker, describe_machine, make_trl_environment, set_environment

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    set_environment()

from floor import floors_of, measure_machine
from materials import prepare
from report import Result, Results, checkout_table, render, write_report
from workloads import WORKLOADS, Workload


def start_worker(
    name: str,
    python: Path,
    workload: Workload,
    folder: Path,
    *,
    checkout: Path = BENCH.parent,
    seed: int = 0,
    dtype: str = "float32",
) -> Worker:
    """Start a checkout's worker on that checkout's groupgrad, or on TRL."""
    trainer = "trl" if name == "trl" else "groupgrad"
    command = [str(python), str(checkout / "bench" / "worker.py"), "--trainer", trainer]
    command += ["--workload", workload.name, "--folder", str(folder)]
    command += ["--seed", str(seed)] if seed else []  # an older checkout does not know it
    command += ["--dtype", dtype] if dtype != "float32" else []
    environment = {} if checkout == BENCH.parent else {"PYTHONPATH": str(checkout / "src")}
    return Worker.launch(name, command, LOGS / f"{workload.name}-{name}.log", environment)


def run_workload(workload: Workload, pythons: dict[str, Path], options: argparse.Namespace) -> Result:
    """Steps of each trainer in turn: warm-up, then the repetitions that count."""
    folder = prepare(workload, MODELS, warm_up_steps=options.demo_warm_up_steps)
    workers = {name: start_worker(name, python, workload, folder) for name, python in pythons.items()}
    if options.against is not None:
        python = Path(sys.executable)
        workers["before"] = start_worker("before", python, workload, folder, checkout=options.against)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    try:
        for worker in workers.values():
            worker.versions = worker.read("ready")["versions"]
        started = time.monotonic()
        for number in range(-options.warm_up, options.repetitions):
            if number >= 1 and options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
                break
            order = list(workers.values())
            for worker in order if number % 2 == 0 else order[::-1]:
                if number == 0:
                    worker.ask("baseline")
                step = worker.ask("step")
                kind = "warm-up" if number < 0 else f"step {number + 1}"
                phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in step["phases"].items())
                print(
                    f"  {kind:8} {worker.name:9} {step['seconds']:8.2f} s  ({phases})"
                    f"  peak +{step['peak_bytes'] / 2**20:,.0f} MiB  {sum(step['lengths']):,} tokens",
                    flush=True,
                )
                if number >= 0:
                    steps[worker.name].append(step)
    finally:
        for worker in workers.values():
            worker.stop()
    (LOGS / f"{workload.name}-steps.json").write_text(json.dumps(steps))
    machine = measure_machine(options.floor_seconds)
    for step in steps["groupgrad"]:
        step["floors"] = floors_of(workload, machine, step)
    return Result(
        workload,
        {name: Series(tuple(measured)) for name, measured in steps.items()},
        {name: worker.versions for name, worker in workers.items()},
        machine,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", help=f"some workloads, comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--repetitions", type=int, help="steps that count, of each trainer (default 5)")
    parser.add_argument(
        "--minutes", type=float, help="after one repetition, begin no further one of a workload that took this long"
    )
    parser.add_argument("--warm_up", type=int, help="steps before them (default 1)", default=1)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--without_trl", action="store_true", help="groupgrad alone: no ratio")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="compare with the groupgrad of another checkout, without TRL"
    )
    parser.add_argument("--trl_python", type=Path, help="an interpreter that has TRL, instead of a new environment")
    parser.add_argument("--output", type=Path, help="file for the report (default for whole runs: bench/RESULTS.md)")
    options = parser.parse_args(arguments)
    options.names = options.only.split(",") if options.only else list(WORKLOADS)
    if unknown := [name for name in options.names if name not in WORKLOADS]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    options.without_trl |= options.against is not None
    whole = not (options.only or options.quick or options.without_trl)
    if whole and options.output is None:
        options.output = BENCH / "RESULTS.md"
    options.repetitions = options.repetitions or (1 if options.quick else 5)
    options.floor_seconds = 0.5 if options.quick else 1.5
    options.demo_warm_up_steps = 800
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for and report; 1 if a workload failed."""
    options = parse(arguments)
    pythons = {"groupgrad": Path(sys.executable)}
    if not options.without_trl:
        pythons["trl"] = options.trl_python or make_trl_environment(BENCH / ".venv-trl")
    results, failed = Results(describe_machine(), options.repetitions), False
    for name in options.names:
        workload = WORKLOADS[name]
        print(f"{name}: {workload.describe()}; {workload.model.describe()}", flush=True)
        try:
            results.results.append(run_workload(workload, pythons, options))
        except FileNotFoundError as error:
            print(f"  skipped: {error}", flush=True)
            results.failures[name] = str(error)
        except RuntimeError as error:
            print(f"  failed: {error}", flush=True)
            results.failures[name], failed = str(error).splitlines()[0], True
        if options.output is not None and options.against is None:
            options.output.write_text(render(results))  # in case the rest never ends
    if options.against is not None:
        print(checkout_table(results.results))
        return int(failed)
    write_report(results, options.output, notes=BENCH / "NOTES.md")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
