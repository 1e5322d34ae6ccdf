"""Ranks that are given different data are told so, before anything is sampled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from forked_ranks import on_ranks

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


def error_of(make_trainer: Any, given: dict[str, Any], folder: Path, sampled: list[int]) -> str:
    """Trains with what a rank is given; the text of its ValueError, or nothing."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 1, "output_dir": str(folder), "eval_strategy": "steps"}
    trainer = make_trainer(
        reward_funcs=lambda completions, **_: (sampled.append(len(completions)), [0.0] * len(completions))[1],
        train_dataset=Dataset.from_list(given.get("train", ROWS)),
        trainer={"eval_dataset": Dataset.from_list(given.get("evaluation", ROWS))},
        **settings,
        **given.get("settings", {}),
    )
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
def test_different_data_of_ranks_are_refused(make_trainer, tmp_path):
    """A data set that is shuffled without a seed has another order on each rank, and a group mixed their prompts."""

    def run(rank: int) -> dict[str, tuple[str, bool]]:
        found = {}
        for name, (given, _) in CASES.items():
            sampled: list[int] = []
            text = error_of(make_trainer, given if rank == 1 else {}, tmp_path / name, sampled)
            found[name] = text, bool(sampled)
        return found

    for found in on_ranks(run, tmp_path, 2):
        for name, (_, expected) in CASES.items():
            text, has_sampled = found[name]
            assert re.match(re.escape(expected), text), (name, text)
            assert bool(text) == bool(expected)
            assert has_sampled == (not expected), name
