"""Small trainers and models for the tests of this folder, and comparisons of two runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from groupgrad import GRPOConfig, GRPOTrainer


@pytest.fixture(scope="module")
def ranks() -> Any:
    """The module `ranks.py`: runs of two processes."""
    import ranks

    return ranks


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_policy(make_model: Callable[..., Qwen3ForCausalLM]) -> Callable[..., Qwen3ForCausalLM]:
    """Builds a small model with larger random weights than usual; a fifth of its vocabulary ends a completion."""

    def make(seed: int = 0, **config: Any) -> Qwen3ForCausalLM:
        model = make_model(seed, **{"initializer_range": 0.15, **config})
        model.generation_config.eos_token_id = small_runs.EOS  # pyright: ignore[reportOptionalMemberAccess]
        return model

    return make


@pytest.fixture
def make_trainer(
    make_policy: Callable[..., Qwen3ForCausalLM], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[..., GRPOTrainer]:
    """`make_trainer(model=..., reward_funcs=..., **config fields)`: a trainer of a few fast steps on a CPU.

    `trainer` has further arguments of its class, which is `cls`.
    """

    def make(
        *,
        model: Any = None,
        reward_funcs: Any = small_runs.letters_reward,
        train_dataset: Any = None,
        trainer: dict[str, Any] | None = None,
        cls: type[GRPOTrainer] = GRPOTrainer,
        **settings: Any,
    ) -> GRPOTrainer:
        run = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 8}
        return cls(
            model=make_policy() if model is None else model,
            reward_funcs=reward_funcs,
            args=GRPOConfig(**{**small_runs.SETTINGS, **run, **settings}),
            train_dataset=small_runs.prompts() if train_dataset is None else train_dataset,
            **{"processing_class": tokenizer, **(trainer or {})},
        )

    return make


@pytest.fixture
def train(make_trainer: Callable[..., GRPOTrainer]) -> Callable[..., GRPOTrainer]:
    """`train(**settings)`: a trainer as `make_trainer` makes it, after its training."""

    def run(**settings: Any) -> GRPOTrainer:
        trainer = make_trainer(**settings)
        trainer.train()
        return trainer

    return run


@pytest.fixture
def final_weights(
    train: Callable[..., GRPOTrainer], make_policy: Callable[..., Qwen3ForCausalLM]
) -> Callable[..., torch.Tensor]:
    """`final_weights(**settings)`: the weights at the end of a run, which have moved; `model` has the policy's changes.

    The model is equal for equal changes, and so is an adapter that is put on it.
    """

    def run(**settings: Any) -> torch.Tensor:
        policy = settings.pop("model", {})
        policy = make_policy(**policy) if isinstance(policy, dict) else policy
        start = small_runs.weights(policy)
        torch.manual_seed(0)
        end = small_runs.weights(train(model=policy, **settings).model)
        assert not torch.equal(end, start)
        return end

    return run


@pytest.fixture
def recorder() -> small_runs.Recorder:
    """A reward function that keeps the arguments of its calls."""
    return small_runs.Recorder()


@pytest.fixture
def tools() -> Any:
    """The module `small_runs.py`."""
    return small_runs
