"""An evaluation with a trainer: its numbers are the model's, and its streams belong to prompts and completions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from forked_ranks import on_ranks

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.eval import measuring, report
from groupgrad.apps.eval.results import Evaluation
from groupgrad.evaluation.prompt_numbers import Measure, numbers_of_prompts

ROWS = Dataset.from_list([{"prompt": text, "level": len(text)} for text in ("ab", "c", "1+1=", "xyz", "7")])


def starts_with_a(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    log_extra("answer_parsed", [text[:1] or None for text in completions])
    return [float(text.startswith("a")) for text in completions]


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
    settings = dict.fromkeys((*report.SAMPLING, "by", "seed"))
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


def test_a_model_of_three_tokens_has_the_enumerated_probabilities(trainer_of: Any, tokenizer: Any) -> None:
    """Two tokens out of a, b and the end: each of the 7 completions has a probability, and so has pass@k.

    With n samples of a prompt the estimate of pass@1 has the standard error sqrt(p (1 - p) / n).
    """
    size, ids = 1500, [tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "<eos>")]
    others = [token for token in range(len(tokenizer)) if token not in ids]
    trainer = trainer_of(
        num_generations_eval=size,
        per_device_eval_batch_size=5 * size,
        max_completion_length=2,
        gradient_accumulation_steps=size,
        steps_per_generation=1,
        generation_kwargs={"suppress_tokens": others},
    )
    found = evaluate(trainer)
    assert {text for prompt in found.prompts for text in prompt.completions} == {"", "a", "b", "aa", "ab", "ba", "bb"}
    numbers = numbers_of_prompts(found.prompts, Measure((1, 3, 20)))

    def after(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits = trainer.model(torch.tensor([tokens])).logits[0, -1].double()
        return torch.softmax(logits[ids], 0).tolist()

    for place, row in enumerate(ROWS):
        prompt_ids = tokenizer(row["prompt"]).input_ids
        p = after(prompt_ids)[0]  # the first token is an a
        spread = math.sqrt(p * (1 - p) / size)
        assert numbers["pass@1"][place] == pytest.approx(p, abs=5 * spread)
        for k in (3, 20):  # whose derivative by p is k (1 - p)^(k - 1)
            slope = k * (1 - p) ** (k - 1)
            expected = 1 - (1 - p) ** k
            assert numbers[f"pass@{k}"][place] == pytest.approx(expected, abs=5 * spread * slope + 1e-3)
        for first, second in itertools.product((0, 1), repeat=2):
            text = "ab"[first] + "ab"[second]
            exact = after(prompt_ids)[first] * after([*prompt_ids, ids[first]])[second]
            share = found.prompts[place].completions.count(text) / size
            assert share == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / size)), text
