"""Samples the uniform workload's batch on request, with groupgrad's engine or with vLLM.

    python bench/vllm_sampling.py --engine groupgrad|vllm --folder FOLDER

Each input line `sample` gives one output line `{"tokens": ..., "seconds": ...}`. vLLM has its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workloads import WORKLOADS

UNIFORM = WORKLOADS["uniform"]
Prompts = list[list[int]]
Sample = Callable[[Prompts], int]
"""Samples a group for each prompt; returns the number of tokens."""

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the batch needs 0.04
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, as ours
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def make_prompts(seed: int) -> Prompts:
    """Fresh random prompts, the same for both engines, so that nothing can be reused from an earlier call."""
    rng, words = random.Random(seed), range(2, UNIFORM.model.vocab_size)
    return [[rng.choice(words) for _ in range(UNIFORM.prompt_tokens or 0)] for _ in range(UNIFORM.num_groups)]


def groupgrad_sampler(folder: Path) -> Sample:
    """The engine that the trainer selects for this model."""
    from datasets import Dataset
    from materials import read_rows
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from worker import config_fields, random_reward

    from groupgrad import GRPOConfig, GRPOTrainer
    from groupgrad.engines.base import Request, SamplingOptions

    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        reward_funcs=random_reward,
        args=GRPOConfig(**config_fields(UNIFORM, str(folder / "output-sampling"))),
        train_dataset=Dataset.from_list(read_rows(folder)),
        processing_class=tokenizer,
    )
    options = SamplingOptions(
        max_new_tokens=UNIFORM.limit, eos_ids=(tokenizer.eos_token_id,), pad_id=tokenizer.pad_token_id
    )

    def sample(prompts: Prompts) -> int:
        requests = [
            Request(prompt, seed=1000 * i + j, max_new_tokens=UNIFORM.limit)
            for i, prompt in enumerate(prompts)
            for j in range(UNIFORM.num_generations)
        ]
        return sum(len(sampled.ids) for sampled in trainer.engine.sample(requests, options))

    return sample


def vllm_sampler(folder: Path) -> Sample:
    """vLLM in this process, in float32, returning token ids alone."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=UNIFORM.batch_rows,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    choice = SamplingParams(
        n=UNIFORM.num_generations, temperature=1.0, max_tokens=UNIFORM.limit, ignore_eos=True, detokenize=False
    )

    def sample(prompts: Prompts) -> int:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], choice, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return sample


def compare_with_vllm(python: Path, models: Path, *, repetitions: int) -> Any:
    """Speeds of both engines, which take turns after a warm-up each, as `report.EngineSpeeds`."""
    from materials import prepare
    from report import EngineSpeeds

    folder = prepare(UNIFORM, models)
    logs = Path(__file__).parent / ".logs"
    logs.mkdir(exist_ok=True)
    processes: dict[str, subprocess.Popen[str]] = {}
    speeds: dict[str, list[float]] = {"groupgrad": [], "vllm": []}
    versions: dict[str, str] = {}
    try:
        for engine, interpreter in (("groupgrad", Path(sys.executable)), ("vllm", python)):
            with (logs / f"sampling-{engine}.log").open("w") as log:
                processes[engine] = subprocess.Popen(
                    [str(interpreter), __file__, "--engine", engine, "--folder", str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **(VLLM_ENVIRONMENT if engine == "vllm" else {})},
                )
            versions |= _ask(processes[engine], engine, None)
        for number in range(-1, repetitions):
            for engine, process in processes.items():
                answer = _ask(process, engine, "sample")
                speed = answer["tokens"] / answer["seconds"]
                print(f"  {engine:9} {answer['seconds']:7.2f} s  {speed:8,.0f} tokens/s", flush=True)
                if number >= 0:
                    speeds[engine].append(speed)
    finally:
        for process in processes.values():
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
    return EngineSpeeds(tuple(speeds["groupgrad"]), tuple(speeds["vllm"]), versions)


def _ask(process: subprocess.Popen[str], engine: str, command: str | None) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    if command is not None:
        process.stdin.write(command + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{engine} ended without an answer; see bench/.logs/sampling-{engine}.log")
    return json.loads(line)


def main() -> None:
    """Load, say so, then sample on demand until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("groupgrad", "vllm"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="what materials.prepare made")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sampler = groupgrad_sampler if options.engine == "groupgrad" else vllm_sampler
    sample = sampler(options.folder)
    package = "groupgrad" if options.engine == "groupgrad" else "vllm-cpu"
    answers.write(json.dumps({package: version(package)}) + "\n")
    answers.flush()
    for number, line in enumerate(sys.stdin):
        if line.strip() != "sample":
            break
        prompts = make_prompts(number)
        started = time.perf_counter()
        tokens = sample(prompts)
        answers.write(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
