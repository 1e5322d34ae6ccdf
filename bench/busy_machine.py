"""Times training steps by how OpenMP threads wait, on the machine as it is and with processes that use its cores.

`python bench/busy_machine.py [--models tiny,small] [--burners 0,2] [--rounds 9] [--steps 2]` starts a process for each
setting, lets them train in turn, `steps` steps at a time, and prints seconds a step and the ratio to the best setting.
With `--burners 2` two processes compute beside them without an end. The order of the settings changes from round to
round, and medians over rounds are compared, since the load of a shared machine changes too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

SETTINGS: dict[str, dict[str, str]] = {
    "groupgrad's default": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
}
"""Environment of each setting; all but the second have as many threads as cores."""

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 200, "hidden_size": 32, "num_layers": 2, "intermediate_size": 48, "head_dim": 8},
    "small": {"vocab_size": 2000, "hidden_size": 256, "num_layers": 4, "intermediate_size": 768, "head_dim": 64},
}


def main() -> None:
    """Compares the settings, or trains with one of them where the parent asks for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--burners", default="0,2", help="numbers of processes that compute beside a run")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.steps)
        return
    for name in options.models.split(","):
        settings = options.settings.split(",")
        workers = {setting: start(name, options.steps, SETTINGS[setting]) for setting in settings}
        for worker in workers.values():
            read(worker)  # the first step, which also compiles kernels
        for num_burners in map(int, options.burners.split(",")):
            compare(f"{name}, {num_burners} burners", workers, num_burners, options.rounds)
        for worker in workers.values():
            worker.communicate()


def compare(title: str, workers: dict[str, Any], num_burners: int, rounds: int) -> None:
    """Prints the median seconds a step of each worker."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_burners)]
    seconds: dict[str, list[float]] = {setting: [] for setting in workers}
    order = list(workers)
    try:
        for _ in range(rounds):
            for setting in order:
                workers[setting].stdin.write("go\n")
                workers[setting].stdin.flush()
                seconds[setting].append(read(workers[setting]))
            order.append(order.pop(0))
    finally:
        for burner in burners:
            burner.kill()
    medians = {setting: statistics.median(taken) for setting, taken in seconds.items()}
    for setting, median in medians.items():
        times = f"{median:.3f} s a step (from {min(seconds[setting]):.3f} to {max(seconds[setting]):.3f})"
        print(f"{title}, {setting}: {times}, {median / min(medians.values()):.2f} x the best", flush=True)


def start(name: str, steps: int, change: dict[str, str]) -> Any:
    """A process that trains with this environment when it is told to."""
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    command = [sys.executable, __file__, "--worker", name, "--steps", str(steps)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**environment, **change}, **pipes)


def read(worker: Any) -> float:
    """Seconds a step that the worker reports."""
    for line in worker.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise RuntimeError(f"a worker ended with {worker.wait()}")


def train(name: str, steps: int) -> None:
    """Trains, and after the first step and each `steps` more reports the seconds of a step and waits for a line."""
    from datasets import Dataset
    from materials import make_model, make_words
    from transformers import TrainerCallback
    from workloads import ModelShape

    from groupgrad import GRPOConfig, GRPOTrainer

    shape = ModelShape(num_heads=4, num_kv_heads=2, tied=True, **SHAPES[name])
    tokenizer = make_words(shape.vocab_size)

    class Clock(TrainerCallback):
        started = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % steps == 1 % steps:
                print("seconds", (time.perf_counter() - self.started) / steps, flush=True)
                control.should_training_stop = not sys.stdin.readline()
                self.started = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            max_steps=100_000,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=48,
            gradient_checkpointing=False,
            disable_tqdm=True,
            learning_rate=0.0,
            logging_steps=1000,
        )
        trainer = GRPOTrainer(
            model=make_model(shape, tokenizer),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8"] * 16}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
