"""Loading, placement and scoring of reward models in a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from small_runs import make_scorer
from tokenizers.processors import TemplateProcessing


@pytest.fixture
def saved(tokenizer: Any, tmp_path: Path) -> str:
    """Saves a reward model in bfloat16 with its tokenizer."""
    folder = tmp_path / "scorer"
    make_scorer().bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def by_hand(model: Any, tokenizer: Any, texts: list[str]) -> list[float]:
    """Scores one text at a time by its last token."""
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0]) for text in texts]


def test_loading_options_are_separate(make_trainer: Callable[..., Any], saved: str, model_dir: Path) -> None:
    """The policy's loading options do not reach reward models, and arguments are not changed."""
    policy, own = {"dtype": "float32", "attn_implementation": "eager"}, {"dtype": "float16"}
    functions = [saved, lambda completions, **kwargs: [0.0] * len(completions)]
    classes = [None, None]
    kept = list(functions)
    trainer = make_trainer(
        model=str(model_dir),
        reward_funcs=functions,
        model_init_kwargs=policy,
        trainer={"reward_processing_classes": classes},
    )
    (scorer,) = trainer.rewards.models
    assert scorer.model.dtype == torch.bfloat16
    assert scorer.model.config._attn_implementation != "eager"
    assert trainer.model.dtype == torch.float32
    assert functions == kept and classes == [None, None]
    assert policy == {"dtype": "float32", "attn_implementation": "eager"}
    (scorer,) = make_trainer(reward_funcs=saved, reward_model_init_kwargs=own).rewards.models
    assert scorer.model.dtype == torch.float16
    assert own == {"dtype": "float16"}
    assert make_trainer(reward_funcs=saved, reward_model_init_kwargs='{"dtype": "float32"}').rewards.models


def test_options_reach_the_reward_models(make_trainer: Callable[..., Any], saved: str) -> None:
    shapes: list[tuple[int, ...]] = []
    with pytest.warns(UserWarning, match=r"reward_model_offload=True \(reward models run on the CPU, in host memory\)"):
        trainer = make_trainer(
            reward_funcs=saved,
            reward_model_device="cpu",
            reward_model_batch_tokens=20,
            reward_model_offload=True,
            max_steps=1,
        )
    (scorer,) = trainer.rewards.models
    options = scorer._options
    assert (options.device, options.batch_tokens, options.offload) == ("cpu", 20, True)
    scorer.model.register_forward_pre_hook(
        lambda module, inputs, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    trainer.train()
    assert sum(rows for rows, _ in shapes) == 8
    assert all(rows * width <= 20 for rows, width in shapes) and len(shapes) > 2


def test_unused_reward_model_options_are_reported(make_trainer: Callable[..., Any], tokenizer: Any) -> None:
    """For a loaded model, only the loading options are unused."""
    given: dict[str, Any] = {"reward_model_init_kwargs": {"dtype": "float16"}, "reward_model_batch_tokens": 20}
    with pytest.warns(UserWarning, match="reward_model_batch_tokens have no effect: no reward function is"):
        make_trainer(**given)
    object_given = {"reward_funcs": make_scorer(), "trainer": {"reward_processing_classes": tokenizer}}
    with pytest.warns(UserWarning, match="^reward_model_init_kwargs has no effect: no reward model is given by name"):
        make_trainer(**object_given, **given)


def test_a_given_tokenizer_is_read_with(
    make_trainer: Callable[..., Any], train: Callable[..., Any], make_tokenizer: Callable[[], Any], saved: str
) -> None:
    """Another than the one beside the reward model: it begins every text with a token."""
    given, texts = make_tokenizer(), []
    given.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])

    def keep(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        texts.extend(prompt + completion for prompt, completion in zip(prompts, completions))
        return [0.0] * len(prompts)

    (alone,) = make_trainer(reward_funcs=saved, trainer={"reward_processing_classes": given}).rewards.models
    classes = {"reward_processing_classes": [given, None]}
    trainer = train(reward_funcs=[saved, keep], max_steps=1, trainer=classes)
    (scorer,) = trainer.rewards.models
    assert alone.processing_class is scorer.processing_class is given
    expected = by_hand(scorer.model, given, texts)
    assert trainer.state.log_history[0]["rewards/scorer/mean"] == pytest.approx(sum(expected) / 8, abs=1e-5)
    assert sum(by_hand(scorer.model, make_tokenizer(), texts)) != pytest.approx(sum(expected), abs=1e-2)


USER, OPEN = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}


@pytest.mark.parametrize(
    ("template", "prompt", "given", "text"),
    [
        ("{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}", [USER], {"mood": "calm"}, "calmhi%s"),
        (None, [USER, OPEN], {"continue_final_message": True}, "<user>hi\n<assistant>Well, %s\n"),
    ],
    ids=["mood", "both parts of a turn"],
)
def test_template_arguments_reach_a_reward_model(train, tokenizer, template, prompt, given, text) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    scorer, texts = make_scorer(), []

    def keep(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        texts.extend(text % completion[0]["content"] for completion in completions)
        return [0.0] * len(prompts)

    trainer = train(
        reward_funcs=[scorer, keep],
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 4),
        chat_template_kwargs=given,
        max_steps=1,
        trainer={"reward_processing_classes": [tokenizer, None]},
    )
    expected = by_hand(scorer, tokenizer, texts)
    mean = trainer.state.log_history[0]["rewards/LlamaForSequenceClassification/mean"]
    assert mean == pytest.approx(sum(expected) / 8, abs=1e-5)


def test_conversations_without_a_template_are_refused_before_training(
    make_trainer: Callable[..., Any], make_tokenizer: Callable[[], Any], tokenizer: Any
) -> None:
    plain = make_tokenizer()
    plain.chat_template = None
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}] * 4)
    with pytest.raises(ValueError, match=r"'LlamaForSequenceClassification' has no chat template.*reward_processing"):
        make_trainer(
            reward_funcs=make_scorer(),
            train_dataset=dataset,
            trainer={"reward_processing_classes": plain},
        )
