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

ROUND = (
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


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_names_of_the_metrics(make_trainer: Any, beta: float) -> None:
    data = Dataset.from_list([{"prompt": f"{a}="} for a in range(4)])
    # Long enough that some completion terminates; otherwise three of the names have no number.
    settings = {"beta": beta, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    settings |= {"max_completion_length": 60, "per_device_train_batch_size": 16, "num_generations": 4}
    trainer = make_trainer(settings, train_dataset=data, eval_dataset=data, reward_funcs=rate_digits)
    trainer.train()
    trained, evaluated, ended = trainer.state.log_history
    kl = {"kl"} if beta else set()
    own = {key for entry in trainer.state.log_history for key in entry if key.startswith("time/")}  # ours, by phase
    own.add("sampling/logp_mismatch")  # ours, of engines whose log-probs are training's
    assert set(trained) - own == {*ROUND, *TRAINING_ONLY} | kl
    assert set(evaluated) == {*(f"eval_{name}" for name in ROUND), *EVALUATION_ONLY} | {f"eval_{name}" for name in kl}
    assert {"train_runtime", "train_loss", "total_flos"} <= set(ended)
    assert trained["completions/mean_length"] <= 60
    assert evaluated["eval_num_tokens"] == trained["num_tokens"]


def test_it_learns(make_trainer: Any, make_model: Any) -> None:
    settings = {"max_steps": 25, "learning_rate": 1e-2, "per_device_train_batch_size": 16, "num_generations": 8}
    trainer = make_trainer(
        {**settings, "max_completion_length": 6, "lr_scheduler_type": "constant"}, reward_funcs=rate_digits
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 25
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


def test_kernels_on_a_cpu_are_refused(make_trainer: Any, unsampled: None) -> None:
    with pytest.raises(ConfigError, match=r"use_liger_kernel=True, but this run is on the device 'cpu'"):
        make_trainer({"use_liger_kernel": True})


def test_kernels_that_are_not_installed(make_trainer: Any, unsampled: None, monkeypatch: Any) -> None:
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    monkeypatch.setattr("groupgrad.modeling.liger.WITHOUT_TRITON", ())
    with pytest.raises(ImportError, match="liger"):
        make_trainer({"use_liger_kernel": True})


def test_paper_recipes_are_configurations(make_trainer: Any) -> None:
    recipes: dict[str, dict[str, Any]] = {
        "DAPO": {"epsilon_high": 0.28, "mask_truncated_completions": True},
        "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": False},
        "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "2-GRPO": {"loss_type": "grpo", "num_generations": 2},
        "ScaleRL": {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "cast_lm_head_to_fp32": True},
        "SAPO": {"loss_type": "sapo"},
        "DeepSeek-V3.2": {"beta": 0.001, "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.5},
        "INTELLECT-2": {"delta": 4.0, "beta": 0.001},
        "80/20": {"epsilon_high": 0.28, "top_entropy_quantile": 0.2},
        "LUSPO": {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
        },
        "VESPO": {"loss_type": "vespo"},
        "GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
        "Skywork-OR1": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
        "TR-DPO": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    }
    for name, recipe in recipes.items():
        trainer = make_trainer({"max_steps": 2, "num_iterations": 2, **recipe}, reward_funcs=rate_digits)
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        assert len(steps) == 2, name
        assert all(torch.isfinite(torch.tensor([step["loss"], step["grad_norm"]])).all() for step in steps), name


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


def test_a_file_gets_plain_lines_and_no_bars(
    make_trainer: Any, make_model: Any, make_tokenizer: Any, tmp_path: Any, capfd: Any
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    capfd.readouterr()
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": False}
    trainer = make_trainer(
        {**settings, "max_completion_length": 6}, model=str(tmp_path / "model"), reward_funcs=rate_digits
    )
    trainer.train()
    trainer.save_model()
    out, err = capfd.readouterr()
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("step")] == [["step", "1"], ["step", "2"]]
    assert not any(bar in err for bar in ("it/s", "%|", "\r"))
