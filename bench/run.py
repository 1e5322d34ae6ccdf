"""Times groupgrad and TRL on the same work, in turn, and writes `bench/RESULTS.md`.

    python bench/run.py [--only uniform,ragged] [--repetitions 5] [--quick] [--with-vllm] [--against CHECKOUT]

TRL is installed into an environment of its own, the newest that the package index has. Each trainer is a process that
takes one optimizer step when it is told to and otherwise waits; the steps of both alternate, so that a change in the
machine's speed meets both. With `--only`, `--quick` or `--without_trl` the report is printed and written to `--output`
only, so that RESULTS.md always shows whole runs. `--against` takes turns with an older checkout of groupgrad instead of
TRL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch comes; whoever only imports this keeps his environment
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")

from environments import make_trl_environment, make_vllm_environment
from floor import measure_machine, sampling_floor, training_floor
from materials import prepare
from report import Result, Results, Series, checkout_table, describe_machine, render, write_report
from vllm_sampling import compare_with_vllm
from workloads import WORKLOADS, Workload, groups_of

BENCH = Path(__file__).resolve().parent


@dataclass(slots=True)
class Worker:
    """A process that takes optimizer steps on demand."""

    trainer: str
    process: subprocess.Popen[str]
    log: Path
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, trainer: str, python: Path, workload: Workload, folder: Path, *extra: str) -> Worker:
        """Start the process; it loads while others do too."""
        command = [str(python), str(BENCH / "worker.py"), "--trainer", trainer, "--workload", workload.name]
        command += ["--folder", str(folder), *extra]
        return cls.launch(trainer, command, BENCH / ".logs" / f"{workload.name}-{trainer}.log")

    @classmethod
    def of_checkout(cls, checkout: Path, workload: Workload, folder: Path) -> Worker:
        """Start a process of another checkout's worker on that checkout's groupgrad."""
        command = [sys.executable, str(checkout / "bench" / "worker.py"), "--trainer", "groupgrad"]
        command += ["--workload", workload.name, "--folder", str(folder)]
        log = BENCH / ".logs" / f"{workload.name}-before.log"
        return cls.launch("before", command, log, {"PYTHONPATH": str(checkout / "src")})

    @classmethod
    def launch(cls, trainer: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Worker:
        """Start a process of this command, which writes its errors to `log`."""
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                env={**os.environ, **(env or {})},
            )
        return cls(trainer, process, log)

    def read(self, event: str) -> dict[str, Any]:
        """The next answer, which has to be of this kind."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.trainer} ended before its `{event}` answer; the end of {self.log}:\n{self.tail()}"
            )
        answer = json.loads(line)
        assert answer["event"] == event, answer
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read` reports the missing answer
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self.read(command)

    def stop(self) -> None:
        """Let the process end."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def tail(self) -> str:
        """The last lines that the process wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def run_workload(workload: Workload, pythons: dict[str, Path], options: argparse.Namespace) -> Result:
    """Steps of each trainer in turn: warm-up, then the repetitions that count."""
    folder = prepare(workload, BENCH / ".models", warm_up_steps=options.demo_warm_up_steps)
    extra = {"groupgrad": ["--pack_weights"] if options.pack_weights else []}
    extra["trl"] = ["--attention", options.trl_attention] if options.trl_attention else []
    workers = {
        trainer: Worker.start(trainer, python, workload, folder, *extra[trainer]) for trainer, python in pythons.items()
    }
    if options.against is not None:
        workers["before"] = Worker.of_checkout(options.against, workload, folder)
    steps: dict[str, list[dict[str, Any]]] = {trainer: [] for trainer in workers}
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
                    f"  {kind:8} {worker.trainer:9} {step['seconds']:8.2f} s  ({phases})"
                    f"  peak +{step['peak_bytes'] / 2**20:,.0f} MiB  {sum(step['lengths']):,} tokens",
                    flush=True,
                )
                if number >= 0:
                    steps[worker.trainer].append(step)
    finally:
        for worker in workers.values():
            worker.stop()
    (BENCH / ".logs" / f"{workload.name}-steps.json").write_text(json.dumps(steps))
    machine = measure_machine(options.floor_seconds)
    ours = [groups_of(step, workload.num_generations) for step in steps["groupgrad"]]
    return Result(
        workload,
        {trainer: Series(tuple(measured)) for trainer, measured in steps.items()},
        {trainer: worker.versions for trainer, worker in workers.items()},
        machine,
        sampling_floors=tuple(sampling_floor(workload.model, machine, groups) for groups in ours),
        training_floors=tuple(training_floor(workload.model, machine, groups) for groups in ours),
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
    parser.add_argument(
        "--with-vllm", "--with_vllm", action="store_true", help="compare sampling with vLLM's CPU build"
    )
    parser.add_argument("--trl_python", type=Path, help="an interpreter that has TRL, instead of a new environment")
    parser.add_argument("--pack_weights", action="store_true", help="groupgrad with engine_pack_weights=True")
    parser.add_argument("--trl_attention", help="attention implementation of TRL's model (default: transformers' own)")
    parser.add_argument("--output", type=Path, help="file for the report (default for whole runs: bench/RESULTS.md)")
    options = parser.parse_args(arguments)
    options.names = options.only.split(",") if options.only else list(WORKLOADS)
    if unknown := [name for name in options.names if name not in WORKLOADS]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    options.without_trl |= options.against is not None
    altered = options.pack_weights or options.trl_attention
    whole = not (options.only or options.quick or options.without_trl or altered)
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
            results.add(run_workload(workload, pythons, options))
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
    if options.with_vllm:
        print("sampling beside vLLM", flush=True)
        try:
            python = make_vllm_environment(BENCH / ".venv-vllm")
            results.vllm = compare_with_vllm(python, BENCH / ".models", repetitions=options.repetitions)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"  failed: {error}", flush=True)
            results.failures["vLLM"], failed = str(error).splitlines()[0], True
    write_report(results, options.output, notes=BENCH / "NOTES.md")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
