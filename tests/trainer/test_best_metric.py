"""The metrics that may choose the best model follow from the table of losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from groupgrad.objectives.policy import LOSSES, LossRecipe
from groupgrad.trainer.best_metric import check_best_metric


def check(metric: str, loss_type: str) -> None:
    config: Any = SimpleNamespace(
        metric_for_best_model=metric, evaluates=True, loss_type=loss_type, beta=0.0, use_vllm=False
    )
    rewards: Any = SimpleNamespace(names=["length"], may_log_metrics=False)
    rollouts: Any = SimpleNamespace(chat=None, function=None)
    check_best_metric(config, [0], rewards, rollouts, is_open=False)


def test_a_new_loss_without_clipping_has_no_clip_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "made_up", LossRecipe(LOSSES["sapo"].surrogate, "token_mean"))  # pyright: ignore
    check("clip_ratio/low_mean", "dapo")
    check("entropy", "made_up")
    with pytest.raises(ValueError, match="no metric of this run's evaluations"):
        check("clip_ratio/low_mean", "made_up")


def test_a_new_loss_has_the_metrics_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "made_up", LOSSES["cispo"])  # pyright: ignore
    check("cispo_clip_ratio", "made_up")
    with pytest.raises(ValueError, match="no metric of this run's evaluations"):
        check("vespo/phi_seq_mean", "made_up")
