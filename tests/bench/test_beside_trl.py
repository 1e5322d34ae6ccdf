"""Learning curves beside TRL: what counts as done, and how much sooner an accuracy is reached."""

from __future__ import annotations

import json
from typing import Any

import beside_trl
import pytest
import worker
from workloads import LEARNING


def run_of(seed: int, rewards: list[float]) -> dict[str, Any]:
    """A run in which both trainers have the same rewards, and a step takes 2 seconds, or 30 with TRL."""
    own = {name: {"seconds": [s] * len(rewards), "rewards": rewards} for name, s in (("groupgrad", 2.0), ("trl", 30.0))}
    return {"seed": seed, "steps": len(rewards), "work": repr(LEARNING), **own}


def test_accuracies_are_running_averages_of_the_mean_of_the_seeds():
    runs = [run_of(0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), run_of(1, [0.0, 0.0, 0.0, 0.2, 0.4, 0.6])]
    passed, rewards = beside_trl.curve(runs, "trl")
    assert passed.tolist() == [30.0, 60.0, 90.0, 120.0, 150.0, 180.0]
    assert rewards.tolist() == pytest.approx([0.0, 0.05, 0.1, 0.175, 0.26, 0.42])
    assert beside_trl.reached(runs, 0.25) == {"groupgrad": (5, 10.0), "trl": (5, 150.0)}
    assert beside_trl.reached(runs, 0.5) is None
    lines = beside_trl.render(runs).splitlines()
    assert lines[2:] == [
        "| 20% | 5 | 5 | 10 s | 150 s | 15.0× |",
        "| 30% | 6 | 6 | 12 s | 180 s | 15.0× |",
        "| 40% | 6 | 6 | 12 s | 180 s | 15.0× |",
    ]


def test_a_later_call_goes_on_with_the_seeds_that_are_missing(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert beside_trl.finished(path, 2) == {}
    runs = [run_of(0, [0.0, 0.1]), {**run_of(1, [0.0, 0.1]), "work": "other"}, run_of(2, [0.0])]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert list(beside_trl.finished(path, 2)) == [0]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    beside_trl.draw([run_of(0, [0.0, 0.1, 0.2]), run_of(1, [0.1, 0.1, 0.3])], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_answer_is_right_by_its_last_number():
    texts = ["28 + 64 = 92.", "92, not 93", "none", "92"]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    assert worker.last_number_is_right(answers, [92] * 4) == [1.0, 0.0, 0.0, 1.0]
