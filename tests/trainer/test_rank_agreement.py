"""Ranks that are given different data are told so, before anything is sampled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from base_fixtures import make_model, make_tokenizer
from datasets import Dataset
from forked_ranks import on_ranks

from groupgrad import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"say {number}"} for number in range(8)]
OTHER_ORDER = [*ROWS[4:], *ROWS[:4]]

CASES: dict[str, tuple[Any, str]] = {
    # what rank 1 is given, and what both ranks are told
    "order": (
        {"train": OTHER_ORDER},
        "train_dataset of ranks 0 and 1 differ: they have 8 and 8 rows, in another",
    ),
    "rows": ({"train": ROWS[:6]}, "train_dataset of ranks 0 and 1 differ: they have 8 and 6 rows"),
    "evaluation": ({"evaluation": OTHER_ORDER}, "eval_dataset of ranks 0 and 1 differ"),
    "the same": ({"settings": {"run_name": "second", "log_level": "error"}}, ""),
}


def error_of(rank: int, given: dict[str, Any], folder: Path, sampled: list[int]) -> str:
    """Trains with what rank 1 alone is given; the text of its ValueError, or nothing."""
    given = given if rank == 1 else {}
    settings = {"per_device_train_batch_size": 2, "num_generations": 4, "max_completion_length": 4, "max_steps": 1}
    settings |= {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    trainer = GRPOTrainer(
        make_model(),
        lambda completions, **kwargs: (sampled.append(len(completions)), [0.0] * len(completions))[1],
        args=GRPOConfig(**{**settings, "eval_strategy": "steps", **given.get("settings", {})}),
        train_dataset=Dataset.from_list(given.get("train", ROWS)),
        eval_dataset=Dataset.from_list(given.get("evaluation", ROWS)),
        processing_class=make_tokenizer(),
    )
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
def test_different_data_of_ranks_are_refused(tmp_path):
    """A data set that is shuffled without a seed has another order on each rank, and a group mixed their prompts."""

    def run(rank: int) -> dict[str, tuple[str, bool]]:
        found = {}
        for name, (given, _) in CASES.items():
            sampled: list[int] = []
            found[name] = error_of(rank, given, tmp_path / name, sampled), bool(sampled)
        return found

    for found in on_ranks(run, tmp_path, 2):
        for name, (_, expected) in CASES.items():
            text, has_sampled = found[name]
            assert re.match(re.escape(expected), text), (name, text)
            assert bool(text) == bool(expected)
            assert has_sampled == (not expected), name
