"""An evaluation with a trainer: its numbers are the model's, and its streams belong to prompts and completions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from forked_ranks import on_ranks
from three_tokens import check_against_enumeration, starts_with_a, token_ids

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.eval import measuring, results
from groupgrad.apps.eval.results import Evaluation

ROWS = Dataset.from_list([{"prompt": text, "level": len(text)} for text in ("ab", "c", "1+1=", "xyz", "7")])


@pytest.fixture
def trainer_of(make_model: Any, tokenizer: Any, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    """`trainer_of(reward, **settings)`: a trainer of a small model; `seed_of_model` chooses its weights."""

    def make(reward: Any = starts_with_a, seed_of_model: int = 0, **settings: Any) -> GRPOTrainer:
        torch.set_num_threads(1)
        run = {"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "num_generations": 2, "use_cpu": True}
        config = GRPOConfig(**{**run, "max_completion_length": 3, "report_to": "none", **settings})
        model = make_model(seed_of_model, initializer_range=0.15)
        return GRPOTrainer(model, reward, config, ROWS, processing_class=tokenizer)

    return make


def evaluate(trainer: GRPOTrainer, rows: Any = ROWS, **options: Any) -> Evaluation:
    settings = dict.fromkeys((*results.SAMPLING, "by", "seed"))
    return measuring.evaluate(trainer, rows, "model", settings, **{"answers": None, "by": None, **options})


def test_a_completion_depends_on_its_prompt_and_number_alone(trainer_of: Any) -> None:
    """Neither the size of batches, nor the number of completions, nor later rows change it."""
    first = evaluate(trainer_of(num_generations_eval=4, per_device_eval_batch_size=20))
    assert len({text for prompt in first.prompts for text in prompt.completions}) > 10
    second = evaluate(trainer_of(num_generations_eval=6, per_device_eval_batch_size=6), ROWS.select(range(3)))
    assert [prompt.completions for prompt in first.prompts[:3]] == [prompt.completions[:4] for prompt in second.prompts]
    other = evaluate(trainer_of(num_generations_eval=4, seed=7))
    assert [prompt.completions for prompt in other.prompts] != [prompt.completions for prompt in first.prompts]


def test_an_evaluation_leaves_the_trainer_as_it_was(trainer_of: Any) -> None:
    trainer = trainer_of()
    before, components = trainer.model.state_dict(), trainer.components
    weights = {name: weight.clone() for name, weight in before.items()}
    first, second = evaluate(trainer), evaluate(trainer)
    assert [prompt.completions for prompt in first.prompts] == [prompt.completions for prompt in second.prompts]
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.model.state_dict().items())
    assert trainer.components is components and trainer.state.global_step == 0


def test_what_a_prompt_keeps(trainer_of: Any) -> None:
    found = evaluate(trainer_of(num_generations_eval=3), by="level")
    assert [prompt.prompt for prompt in found.prompts] == ["ab", "c", "1+1=", "xyz", "7"]
    assert [prompt.column for prompt in found.prompts] == [2, 1, 4, 3, 1]
    for prompt in found.prompts:
        assert prompt.rewards == [float(text.startswith("a")) for text in prompt.completions]
        assert prompt.functions == {"starts_with_a": prompt.rewards}
        assert prompt.answers == [text[:1] or None for text in prompt.completions]
        assert all(length <= 3 for length in prompt.lengths) and len(prompt.finish_reasons) == 3


def test_a_column_of_answers_that_is_not_logged(trainer_of: Any) -> None:
    with pytest.raises(ValueError, match="--answer vote: the reward functions have logged no such column"):
        evaluate(trainer_of(), answers="vote")
    silent = evaluate(trainer_of(lambda completions, **_: [0.0] * len(completions)))
    assert all(prompt.answers is None for prompt in silent.prompts)


def test_two_ranks_find_what_one_finds(trainer_of: Any, tmp_path: Path) -> None:
    def prompts() -> list[Any]:
        return evaluate(trainer_of(num_generations_eval=4, per_device_eval_batch_size=4)).prompts

    both = on_ranks(lambda rank: prompts(), tmp_path, 2, connect=False)
    assert both[0] == both[1] == prompts()


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_model_of_three_tokens_has_the_enumerated_probabilities(trainer_of: Any, tokenizer: Any, engine: str) -> None:
    """tests/vllm/test_training.py has the same with vLLM."""
    size, ids = 1500, token_ids(tokenizer)
    trainer = trainer_of(
        num_generations_eval=size,
        per_device_eval_batch_size=5 * size,
        max_completion_length=2,
        gradient_accumulation_steps=size,
        steps_per_generation=1,
        generation_kwargs={"suppress_tokens": [token for token in range(len(tokenizer)) if token not in ids]},
        rollout_engine=engine,
    )
    check_against_enumeration(evaluate(trainer), trainer.model, tokenizer, ROWS["prompt"])
