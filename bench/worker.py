"""Trains with ONE trainer on one workload, one optimizer step for each line that comes in.

    python bench/worker.py --trainer groupgrad|trl --workload NAME --folder FOLDER

Both trainers run through the API that they have in common; only the import differs. Lines out are JSON: first
`{"event": "ready", ...}`, then one for each `step` or `baseline` line in. `baseline` notes the memory in use between
steps, weights and optimizer state included; peaks are counted from there. Between steps the process waits on the pipe,
so that another trainer has the machine to itself.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib
import json
import os
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from workloads import WORKLOADS, Workload, scattered_reward


class Stop(Exception):
    """The input has ended, so no further step is made."""


class PeakMemory:
    """This process's resident memory: now, and the most since it was last reset, in bytes. Linux only."""

    @staticmethod
    def _read(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {key}")

    def settle(self) -> int:
        """Give back what is unused; the bytes that stay."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return self._read("VmRSS:")

    def reset(self) -> None:
        """Start counting the peak anew."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The most since `reset`."""
        return self._read("VmHWM:")


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

    def send(self, **answer: Any) -> None:
        """One JSON line out."""
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Answers come at the beginning of the next step, when the last one has been logged.
        if self.measured is None:
            self.send(event="ready", versions={name: version(name) for name in (self.trainer, "torch", "transformers")})
        else:
            self.send(event="step", **self.measured, **vars(self.recorder), phases=self.phases())
        while (command := sys.stdin.readline().strip()) == "baseline":
            self.baseline = self.memory.settle()
            self.send(event="baseline", bytes=self.baseline)
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


def reward_functions(workload: Workload) -> list[Callable[..., list[float]]]:
    """The workload's reward functions."""
    if workload.source == "demo":
        task = import_demo_task()
        return [task.correctness_reward, task.format_reward]
    return [random_reward]


COMMON: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "beta": 0.0,
    "max_steps": 1_000_000,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 0,
}
"""The same in every benchmark and for both trainers: on-policy, float32, AdamW, no KL term."""


def config_fields(workload: Workload, output_dir: str) -> dict[str, Any]:
    """The configuration, the same for both."""
    return {
        **COMMON,
        "output_dir": output_dir,
        "per_device_train_batch_size": workload.batch_rows // workload.micro_batches,
        "gradient_accumulation_steps": workload.micro_batches,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.limit,
        "temperature": 1.0,
        "learning_rate": 1e-6,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=("groupgrad", "trl"), required=True)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="what materials.prepare made")
    parser.add_argument("--pack_weights", action="store_true", help="groupgrad: engine_pack_weights=True")
    parser.add_argument("--attention", default=None, help="attn_implementation of the model (default: transformers')")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed must not mix with the answers
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process shall be the one that goes
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

    workload = WORKLOADS[options.workload]
    library = importlib.import_module(options.trainer)
    loading = {"attn_implementation": options.attention} if options.attention else {}
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, **loading)
    recorder = Recorder()
    # Of its own: a worker of another checkout trains at the same time.
    output = tempfile.TemporaryDirectory(prefix=f"output-{options.trainer}-")
    fields = config_fields(workload, output.name)
    if options.pack_weights:
        fields["engine_pack_weights"] = True
    trainer: Any = library.GRPOTrainer(
        model=model,
        reward_funcs=[recorder.wrap(function) for function in reward_functions(workload)],
        args=library.GRPOConfig(**fields),
        train_dataset=Dataset.from_list(read_rows(options.folder)),
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
