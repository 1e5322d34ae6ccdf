"""Evaluation scores every prompt once, does not affect training, and is reproducible."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}


@pytest.fixture
def recorder(tools):
    """A reward function that records its arguments by phase."""

    class Recorder:
        def __init__(self) -> None:
            self.calls: list[dict[str, Any]] = []

        def __call__(self, prompts, completions, completion_ids, trainer_state, **columns):
            rewards = tools.letters_reward(completion_ids)
            self.calls.append({"prompts": prompts, "completion_ids": completion_ids, "rewards": rewards, **columns})
            return rewards

        def take(self, key: str) -> list[Any]:
            taken = [item for call in self.calls for item in call[key]]
            self.calls.clear()
            return taken

    return Recorder()


def eval_entries(trainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if any(key.startswith("eval_") for key in entry)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_evaluation_while_training_changes_nothing(make_trainer, make_policy, tools, dropout):
    """An evaluation does not change the random stream of dropout, so the training log stays the same."""
    finals, logs = [], []
    for settings in ({}, {**EVERY_STEP, "eval_on_start": True}):
        policy = make_policy(attention_dropout=dropout)
        trainer = make_trainer(
            model=policy,
            trainer={"eval_dataset": tools.prompts(5)},
            steps_per_generation=2,
            max_steps=4,
            **settings,
        )
        if settings:
            trainer.evaluate()
        trainer.train()
        finals.append(tools.weights(policy))
        logs.append([entry for entry in tools.without_times(trainer.state.log_history) if "loss" in entry])
    assert torch.equal(finals[0], finals[1])
    assert logs[0] == logs[1]


def test_time_spent_evaluating_is_no_time_of_a_step(make_trainer, tools, monkeypatch):
    trainer = make_trainer(trainer={"eval_dataset": tools.prompts(3)}, max_steps=3, **EVERY_STEP)
    score = trainer.rewards.score

    def slow_in_evaluation(rollouts, **kwargs):
        if "evaluating" in trainer.timings._open:
            time.sleep(1.2)
        return score(rollouts, **kwargs)

    monkeypatch.setattr(trainer.rewards, "score", slow_in_evaluation)
    trainer.train()
    seconds = [entry["time/rewards"] for entry in trainer.state.log_history if "time/rewards" in entry]
    assert len(seconds) == 3 and max(seconds) < 0.8


def test_evaluation_restores_the_mode_and_uses_no_dropout(make_trainer, make_policy, tools):
    """Half of the attention is dropped in training; without dropout two evaluations agree to the last digit."""
    policy = make_policy(attention_dropout=0.5)
    trainer = make_trainer(model=policy, beta=0.1, trainer={"eval_dataset": tools.prompts(3)})
    trainer.train()
    assert policy.training
    first, second = trainer.evaluate(), trainer.evaluate()
    assert policy.training
    assert tools.without_times([first]) == tools.without_times([second])


def test_the_same_policy_gets_the_same_numbers(make_trainer, tools):
    trainer = make_trainer(trainer={"eval_dataset": tools.prompts(5)}, per_device_eval_batch_size=8)
    before = tools.without_times([trainer.evaluate()])[0]
    assert tools.without_times([trainer.evaluate()])[0] == before
    trainer.train()
    after = tools.without_times([trainer.evaluate()])[0]
    assert after["eval_reward"] != before["eval_reward"]
    assert after["eval_entropy"] != before["eval_entropy"]


@pytest.mark.parametrize("rows, group", [(5, None), (5, 3), (7, 1), (16, 4), (1, 8)])
def test_every_prompt_is_measured_once(make_trainer, tools, recorder, rows, group):
    """Each prompt `num_generations_eval` times, in order, also where the last batch is not full."""
    trainer = make_trainer(
        reward_funcs=recorder,
        trainer={"eval_dataset": tools.prompts(rows)},
        per_device_eval_batch_size=8,
        num_generations_eval=group,
    )
    metrics = trainer.evaluate()
    assert recorder.take("row") == [row for row in range(rows) for _ in range(group or 4)]
    assert metrics["eval_samples_per_second"] == pytest.approx(rows * (group or 4) / metrics["eval_runtime"], rel=0.05)


def test_metrics_are_exact_over_uneven_batches(make_trainer, tools, recorder):
    """7 prompts in batches of 2, 2, 2, 1: every mean is over completions or tokens, not over batches."""
    trainer = make_trainer(
        reward_funcs=recorder,
        trainer={"eval_dataset": tools.prompts(7)},
        per_device_eval_batch_size=8,
        beta=0.1,
    )
    trainer.train()
    recorder.calls.clear()
    metrics = trainer.evaluate()
    groups = [call["rewards"][i : i + 4] for call in recorder.calls for i in range(0, len(call["rewards"]), 4)]
    batches = [call["rewards"] for call in recorder.calls]
    lengths = [len(ids) for call in recorder.calls for ids in call["completion_ids"]]
    rewards = [reward for batch in batches for reward in batch]
    assert [len(batch) for batch in batches] == [8, 8, 8, 4]
    assert metrics["eval_reward"] == pytest.approx(sum(rewards) / 28)
    assert metrics["eval_rewards/Recorder/mean"] == pytest.approx(sum(rewards) / 28)
    assert metrics["eval_reward_std"] == pytest.approx(statistics.mean(statistics.stdev(b) for b in batches))
    assert metrics["eval_frac_reward_zero_std"] == sum(len(set(group)) == 1 for group in groups) / 7
    assert metrics["eval_completions/mean_length"] == pytest.approx(sum(lengths) / 28)
    assert metrics["eval_completions/min_length"] == min(lengths)
    assert metrics["eval_completions/max_length"] == max(lengths)
    # On the policy's own samples the ratio is 1: what the policy term adds up to is minus the mean advantage a token.
    advantages = [
        (reward - statistics.mean(group)) / (statistics.stdev(group) + 1e-4) for group in groups for reward in group
    ]
    policy_term = -sum(a * n for a, n in zip(advantages, lengths))
    # The policy term's denominator is the tokens of its batch, and batches weigh as many tokens as they have.
    assert metrics["eval_loss"] == pytest.approx(policy_term / sum(lengths) + 0.1 * metrics["eval_kl"], abs=1e-6)
    assert metrics["eval_kl"] > 0


def test_options_of_the_loss_hold_in_evaluation(make_trainer, tools):
    """The same completions of the same policy."""
    losses = set()
    cispo = {"loss_type": "cispo", "epsilon_high": 5.0}
    for settings in ({}, cispo, {"top_entropy_quantile": 0.5}, {"mask_truncated_completions": True}):
        trainer = make_trainer(trainer={"eval_dataset": tools.prompts(5)}, per_device_eval_batch_size=8, **settings)
        losses.add(round(trainer.evaluate()["eval_loss"], 6))
    assert len(losses) == 4


def test_named_sets_have_their_own_keys(make_trainer, tools):
    trainer = make_trainer(trainer={"eval_dataset": {"a": tools.prompts(2), "b": tools.prompts(3)}}, **EVERY_STEP)
    metrics = trainer.evaluate()
    keys = ["loss", "reward", "reward_std", "rewards/letters_reward/mean", "completions/mean_length", "entropy"]
    for name in ("a", "b"):
        assert {f"eval_{name}_{key}" for key in [*keys, "num_tokens", "runtime"]} <= metrics.keys()
    assert "eval_reward" not in metrics and "eval_loss" not in metrics
    assert metrics["eval_a_reward"] != metrics["eval_b_reward"]
    alone = make_trainer().evaluate(tools.prompts(3), metric_key_prefix="eval_b")
    assert alone["eval_b_reward"] == metrics["eval_b_reward"]
    only = trainer.evaluate(eval_dataset="b", metric_key_prefix="eval_b")
    assert only["eval_b_reward"] == metrics["eval_b_reward"]


def test_a_stream_is_evaluated(make_trainer, tools, recorder):
    stream = tools.prompts(5).to_iterable_dataset()
    trainer = make_trainer(
        reward_funcs=recorder, trainer={"eval_dataset": stream}, num_generations_eval=2, per_device_eval_batch_size=4
    )
    metrics = trainer.evaluate()
    assert recorder.take("row") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    expected = make_trainer(num_generations_eval=2, per_device_eval_batch_size=4).evaluate(tools.prompts(5))
    assert metrics["eval_reward"] == expected["eval_reward"]


def test_evaluation_before_the_first_step(make_trainer, tools):
    trainer = make_trainer(trainer={"eval_dataset": tools.prompts(4)}, eval_on_start=True, **EVERY_STEP)
    before = trainer.evaluate()
    trainer.train()
    entries = eval_entries(trainer)
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3]
    assert entries[0]["eval_reward"] == before["eval_reward"]


def test_it_follows_the_schedule(make_trainer, tools):
    trainer = make_trainer(
        trainer={"eval_dataset": tools.prompts(2)},
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
    )
    trainer.train()
    assert [entry["step"] for entry in eval_entries(trainer)] == [2, 4]


def test_it_works_without_training_and_counts_no_tokens(make_trainer, tools):
    trainer = make_trainer(trainer={"eval_dataset": tools.prompts(4)})
    metrics = trainer.evaluate()
    assert metrics["eval_num_tokens"] == 0.0
    assert trainer.state.global_step == 0
    assert trainer.state.num_input_tokens_seen == 0
    assert 0.0 <= metrics["eval_completions/clipped_ratio"] <= 1.0


def test_no_set_is_an_error_that_says_so(make_trainer):
    with pytest.raises(ValueError, match="eval_dataset"):
        make_trainer().evaluate()


def test_a_failing_reward_is_an_error_and_training_can_go_on(make_trainer, tools):
    """An error in an evaluation restores the model's mode."""

    def reward(completion_ids, trainer_state, row, **kwargs):
        if row == [0] * 4:
            raise ZeroDivisionError("no judge")
        return tools.letters_reward(completion_ids)

    trainer = make_trainer(reward_funcs=reward, trainer={"eval_dataset": tools.prompts(1)})
    trainer.model.train()
    with pytest.raises(ValueError, match="no judge"):
        trainer.evaluate()
    assert all(module.training for module in trainer.model.modules())
    trainer.train()
    assert trainer.state.global_step == 3
