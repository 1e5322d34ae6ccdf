"""Measures the steps at which a checkpoint is saved, with and without `save_in_background`.

`python bench/background_saves.py --output bench/RESULTS-background-saves.md` trains a model of 76 M parameters with
random weights on a CPU, saves every fourth step and writes the table. Runs offline, in minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from groupgrad import GRPOConfig, GRPOTrainer

EVERY = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz!"


class Clock(TrainerCallback):
    """Seconds from the beginning of each step to that of the next, or to the end of training."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """By step, from the first."""
        return [end - start for start, end in zip(self.marks, self.marks[1:])]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 10, "num_attention_heads": 10}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, **sizes))


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def measure(folder: Path, num_steps: int, *, in_background: bool) -> list[float]:
    """Seconds of each step."""
    clock = Clock()
    trainer = GRPOTrainer(
        model=make_model(),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_steps=EVERY,
            save_total_limit=1,
            save_in_background=in_background,
            max_steps=num_steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=32,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{letter}!" for letter in LETTERS]}),
        processing_class=make_tokenizer(),
        callbacks=[clock],
    )
    trainer.train()
    return clock.seconds()


def row(name: str, seconds: list[float]) -> str:
    """A line of the table; the first step, which compiles, and the last save do not count."""
    by_step = dict(enumerate(seconds, start=1))
    last = len(by_step)
    saves = [by_step[step] for step in by_step if step % EVERY == 0 and step < last]
    after = [by_step[step] for step in by_step if step % EVERY == 1 and step > 1]
    others = [by_step[step] for step in by_step if step % EVERY in (2, 3)]
    cells = [f"{statistics.median(found):.2f}" for found in (saves, after, others)]
    return f"| {name} | {' | '.join(cells)} | {sum(seconds[1:]):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = []
    for name, in_background in (("false", False), ("true", True)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            lines.append(row(name, measure(Path(folder), options.steps, in_background=in_background)))
    num_bytes = 12 * sum(parameter.numel() for parameter in make_model().parameters())
    text = (
        "# Steps with a checkpoint\n\n"
        f"Written by `python bench/background_saves.py` ({torch.get_num_threads()} threads, CPU; see its head). A "
        f"checkpoint of {num_bytes / 1e9:.2f} GB every {EVERY} steps; seconds, medians over {options.steps} steps.\n\n"
        "| save_in_background | step with a save | step after it | other steps | all steps but the first |\n"
        "|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
