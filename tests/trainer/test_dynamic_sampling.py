"""Dynamic sampling through the trainer: other prompts train in the place of groups whose rewards are all equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class RowReward:
    """Rewards that vary within a group for the prompts of `varied` alone; it notes all rows that it sees."""

    def __init__(self, *varied: int):
        self.varied, self.seen = varied, []
        self.__name__ = "score"

    def __call__(self, completion_ids: list[list[int]], row: list[int], **columns: Any) -> list[float]:
        self.seen.append(row)
        return [float(place % 4) if number in self.varied else 0.0 for place, number in enumerate(row)]


def test_the_groups_that_train_have_a_signal(make_trainer):
    """Of 16 prompts four vary. With 40 further rounds each of the two groups of a step has one of them in the end."""
    reward, trained = RowReward(2, 5, 11, 14), []
    trainer = make_trainer(reward_funcs=reward, dynamic_sampling_rounds=40)
    trainer.on_experience = lambda experience: trained.extend(r.prompt.row["row"] for r in experience.rollouts)
    trainer.train()
    assert len(trained) == 3 * 8
    assert set(trained) <= {2, 5, 11, 14}
    assert sum(map(len, reward.seen)) > 3 * 8
    logs = [entry for entry in trainer.state.log_history if "dynamic_sampling/rounds" in entry]
    assert len(logs) == 3
    discarded = (sum(map(len, reward.seen)) - 3 * 8) / 4
    assert sum(entry["dynamic_sampling/discarded"] * 2 for entry in logs) == pytest.approx(discarded)
    for entry in logs:
        assert entry["frac_reward_zero_std"] == 0.0
        assert entry["dynamic_sampling/rounds"] <= 40
        assert entry["dynamic_sampling/reward"] < entry["reward"]


def test_a_run_without_flat_groups_is_the_same_run(make_trainer, tools):
    """Rounds that are not needed change no bit."""
    weights = []
    for rounds in (0, 3):
        trainer = make_trainer(
            reward_funcs=lambda completion_ids, **_: [float(place % 4) for place, _ in enumerate(completion_ids)],
            dynamic_sampling_rounds=rounds,
        )
        trainer.train()
        weights.append(tools.weights(trainer.model))
    assert torch.equal(*weights)


def test_a_stream_is_refused(make_trainer, tools):
    with pytest.raises(ValueError, match=r"dynamic_sampling_rounds=2 .* stream"):
        make_trainer(train_dataset=tools.prompts().to_iterable_dataset(), dynamic_sampling_rounds=2)


@pytest.mark.parametrize("rounds", [-1, 1.5])
def test_a_number_that_is_none_is_refused(make_trainer, rounds):
    with pytest.raises(ValueError, match="dynamic_sampling_rounds"):
        make_trainer(dynamic_sampling_rounds=rounds)
