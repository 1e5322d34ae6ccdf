"""Measures the processor time of an optimizer step of small models, all of it or mostly the host's part.

    python bench/host_time.py [--workload demo|small] [--narrow] [--steps 30] [--profile 25] [--parts] [--against PATH]

`demo` is a step of the demo: 256 rows of at most 40 tokens and a model of two layers. `small` is a model of a million
parameters with 128 rows of at most 16 tokens. Processor seconds of one thread are reported, because other work on the
machine hardly changes them. Most of them are arithmetic: with `--narrow` the same rows go through as many layers of 16
numbers and the smallest vocabulary, which leaves mostly the host's part: Python, torch's dispatch, allocation.
`--profile` lists the functions that take most of it, by calls and seconds, `--parts` the milliseconds of a step's parts
on the training thread, each without the parts that it calls. `--against` runs another checkout's package in turn with
this one, each in a process of its own, and prints the ratio.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import importlib
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plumbing import CPU_RUN

os.environ.setdefault("OMP_NUM_THREADS", "1")

WARM_UP = 3
"""Steps before the first one that counts."""

PARTS = {
    "decode steps in C++": "groupgrad.engines.native.cpp_step:CompiledStep.sample",
    "decode steps in C++, one a call": "groupgrad.engines.native.cpp_step:CompiledStep.__call__",
    "prompts": "groupgrad.engines.native.session:NativeSession._prefill",
    "the rest of the native engine": "groupgrad.engines.native.engine:NativeEngine.sample",
    "rewards, texts, collation": "groupgrad.rollout.collector:ExperienceCollector.__call__",
    "layout of a pass": "groupgrad.scoring.layout:flat_layout",
    "attention, forward": "groupgrad.scoring.block_attention:attend",
    "attention, backward": "groupgrad.scoring.block_attention:_RowAttention.backward",
    "the rest of the forward pass": "groupgrad.trainer.trainer:score_tokens",
    "the rest of the backward pass": "groupgrad.trainer.trainer:GRPOTrainer._backward",
    "record of rollouts": "groupgrad.trainer.run_recorder:RunRecorder.on_step_end",
    "optimizer": "torch.optim:AdamW.step",
    "the rest of training_step": "groupgrad.trainer.trainer:GRPOTrainer.training_step",
}
"""Parts of a step, and the functions that they are."""


class PartTimes:
    """Seconds of the training thread in each of `PARTS`, without those of the parts inside it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = 0.0
        for label, path in PARTS.items():
            module, _, names = path.partition(":")
            *owners, name = names.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            timed = self._timed(getattr(owner, name), label)
            is_static = isinstance(vars(owner).get(name), staticmethod)
            setattr(owner, name, staticmethod(timed) if is_static else timed)

    def _timed(self, function: Any, label: str) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            outer, self._inner, began = self._inner, 0.0, time.thread_time()
            try:
                return function(*args, **named)
            finally:
                whole = time.thread_time() - began
                self.seconds[label] += whole - self._inner
                self._inner = outer + whole

        return call


class Clock:
    """Processor seconds of each step, from its end to the end of the next; made a callback by `trainer_of`.

    The profiler and the times of parts run in the steps after those of the warm-up.
    """

    def __init__(self, profiler: cProfile.Profile | None, parts: PartTimes | None) -> None:
        self.seconds: list[float] = []
        self._ended = 0.0
        self._profiler, self._parts = profiler, parts

    def end_step(self) -> None:
        """Notes the step that ends."""
        now = time.process_time()
        self.seconds.append(now - self._ended)
        if self._profiler is not None and len(self.seconds) == WARM_UP:
            self._profiler.enable()
        if self._parts is not None and len(self.seconds) == WARM_UP:
            self._parts.seconds = dict.fromkeys(PARTS, 0.0)
        self._ended = time.process_time()


def scattered_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer_of(workload: str, folder: str, steps: int, clock: Clock, *, is_narrow: bool) -> Any:
    """A trainer of the workload that runs `steps` steps and tells `clock` of each."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

    from groupgrad import GRPOConfig, GRPOTrainer
    from groupgrad.apps.demo import task

    class Follow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.end_step()

    tokenizer: Any = task.make_tokenizer()
    rows = task.make_splits(0).grpo
    dataset = [{"prompt": problem.prompt} for problem in rows]
    if workload == "demo":
        model, sizes = task.make_model(tokenizer, 0), (256, 16, task.MAX_COMPLETION_LENGTH)
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=1024,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=32,
                max_position_embeddings=128,
                tie_word_embeddings=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
        sizes = (128, 8, 16)
    if is_narrow:
        narrow = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        narrow |= {"head_dim": 8, "vocab_size": len(tokenizer)}
        model = Qwen3ForCausalLM(Qwen3Config(**(model.config.to_dict() | narrow)))
    config = GRPOConfig(
        **CPU_RUN,
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=sizes[0],
        num_generations=sizes[1],
        max_completion_length=sizes[2],
        learning_rate=1e-5,
        logging_steps=5,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=scattered_reward,
        args=config,
        train_dataset=Dataset.from_list(dataset),
        processing_class=tokenizer,
        callbacks=[Follow()],
    )


def measure(options: argparse.Namespace) -> float:
    """Median processor seconds of a step; prints the profile and the parts."""
    import torch

    torch.set_num_threads(1)
    profiler = cProfile.Profile(time.process_time) if options.profile else None
    parts = PartTimes() if options.parts else None
    clock = Clock(profiler, parts)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(options.workload, folder, WARM_UP + options.steps, clock, is_narrow=options.narrow).train()
    if profiler is not None:
        profiler.disable()
        for order in ("tottime", "cumulative"):
            pstats.Stats(profiler, stream=sys.stderr).sort_stats(order).print_stats(options.profile)
    for label, seconds in [] if parts is None else sorted(parts.seconds.items(), key=lambda part: -part[1]):
        print(f"{1e3 * seconds / options.steps:8.1f} ms  {label}")
    return statistics.median(clock.seconds[WARM_UP:])


def compare(options: argparse.Namespace) -> None:
    """Measures this checkout and another in turn, and prints the medians and their ratio."""
    roots = {"this": Path(__file__).resolve().parents[1], "other": options.against.resolve()}
    command = [sys.executable, __file__, "--workload", options.workload, "--steps", str(options.steps), "--json"]
    command += ["--narrow"] * options.narrow
    found: dict[str, list[float]] = {name: [] for name in roots}
    for _ in range(options.rounds):
        for name, root in roots.items():
            environment = {**os.environ, "PYTHONPATH": str(root / "src")}
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            found[name].append(json.loads(output.splitlines()[-1])["seconds"])
    this, other = (statistics.median(found[name]) for name in roots)
    print(
        f"{options.workload}: {1e3 * this:.1f} ms of a processor a step, {options.against} {1e3 * other:.1f} ms, "
        f"{this / other:.2f} of it"
    )


def main() -> None:
    """Print the seconds of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("demo", "small"), default="small")
    parser.add_argument("--narrow", action="store_true", help="a model with little arithmetic")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    parser.add_argument("--parts", action="store_true", help="print the milliseconds of a step's parts")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    if options.against is not None:
        compare(options)
        return
    seconds = measure(options)
    print(json.dumps({"seconds": seconds}) if options.json else f"{1e3 * seconds:.1f} ms of a processor a step")


if __name__ == "__main__":
    main()
