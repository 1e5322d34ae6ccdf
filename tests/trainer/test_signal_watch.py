"""One warning when ten generation batches in a row give no gradient, with the reasons that were seen."""

from __future__ import annotations

import logging

import pytest

from groupgrad.metrics import average, mean_of
from groupgrad.trainer.step_log import LearningSignalWatch

WARNING = "gave no gradient, so nothing was learned"


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def unscored(completions, **kwargs):
    return [None] * len(completions)


def lengths(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize(
    ("reward", "reason", "remedy"),
    [
        (
            constant,
            "in 10 of them the rewards of each group were equal",
            "End the run if the task is learned",
        ),
        (unscored, "in 10 of them no completion was scored", "return numbers"),
    ],
)
def test_it_warns_once(make_trainer, caplog, reward, reason, remedy):
    with caplog.at_level(logging.WARNING):
        make_trainer(reward_funcs=reward, max_steps=12).train()
    (message,) = warnings_of(caplog)
    assert message.startswith("the last 10 generation batches")
    assert reason in message
    assert remedy in message


@pytest.mark.parametrize(("reward", "settings"), [(lengths, {}), (constant, {"beta": 0.1})])
def test_it_is_silent_where_there_is_a_gradient(make_trainer, caplog, reward, settings):
    with caplog.at_level(logging.WARNING):
        make_trainer(reward_funcs=reward, max_steps=11, **settings).train()
    assert not warnings_of(caplog)


def generation(*, equal=0.0, truncated=0.0):
    """Metrics of a generation batch with these shares of groups with equal rewards and of truncated completions."""
    return {
        "reward": average(1.0),
        "frac_reward_zero_std": mean_of(equal, 1.0),
        "completions/clipped_ratio": mean_of(truncated, 1.0),
    }


def test_reasons_are_counted_and_a_gradient_starts_anew(caplog):
    watch = LearningSignalWatch(mask_truncated=True)
    for metrics in [generation(equal=1.0)] * 9 + [generation(equal=0.5)] + [generation(truncated=1.0)] * 7:
        watch.read(metrics)
    assert not warnings_of(caplog)
    for metrics in [generation(equal=1.0)] * 3:
        watch.read(metrics)
    (message,) = warnings_of(caplog)
    assert "in 7 of them every completion was truncated" in message
    assert "in 3 of them the rewards of each group were equal" in message
    assert "Raise max_completion_length; end the run if the task is learned; otherwise choose tasks" in message


def test_truncated_completions_that_are_trained_give_a_gradient(caplog):
    watch = LearningSignalWatch(mask_truncated=False)
    for _ in range(12):
        watch.read(generation(truncated=1.0))
    assert not warnings_of(caplog)
