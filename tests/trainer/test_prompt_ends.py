"""The first and last tokens of prompts: one BOS, no EOS of the tokenizer's, an assistant's turn that is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

BEGIN_AND_END = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
USER = {"role": "user", "content": "hi"}
OPEN = {"role": "assistant", "content": "Well, "}


@pytest.fixture
def prompt_ids() -> Callable[..., list[list[int]]]:
    """The ids that a training step samples from."""

    def of(trainer: Any) -> list[list[int]]:
        seen: list[list[int]] = []
        trainer.on_experience = lambda experience: seen.extend(
            experience.batch.prompt_ids[a:b].tolist()
            for a, b in zip(experience.batch.prompt_offsets[:-1], experience.batch.prompt_offsets[1:])
        )
        trainer.train()
        return seen

    return of


@pytest.mark.parametrize("special_tokens", ["auto", "split"])
def test_texts_begin_with_one_bos_and_do_not_end(make_trainer, tokenizer, prompt_ids, special_tokens):
    """A text that has the BOS gets no second one; the EOS that the tokenizer appends is left out, and it alone."""
    tokenizer._tokenizer.post_processor = BEGIN_AND_END
    a = tokenizer.convert_tokens_to_ids("a")
    trainer = make_trainer(
        train_dataset=Dataset.from_dict({"prompt": ["a", "<bos>aa", "a<eos>a", "<bos>"]}),
        max_steps=1,
        per_device_train_batch_size=16,
        special_tokens_in_prompts=special_tokens,
    )
    found = {tuple(ids) for ids in prompt_ids(trainer)}
    if special_tokens == "auto":
        assert found == {(2, a), (2, a, a), (2, a, 1, a), (2,)}
    else:  # there the text's own BOS is ordinary text, behind the tokenizer's
        assert {ids[0] for ids in found} == {2} and all(1 not in ids and ids.count(2) == 1 for ids in found)


@pytest.mark.parametrize("engine", ["native", "transformers", "paged"])
def test_an_assistants_turn_is_continued(make_trainer, tokenizer, prompt_ids, caplog, engine):
    """The turn stays open and its text is the prompt's; other prompts get a generation prompt as ever."""
    seen: list[tuple[Any, Any]] = []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions))
        return [float(len(c[0]["content"])) for c in completions]

    settings: dict[str, Any] = {"rollout_engine": engine}
    if engine == "paged":
        settings = {"use_transformers_continuous_batching": True}
    trainer = make_trainer(
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": [USER, OPEN]}, {"prompt": [USER]}] * 4),
        chat_template_kwargs={"continue_final_message": True},
        max_steps=1,
        per_device_train_batch_size=16,
        shuffle_dataset=False,
        **settings,
    )
    found = {tokenizer.decode(ids) for ids in prompt_ids(trainer)}
    assert found == {"<user>hi\n<assistant>Well, ", "<user>hi\n<assistant>"}
    assert {len(prompt) for prompt, _ in seen} == {1, 2}
    for prompt, completion in seen:
        assert prompt in ([USER, OPEN], [USER])
        assert [message["role"] for message in completion] == ["assistant"]
        assert not completion[0]["content"].startswith("Well")
    assert "ends with an assistant's message" not in caplog.text


def test_without_it_another_turn_begins_and_that_is_said(make_trainer, tokenizer, prompt_ids, caplog):
    trainer = make_trainer(train_dataset=Dataset.from_list([{"prompt": [USER, OPEN]}] * 8), max_steps=1)
    assert caplog.text.count("ends with an assistant's message ('Well, ')") == 1
    assert {tokenizer.decode(ids) for ids in prompt_ids(trainer)} == {"<user>hi\n<assistant>Well, \n<assistant>"}
