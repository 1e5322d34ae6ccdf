"""Trains agents with one trainer, one optimizer step for each input line; started by `agents.py`.

    python bench/agents_worker.py --trainer groupgrad|trl --folder FOLDER

Input lines are `step free` (tools return at once) and `step sleeping` (tools sleep at random). Output lines are JSON:
first `{"event": "ready", ...}`, then the measurements of each step, with the input line as the event.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
from agents_task import MAX_COMPLETION_LENGTH, NUM_GENERATIONS, NUM_ROLLOUTS, NUM_TURNS, TEMPERATURE, Tools
from datasets import Dataset
from materials import read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from worker import COMMON, Stop, time_calls
from workloads import scattered_reward

KEPT = ("time/", "tools/", "rollouts/", "completions/", "sampling/")
"""Prefixes of the logged metrics that are sent."""


class Rollouts:
    """A reward function with pseudo-random rewards. Records the turns and tokens of a step's rollouts."""

    __name__ = "scattered"

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.tokens: list[int] = []
        self.finished: list[bool] = []

    def clear(self) -> None:
        """Clear the records of the last step."""
        self.turns, self.tokens, self.finished = [], [], []

    def __call__(
        self, completions: list[list[dict[str, Any]]], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        for messages, ids in zip(completions, completion_ids):
            self.turns.append(sum(message["role"] == "assistant" for message in messages))
            self.tokens.append(len(ids))
            self.finished.append(self.turns[-1] == NUM_TURNS and not messages[-1].get("tool_calls"))
        return [scattered_reward(ids) for ids in completion_ids]


class Lockstep(TrainerCallback):
    """Runs one optimizer step for each input line and sends its measurements."""

    def __init__(self, trainer: str, tools: Tools, rollouts: Rollouts, answers: TextIO, trace: Trace):
        self.trainer, self.tools, self.rollouts, self.answers, self.trace = trainer, tools, rollouts, answers, trace
        self.command, self.started, self.seconds = "", 0.0, 0.0
        self.cpu_started, self.cpu_s = 0.0, 0.0

    def send(self, **answer: Any) -> None:
        """Write one JSON line."""
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A step is sent at the beginning of the next one, because it is logged after its end.
        if not self.command:
            self.send(event="ready", versions={name: version(name) for name in (self.trainer, "torch", "transformers")})
        else:
            logged = next((entry for entry in reversed(state.log_history) if "loss" in entry), {})
            self.send(
                event=self.command,
                seconds=self.seconds,
                cpu_s=self.cpu_s,
                generate_s=self.trace.generate_seconds(),
                slept_s=self.tools.slept_s,
                num_calls=self.tools.num_calls,
                turns=self.rollouts.turns,
                tokens=self.rollouts.tokens,
                finished=self.rollouts.finished,
                logged={key: value for key, value in logged.items() if key.startswith(KEPT)},
            )
        self.command = sys.stdin.readline().strip()
        if self.command not in ("step free", "step sleeping"):
            raise Stop
        self.tools.sleeps = self.command == "step sleeping"
        self.tools.clear()
        self.rollouts.clear()
        self.trace.begin()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds, self.cpu_s = time.perf_counter() - self.started, time.process_time() - self.cpu_started
        self.trace.end()


class Trace:
    """Measures a step beside the trainer's metrics: TRL's seconds in `generate`, and an optional profile."""

    def __init__(self, generate_seconds: Callable[[], float], profile: Path | None):
        self.generate_seconds, self.profile = generate_seconds, profile
        self._profiler: Any = None
        self._step = 0

    def begin(self) -> None:
        """A step begins."""
        if self.profile is not None:
            import cProfile

            self._profiler = cProfile.Profile()
            self._profiler.enable()

    def end(self) -> None:
        """It ended."""
        self._step += 1
        if self._profiler is not None and self.profile is not None:
            self._profiler.disable()
            self._profiler.dump_stats(f"{self.profile}.{self._step}")


def config_fields(output_dir: str) -> dict[str, Any]:
    """The configuration of both trainers; a step is one generation batch."""
    return {
        **COMMON,
        "output_dir": output_dir,
        "per_device_train_batch_size": NUM_ROLLOUTS,
        "gradient_accumulation_steps": 1,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-7,  # the model must still call tools at the end
    }


def main() -> None:
    """Train until the input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trainer", required=True, choices=("groupgrad", "trl"))
    parser.add_argument("--folder", required=True, type=Path, help="folder that agents_task.prepare wrote")
    parser.add_argument("--profile", type=Path, help="write a Python profile of each step to FILE.1, FILE.2, ...")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries must not mix with the output lines
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

    library = importlib.import_module(options.trainer)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    generate_seconds = time_calls(model, "generate") if options.trainer == "trl" else functools.partial(float, 0)
    tools, rollouts = Tools(), Rollouts()
    trainer: Any = library.GRPOTrainer(
        model=model,
        reward_funcs=rollouts,
        args=library.GRPOConfig(**config_fields(str(options.folder / f"output-{options.trainer}"))),
        train_dataset=Dataset.from_list(read_rows(options.folder)),
        processing_class=AutoTokenizer.from_pretrained(options.folder),
        tools=tools.functions(),
    )
    trace = Trace(generate_seconds, options.profile)
    trainer.add_callback(Lockstep(options.trainer, tools, rollouts, answers, trace))
    try:
        trainer.train()
    except Stop:
        return
    raise RuntimeError("training ended although nobody asked it to")


if __name__ == "__main__":
    main()
