"""The vLLM benchmark's report."""

from __future__ import annotations

from typing import Any

import pytest
import vllm_engines


def event(step: int, seconds: float, **more: float) -> dict[str, float]:
    return {
        "step": step,
        "step_time": seconds,
        "time/sampling": seconds / 4,
        "time/scoring": 0.0,
        "time/training": seconds / 2,
        "rewards/correctness_reward/mean": step / 100,
        **more,
    }


def result(accuracy: float, **more: float) -> dict[str, Any]:
    log = [event(step, seconds, **more) for step, seconds in ((5, 9.0), (10, 8.0), (15, 1.0), (20, 2.0), (25, 3.0))]
    return {"accuracy": accuracy, "greedy": 0.9, "format": 1.0, "log_history": [*log, {"train_runtime": 1.0}]}


def test_medians_leave_out_the_start():
    expected = {"step": 2.0, "sampling": 0.5, "weights": 0.0, "scoring": 0.0, "training": 1.0}
    assert vllm_engines.medians(result(0.9)["log_history"]) == expected


def test_accuracy_gap_is_between_the_farthest_two():
    assert vllm_engines.accuracy_gap({"a": result(0.9), "b": result(0.96), "c": result(0.93)}) == pytest.approx(0.06)


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.95, "5.0 points apart: within 5"), (0.96, "NOT within 5")])
def test_a_report_says_whether_engines_agree(accuracy: float, verdict: str):
    measured = {
        "seed": 0,
        "steps": 25,
        "chunk": 5,
        "num_held_out": 512,
        "before": {"accuracy": 0.2, "format": 0.2},
        "results": {
            "native": result(0.9, **{"sampling/logp_mismatch": 1e-6}),
            "colocate": result(accuracy, **{"sampling/sampling_logp_difference/mean": 2e-4, "time/weights": 0.25}),
        },
        "date": "today",
        "machine": "a machine",
        "versions": {"torch": "2"},
    }
    text = vllm_engines.render(measured)
    assert verdict in text
    assert "| native engine | 20.0% | 90.0% | 90.0% | 100.0% | 1.0e-06 |" in text
    assert "| vLLM in the training process (colocate) | 2.000 | 0.500 | 0.250 | 0.000 | 1.000 |" in text
