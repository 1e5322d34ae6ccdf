"""Shared by the benchmarks: an environment for a peer, processes that take turns, memory, dates and tables.

Nothing here imports torch: whoever starts processes leaves cores and cards to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

BENCH = Path(__file__).resolve().parent
LOGS, MODELS = BENCH / ".logs", BENCH / ".models"
TORCH = "torch==2.13.0"
"""The build that groupgrad is tested with. It is installed first and pinned, because other packages would install a
CUDA build of several gigabytes."""

ENVIRONMENT = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
CPU_RUN: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
}
"""Settings of a run in float32 on a CPU that leaves nothing behind; TRL knows them all too."""


def set_environment() -> None:
    """Defaults of this process and of the workers that it starts, which inherit them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def make_trl_environment(folder: Path) -> Path:
    """The interpreter of an environment with the newest TRL, which is installed or updated."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"installing TRL into {folder.name} ...", flush=True)
    subprocess.run([*pip, TORCH], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(TORCH + "\n")
        constraints.flush()
        subprocess.run([*pip, "--constraint", constraints.name, "--upgrade", "trl"], check=True)
    return python


@dataclass(slots=True)
class Worker:
    """A process that works on demand: it reads a command a line, and answers with a line of JSON that names it."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def launch(cls, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Worker:
        """Start a process of this command, which writes its errors to `log`; it loads while others do too."""
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
        return cls(name, process, log)

    def read(self, event: str) -> dict[str, Any]:
        """The next answer, which has to be of this kind."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended before its `{event}` answer; the end of {self.log}:\n{self.tail()}")
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


def open_answers() -> TextIO:
    """A worker's side of the pipe. Whatever else is printed goes to its log, so that it does not mix with answers."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def send(answers: TextIO, **answer: Any) -> None:
    """One answer of a worker."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


class PeakMemory:
    """This process's resident memory: now, and the most since it was last reset, in bytes. Linux only."""

    @staticmethod
    def _read(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {key}")

    def settle(self) -> int:
        """Give back what is unused, once no thread works any more; the bytes that stay."""
        # The first step's records copy the tokenizer on a thread of their own, 50 MiB with Qwen3's. By how long this
        # process has waited for another, that would count before the step or in it.
        _wait_for_threads()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return self._read("VmRSS:")

    def reset(self) -> None:
        """Start counting the peak anew."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The most since `reset`."""
        return self._read("VmHWM:")


def _wait_for_threads(patience_s: float = 60.0) -> None:
    """Wait until no thread of this process computes, or for `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        used = time.process_time()
        time.sleep(0.5)
        # Watching threads take 1 ms; one that works may get no more than 50 on a busy machine.
        if time.process_time() - used < 0.005:
            return


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

    def floor(self, name: str) -> float:
        """Median of the least seconds that the machine allows a part."""
        return statistics.median(step["floors"][name] for step in self.steps)

    def share_of_floor(self, name: str) -> float | None:
        """The least seconds that the machine allows a part over those measured, median over steps; 1 is the limit."""
        shares = [step["floors"][name] / step["phases"][name] for step in self.steps if step["phases"].get(name)]
        return statistics.median(shares) if shares else None


def today() -> str:
    """The time now, for a report."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def describe_machine() -> str:
    """Processor, cores, memory and system."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
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
