"""Advantage estimators through `train()`: they get rewards and lengths, their settings, and a user's own trains too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import twins
from rank_cases import success

from groupgrad import GRPOTrainer
from groupgrad.objectives import ESTIMATORS

GROUP = 4


class Kept(GRPOTrainer):
    """A trainer that keeps what the estimator got, and the advantages that it trained."""

    def compute_advantages(self, rewards: Any, num_generations: int, lengths: Any = None, turns: Any = None) -> Any:
        self.given = (rewards.squeeze(1).numpy(), lengths.numpy())
        return super().compute_advantages(rewards, num_generations, lengths, turns)

    def batch_loss(self, model: Any, batch: Any, **known: Any) -> Any:
        self.trained = (batch.advantages.numpy(), batch.loss_tokens.numpy())
        return super().batch_loss(model, batch, **known)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_is_trained_is_what_the_estimator_says(train: Any, name: str) -> None:
    twin, reward = twins.ESTIMATORS[name], {"reward_funcs": success} if ESTIMATORS[name].binary else {}
    chosen = twin.settings[-1]
    trainer = train(cls=Kept, max_steps=1, advantage_estimator=name, advantage_settings=dict(chosen) or None, **reward)
    (rewards, lengths), (advantages, loss_tokens) = trainer.given, trainer.trained
    assert sorted(lengths) == sorted(loss_tokens) and len(set(lengths)) > 1 and len(set(rewards)) > 1
    groups = rewards.reshape(-1, GROUP)
    scored = twins.Scored(
        *(groups[:, :, None], np.ones(1), lengths.reshape(-1, GROUP)),
        turns=[[np.array([[reward]]) for reward in group] for group in groups],
        states=[[["start"]] * GROUP for _ in groups],
        scale="group",
        aggregation="sum_then_normalize",
        settings=ESTIMATORS[name].make_settings(chosen),
    )
    expected = np.array(twin.advantages(scored)).ravel()
    assert sorted(advantages) == pytest.approx(sorted(expected), abs=1e-6), "micro-batches may have another order"


def test_maxrl_refuses_weights_that_sum_successes_to_other_numbers(make_trainer: Any) -> None:
    def other(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.0] * len(completion_ids)

    settings: dict[str, Any] = {"reward_funcs": [success, other], "advantage_estimator": "maxrl"}
    for weights in (None, [0.2, 0.0], [1.0, 1.0]):
        make_trainer(**settings, reward_weights=weights)
    with pytest.raises(ValueError, match=r"'maxrl' is for .* the weights \(1\.0, 0\.2\) .* the weight 1"):
        make_trainer(**settings, reward_weights=[1.0, 0.2])


def test_a_subclass_need_not_take_lengths(train: Any) -> None:
    class Old(GRPOTrainer):
        def compute_advantages(self, rewards: Any, num_generations: int) -> Any:
            calls.append(num_generations)
            return super().compute_advantages(rewards, num_generations)

    calls: list[int] = []
    train(cls=Old, max_steps=1)
    assert calls == [GROUP]
    with pytest.raises(ValueError, match="compute_advantages gets them as its third argument, lengths"):
        train(cls=Old, max_steps=1, advantage_estimator="opo")


def two_turns(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Completions of the policy whose third token, if there are four, counts as read and not as sampled."""
    answer = trainer.sample_completions(prompts, max_new_tokens=6)
    masks = [[int(place != 2 or len(ids) < 4) for place in range(len(ids))] for ids in answer["completion_ids"]]
    return {**answer, "env_mask": masks}


def by_turns(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return [[float(ids[0] % 5), float(ids[-1] % 3)] if len(ids) >= 4 else float(ids[0] % 5) for ids in completion_ids]


def test_turns_train_with_advantages_of_their_own(train: Any) -> None:
    """Two turns of rollouts of one's own, over two micro-batches and two steps of each generation batch."""

    class Turns(GRPOTrainer):
        def compute_advantages(self, rewards: Any, num_generations: int, lengths: Any = None, turns: Any = None) -> Any:
            self.returns = [[float(x) for x in one.rewards.nan_to_num().flip(0).cumsum(0).flip(0)] for one in turns]
            self.lengths = [one.lengths for one in turns]
            return super().compute_advantages(rewards, num_generations, lengths, turns)

        def batch_loss(self, model: Any, batch: Any, **known: Any) -> Any:
            for row, (start, end) in enumerate(pairwise(batch.offsets.tolist())):
                seen[int(batch.row_index[row])] = batch.token_advantages[start:end].tolist()
            return super().batch_loss(model, batch, **known)

    seen: dict[int, list[float]] = {}
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2}
    chosen = {"advantage_estimator": "turn_returns", "scale_rewards": "none"}
    trainer = train(cls=Turns, reward_funcs=by_turns, trainer={"rollout_func": two_turns}, **settings, **chosen)
    assert len(seen) == 8 and {len(returns) for returns in trainer.returns} == {1, 2}
    for row, returns in enumerate(trainer.returns):
        group = trainer.returns[row // GROUP * GROUP :][:GROUP]
        expected: list[float] = []
        for turn, (value, length) in enumerate(zip(returns, trainer.lengths[row])):
            others = [one[turn] for one in group if turn < len(one)]
            expected += [value - sum(others) / len(others)] * length + [0.0] * (turn == 0 and len(returns) == 2)
        assert seen[row] == pytest.approx(expected, abs=1e-6)
    assert any(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)


def test_an_estimator_of_ones_own_and_its_settings_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any
) -> None:
    (tmp_path / "modules" / "estimators_of_a_run").mkdir(parents=True)
    (tmp_path / "modules" / "estimators_of_a_run" / "shifted.py").write_text(
        "from dataclasses import dataclass\n"
        "from groupgrad.objectives import Estimate, Estimator\n"
        "@dataclass(frozen=True)\nclass Settings:\n    shift: float = 0.0\n"
        "ESTIMATOR = Estimator(lambda groups, options: Estimate(groups.rewards - options.settings.shift),"
        " settings=Settings)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    own = {"advantage_estimator": "estimators_of_a_run.shifted", "advantage_settings": {"shift": 2.0}}
    trainer = train(cls=Kept, max_steps=1, **own)
    assert sorted(trainer.trained[0]) == pytest.approx(sorted(trainer.given[0] - 2.0), abs=1e-6)


def test_a_state_needs_environments_and_turns_need_tools(make_trainer: Any, caplog: Any) -> None:
    with pytest.raises(ValueError, match="names state='board', an attribute of environments, but there is no"):
        make_trainer(advantage_estimator="gigpo", advantage_settings={"state": "board"})
    make_trainer(advantage_estimator="gigpo")
    assert "advantage_estimator='gigpo' credits turns, but every completion is one turn" in caplog.text
