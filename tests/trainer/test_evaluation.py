"""Evaluation scores every prompt once, does not affect training, and is reproducible."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from datasets import DatasetDict
from step_events import At

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}


def eval_entries(trainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if any(key.startswith("eval_") for key in entry)]


def test_evaluation_while_training_changes_nothing(make_trainer, make_policy, tools):
    """An evaluation does not change the random stream of dropout, so the training log stays the same, whatever rewards
    and sampling it has. It measures the policy as it is, at first the same as `evaluate` does before training."""
    own_sampling = {"eval_sampling": {"temperature": 1.5, "num_generations": 2}, "eval_k": [1, 2]}
    own_rewards = {"eval_reward_funcs": lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]}
    plain, on_start = {"eval_dataset": tools.prompts(5)}, {**EVERY_STEP, "eval_on_start": True}
    trainers, befores = [], []
    for given, settings in ((plain, {}), (plain, on_start), ({**plain, **own_rewards}, {**on_start, **own_sampling})):
        trainer = make_trainer(
            model=make_policy(attention_dropout=0.5),
            trainer=given,
            steps_per_generation=2,
            max_steps=3,
            **settings,
        )
        if settings:
            befores.append(trainer.evaluate())
        trainer.train()
        trainers.append(trainer)
    finals = [tools.weights(trainer.model) for trainer in trainers]
    logs = [[e for e in tools.without_times(trainer.state.log_history) if "loss" in e] for trainer in trainers]
    assert all(torch.equal(final, finals[0]) for final in finals) and all(log == logs[0] for log in logs)
    for trainer, before in zip(trainers[1:], befores):
        entries = eval_entries(trainer)
        assert [entry["step"] for entry in entries] == [0, 1, 2, 3]
        for name in ("eval_reward", "eval_entropy"):
            assert entries[0][name] == before[name] != entries[3][name]


@pytest.mark.slow
def test_time_spent_evaluating_is_no_time_of_a_step(make_trainer, tools, monkeypatch):
    trainer = make_trainer(trainer={"eval_dataset": tools.prompts(1)}, max_steps=2, **EVERY_STEP)
    score = trainer.rewards.score

    def slow_in_evaluation(rollouts, **kwargs):
        if "evaluating" in trainer.timings._open:
            time.sleep(1.2)
        return score(rollouts, **kwargs)

    monkeypatch.setattr(trainer.rewards, "score", slow_in_evaluation)
    trainer.train()
    seconds = [entry["time/rewards"] for entry in trainer.state.log_history if "time/rewards" in entry]
    assert len(seconds) == 2 and max(seconds) < 0.8


@pytest.mark.parametrize("rows, group", [(5, None), (5, 3), (7, 1), (1, 8)])
def test_every_prompt_is_measured_once(make_trainer, tools, recorder, rows, group):
    """Each prompt `num_generations_eval` times, in order, also where the last batch is not full; of a stream too."""
    trainer = make_trainer(
        reward_funcs=recorder,
        trainer={"eval_dataset": tools.prompts(rows)},
        per_device_eval_batch_size=8,
        num_generations_eval=group,
    )
    metrics, from_list = trainer.evaluate(), recorder.take("row")
    assert from_list == [row for row in range(rows) for _ in range(group or 4)]
    assert metrics["eval_samples_per_second"] == pytest.approx(rows * (group or 4) / metrics["eval_runtime"], rel=0.05)
    streamed = trainer.evaluate(tools.prompts(rows).to_iterable_dataset())
    assert recorder.take("row") == from_list and streamed["eval_reward"] == metrics["eval_reward"]


def test_no_rank_gets_more_rows_than_its_batch_size(make_trainer, tools, monkeypatch):
    """24 rows of two ranks hold three groups of eight, and a rank that got two of them would have 16 rows."""
    settings = {"per_device_eval_batch_size": 12, "num_generations_eval": 8}
    trainer = make_trainer(trainer={"eval_dataset": tools.prompts(5)}, **settings)
    monkeypatch.setattr("groupgrad.dist.world_size", lambda: 2)
    batches = list(trainer.get_eval_dataloader())
    assert [len(batch.rows) for batch in batches] == [2, 2, 1]
    assert all(len(batch.rank_rows(rank, 2, 8)) <= 12 for batch in batches for rank in range(2))


def test_metrics_are_exact_over_uneven_batches(train, tools, recorder):
    """7 prompts in batches of 2, 2, 2, 1: every mean is over completions or tokens, not over batches."""
    predicted: list[int] = []
    watch = At("on_prediction_step", lambda _: predicted.append(1))
    given = {"eval_dataset": tools.prompts(7), "callbacks": [watch]}
    trainer = train(reward_funcs=recorder, trainer=given, per_device_eval_batch_size=8, beta=0.1)
    recorder.calls.clear()
    metrics = trainer.evaluate()
    groups = [call["rewards"][i : i + 4] for call in recorder.calls for i in range(0, len(call["rewards"]), 4)]
    batches = [call["rewards"] for call in recorder.calls]
    lengths = [len(ids) for call in recorder.calls for ids in call["completion_ids"]]
    rewards = [reward for batch in batches for reward in batch]
    assert [len(batch) for batch in batches] == [8, 8, 8, 4] and len(predicted) == 4
    assert metrics["eval_reward"] == pytest.approx(sum(rewards) / 28)
    assert metrics["eval_rewards/Recorder/mean"] == pytest.approx(sum(rewards) / 28)
    assert metrics["eval_reward_std"] == pytest.approx(statistics.stdev(rewards), rel=1e-12)
    assert metrics["eval_rewards/Recorder/std"] == pytest.approx(statistics.stdev(rewards), rel=1e-12)
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


def test_no_number_of_an_evaluation_depends_on_the_size_of_its_batches(make_trainer, tools):
    """The spread of rewards is over all rows of the set. Losses are not compared: their denominators are a batch's."""

    def partly(completion_ids, **_):
        return [float(len(ids)) if len(ids) % 2 else None for ids in completion_ids]

    found = []
    for size in (4, 12, 64):
        trainer = make_trainer(
            reward_funcs=[tools.letters_reward, partly],
            trainer={"eval_dataset": tools.prompts(5)},
            per_device_eval_batch_size=size,
            top_k=1,  # random streams are a batch's
            beta=0.1,
        )
        metrics = trainer.evaluate()
        found.append({name: v for name, v in metrics.items() if not any(t in name for t in ("runtime", "per_second"))})
    assert {"eval_reward_std", "eval_rewards/letters_reward/std", "eval_rewards/partly/std"} <= found[0].keys()
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)
        for name in (name for name in other if name.endswith("std")):
            assert other[name] == found[0][name]


