"""Shared by the programs of this folder: sums as a data set, and a run of `python examples/programs/X.py MODEL OUT`."""

import re
import sys

import yaml
from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer

QUESTIONS = [(f"What is {a} + {b}?", a + b) for a in range(10, 60, 7) for b in range(11, 60, 6)]


def is_right(text: object, answer: int) -> float:
    """1 if the last number of a text is the answer, else 0."""
    numbers = re.findall(r"\d+", str(text))
    return float(bool(numbers) and int(numbers[-1]) == answer)


def train(agent, parse=None, **defaults) -> GRPOTrainer:
    """Trains an agent with the model, folder and settings (key=value) of the command line."""
    model, output_dir, *settings = sys.argv[1:]
    given = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in settings)}
    rows = Dataset.from_list([{"question": question, "answer": answer} for question, answer in QUESTIONS])
    args = GRPOConfig(output_dir=output_dir, **{**defaults, **given})
    trainer = GRPOTrainer(model, agent=agent, response_parser=parse, args=args, train_dataset=rows)
    trainer.train()
    return trainer
