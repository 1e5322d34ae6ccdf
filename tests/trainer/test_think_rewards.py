"""Think rewards where the template opens `<think>`, where it is a special token, and where tools split it off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from groupgrad.engines.base import BatchEngine, Sample
from groupgrad.rewards import reasoning_accuracy_reward, think_format_reward
from groupgrad.trainer.run_summary import template_in_words

OPENING = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:%s{% endif %}"
)
ANSWER = "\\boxed{42}"
GOOD, OTHER, UNFINISHED = f"why</think>{ANSWER}", ANSWER, "why"
REWARDS = [1.0, 0.0, 0.0, 1.0]


def add(number: int) -> int:
    """Adds a number.

    Args:
        number: What to add.
    """
    return number


class Played(BatchEngine):
    """Samples these rows of tokens, ended by EOS."""

    is_exact = False

    def __init__(self, rows: list[list[int]]):
        self._rows = rows

    def sample(self, requests: Any, options: Any) -> list[Sample]:
        return [Sample([*ids, 1], "eos", [-1.0] * (len(ids) + 1), [1.0] * (len(ids) + 1)) for ids in self._rows]


@pytest.fixture
def scored(make_trainer, make_policy, tokenizer) -> Callable[..., Any]:
    """`scored(texts, ...)`: trains a step in which the engine samples these texts, ended by EOS.

    Returns the trainer, the rewards by the name of their function, and the completions that a function saw.
    """

    def score(texts: list[str], prompt: Any = None, tools: list[Any] | None = None, **settings: Any) -> Any:
        seen: dict[str, Any] = {}

        def wrapped(completions: list[Any], raw_completions: list[str], **kwargs: Any) -> list[float]:
            seen.update(completions=completions, raw=raw_completions)
            return think_format_reward(completions)  # pyright: ignore[reportReturnType]

        row = {"prompt": prompt or [{"role": "user", "content": "q"}], "solution": "42"}
        trainer = make_trainer(
            model=make_policy(vocab_size=len(tokenizer)),
            reward_funcs=[think_format_reward, reasoning_accuracy_reward, wrapped],
            train_dataset=Dataset.from_list([row] * 2),
            per_device_train_batch_size=len(texts),
            num_generations=len(texts),
            max_completion_length=60,
            max_steps=1,
            trainer={"tools": tools},
            **settings,
        )

        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        engine, played = trainer.components.collector.rollouts.engine, Played(rows)
        engine.sample, engine.session = played.sample, played.session
        found: list[Any] = []
        trainer.on_experience = found.append
        trainer.train()
        table = found[0].table
        return trainer, dict(zip(table.names, table.rewards.T.tolist())), seen

    return score


def with_think_tokens(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})


def test_a_template_that_opens_the_block(scored, tokenizer):
    tokenizer.chat_template = OPENING.replace("%s", "<think>\n")
    trainer, rewards, seen = scored([GOOD, OTHER, UNFINISHED, GOOD])
    assert rewards["think_format_reward"] == [1.0, 0.0, 0.0, 1.0]
    assert rewards["reasoning_accuracy_reward"] == [1.0, 0.0, 0.0, 1.0]
    assert seen["completions"][0] == [{"role": "assistant", "content": GOOD}], "as in TRL"
    assert seen["raw"][0] == f"<think>\n{GOOD}"
    assert "opens '<think>': completions begin behind it" in template_in_words(trainer)


def test_a_text_prompt_that_opens_the_block(scored):
    _, rewards, _ = scored([GOOD, OTHER], prompt="q <think>\n")
    assert rewards["think_format_reward"] == [1.0, 0.0]


def test_a_template_that_closes_the_block(scored, tokenizer):
    tokenizer.chat_template = OPENING.replace("%s", "<think>\n\n</think>\n\n")
    trainer, rewards, _ = scored([f"<think>{GOOD}", OTHER])
    assert rewards["think_format_reward"] == [1.0, 0.0]
    assert "writes an empty '<think>' block" in template_in_words(trainer)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("is_text", [False, True])
def test_think_tags_that_are_special_tokens(scored, tokenizer, keep, is_text):
    """The option keeps them for all functions, but not the tokens that end an answer."""
    with_think_tokens(tokenizer)
    texts = [f"<think>{GOOD}", OTHER, f"<think>{UNFINISHED}", f"<think>{GOOD}"]
    prompt = "q" if is_text else None
    trainer, rewards, seen = scored(texts, prompt=prompt, special_tokens_in_completions=keep)
    assert rewards["think_format_reward"] == REWARDS
    assert rewards["reasoning_accuracy_reward"] == REWARDS
    assert rewards["wrapped"] == (REWARDS if keep else [0.0] * 4)
    first = seen["completions"][0] if is_text else seen["completions"][0][-1]["content"]
    assert first == (texts[0] if keep else f"why{ANSWER}")
    if not is_text:
        assert ("is a special token, which the texts of completions lack" in template_in_words(trainer)) is not keep


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_tools_that_split_the_block_off(scored, tokenizer, is_special, keep):
    from scripted_agents import with_tools

    with_tools(tokenizer)
    if is_special:
        with_think_tokens(tokenizer)
    texts = [f"<think>{GOOD}", OTHER, f"<think>{UNFINISHED}", f"<think>{GOOD}"]
    _, rewards, seen = scored(texts, tools=[add], special_tokens_in_completions=keep)
    assert seen["completions"][0] == [{"role": "assistant", "content": ANSWER, "reasoning_content": "why"}]
    assert seen["raw"] == texts
    assert rewards["think_format_reward"] == rewards["reasoning_accuracy_reward"] == rewards["wrapped"] == REWARDS
