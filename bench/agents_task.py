"""The task of `agents.py`: a model that calls a tool three times and then answers, the tool, and the prompts.

A model with random weights calls no tools, so this one is trained for some minutes on synthetic conversations of four
turns. In each turn it repeats the number of the last message, says random words, whose number is geometric, and calls
`look` with that number and a random word; after a 0 it answers. Each number has its own words and stands equally far
before its turn, so that the task depends on few tokens and is learned fast. The tokenizer is trained here with a few
thousand tokens, so that the output head does not dominate the time; its chat template is Qwen3's.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from materials import make_model, read_qwen3_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from workloads import ModelShape

NUM_ROLLOUTS, NUM_GENERATIONS, NUM_TURNS = 64, 8, 4
NUM_PROMPTS = 64
MAX_COMPLETION_LENGTH = 768
"""Far above the lengths of the model, because the trainers treat truncated turns differently."""
TEMPERATURE = 0.7
"""Sampling temperature. After a few minutes of training the thousands of unused tokens still have a per cent of the
probability; a low temperature removes it."""
MEAN_WORDS = 32
"""Mean words of a training turn before its call; their number is geometric. Sampled turns have a fourth less, because
the temperature favours their end."""
SLEEP_S = 0.2
SHAPE = ModelShape(
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    tied=True,
)
"""The size of `large_vocab` and `gsm8k` in the other benchmark, without their heads."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
NUM_SPOKEN = 64
"""Distinct words in the model's turns."""
REPLY = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
"""Text that Qwen3's template puts between two turns."""


def sleep_of(n: int, about: str) -> float:
    """Seconds that a call with these arguments sleeps where tools sleep: 0.2 or nothing, each for half of them."""
    return SLEEP_S * (zlib.crc32(f"{n} {about}".encode()) & 1)


