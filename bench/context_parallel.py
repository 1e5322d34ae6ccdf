"""Prints memory and final weights of a training on one long row: on one process, and cut over the tokens to several.

    python bench/context_parallel.py [--tokens 16384] [--processes 1 2 4]

Each run is a whole training on CPU processes (gloo), a step of SGD in float32 on a group of four completions of random
tokens: one of `--tokens` tokens and three short ones. Columns: the most memory of a process's activations (what a
pass saves for its backward pass, each storage once), its share of one process's, the growth of the peak of a process's
memory during the step (VmHWM; temporary tensors and gradients too), and the difference of the final weights to those of
one process, relative to the weights and to their change.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from materials import make_model, make_words
from plumbing import CPU_RUN, PeakMemory, table
from torch import nn
from transformers import TrainerCallback
from workloads import ModelShape

from groupgrad import GRPOConfig, GRPOTrainer, dist
from groupgrad.scoring.fused_modules import compiled_parts

SHAPE = ModelShape(
    vocab_size=512, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=192
)
SHORT_TOKENS = 24
NUM_ROWS = 4


class SavedBytes:
    """The most bytes that one of the observed passes saved for its backward pass, the model's weights left out."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.most = 0

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context of a forward pass."""
        sizes: dict[int, int] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        # `stays`: training has no hooks, and with them the modules would not compute as in training.
        hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
        with compiled_parts(self._model, stays=True), hooks:
            yield
        self.most = max(self.most, sum(sizes.values()))


class StepMemory(TrainerCallback):
    """The growth of the process's peak memory in the step."""

    def __init__(self) -> None:
        self._memory, self._before, self.peak_bytes = PeakMemory(), 0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self._memory.settle()
        self._memory.reset()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peak_bytes = self._memory.peak() - self._before


def build(folder: Path, num_tokens: int) -> GRPOTrainer:
    """The trainer of one of as many processes as there are."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = make_words(SHAPE.vocab_size)
    rows_here = NUM_ROWS // num_processes

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        first = dist.rank() * rows_here
        stream = torch.Generator().manual_seed(0)
        lengths = [num_tokens, *[SHORT_TOKENS] * (NUM_ROWS - 1)]
        rows = [torch.randint(2, SHAPE.vocab_size, (length,), generator=stream).tolist() for length in lengths]
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": rows[first : first + len(prompts)], "logprobs": None}

    return GRPOTrainer(
        model=make_model(SHAPE, tokenizer, max_length=2 * num_tokens),
        reward_funcs=lambda completion_ids, **_: [
            float(len(ids) > SHORT_TOKENS) + ids[0] / 512 for ids in completion_ids
        ],
        args=GRPOConfig(
            **CPU_RUN,
            output_dir=str(folder / "run"),
            ddp_backend="gloo" if num_processes > 1 else None,
            max_steps=1,
            per_device_train_batch_size=rows_here,
            num_generations=NUM_ROWS,
            max_completion_length=num_tokens,
            loss_type="grpo",
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            context_parallel_size=num_processes,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w5 w6 w7 w8"}] * 2),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def work(folder: Path, num_tokens: int) -> None:
    """One process: trains, and writes what it measured into the folder."""
    torch.set_num_threads(1)
    trainer = build(folder, num_tokens)
    start = weights_of(trainer.model)
    saved, memory, loss = SavedBytes(trainer.model), StepMemory(), trainer.batch_loss

    def observed(*args: Any, **kwargs: Any) -> Any:
        with saved.observed():
            return loss(*args, **kwargs)

    trainer.batch_loss = observed
    trainer.add_callback(memory)
    trainer.train()
    rank = os.environ.get("RANK", "0")
    numbers = {"saved_bytes": saved.most, "peak_bytes": memory.peak_bytes}
    (folder / f"{rank}.json").write_text(json.dumps(numbers))
    torch.save((start, weights_of(trainer.model)), folder / f"{rank}.pt")


def weights_of(model: nn.Module) -> torch.Tensor:
    """All parameters, as float64."""
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def measure(folder: Path, num_processes: int, num_tokens: int, *, timeout_s: float = 1800.0) -> list[dict[str, Any]]:
    """What each process measured, with its `weights` before and after. RuntimeError if one of them fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--tokens", str(num_tokens), "--folder", str(folder)]
    if num_processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{num_processes} processes ended with {done.returncode}: {done.stderr[-3000:]}")
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
    return [{**result, "weights": torch.load(folder / f"{rank}.pt")} for rank, result in enumerate(results)]


def render(runs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The table, from the results of one process and of others."""
    start, alone = runs[0][0]["weights"]
    rows = []
    for results in runs:
        saved, peak = (max(result[key] for result in results) for key in ("saved_bytes", "peak_bytes"))
        gap = max(float((result["weights"][1] - alone).norm()) for result in results)
        rows.append(
            [
                str(len(results)),
                f"{saved / 2**20:.0f} MiB",
                f"{saved / runs[0][0]['saved_bytes']:.0%}",
                f"{peak / 2**20:.0f} MiB",
                f"{gap / float(alone.norm()):.1e}",
                f"{gap / float((alone - start).norm()):.1e}",
            ]
        )
    header = ["processes", "activations", "share of one", "growth of the peak", "difference"]
    return table([*header, "of the change"], rows)


def main() -> None:
    """Makes the runs one after the other, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        work(arguments.folder, arguments.tokens)
        return
    with tempfile.TemporaryDirectory() as root:
        numbers = sorted({1, *arguments.processes})
        runs = [measure(Path(root) / str(number), number, arguments.tokens) for number in numbers]
    print(render(runs))


if __name__ == "__main__":
    main()
