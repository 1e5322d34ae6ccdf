from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from groupgrad.apps.demo import curves

HISTORY = [
    {"step": 2, "loss": 0.0, "reward": 0.25, "reward_std": 0.5, "completions/mean_length": 10.0},
    {"step": 4, "eval_reward": 0.5, "eval_rewards/accuracy/mean": 0.1},
    {"step": 4, "loss": 0.1, "reward": 0.75, "reward_std": 0.25, "completions/mean_length": 14.0},
    {"step": 4, "train_runtime": 3.0},
]


def test_series_has_the_numbers_of_one_key_by_step():
    reward = curves.series(
        [*HISTORY, {"step": 1, "reward": 0.0}, {"step": 2, "reward": 0.3}, {"reward": 9.0}], "reward"
    )
    assert reward.index.tolist() == [1, 2, 4]
    assert reward.values.tolist() == [0.0, 0.3, 0.75]


def test_the_running_average_is_unbiased_and_skips_nan():
    # span 3: each earlier value weighs half of the next.
    average = curves.running_average(pd.Series([1.0, 3.0, np.nan, 7.0]), 3)
    np.testing.assert_allclose(average, [1.0, (0.5 * 1 + 3) / 1.5, (0.5 * 1 + 3) / 1.5, (0.25 + 1.5 + 7) / 1.75])
    assert curves.running_average(pd.Series([np.nan]), 5).isna().all()


@pytest.fixture
def drawn(monkeypatch):
    """Collects the saved figures."""
    figure = pytest.importorskip("matplotlib.figure")
    figures = []
    original = figure.Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return figures


def test_the_picture_shows_training_evaluation_and_length(tmp_path, drawn):
    path = curves.plot_rewards(HISTORY, tmp_path / "new" / "reward.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    top, bottom = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in top.lines}
    assert lines == {"training": [[2, 0.25], [4, 0.75]], "evaluation": [[4, 0.5]]}
    band = top.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (-0.25, 1.0)
    assert bottom.lines[0].get_xydata().tolist() == [[2, 10], [4, 14]]


def test_long_runs_are_smoothed_and_sets_have_their_own_points(tmp_path, drawn):
    history = [{"step": i, "reward": float(i % 2)} for i in range(1, 101)]
    history += [{"step": 50, "eval_math_reward": 0.5, "eval_code_reward": 0.25}]
    curves.plot_rewards(history, tmp_path / "reward.png")
    (axis,) = drawn[0].axes
    labels = [line.get_label() for line in axis.lines]
    assert labels[1:] == ["training (running average)", "evaluation math", "evaluation code"]
    smooth = axis.lines[1].get_ydata()
    assert np.ptp(smooth[20:]) < 0.5 < np.ptp(axis.lines[0].get_ydata())


def test_one_event_or_only_evaluations_can_be_plotted(tmp_path, drawn):
    curves.plot_rewards(HISTORY[:1], tmp_path / "a.png")
    assert drawn[0].axes[0].get_xlim() == pytest.approx((1, 3), abs=0.2)
    curves.plot_rewards(HISTORY[1:2], tmp_path / "b.png")


def test_no_reward_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"1 events and no `reward`"):
        curves.plot_rewards([{"step": 1, "loss": 0.0}], tmp_path / "reward.png")
