"""A generation batch and an evaluation on two processes give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import rollout_ranks
from forked_ranks import two_once


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, make_model: Any, make_tokenizer: Any) -> dict[str, Any]:
    """Results of a run with one process and of a run with two, by rank and world size."""
    make = lambda: rollout_ranks.main(make_model().eval(), make_tokenizer())  # noqa: E731
    _, (first, second) = two_once(tmp_path_factory, "rollout-ranks", lambda out: make(), connect=True)
    return {"0of1": make(), "0of2": first, "1of2": second}


@pytest.mark.parametrize("kind", ["batch", "by length"])
def test_ranks_sample_and_score_the_rows_that_one_process_would(results, kind):
    alone, first, second = (results[name][kind] for name in ("0of1", "0of2", "1of2"))
    assert set(first["rows"]).isdisjoint(second["rows"])
    together = {**first["rows"], **second["rows"]}
    assert together.keys() == alone["rows"].keys()
    for row, (ids, advantage) in alone["rows"].items():
        assert together[row][0] == ids
        assert together[row][1] == pytest.approx(advantage, rel=1e-12)
    assert len({advantage for _, advantage in together.values()}) > 2


def test_every_rank_has_the_totals_of_the_whole_generation_batch(results):
    alone, first, second = (results[name]["batch"] for name in ("0of1", "0of2", "1of2"))
    for rank in (first, second):
        assert rank["num_tokens"] == alone["num_tokens"]
        assert rank["mean_reward"] == pytest.approx(alone["mean_reward"], rel=1e-12)
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)


def test_a_reward_that_fails_on_one_rank_stops_all(results):
    assert results["1of2"]["broken"][0] == "RewardError"
    assert results["0of2"]["broken"][0] == "RankError"
    assert "rank 1 failed with RewardError" in results["0of2"]["broken"][1]


def test_failed_rollouts_are_counted_over_all_ranks(results):
    """Three of one rank's four rows, but of eight in all; and five of eight, which every rank raises alike."""
    alone, first, second = (results[name]["failed"] for name in ("0of1", "0of2", "1of2"))
    together = {**first["rows"], **second["rows"]}
    assert {row for row, (_, advantage) in together.items() if advantage == 0} >= {5, 6, 7}
    assert together.keys() == alone["rows"].keys()
    for rank in (first, second):
        assert rank["mean_reward"] == pytest.approx(alone["mean_reward"], rel=1e-12)
    problem = "5 of 8 rollouts of step 0 failed, more than half; the first (row 0): no such level"
    for name in ("0of1", "0of2", "1of2"):
        assert results[name]["mostly failed"] == ["RolloutError", problem]


def test_an_evaluation_gives_the_same_numbers_also_where_a_rank_has_no_row(results):
    alone = results["0of1"]["evaluation"]
    assert alone["completions/mean_length"] > 1
    assert alone["loss"] == pytest.approx(0.5 * alone["kl"], rel=1e-4), "single completions have no advantage"
    assert alone["kl"] > 1e-3
    assert results["0of2"]["evaluation"] == pytest.approx(alone, rel=1e-5, abs=1e-7)
    assert results["1of2"]["evaluation"] == pytest.approx(alone, rel=1e-5, abs=1e-7)
