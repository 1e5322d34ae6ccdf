"""Training with an engine that samples from a copy of the weights: its pushes, and the correction of its log-probs.

The engine simulates colocated vLLM: another copy of the model, which only a push changes.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from noted_calls import note_calls
from peft import LoraConfig
from simulated_vllm import Copy, simulate_vllm
from tiny_vlms import build

from groupgrad import GRPOConfig
from groupgrad.integrations.vllm import setup as vllm_setup
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.rollout.sources import RolloutComponents

STEPS = {"max_steps": 3}
VLLM = {"use_vllm": True, "vllm_max_model_length": 64}
SERVER = {"use_vllm": True, "vllm_mode": "server"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Replaces vLLM by `Copy`; returns the copies that were started."""
    return simulate_vllm(monkeypatch)


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_each_generation_batch_is_sampled_from_the_weights_of_its_step(train, served):
    """The copy samples the same as the native engine, so the runs only differ by the correction's rounding."""
    ours, theirs = train(**STEPS), train(**VLLM, **STEPS)
    (engine,) = served
    assert engine.pushes == [("weights", 0), ("weights", 1), ("weights", 2)]
    # Stale weights would be off by far more after steps of this size.
    assert max(logged(theirs, "sampling/sampling_logp_difference/max")) < 1e-5
    assert logged(theirs, "sampling/importance_sampling_ratio/mean") == pytest.approx([1] * 3, abs=1e-4)
    assert engine.sleeps == 3
    assert len(logged(theirs, "time/weights")) == 3
    assert logged(theirs, "reward") == logged(ours, "reward")
    assert logged(theirs, "loss") == pytest.approx(logged(ours, "loss"), abs=1e-5)
    assert logged(theirs, "entropy") == pytest.approx(logged(ours, "entropy"), rel=1e-5)


def test_a_generation_batch_of_several_steps_is_sampled_once(train, served):
    train(**VLLM, **{**STEPS, "max_steps": 4, "num_iterations": 2})
    assert [version for _, version in served[0].pushes] == [0, 2]


def test_what_may_have_changed_outside_of_training_is_sent_again(make_trainer, tools, served):
    trainer = make_trainer(**VLLM, **STEPS, trainer={"eval_dataset": tools.prompts(2)}, per_device_eval_batch_size=4)
    trainer.evaluate()
    trainer.evaluate()
    assert served[0].pushes == [("weights", 0)] * 2
    trainer.train()
    trainer.evaluate()
    assert [version for _, version in served[0].pushes[2:]] == [0, 1, 2, 3]


def test_an_adapter_is_sent_alone_unless_told_to_merge(make_trainer, train, served):
    peft = LoraConfig(r=4, target_modules=["q_proj"])
    train(**VLLM, **STEPS, trainer={"peft_config": peft})
    train(**VLLM, **STEPS, trainer={"peft_config": peft}, vllm_lora_updates="merge")
    assert {kind for kind, _ in served[0].pushes} == {"adapter"}
    assert {kind for kind, _ in served[1].pushes} == {"weights"}
    with pytest.raises(ValueError, match="vllm_lora_updates='adapter', but the model has no adapter"):
        make_trainer(**VLLM, **STEPS, vllm_lora_updates="adapter")
    whole = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="trains whole modules"):
        make_trainer(**VLLM, **STEPS, trainer={"peft_config": whole}, vllm_lora_updates="adapter")


@pytest.fixture
def first_step(make_trainer, served):
    """`first_step(shift, mode)`: what a step logs whose sampler's log-probs are too high by `shift`."""

    def run(shift: float, mode: str, **settings: Any) -> dict[str, float]:
        trainer = make_trainer(**VLLM, max_steps=1, vllm_importance_sampling_mode=mode, **settings)
        served[-1].shift = shift
        trainer.train()
        return trainer.state.log_history[0]

    return run


def test_the_ratio_multiplies_the_loss(first_step):
    """Log-probs that are 0.5 too low make every ratio exp(0.5), which token truncation at 3 leaves as it is."""
    settings = {"loss_type": "dr_grpo", "scale_rewards": False}
    plain, shifted = (first_step(shift, "token_truncate", **settings) for shift in (0.0, -0.5))
    for entry, ratio in ((plain, 1.0), (shifted, 1.6487)):
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratio, rel=1e-4)
    assert shifted["grad_norm"] / plain["grad_norm"] == pytest.approx(1.6487, rel=1e-3)


def test_without_the_correction_nothing_is_multiplied_or_measured(first_step):
    off = {"vllm_importance_sampling_correction": False}
    plain, shifted = (first_step(shift, "sequence_mask", **off) for shift in (0.0, -0.5))
    assert "sampling/importance_sampling_ratio/mean" not in plain.keys() | shifted.keys()
    assert plain["grad_norm"] == pytest.approx(shifted["grad_norm"], rel=1e-6)


