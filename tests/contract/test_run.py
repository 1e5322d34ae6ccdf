"""Whole runs: the model learns, its metrics have the documented names, a search tries settings."""

from __future__ import annotations

import importlib.util
from typing import Any

import optuna
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from groupgrad.errors import ConfigError
from groupgrad.kernels import library

SAMPLED = (
    "num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length",
    "completions/max_terminated_length", "rewards/rate_digits/mean", "rewards/rate_digits/std", "reward", "reward_std",
    "frac_reward_zero_std", "entropy", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/low_min",
    "clip_ratio/high_mean", "clip_ratio/high_max", "loss",
)  # fmt: skip
"""Names of the documents, in training as they are and in evaluation behind `eval_`."""
TRAINING_ONLY = ("step_time", "grad_norm", "learning_rate", "epoch", "step")
EVALUATION_ONLY = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch", "step")


def rate_digits(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of digits, at random one of nine characters."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def test_names_of_the_metrics(make_trainer: Any) -> None:
    data = Dataset.from_list([{"prompt": f"{a}="} for a in range(4)])
    # Long enough that some completion terminates; otherwise three of the names have no number.
    settings = {"beta": 0.1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    settings |= {"max_completion_length": 60, "per_device_train_batch_size": 16, "num_generations": 4}
    trainer = make_trainer(settings, train_dataset=data, eval_dataset=data, reward_funcs=rate_digits)
    trainer.train()
    trained, evaluated, ended = trainer.state.log_history
    own = {key for entry in trainer.state.log_history for key in entry if key.startswith("time/")}  # ours, by phase
    path = "sampling/path/direct" if library() is None else "sampling/path/compiled"
    own |= {path, f"eval_{path}"}  # ours, of the native engine
    own |= {"eval_reward_low", "eval_reward_high"}  # ours, the interval over prompts
    own.add("sampling/logp_mismatch")  # ours, of engines whose log-probs are training's
    assert set(trained) - own == {*SAMPLED, *TRAINING_ONLY, "kl"}
    assert set(evaluated) - own == {*(f"eval_{name}" for name in (*SAMPLED, "kl")), *EVALUATION_ONLY}
    assert {"train_runtime", "train_loss", "total_flos"} <= set(ended)
    assert trained["completions/mean_length"] <= 60
    assert evaluated["eval_num_tokens"] == trained["num_tokens"]


def test_it_learns(make_trainer: Any, make_model: Any) -> None:
    settings = {"max_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 16, "num_generations": 8}
    trainer = make_trainer(
        {**settings, "max_completion_length": 6, "lr_scheduler_type": "constant"}, reward_funcs=rate_digits
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 20
    assert rewards[0] < 0.3
    assert min(rewards[-3:]) > 0.8


def test_a_search_with_optuna_starts_each_trial_from_the_same_weights(make_trainer: Any) -> None:
    data = Dataset.from_list([{"prompt": f"{a}="} for a in range(2)])
    settings = {"lr_scheduler_type": "constant", "max_completion_length": 6, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 4}
    rates = [1e-2, 2e-2]
    weights: list[tuple[float, torch.Tensor]] = []

    class KeepWeights(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights.append((args.learning_rate, kwargs["model"].lm_head.weight.detach().clone()))

    trainer = make_trainer(settings, reward_funcs=rate_digits, eval_dataset=data, callbacks=[KeepWeights()])
    start = trainer.model.lm_head.weight.detach().clone()
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates), "temperature": 0.5},
        compute_objective=lambda metrics: metrics["eval_reward"],
        n_trials=3,
        direction="maximize",
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    assert best.hyperparameters["learning_rate"] in rates
    assert 0 <= best.objective <= 1
    assert [rate for rate, _ in weights] == [rates[1], rates[0], rates[1]]
    assert not any(torch.equal(trained, start) for _, trained in weights)
    for rate, trained in weights:
        plain = make_trainer({**settings, "learning_rate": rate, "temperature": 0.5}, reward_funcs=rate_digits)
        assert torch.equal(plain.model.lm_head.weight, start)
        plain.train()
        assert torch.equal(plain.model.lm_head.weight, trained)
    assert trainer.evaluate()["eval_reward"] >= 0, "the trainer has its model after the search"


def test_kernels_are_refused_on_a_cpu_and_where_they_are_not_installed(
    make_trainer: Any, unsampled: None, monkeypatch: Any
) -> None:
    with pytest.raises(ConfigError, match=r"use_liger_kernel=True, but this run is on the device 'cpu'"):
        make_trainer({"use_liger_kernel": True})
    if not importlib.util.find_spec("liger_kernel"):
        monkeypatch.setattr("groupgrad.models.liger.WITHOUT_TRITON", ())
        with pytest.raises(ImportError, match="liger"):
            make_trainer({"use_liger_kernel": True})


def test_steps_without_any_reward_give_one_warning(make_trainer: Any, make_model: Any, caplog: Any) -> None:
    def nothing(completions: list[str], **kwargs: Any) -> list[None]:
        return [None] * len(completions)

    data = Dataset.from_list([{"prompt": f"{a}+1="} for a in range(4)])
    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    trainer = make_trainer(settings, reward_funcs=nothing, train_dataset=data, eval_dataset=data)
    trainer.train()
    (text,) = [record.getMessage() for record in caplog.records if record.name.startswith("groupgrad.")]
    assert text.startswith("step 0: 4 of 4 completions got no reward, since 'nothing' returned None or NaN")
    assert "the first is row 0 (prompt '" in text
    assert trainer.state.global_step == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), make_model().parameters()))


def test_a_readme_of_the_users_is_kept(make_trainer: Any, tmp_path: Any, caplog: Any) -> None:
    mine, own = tmp_path / "mine", tmp_path / "own"
    mine.mkdir()
    (mine / "README.md").write_text("# My notes\n")
    for folder in (mine, own, own):
        settings = {"output_dir": str(folder), "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        make_trainer({**settings, "max_completion_length": 6}, reward_funcs=rate_digits).train()
    assert (mine / "README.md").read_text() == "# My notes\n"
    assert "| `max_completion_length` | 6 |" in (own / "README.md").read_text()
    kept = [record for record in caplog.records if "is kept, since groupgrad has not written it" in record.getMessage()]
    assert len(kept) == 1


@pytest.mark.parametrize("kept", ["all columns", "columns of prompts"])
def test_rows_that_a_transform_makes_are_trained_on(make_trainer: Any, kept: str) -> None:
    """Its columns are the row's: those that it reads are not asked for, and rewards get those that it makes."""
    seen: list[Any] = []

    def reward(completions: list[str], solution: list[str]) -> list[float]:
        seen.extend(solution)
        return [0.0] * len(completions)

    def zero(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def make(rows: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [f"{q}+1=" for q in rows["question"]], "solution": rows["question"]}

    data = Dataset.from_list([{"question": str(a)} for a in range(4)]).with_transform(make)
    is_pruned = kept == "columns of prompts"
    make_trainer(
        {"remove_unused_columns": is_pruned}, train_dataset=data, reward_funcs=zero if is_pruned else reward
    ).train()
    assert is_pruned or (len(seen) == 4 and set(seen) <= set("0123"))
