"""Dynamic sampling through the trainer: other prompts train in the place of groups whose rewards are all equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from noted_calls import note_calls
from scripted_agents import with_tools
from simulated_vllm import simulate_vllm

from groupgrad.rollout.single_turn import SingleTurnRollouts


class RowReward:
    """Rewards that vary within a group for the prompts of `varied` alone; it notes all rows that it sees."""

    def __init__(self, *varied: int):
        self.varied, self.seen = varied, []
        self.__name__ = "score"

    def __call__(self, completion_ids: list[list[int]], row: list[int], **columns: Any) -> list[float]:
        self.seen.append(row)
        return [float(place % 4) if number in self.varied else 0.0 for place, number in enumerate(row)]


def test_the_groups_that_train_have_a_signal(make_trainer):
    """The rewards of four of the 16 prompts vary; 40 further rounds are enough to draw one of them for each group."""
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


def test_a_run_without_flat_groups_is_the_same_run(final_weights):
    """Rounds that are not needed change no bit."""
    rises = lambda completion_ids, **_: [float(place % 4) for place, _ in enumerate(completion_ids)]  # noqa: E731
    weights = [final_weights(reward_funcs=rises, dynamic_sampling_rounds=rounds) for rounds in (0, 3)]
    assert torch.equal(*weights)


def test_a_stream_and_a_number_that_is_none_are_refused(make_trainer, tools):
    with pytest.raises(ValueError, match=r"dynamic_sampling_rounds=2 .* stream"):
        make_trainer(train_dataset=tools.prompts().to_iterable_dataset(), dynamic_sampling_rounds=2)
    for rounds in (-1, 1.5):
        with pytest.raises(ValueError, match="dynamic_sampling_rounds"):
            make_trainer(dynamic_sampling_rounds=rounds)


class Counting:
    """An environment whose reward varies for every fourth row alone; it knows the row that it was reset with."""

    made: list[Counting]

    def __init__(self) -> None:
        self.rows: list[int] = []
        Counting.made.append(self)

    def reset(self, row: int, **columns: Any) -> str:
        self.rows.append(row)
        return f" {row}"

    def count(self) -> int:
        """Counts the resets."""
        return len(self.rows)

    def get_reward(self) -> float:
        return Counting.made.index(self) % 4 if self.rows[-1] % 4 == 0 else 1.0


def test_environments_are_reset_with_the_rows_that_are_drawn(make_trainer, tokenizer, make_model):
    Counting.made = []
    messages = [[{"role": "user", "content": f"Count to {row}."}] for row in range(16)]
    trainer = make_trainer(
        model=make_model(max_position_embeddings=2048),
        reward_funcs=[],
        train_dataset=Dataset.from_dict({"prompt": messages, "row": list(range(16))}),
        trainer={"environment_factory": Counting, "processing_class": with_tools(tokenizer)},
        dynamic_sampling_rounds=40,
        max_steps=2,
    )
    trained = []
    trainer.on_experience = lambda experience: trained.append(
        [(r.prompt.row["row"], reward) for r, reward in zip(experience.rollouts, experience.combined_rewards)]
    )
    trainer.train()
    assert all(row % 4 == 0 for batch in trained for row, _ in batch)
    assert all(len({reward for _, reward in batch[start : start + 4]}) > 1 for batch in trained for start in (0, 4))
    assert len(Counting.made) == 8, "further rounds take the environments of the groups that they replace"
    assert sum(len(made.rows) for made in Counting.made) > 16


@pytest.mark.parametrize("copies", [1, 4])
def test_a_rollout_function_is_asked_for_the_prompts_that_are_drawn(make_trainer, copies):
    """Both kinds of functions: one completion for each prompt given, or a group for each."""
    asked, reward = [], RowReward(2, 5, 11, 14)

    def roll(prompts: list[str], trainer: Any) -> dict[str, Any]:
        asked.append(len(prompts))
        count = len(prompts) * copies
        return {"prompt_ids": [[5, 6]] * count, "completion_ids": [[7, 1]] * count, "logprobs": None}

    trainer = make_trainer(reward_funcs=reward, dynamic_sampling_rounds=40, trainer={"rollout_func": roll}, max_steps=2)
    trained: list[int] = []
    trainer.on_experience = lambda experience: trained.extend(r.prompt.row["row"] for r in experience.rollouts)
    trainer.train()
    assert set(trained) <= {2, 5, 11, 14} and len(trained) == 16
    assert len(asked) == len(reward.seen) > 2


def test_rounds_beside_batches_that_are_sampled_ahead(train, monkeypatch):
    """Each generation batch of a server is still begun once, and its further rounds have weights of its own step."""
    served, note = simulate_vllm(monkeypatch), lambda self, request: (request.number, request.attempt)
    asked = note_calls(monkeypatch, SingleTurnRollouts, "__call__", note)
    reward = RowReward(2, 5, 11, 14)
    trainer = train(reward_funcs=reward, use_vllm=True, vllm_mode="server", rollout_ahead=1, dynamic_sampling_rounds=40)
    assert served
    assert sorted(number for number, attempt in asked if attempt == 0) == [0, 1, 2]
    assert any(attempt for _, attempt in asked)
    assert len(set(asked)) == len(asked)
    assert all(entry["frac_reward_zero_std"] == 0 for entry in trainer.state.log_history if "reward" in entry)