def test_much_dropped_is_a_warning_that_names_the_remedy(make_trainer, served, caplog):
    trainer = make_trainer(**VLLM, **STEPS, vllm_importance_sampling_mode="token_mask")
    served[0].shift = -2.0  # a ratio of 7.4, beyond the bound of 3
    trainer.train()
    assert logged(trainer, "sampling/frac_dropped_rows") == [1.0] * 3
    assert logged(trainer, "sampling/importance_sampling_ratio/max") == pytest.approx([7.389] * 3, rel=1e-3)
    warned = [record.message for record in caplog.records if "drops 100 % of the completions" in record.message]
    assert len(warned) == 1, "once, although every step does"
    assert "Raise vllm_importance_sampling_clip_max" in warned[0]


@pytest.mark.parametrize("ahead", [1, 2])
def test_generation_batches_ahead_are_at_most_as_old_as_agreed_and_none_is_sampled_in_vain(
    train, served, ahead, monkeypatch
):
    seen = note_calls(monkeypatch, SingleTurnRollouts, "__call__", lambda self, request: request.number)
    settings = {**SERVER, **STEPS, "max_steps": 5}
    trainer = train(**settings, rollout_ahead=ahead)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    lags = logged(trainer, "sampling/policy_lag")
    assert lags[:1] == [0] and max(lags) == ahead
    assert min(lags[1:]) >= 1
    # The ratio is between the weights that train and those that sampled, which differ now.
    assert logged(trainer, "sampling/sampling_logp_difference/max")[-1] > 1e-4


def test_rows_go_on_with_weights_that_are_sent_in_flight(train, served, monkeypatch):
    pushed: list[tuple[int, bool]] = []
    refresh, sample = VLLMPolicy.refresh, SingleTurnRollouts.__call__

    def recorded(self: VLLMPolicy, step: int, *, keeps_rows: bool = False) -> None:
        pushed.append((step, keeps_rows))
        refresh(self, step, keeps_rows=keeps_rows)

    def slow(self: SingleTurnRollouts, request: Any) -> Any:
        time.sleep(0.2)
        return sample(self, request)

    monkeypatch.setattr(VLLMPolicy, "refresh", recorded)
    monkeypatch.setattr(SingleTurnRollouts, "__call__", slow)
    settings = {**SERVER, **STEPS, "max_steps": 5}
    trainer = train(**settings, rollout_ahead=2, vllm_in_flight_updates=True)
    assert [step for step, _ in pushed] == [0, 1, 2, 3, 4], "each step's weights are sent"
    assert (1, True) in pushed, "although the third batch is being sampled"
    assert max(logged(trainer, "sampling/policy_lag")) <= 2


def test_with_updates_in_flight_an_adapter_is_merged(train, served):
    settings = {**SERVER, **STEPS, "rollout_ahead": 2, "vllm_in_flight_updates": True}
    train(**settings, trainer={"peft_config": LoraConfig(r=4, target_modules=["q_proj"])})
    assert {kind for kind, _ in served[0].pushes} == {"weights"}


def test_models_that_take_images_are_not_updated_in_flight():
    config = GRPOConfig("run", use_cpu=True, bf16=False, **SERVER, rollout_ahead=2, vllm_in_flight_updates=True)
    bundle: Any = None
    with pytest.raises(ValueError, match=r"vllm_in_flight_updates=True with Llava\w+, which takes images"):
        vllm_setup.serve_policy(config, build("llava_next").model, bundle, RolloutComponents())


def test_a_rollout_function_cannot_run_ahead(make_trainer):
    settings = {**SERVER, **STEPS}
    with pytest.raises(ValueError, match="rollout_ahead=1 with a rollout_func"):
        make_trainer(**settings, rollout_ahead=1, trainer={"rollout_func": lambda prompts, trainer: {}})


def test_prompts_must_fit_into_vllms_context(make_trainer, monkeypatch, served):
    monkeypatch.setattr(Copy, "max_model_len", 2)
    with pytest.raises(ValueError, match="the model has 2 positions"):
        make_trainer(**VLLM, **STEPS)


def test_the_correction_is_what_the_configuration_says(first_step):
    """Ratios of exp(0.5) or more a sequence are moved to the upper bound, those of exp(-0.5) or less to the lower."""
    bounds = {"vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_clip_min": 0.7}
    norms = {}
    for mode, shift in [("truncate", 0.0), ("truncate", -0.5), ("truncate", 0.5), ("mask", -0.5), ("mask", 0.5)]:
        norms[mode, shift] = first_step(shift, f"sequence_{mode}", **bounds)["grad_norm"]
    plain = norms["truncate", 0.0]
    assert norms["truncate", -0.5] == pytest.approx(1.5 * plain, rel=1e-3)
    assert norms["truncate", 0.5] == pytest.approx(0.7 * plain, rel=1e-3)
    assert norms["mask", -0.5] == norms["mask", 0.5] == 0.0


def test_a_resumed_run_sends_its_weights(make_trainer, train, served, tmp_path):
    settings = {**VLLM, **STEPS, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    train(**settings)
    trainer = make_trainer(**settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert served[1].pushes == [("weights", 2)]
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")[-1:]) < 1e-5
