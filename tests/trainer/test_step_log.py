"""Warnings of a step's numbers: the first batch, no signal for ten batches, sampling that differs from training."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from groupgrad import dist
from groupgrad.errors import NoSignalError
from groupgrad.metrics import maximum, mean_of, merge_all, minimum
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS
from groupgrad.scoring.rounding import Rounding
from groupgrad.trainer.sampler_logprobs import MISMATCH
from groupgrad.trainer.step_log import FirstBatch, LearningSignalWatch, MismatchWatch, tolerance

LOGGER = "groupgrad.trainer.step_log"


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def lengths(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture
def endless(make_policy):
    """A model with one end token, which it does not sample here in the first step."""
    model = make_policy()
    model.generation_config.eos_token_id = [1]
    return model


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_that_truncates_all_completions_is_warned_once(train, endless, caplog, masked):
    settings = {"max_completion_length": 2, "logging_steps": 100, "mask_truncated_completions": masked}
    with caplog.at_level(logging.WARNING):
        train(model=endless, max_steps=2, **settings)
    (message,) = warnings_of(caplog)
    if masked:
        assert "they teach nothing (mask_truncated_completions=True)" in message
        assert message.endswith("Raise it, or reward short answers.")
    else:
        assert message.startswith("step 1: all completions were truncated, so unfinished answers are rewarded")
        assert "max_completion_length is 2. Raise max_completion_length, reward short answers" in message


def test_a_run_whose_first_rewards_are_equal_ends_by_option(make_trainer, train, tmp_path):
    settings = {"max_steps": 5, "stop_without_signal": 2, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(
        NoSignalError, match=r"stop_without_signal=2: .* the rewards of each group were equal"
    ) as raised:
        train(reward_funcs=constant, **settings)
    assert "partial rewards" in str(raised.value)
    trainer = make_trainer(reward_funcs=constant, **settings)
    trainer.train(resume_from_checkpoint=True)  # of a run that is past its beginning
    assert trainer.state.global_step == 5


def test_a_run_goes_on_once_a_group_had_a_signal(train):
    """The rewards differ in the second generation batch alone, and batches serve two steps."""
    calls = []

    def once(completions, **kwargs):
        calls.append(len(completions))
        return [float(len(calls) == 2 and place == 0) for place, _ in enumerate(completions)]

    trainer = train(reward_funcs=once, max_steps=8, steps_per_generation=2, stop_without_signal=2)
    assert trainer.state.global_step == 8 and len(calls) == 4


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
        plan=SimpleNamespace(prompts_per_generation=4),
    )
    monkeypatch.setattr(dist, "all_gather_objects", lambda own: [own, metrics(4)])
    with caplog.at_level(logging.WARNING):
        state = SimpleNamespace(global_step=1, is_world_process_zero=is_main)
        FirstBatch(trainer).on_step_end(None, state, None)
    found = warnings_of(caplog)
    assert [text.partition(",")[0] for text in found] == ["step 1: 50 % of completions were truncated"] * is_main


def signal_warnings(caplog):
    return [text for text in warnings_of(caplog) if "so they taught nothing" in text]


def test_a_run_without_a_signal_is_warned_once(make_trainer, train, caplog):
    """One warning names its groups without variance, one its ten batches without a gradient; a resumed run has none."""
    settings = {"reward_funcs": constant, "max_completion_length": 40, "per_device_train_batch_size": 16}
    settings |= {"save_strategy": "steps", "save_steps": 12}
    with caplog.at_level(logging.WARNING):
        train(max_steps=12, **settings)
        first, last = warnings_of(caplog)
        caplog.clear()
        make_trainer(max_steps=13, **settings).train(resume_from_checkpoint=True)
    assert first.startswith("step 1: 100 % of groups have no variance") and "raise num_generations" in first
    assert last.startswith("in the last 10 generation batches the rewards of each group were equal, or missing")
    assert "End the run if the task is learned" in last
    assert not warnings_of(caplog)


def test_a_run_with_a_signal_is_silent(train, caplog):
    with caplog.at_level(logging.WARNING):
        train(reward_funcs=lengths, max_steps=11, max_completion_length=40)
    assert not warnings_of(caplog)


def test_batches_without_a_signal_are_counted_in_a_row(caplog):
    experiences = [SimpleNamespace(metrics={"frac_reward_zero_std": mean_of(1.0, 1.0)})]
    watch = LearningSignalWatch(SimpleNamespace(_step_log=SimpleNamespace(experiences=experiences)))
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    for equal in [1.0] * 9 + [0.5] + [1.0] * 9:
        experiences[0].metrics["frac_reward_zero_std"] = mean_of(equal, 1.0)
        watch.on_step_end(SimpleNamespace(stop_without_signal=0), state, None)
    assert not signal_warnings(caplog)
    watch.on_step_end(SimpleNamespace(stop_without_signal=0), state, None)
    assert len(signal_warnings(caplog)) == 1


def test_it_warns_once_and_again_after_tenfold_growth(caplog):
    watch, warned = MismatchWatch(1e-4), []
    for step, gaps in enumerate(
        [[1e-5, 1e-4], [2e-4, 1e-3, float("nan")], [9e-3], [1.1e-2], [0.1], [], [float("nan")]]
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            watch.end_step(step, merge_all({MISMATCH: maximum(torch.tensor(gap))} for gap in gaps))
        if caplog.records:
            warned.append(step)
            assert f"step {step}: " in caplog.text
    assert warned == [1, 3]


def test_half_precision_and_low_temperatures_may_round_more():
    float32, bfloat16, float16 = (Rounding(eps) for eps in (2**-23, 2**-7, 2**-10))
    assert [tolerance(rounding, 1.0) for rounding in (float32, bfloat16, float16)] == [1e-4, 0.5, 0.0625]
    assert tolerance(float32, 0.01) == pytest.approx(1e-2)
    assert tolerance(bfloat16, 0.5) == 1.0
    assert tolerance(float32, 5.0) == 1e-4


def test_more_than_a_quarter_dropped_is_said_once_and_again_above_half(caplog):
    watch, warned = MismatchWatch(1e-4), []
    for step, (tokens, rows) in enumerate([(25, 25), (26, 0), (40, 50), (0, 51), (100, 100)]):
        caplog.clear()
        micro_batches = [
            {
                FRAC_DROPPED_TOKENS: mean_of(tokens * share / 100, 1),
                FRAC_DROPPED_ROWS: mean_of(rows * share / 100, 1),
            }
            for share in (0, 2)  # their mean counts
        ]
        watch.end_step(step, merge_all(micro_batches))
        if caplog.records:
            warned.append(step)
            assert f"step {step}: " in caplog.text
            assert f"drops {rows} % of the completions and {tokens} % of the tokens" in caplog.text
            assert "Raise vllm_importance_sampling_clip_max" in caplog.text
    assert warned == [1, 3]
    watch.end_step(9, {})
