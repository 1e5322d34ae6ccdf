"""Trains with ONE trainer on one workload, one optimizer step for each line that comes in.

    python bench/worker.py --trainer groupgrad|trl --workload NAME --folder FOLDER

Both trainers run through the API that they have in common; only the import differs. Lines out are JSON: first
`{"event": "ready", ...}`, then one for each `step` or `baseline` line in. `baseline` notes the memory in use between
steps, weights and optimizer state included; peaks are counted from there. Between steps the process waits on the pipe,
so that another trainer has the machine to itself.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from materials import import_demo_task, read_rows
from plumbing import CPU_RUN, PeakMemory, open_answers, send
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from workloads import LEARNING, WORKLOADS, Workload, scattered_reward


class Stop(Exception):
    """The input has ended, so no further step is made."""


class Recorder:
    """Notes what the reward functions saw in a step: lengths and the sum of rewards, one number a row."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.prompt_tokens: list[int] = []
        self.rewards: list[float] = []

    def clear(self) -> None:
        """Forget the last step."""
        self.lengths, self.prompt_tokens, self.rewards = [], [], []

    def wrap(self, function: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """The same reward function, watched."""

        @functools.wraps(function)
        def watched(completion_ids: list[list[int]], prompt_tokens: list[int], **inputs: Any) -> list[float]:
            rewards = function(completion_ids=completion_ids, prompt_tokens=prompt_tokens, **inputs)
            self.lengths, self.prompt_tokens = [len(ids) for ids in completion_ids], list(prompt_tokens)
            self.rewards = [a + b for a, b in zip(self.rewards or [0.0] * len(rewards), rewards)]
            return rewards

        return watched


class Lockstep(TrainerCallback):
    """Runs one optimizer step a line, and answers with what it measured."""

    def __init__(
        self, trainer: str, recorder: Recorder, answers: TextIO, phases: Callable[[], dict[str, float]]
    ) -> None:
        self.trainer, self.recorder, self.answers, self.phases = trainer, recorder, answers, phases
        self.memory, self.baseline, self.started = PeakMemory(), 0, 0.0
        self.measured: dict[str, Any] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Answers come at the beginning of the next step, when the last one has been logged.
        if self.measured is None:
            versions = {name: version(name) for name in (self.trainer, "torch", "transformers")}
            send(self.answers, event="ready", versions=versions)
        else:
            send(self.answers, event="step", **self.measured, **vars(self.recorder), phases=self.phases())
        while (command := sys.stdin.readline().strip()) == "baseline":
            self.baseline = self.memory.settle()
            send(self.answers, event="baseline", bytes=self.baseline)
        if command != "step":
            raise Stop
        self.recorder.clear()
        self.memory.reset()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.started
        peak = self.memory.peak() - self.baseline
        self.measured = {"seconds": seconds, "peak_bytes": peak, "held_bytes": self.baseline}


def random_reward(completion_ids: list[list[int]], flat: list[bool], **_: Any) -> list[float]:
    """A number for each completion that looks random; a constant for flat prompts."""
    return [0.5 if same else scattered_reward(ids) for ids, same in zip(completion_ids, flat)]


def last_number_is_right(completions: list[Any], solution: list[int], **_: Any) -> list[float]:
    """1 for an answer whose last number is the solution, else 0; the demo's reward, which TRL's environment has not."""
    answers = [re.findall(r"\d+", messages[-1]["content"]) for messages in completions]
    return [float(numbers[-1:] == [str(right)]) for numbers, right in zip(answers, solution)]


def reward_functions(workload: Workload) -> list[Callable[..., list[float]]]:
    """The workload's reward functions."""
    if workload.source == "demo":
        task = import_demo_task()
        return [task.correctness_reward, task.format_reward]
    if workload == LEARNING:
        return [last_number_is_right]
    return [random_reward]


def config_fields(workload: Workload, output_dir: str, seed: int = 0) -> dict[str, Any]:
    """The configuration, the same for both trainers: on-policy, float32, AdamW, no KL term."""
    return {
        **CPU_RUN,
        "output_dir": output_dir,
        "per_device_train_batch_size": workload.batch_rows // workload.micro_batches,
        "gradient_accumulation_steps": workload.micro_batches,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.limit,
        "temperature": 1.0,
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "max_steps": 1_000_000,
        "logging_steps": 1,
        "shuffle_dataset": False,
        "seed": seed,
    }


def time_calls(owner: Any, name: str) -> Callable[[], float]:
    """Replace a method on the instance by one that is timed; the function gives the seconds since it was last asked."""
    inner, total = getattr(owner, name), [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            total[0] += time.perf_counter() - started

    def take() -> float:
        seconds, total[0] = total[0], 0.0
        return seconds

    setattr(owner, name, timed)
    return take


def main() -> None:
    """Build the trainer, then step on demand until the input ends."""
    known = {**WORKLOADS, LEARNING.name: LEARNING}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=("groupgrad", "trl"), required=True)
    parser.add_argument("--workload", choices=sorted(known), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="what materials.prepare made")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, and of the order of prompts unless it is 0")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    options = parser.parse_args()
    answers = open_answers()
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process shall be the one that goes
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

    workload, rows = known[options.workload], read_rows(options.folder)
    if options.seed:
        random.Random(options.seed).shuffle(rows)
    library = importlib.import_module(options.trainer)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
    recorder = Recorder()
    # Of its own: a worker of another checkout trains at the same time.
    output = tempfile.TemporaryDirectory(prefix=f"output-{options.trainer}-")
    trainer: Any = library.GRPOTrainer(
        model=model,
        reward_funcs=[recorder.wrap(function) for function in reward_functions(workload)],
        args=library.GRPOConfig(**config_fields(workload, output.name, options.seed)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.folder),
    )
    if options.trainer == "trl":
        sampling_seconds = time_calls(model, "generate")

        def phases() -> dict[str, float]:
            return {"sampling": sampling_seconds()}
    else:

        def phases() -> dict[str, float]:
            logged = next(event for event in reversed(trainer.state.log_history) if "step_time" in event)
            return {key.removeprefix("time/"): value for key, value in logged.items() if key.startswith("time/")}

    trainer.add_callback(Lockstep(options.trainer, recorder, answers, phases))
    try:
        trainer.train()
    except Stop:
        return
    raise RuntimeError("training ended although nobody asked it to")


if __name__ == "__main__":
    main()