class Tools:
    """The tool, and the counts of its calls since `clear`."""

    def __init__(self) -> None:
        self.sleeps = False
        """True if calls sleep at random."""
        self.num_calls = 0
        self.slept_s = 0.0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Reset the counts."""
        self.num_calls, self.slept_s = 0, 0.0

    def functions(self) -> list[Callable[..., Any]]:
        """The argument `tools` of a trainer."""

        def look(n: int, about: str) -> int:
            """Looks something up in the archive and says how many things are left to be looked up after it.

            Args:
                n: How many things are still to be looked up, this one included. It was told in the question or by
                    the last look.
                about: What to look up, one word.

            Returns:
                How many things are left. With nothing left, answer the question.
            """
            seconds = sleep_of(n, about) if self.sleeps else 0.0
            with self._lock:
                self.num_calls, self.slept_s = self.num_calls + 1, self.slept_s + seconds
            if seconds:
                time.sleep(seconds)
            return n - 1

        return [look]


def prepare(root: Path, *, num_steps: int) -> Path:
    """The folder with the task's model, tokenizer and `rows.jsonl`, made if it is missing or of another recipe."""
    folder = root / "agents"
    recipe = f"{SHAPE} {NUM_SPOKEN} {MEAN_WORDS} {NUM_TURNS} {num_steps}"
    if (folder / "recipe.txt").exists() and (folder / "recipe.txt").read_text() == recipe:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    model = make_model(SHAPE, tokenizer)
    train(model, tokenizer, num_steps=num_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rng = random.Random(1)
    rows = [{"prompt": question(rng)} for _ in range(NUM_PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.txt").write_text(recipe)
    return folder


def make_words() -> list[str]:
    """All 3,600 words of two syllables, in random order."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    words = [first + second for first in syllables for second in syllables]
    random.Random(0).shuffle(words)
    return words


SPOKEN = make_words()[:NUM_SPOKEN]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `SHAPE.vocab_size` tokens with Qwen3's chat template; a word is a token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=read_qwen3_tokenizer().chat_template,
    )
    # The most frequent words are merged first, so those of the template and of the turns become tokens.
    often = render(made, question(random.Random(0)))
    said = " ".join(["", *SPOKEN, *map(str, range(NUM_TURNS))]) + "\n" + "\n".join(SPOKEN)
    texts = [often, said] * 100 + [" " + " ".join(make_words())] * 2
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocab_size - len(MARKUP),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=made.chat_template,
    )


def question(rng: random.Random) -> list[dict[str, str]]:
    """A prompt: some words to look up."""
    words = " ".join(rng.choices(SPOKEN, k=12))
    # The same number of tokens after the number as in a tool's reply.
    return [{"role": "user", "content": f"What is to be said of this: {words}? Look up {NUM_TURNS - 1} in all"}]


def render(tokenizer: Any, messages: list[dict[str, str]], *, with_tools: bool = True) -> str:
    """The prompt's text, with the tool's schema and the generation prompt."""
    tools = Tools().functions() if with_tools else None
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


def demonstrate(rng: random.Random, mean_words: float = MEAN_WORDS) -> list[str]:
    """The turns of a training conversation, without their end marks; the replies between them are `REPLY`."""
    turns = []
    for left in reversed(range(NUM_TURNS)):
        own_words = SPOKEN[left::NUM_TURNS]
        count = 1
        while rng.random() > 1 / mean_words:
            count += 1
        said = str(left) + "".join(f" {word}" for word in rng.choices(own_words, k=count))
        call = {"name": "look", "arguments": {"n": left, "about": rng.choice(own_words)}}
        turns.append(f"{said}\n<tool_call>\n{json.dumps(call)}\n</tool_call>" if left else f"{said}.")
    return turns


def conversation(
    tokenizer: Any, rng: random.Random, *, with_tools: bool = True, mean_words: float = MEAN_WORDS
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and which of them belong to the model's turns (end marks included)."""
    ids = tokenizer(render(tokenizer, question(rng), with_tools=with_tools), add_special_tokens=False)["input_ids"]
    said = [False] * len(ids)
    for number, turn in enumerate(turns := demonstrate(rng, mean_words)):
        own = tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"]
        left = len(turns) - 1 - number
        between = REPLY.format(left - 1).removeprefix("<|im_end|>") if left else ""
        reply = tokenizer(between, add_special_tokens=False)["input_ids"]
        ids, said = ids + own + reply, said + [True] * len(own) + [False] * len(reply)
    return ids, said


def batches(tokenizer: Any, *, num_batches: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels, (rows, longest) int64; labels are -100 outside the model's turns.

    In the first two thirds turns have few words and prompts no schema, which takes a quarter of the time a row.
    """
    rng = random.Random(seed)
    for number in range(num_batches):
        short = 3 * number < 2 * num_batches
        mean_words, rows = (3, 8) if short else (MEAN_WORDS, 4)
        drawn = [conversation(tokenizer, rng, with_tools=not short, mean_words=mean_words) for _ in range(rows)]
        longest = max(len(ids) for ids, _ in drawn)
        ids = torch.full((rows, longest), tokenizer.pad_token_id)
        labels = torch.full((rows, longest), -100)
        for row, (tokens, said) in enumerate(drawn):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.tensor([t if own else -100 for t, own in zip(tokens, said)])
        yield ids, labels


def train(model: PreTrainedModel, tokenizer: Any, *, num_steps: int, learning_rate: float = 3e-3) -> list[float]:
    """Train the model on such conversations; returns each step's loss in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    words = torch.tensor(tokenizer([f" {word}" for word in SPOKEN], add_special_tokens=False)["input_ids"]).flatten()
    losses = []
    model.train()
    for step, (ids, labels) in enumerate(batches(tokenizer, num_batches=num_steps, seed=0)):
        share = step / num_steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, share / 0.1 + 1e-2) * (1 - share)
        # No padding mask is needed: padding comes after all labels.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        values = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        # The token after a word is random; with full weight its noise would hide the rest of the task.
        weights = torch.where(torch.isin(ids[:, :-1], words), 0.1, 1.0) * (labels[:, 1:] >= 0)
        loss = (weights * values).sum() / weights.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == num_steps - 1:
            print(f"  teaching the model to call: step {step}, loss {losses[-1]:.3f}", flush=True)
    model.eval()
    return losses
