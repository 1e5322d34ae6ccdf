"""A reasoning task that a model of 130,000 parameters learns on a CPU: add four digits in written steps.

A prompt is `3+5+7+2=`. The good answer shows its work, `<think>3+5=8 8+7=15 15+2=17</think><answer>17</answer>`.
The base model is trained on demonstrations by careless pupils, who mostly guess, and sometimes slip or forget the tags;
the table `HABITS` says how often. It has seen how the task is done, but rarely does it. Nothing is downloaded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

Habit = Literal["careful", "slip", "untagged", "guess"]

HABITS: dict[Habit, float] = {
    "careful": 0.18,  # right steps, right answer, right format
    "slip": 0.04,  # one step is a little off, and all that follows with it
    "untagged": 0.18,  # right steps, but the answer has no tags
    "guess": 0.60,  # no steps at all; mostly a term is forgotten
}
"""Share of each way of answering among the demonstrations."""

NUM_TERMS = 4
MAX_COMPLETION_LENGTH = 40
"""Tokens that a completion may have; the longest good one has 29, EOS included."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, EOS = "<pad>", "<eos>"
GOOD_FORMAT = re.compile(r"<think>[^<>]+</think><answer>(\d+)</answer>")
TAGGED_ANSWER = re.compile(r"<answer>(\d+)</answer>")


@dataclass(slots=True, frozen=True)
class Problem:
    """Some digits to add up."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The prompt, `3+5+7+2=`."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def solution(self) -> int:
        """The sum."""
        return sum(self.terms)

    def row(self) -> dict[str, Any]:
        """The problem as a data-set row; `solution` reaches the reward functions."""
        return {"prompt": self.prompt, "solution": self.solution}


@dataclass(slots=True, frozen=True)
class Splits:
    """Three sets of problems, no two of which share a prompt."""

    warm_up: list[Problem]
    grpo: list[Problem]
    held_out: list[Problem]


def make_splits(seed: int, *, num_held_out: int = 512) -> Splits:
    """All problems, shuffled by `seed`: `num_held_out`, then 1,024 for GRPO, and the rest for the warm-up."""
    problems = [Problem(terms) for terms in product(range(1, 10), repeat=NUM_TERMS)]
    random.Random(seed).shuffle(problems)
    held_out, rest = problems[:num_held_out], problems[num_held_out:]
    return Splits(warm_up=rest[1024:], grpo=rest[:1024], held_out=held_out)


def demonstrate(problem: Problem, habit: Habit, rng: random.Random) -> str:
    """A completion by a pupil of this habit, without EOS."""
    if habit == "guess":
        return f"<answer>{problem.solution - rng.choice((0, *problem.terms))}</answer>"
    slip_at = rng.randrange(1, len(problem.terms)) if habit == "slip" else None
    steps, running = [], problem.terms[0]
    for i, term in enumerate(problem.terms[1:], 1):
        result = running + term + (rng.choice((-2, -1, 1, 2)) if i == slip_at else 0)
        steps.append(f"{running}+{term}={result}")
        running = result
    answer = str(running) if habit == "untagged" else f"<answer>{running}</answer>"
    return f"<think>{' '.join(steps)}</think>{answer}"


def read_answer(completion: str) -> int | None:
    """The number in the last answer tags, or None."""
    answers = TAGGED_ANSWER.findall(completion)
    return int(answers[-1]) if answers else None


def correctness_reward(completions: list[str], solution: list[int], **_: Any) -> list[float]:
    """1 for a tagged answer that is the sum, else 0."""
    return [float(read_answer(text) == right) for text, right in zip(completions, solution)]


def format_reward(completions: list[str], **_: Any) -> list[float]:
    """1 for steps followed by a tagged answer and nothing else, else 0; right or wrong does not matter."""
    return [float(GOOD_FORMAT.fullmatch(text) is not None) for text in completions]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character and one a tag; decoding gives back the text."""
    words = [PAD, EOS, *TAGS, *"0123456789", *"+= "]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("</?[a-z]+>|."), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3-architecture model of about 130,000 parameters, float32."""
    torch.manual_seed(seed)
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[EOS],
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def demonstration_batches(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, *, batch_size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches of fresh demonstrations: `input_ids`, `attention_mask`, `labels`, (batch_size, longest) int64.

    Only completion tokens and EOS are labelled; the rest is -100.
    """
    rng = random.Random(seed)
    habits, weights = list(HABITS), list(HABITS.values())
    while True:
        chosen = rng.choices(problems, k=batch_size)
        answers = [demonstrate(p, habit, rng) for p, habit in zip(chosen, rng.choices(habits, weights, k=batch_size))]
        texts = [problem.prompt + answer + EOS for problem, answer in zip(chosen, answers)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for i, problem in enumerate(chosen):
            labels[i, : len(tokenizer(problem.prompt)["input_ids"])] = -100
        yield {**batch, "labels": labels}


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    num_steps: int = 800,
    batch_size: int = 64,
    seed: int = 0,
) -> list[float]:
    """Trains the model on careless demonstrations; gives each step's loss in nats a token.

    The learning rate rises over the first tenth of the steps and falls to zero along a cosine.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    batches = demonstration_batches(problems, tokenizer, batch_size=batch_size, seed=seed)
    losses: list[float] = []
    model.train()
    with tqdm(total=num_steps, desc="warm-up", unit="step", disable=None) as bar:
        for _, batch in zip(range(num_steps), batches):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss={losses[-1]:.3f}", refresh=False)
            bar.update()
    return losses
