"""`eval_reward_funcs`: an evaluation scores its completions by functions of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
from datasets import Dataset

from groupgrad import GRPOTrainer

EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}


def length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def odd(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(ids[-1] % 2) for ids in completion_ids]


@pytest.mark.parametrize("estimator", ["rloo", "maxrl"])
def test_an_evaluation_is_that_of_a_run_which_trains_on_these_functions(make_trainer, tools, estimator):
    """All weights are 1, and the estimator of training, which may be for other rewards, plays no part."""
    settings = {"per_device_eval_batch_size": 8, "eval_k": [1, 2]}
    expected = make_trainer(reward_funcs=[length, odd], **settings).evaluate(tools.prompts(5))
    trainer = make_trainer(
        reward_funcs=[odd, odd],
        reward_weights=[0.0, 1.0],
        advantage_estimator=estimator,
        trainer={"eval_reward_funcs": [length, odd]},
        **settings,
    )
    metrics = trainer.evaluate(tools.prompts(5))
    assert tools.without_times([metrics]) == tools.without_times([expected])
    assert metrics["eval_reward"] == metrics["eval_rewards/length/mean"] + metrics["eval_rewards/odd/mean"]
    assert {"eval_pass@1", "eval_pass@2", "eval_rewards/length/std", "eval_loss"} <= metrics.keys()


def test_training_keeps_the_hooks_of_a_subclass(train, tools):
    seen: list[tuple[str, tuple[str, ...]]] = []

    class Hooked(GRPOTrainer):
        def score_rollouts(self, rollouts, **kwargs):
            table = super().score_rollouts(rollouts, **kwargs)
            seen.append(("score", tuple(table.names)))
            return table

        def compute_advantages(self, rewards, num_generations):
            seen.append(("advantages", tuple(map(str, rewards.shape[1:]))))
            return super().compute_advantages(rewards, num_generations)

    given = {"eval_dataset": tools.prompts(3), "eval_reward_funcs": length}
    trainer = train(cls=Hooked, max_steps=2, trainer=given, **EVALUATES)
    assert seen == [("score", ("letters_reward",)), ("advantages", ("1",))] * 2  # the evaluations call neither
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluated) == 2
    for entry in evaluated:
        assert entry["eval_reward"] == entry["eval_rewards/length/mean"] == entry["eval_completions/mean_length"]
        assert "eval_rewards/letters_reward/mean" not in entry


def test_each_set_has_the_columns_of_its_own_functions(make_trainer, tools):
    """Training's set lacks the column that evaluation's function requires, and the other way round."""

    def trained(completion_ids, row):
        return [float(number) for number in row]

    def level_of(completion_ids, level=None):
        return [float(number) for number in level or [-1] * len(completion_ids)]

    def requires_level(completion_ids, level):
        return level_of(completion_ids, level)

    held_out = Dataset.from_dict({"prompt": ["ab", "cd"], "level": [3, 5], "unused": [0, 0]})
    extra = {"eval_dataset": held_out, "eval_reward_funcs": level_of}
    trainer = make_trainer(reward_funcs=trained, trainer=extra, remove_unused_columns=True, max_steps=1, **EVALUATES)
    trainer.train()
    assert trainer.state.log_history[1]["eval_reward"] == 4.0
    assert trainer.evaluate(held_out)["eval_reward"] == 4.0
    with pytest.raises(
        ValueError, match="'requires_level' requires the argument 'level', and eval_dataset has no such"
    ):
        make_trainer(trainer={"eval_dataset": tools.prompts(2), "eval_reward_funcs": requires_level})


def test_workers_and_what_a_failure_means_are_for_these_functions_too(make_trainer, tools):
    def process(completion_ids):  # not of the module, which a new process need not find
        return [float(os.getpid())] * len(completion_ids)

    def broken(completion_ids):
        raise ZeroDivisionError

    trainer = make_trainer(
        reward_funcs=lambda completion_ids: [0.0] * len(completion_ids),
        reward_workers=1,
        trainer={"eval_reward_funcs": process, "eval_dataset": tools.prompts(2)},
    )
    workers = {trainer.evaluate()["eval_reward"]}
    assert os.getpid() not in workers and all(not is_alive(int(pid)) for pid in workers)
    trainer = make_trainer(
        reward_funcs=length,
        on_reward_failure={"length": 0.0, "broken": 0.25},
        trainer={"eval_reward_funcs": broken},
    )
    assert trainer.evaluate(tools.prompts(2))["eval_reward"] == 0.25
    with pytest.raises(ValueError, match="names 'brokem', and the reward functions are 'length', 'broken'"):
        make_trainer(reward_funcs=length, on_reward_failure={"brokem": 0.0}, trainer={"eval_reward_funcs": broken})


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ([], ValueError, r"eval_reward_funcs=\[\]: completions need a reward; give"),
        ("accuracy_reward", ValueError, "eval_reward_funcs='accuracy_reward'.*give the function itself"),
        ([3.5], TypeError, "eval_reward_funcs contains 3.5 .*give functions"),
        ("no-such-model", OSError, "eval_reward_funcs has 'no-such-model', a text"),
    ],
)
def test_bad_functions_are_refused_at_construction(make_trainer, given, kind, text):
    with pytest.raises(kind, match=text):
        make_trainer(trainer={"eval_reward_funcs": given})
