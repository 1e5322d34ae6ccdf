"""Reward functions of several ranks see whole groups wherever sizes allow; elsewhere a line says that they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks

PARTS = "reward functions see parts of groups: a process samples 6 completions of a generation batch, which "
CASES: dict[str, dict[str, Any]] = {
    # TRL gives whole groups here: 12 rows for each rank, cut into four steps of 3 rows a rank
    "dealt to steps": {"shuffle_rows": "rows"},
    "in order": {"shuffle_rows": "groups"},
    "cut": {"generation_batch_size": 12},
}


def train(ranks: Any, out: Path, case: str) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Returns the prompts that each call of the reward function saw, in training and evaluation, and the weights."""
    seen: list[list[int]] = []

    def reward(completion_ids: list[list[int]], row: list[int], **kwargs: Any) -> list[float]:
        seen.append(row)
        return ranks.HELP.letters_reward(completion_ids)

    settings = {"step_rows": 6, "micro_batches": 1, "generation_batch_size": 24, "max_steps": 4, **CASES[case]}
    settings |= {"beta": 0.1, "per_device_eval_batch_size": 6}
    trainer = ranks.build(case, out, reward=reward, **settings)
    trainer.train()
    in_training = seen[:]
    trainer.evaluate(ranks.HELP.prompts(3))
    return in_training, seen[len(in_training) :], ranks.HELP.weights(trainer.model)


def are_whole(calls: list[list[int]]) -> bool:
    return all(rows[at : at + 4] == [rows[at]] * 4 for rows in calls for at in range(0, len(rows), 4))


@pytest.mark.quick("in order")
@pytest.mark.parametrize("case", CASES)
def test_functions_see_whole_groups_and_training_is_that_of_one_process(ranks, tmp_path, case):
    endings = on_ranks(lambda rank: train(ranks, tmp_path / "two", case), tmp_path, 2, connect=False)
    said = [(tmp_path / f"rank_{rank}.log").read_text().count(PARTS) for rank in range(2)]
    _, _, alone = train(ranks, tmp_path / "one", case)
    for in_training, in_evaluation, weights in endings:
        assert ranks.HELP.relative(weights, alone) < 1e-5
        assert [len(rows) for rows in in_training] == ([6, 6] if case == "cut" else [12])
        assert are_whole(in_training) == (case != "cut")
        assert are_whole(in_evaluation)
    assert sorted(len(rows) for _, calls, _ in endings for rows in calls) == [4, 4, 4]  # never two groups of a rank's 6
    assert said == ([1, 0] if case == "cut" else [0, 0])
