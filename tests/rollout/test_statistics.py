"""Numbers about completions, worked by hand."""

from __future__ import annotations

from groupgrad.metrics import merge_all
from groupgrad.rollout.statistics import completion_metrics, lag_metrics, num_tokens


def read(metrics: dict) -> dict[str, float | None]:
    return {key: metric.read() for key, metric in metrics.items()}


def test_lengths_and_the_share_of_truncated_completions(make_rollout):
    rollouts = [
        make_rollout(4),
        make_rollout(10, "length"),
        make_rollout(2),
        make_rollout(7, "tool_budget", sampled=[True] * 3 + [False] * 4),
        make_rollout(0, "context"),
    ]
    assert read(completion_metrics(rollouts)) == {
        "completions/clipped_ratio": 3 / 5,
        "completions/mean_length": (4 + 10 + 2 + 3 + 0) / 5,
        "completions/min_length": 0,
        "completions/max_length": 10,
        "completions/mean_terminated_length": 3,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 4,
    }


def test_the_lag_is_of_each_token_that_the_policy_sampled(make_rollout):
    rollouts = [
        make_rollout(2, policy_version=4),
        make_rollout(4, policy_version=3, policy_versions=[3, 3, 5, 5], sampled=[True, False, True, True]),
    ]
    found = {"sampling/policy_lag": 3, "sampling/policy_lag_mean": (2 + 2 + 3 + 1 + 1) / 5}
    assert read(lag_metrics(rollouts, 6)) == {**found, "sampling/frac_mixed_rows": 1 / 2}


def test_without_a_terminated_completion_nothing_is_said_of_their_length(make_rollout):
    """An empty completion that ended counts as terminated."""
    metrics = read(completion_metrics([make_rollout(4, "length")]))
    assert metrics["completions/clipped_ratio"] == 1
    assert [metrics[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")] == [None] * 3
    metrics = read(completion_metrics([make_rollout(0), make_rollout(3)]))
    assert metrics["completions/clipped_ratio"] == metrics["completions/min_terminated_length"] == 0
    assert metrics["completions/mean_terminated_length"] == 1.5


def test_parts_of_a_generation_batch_merge_to_the_whole(make_rollout):
    rollouts = [make_rollout(4), make_rollout(9, "length"), make_rollout(2), make_rollout(5)]
    whole = read(completion_metrics(rollouts))
    for parts in (([0], [1, 2, 3]), ([1], [0, 2, 3]), ([], [0, 1, 2, 3])):
        assert read(merge_all(completion_metrics([rollouts[i] for i in part]) for part in parts)) == whole


def test_tokens_seen_are_prompt_and_sampled_tokens_of_every_row(make_rollout):
    assert num_tokens(
        [make_rollout(4), make_rollout(5, sampled=[True, False, False, True, True]), make_rollout(0)]
    ) == ((3 + 4) + (3 + 3) + (3 + 0))
