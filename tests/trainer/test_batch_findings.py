"""The first step of a run warns of truncated completions and of groups without variance, once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from groupgrad import dist
from groupgrad.metrics import maximum, mean_of, minimum
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.trainer.step_log import FirstBatch, ending

LOGGER = "groupgrad.trainer.step_log"


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture
def endless(make_policy):
    """A model with one end token, which it does not sample here in the first step."""
    model = make_policy()
    model.generation_config.eos_token_id = [1]
    return model


def test_a_run_that_truncates_all_completions_is_warned_once(make_trainer, endless, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(model=endless, max_steps=3, max_completion_length=2, logging_steps=100).train()
    (message,) = warnings_of(caplog)
    assert message.startswith("step 1: all completions were truncated, so unfinished answers are rewarded")
    assert "max_completion_length is 2. Raise max_completion_length, reward short answers" in message


def test_truncated_completions_that_are_masked_teach_nothing(make_trainer, endless, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(model=endless, max_steps=1, max_completion_length=2, mask_truncated_completions=True).train()
    (message,) = warnings_of(caplog)
    assert "they teach nothing (mask_truncated_completions=True)" in message
    assert message.endswith("Raise it, or reward short answers.")


def test_groups_without_variance_are_warned_of_once_and_not_by_a_resumed_run(make_trainer, caplog):
    settings = {"reward_funcs": constant, "max_completion_length": 40, "save_strategy": "steps", "save_steps": 1}
    settings |= {"per_device_train_batch_size": 16}
    with caplog.at_level(logging.WARNING):
        make_trainer(max_steps=2, **settings).train()
    (message,) = warnings_of(caplog)
    assert message.startswith("step 1: 100 % of groups have no variance")
    assert "raise num_generations" in message
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer(max_steps=3, **settings).train(resume_from_checkpoint=True)
    assert not warnings_of(caplog)


def test_a_run_without_findings_is_silent(make_trainer, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(max_steps=2, max_completion_length=40).train()
    assert not warnings_of(caplog)


@pytest.mark.parametrize("is_main", [True, False])
def test_shares_are_those_of_all_ranks_and_the_main_process_warns(is_main, monkeypatch, caplog):
    def metrics(clipped):
        return {
            "completions/clipped_ratio": mean_of(clipped, 4),
            "completions/min_length": minimum(2),
            "completions/max_length": maximum(6),
            "frac_reward_zero_std": mean_of(0, 2),
            "reward": mean_of(2.0, 4),
        }

    trainer = SimpleNamespace(
        _step_log=SimpleNamespace(experiences=[SimpleNamespace(metrics=metrics(0))]),
        args=SimpleNamespace(max_completion_length=6, mask_truncated_completions=False),
        prompt_maker=SimpleNamespace(max_context=None),
        rollout_components=RolloutComponents(),
        plan=SimpleNamespace(prompts_per_generation=4),
    )
    monkeypatch.setattr(dist, "all_gather_objects", lambda own: [own, metrics(4)])
    with caplog.at_level(logging.WARNING):
        state = SimpleNamespace(global_step=1, is_world_process_zero=is_main)
        FirstBatch(trainer).on_step_end(None, state, None)
    found = warnings_of(caplog)
    assert [text.partition(",")[0] for text in found] == ["step 1: 50 % of completions were truncated"] * is_main


def test_agents_that_are_cut_before_the_limit_are_not_told_of_the_context():
    """Results of tools count against the limit, but not in the length of a completion."""
    metrics = {"completions/clipped_ratio": 1.0, "completions/min_length": 2, "completions/max_length": 40}
    trainer = SimpleNamespace(
        args=SimpleNamespace(max_completion_length=64, mask_truncated_completions=False),
        prompt_maker=SimpleNamespace(max_context=512),
        rollout_components=RolloutComponents(chat=object()),
    )
    assert ending(trainer, metrics).setting.startswith("max_completion_length is 64. Raise max_completion_length")
    trainer.rollout_components = RolloutComponents()
    assert "have a context of 512 positions together" in ending(trainer, metrics).setting