ALL_MASKED = {"mask_truncated_completions": True, "max_completion_length": 1}
BEST = {**EVERY_STEP, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "max_steps": 2}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_an_evaluation_without_a_measurement_is_not_better(train, make_policy, tools, caplog, loss_type):
    """All rows are cut off and masked: a loss that divides by tokens has nothing to divide by."""
    policy = make_policy()
    policy.generation_config.eos_token_id = 1
    settings = {**BEST, **ALL_MASKED, "metric_for_best_model": "loss"}
    trainer = train(model=policy, loss_type=loss_type, trainer={"eval_dataset": tools.prompts(3)}, **settings)
    assert trainer.state.global_step == 2
    has_loss = ["eval_loss" in entry for entry in eval_entries(trainer)]
    assert has_loss == [loss_type == "grpo"] * 2
    told = [r.getMessage() for r in caplog.records if "measured nothing" in r.getMessage()]
    assert len(told) == (loss_type == "dapo")
    assert all("metric_for_best_model='loss'" in text for text in told)
    assert (trainer.state.best_global_step is None) == (loss_type == "dapo")


def test_a_metric_that_a_callback_adds_chooses_the_best_model(make_trainer, tools, caplog):
    adds = At("on_evaluate", lambda at: at.metrics.update(eval_share=0.5), 2)
    extra = {"eval_dataset": tools.prompts(3), "callbacks": [adds]}
    with pytest.warns(UserWarning, match="an evaluation without it counts as not better than others"):
        trainer = make_trainer(trainer=extra, metric_for_best_model="share", greater_is_better=True, **BEST)
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, 0.5)
    assert caplog.text.count("measured nothing for metric_for_best_model='share'") == 1


def test_a_misspelled_metric_is_named_at_the_start(make_trainer, tools):
    with pytest.warns(UserWarning, match=r"metric_for_best_model='rewrad' is no metric.*did you mean 'reward'"):
        make_trainer(trainer={"eval_dataset": tools.prompts(3)}, metric_for_best_model="rewrad", **BEST)


def test_options_of_the_loss_hold_in_evaluation(make_trainer, tools):
    """The same completions of the same policy."""
    losses = set()
    cispo = {"loss_type": "cispo", "epsilon_high": 5.0}
    for settings in ({}, cispo, {"top_entropy_quantile": 0.5}, {"mask_truncated_completions": True}):
        trainer = make_trainer(trainer={"eval_dataset": tools.prompts(5)}, per_device_eval_batch_size=8, **settings)
        losses.add(round(trainer.evaluate()["eval_loss"], 6))
    assert len(losses) == 4


def test_named_sets_have_their_own_keys(make_trainer, tools):
    sets = DatasetDict(a=tools.prompts(2), b=tools.prompts(3))
    trainer = make_trainer(trainer={"eval_dataset": sets}, **EVERY_STEP)
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
