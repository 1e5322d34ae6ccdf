"""A run resumed from a checkpoint continues bit for bit: weights, logged numbers, stored completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rank_cases import LOSSES, PAIRS, loss_settings, success

# Settings of a run, and the step whose checkpoint it is resumed from.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "inside_a_generation_batch": (
        {
            "steps_per_generation": 4,
            "max_steps": 5,
            "lr_scheduler_type": "linear",
            "entropy_coef": 0.1,
            "use_adaptive_entropy": True,
            "entropy_target": 5.0,
            "entropy_coef_delta": 0.05,
        },
        2,
    ),
    "dynamic_sampling": (
        {"steps_per_generation": 2, "max_steps": 5, "dynamic_sampling_rounds": 2, "flat_groups": True},
        3,
    ),
    "between_two_generation_batches_of_a_step": (
        {"generation_batch_size": 24, "gradient_accumulation_steps": 2, "max_steps": 4},
        1,
    ),
    "end_of_an_epoch": ({"rows": 8, "per_device_train_batch_size": 16, "max_steps": 3}, 2),
    "second_epoch": (
        {"rows": 8, "steps_per_generation": 2, "max_steps": 7, "num_train_epochs": 2, "shuffle_rows": "groups"},
        5,
    ),
    "synced_reference": ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 4}, 3),
    "synced_adapter": (
        {"peft": True, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 4},
        3,
    ),
    "stream": ({"stream": True, "steps_per_generation": 2, "max_steps": 5}, 3),
    "log_window": (
        {"logging_steps": 3, "steps_per_generation": 2, "max_steps": 7, "log_completions": True, "rows": 16},
        4,
    ),
    "evaluated": ({"dropout": 0.5, "evaluate": True, "gradient_accumulation_steps": 2, "max_steps": 4}, 2),
    "workers": ({"dataloader_num_workers": 1, "steps_per_generation": 2, "max_steps": 3}, 1),
    "stochastic_rounding": ({"dtype": torch.bfloat16, "stochastic_rounding": True, "learning_rate": 1e-4}, 2),
    # Each loss, estimator and mask, in the second pass over a generation batch.
    **{name: (loss_settings(name), 3) for name in LOSSES},
    **{name: ({**settings, "reward_funcs": success}, 3) for name, settings in PAIRS.items()},
}


def few_vary(completion_ids: list[list[int]], row: list[int], **kwargs: Any) -> list[float]:
    """Rewards that are equal within a group, except for every third prompt."""
    return [float(len(ids) + ids[0] % 3) if number % 3 == 0 else 0.5 for ids, number in zip(completion_ids, row)]


@pytest.fixture
def build(make_trainer, make_policy, tools, tmp_path):
    """`build(folder, **settings)` returns a new trainer and model, equal for equal settings."""

    def make(folder: str, **settings: Any):
        policy = make_policy(attention_dropout=settings.pop("dropout", 0.0)).to(settings.pop("dtype", torch.float32))
        dataset = tools.prompts(settings.pop("rows", 16))
        if settings.pop("stream", False):
            dataset = dataset.to_iterable_dataset()
        extra: dict[str, Any] = {}
        if settings.pop("evaluate", False):
            extra["eval_dataset"] = tools.prompts(3)
            settings |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
        if settings.pop("flat_groups", False):
            settings["reward_funcs"] = few_vary
        if settings.pop("peft", False):
            from peft import LoraConfig

            extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
        return make_trainer(
            model=policy,
            train_dataset=dataset,
            trainer=extra,
            **{
                "output_dir": str(tmp_path / folder),
                "save_strategy": "steps",
                "save_steps": 1,
                "num_completions_to_print": 0 if settings.get("log_completions") else None,
                **settings,
            },
        )

    return make


def completions(folder: Path) -> dict[str, Any]:
    return {path.name: pq.read_table(path).to_pylist() for path in sorted((folder / "completions").glob("*.parquet"))}


@pytest.mark.quick(
    "clip_cov", "evaluated", "inside_a_generation_batch", "stochastic_rounding", "stream", "synced_adapter"
)
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(build, tools, tmp_path, case):
    settings, step = CASES[case]
    straight = build("straight", **settings)
    straight.train()
    torch.manual_seed(1234)  # the state that a new process starts with is another one
    resumed = build("resumed", **settings)
    resumed.train(str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert torch.equal(tools.weights(resumed.model), tools.weights(straight.model))
    logs = [tools.without_times(trainer.state.log_history) for trainer in (resumed, straight)]
    assert logs[0][:-1] == logs[1][:-1]
    assert logs[0][-1]["total_flos"] == logs[1][-1]["total_flos"]
    if settings.get("log_completions"):
        stored, expected = completions(tmp_path / "resumed"), completions(tmp_path / "straight")
        late = {name: rows for name, rows in expected.items() if int(name.split("_")[1].split(".")[0]) > step}
        assert stored == late
        assert [row["step"] for row in stored["completions_00006.parquet"]] == [4] * 16


def test_the_mean_loss_of_a_resumed_run_is_that_of_its_own_steps(build, tmp_path):
    build("straight", logging_steps=3, max_steps=4).train()
    each = build("each", logging_steps=1, max_steps=4, save_strategy="no")
    each.train()
    losses = [entry["loss"] for entry in each.state.log_history[:-1]]
    resumed = build("resumed", logging_steps=3, max_steps=4)
    output = resumed.train(str(tmp_path / "straight" / "checkpoint-2"))
    assert output.training_loss == pytest.approx(sum(losses[2:]) / 2, abs=1e-6)
    assert resumed.state.log_history[0]["loss"] == pytest.approx(sum(losses[:3]) / 3, abs=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("weights_alone", [False, True])
def test_tokens_and_generation_batches_are_counted_on(build, recorder, tmp_path, caplog, weights_alone):
    """`num_tokens` counts the run, and a resume within a generation batch samples nothing until the next one; where
    weights alone were saved it is sampled again, which is said."""
    settings = {"steps_per_generation": 2, "max_steps": 6, "reward_funcs": recorder, "save_only_model": weights_alone}
    straight = build("straight", **settings)
    straight.train()
    assert [call["step"] for call in recorder.calls] == [0, 2, 4]
    recorder.calls.clear()
    resumed = build("resumed", **settings)
    with caplog.at_level("WARNING", logger="groupgrad"):
        resumed.train(str(tmp_path / "straight" / "checkpoint-3"))
    assert [call["step"] for call in recorder.calls] == ([3, 4] if weights_alone else [4])
    assert ("sampled again" in caplog.text) == weights_alone
    assert resumed.state.global_step == 6
    if not weights_alone:
        assert resumed.state.num_input_tokens_seen == straight.state.num_input_tokens_seen


def test_another_batch_shape_samples_the_generation_batch_again(build, tmp_path, caplog):
    """Rollouts of a checkpoint are used only with the micro-batch size that they were split for."""
    build("straight", steps_per_generation=4, max_steps=2).train()
    sizes = {"steps_per_generation": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    resumed = build("resumed", max_steps=3, **sizes)
    with caplog.at_level("WARNING", logger="groupgrad"):
        resumed.train(str(tmp_path / "straight" / "checkpoint-2"))
    (message,) = [r.getMessage() for r in caplog.records if "sampled again" in r.getMessage()]
    assert "its rollouts for other sizes (micro_batch_rows: 8 then, 4 now" in message
    assert resumed.state.global_step == 3


def test_evaluation_on_a_resumed_start_sees_the_synced_reference(build, tmp_path):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    build("straight", **settings).train()
    resumed = build("resumed", evaluate=True, eval_on_start=True, **settings)
    resumed.train(str(tmp_path / "straight" / "checkpoint-2"))
    on_start = next(entry for entry in resumed.state.log_history if "eval_kl" in entry)
    assert on_start["step"] == 2
    assert on_start["eval_kl"] == pytest.approx(0.0, abs=1e-9)


def test_the_best_model_is_loaded_at_the_end(build, tools, tmp_path):
    """Best by `eval_reward`: the weights after the last step are replaced by those of the best checkpoint."""
    trainer = build(
        "run",
        evaluate=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        max_steps=4,
        learning_rate=3e-2,
    )
    trainer.train()
    rewards = {e["step"]: e["eval_reward"] for e in trainer.state.log_history if "eval_reward" in e}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert sorted(rewards) == [1, 2, 3, 4]
    assert trainer.state.best_global_step == best
    assert trainer.state.best_metric == rewards[best]
    saved = type(trainer.model).from_pretrained(tmp_path / "run" / f"checkpoint-{best}")
    assert torch.equal(tools.weights(trainer.model), tools.weights(saved))


@pytest.mark.quick(1)
@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 1}], ids=str)
def test_a_finished_run_takes_no_further_step(make_trainer, caplog, length):
    settings = {**length, "save_strategy": "steps", "save_steps": 1}
    steps = make_trainer(**settings).train().global_step
    again = make_trainer(**settings)
    with caplog.at_level("WARNING"):
        result = again.train(resume_from_checkpoint=True)
    assert (result.global_step, result.training_loss) == (steps, 0.0)
    (message,) = [r.getMessage() for r in caplog.records if "no step was taken" in r.getMessage()]
    assert f"at step {steps} and the run has {steps}" in message
    longer = make_trainer(**{**settings, "max_steps": steps + 1})
    assert longer.train(resume_from_checkpoint=True).global_step == steps + 1
    assert len([r for r in caplog.records if "no step was taken" in r.getMessage()]) == 1
