"""An agent that learns to use a calculator: `python examples/agent_calculator.py`, offline, minutes on two cores.

A question is `17*28+16=`, with numbers that the model never saw together. Two small layers cannot multiply in their
head, so the way to a right answer is: call `multiply`, read the result, call `async_add` with it, say the result.

1. Warm-up: demonstrations by sloppy users show what a call looks like. Most of them go wrong somewhere.
2. GRPO with `tools=[multiply, async_add]`; the reward looks only at the final answer.
3. Held-out questions, before and after. A call is correct if its result is the one that the question needs next.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from random import Random
from typing import Any

# Threads that spin while they wait slow a run down when other processes use the same cores. OpenMP reads this when
# PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from datasets import Dataset
from transformers.utils import get_json_schema
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOTrainer
from tiny_agent import (
    Message,
    call,
    make_config,
    make_model,
    make_tokenizer,
    measure,
    parse,
    run,
    say,
    warm_up,
)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """Add two numbers, on a server that takes its time.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    # While this rollout waits, others are sampled; plain functions run in threads, async ones on one event loop.
    await asyncio.sleep(0.005)
    return a + b


TOOLS = [multiply, async_add]
WORDS = ("multiply", "async_add", '{"a": ', ', "b": ', "(a, b) ")
"""Strings that are one token each, so that a call is about fifteen tokens."""


@dataclass(slots=True, frozen=True)
class Question:
    """a*b, a+b or a*b+c."""

    a: int
    b: int
    operator: str
    c: int | None = None

    @property
    def text(self) -> str:
        """The question."""
        return f"{self.a}{self.operator}{self.b}" + (f"+{self.c}=" if self.c is not None else "=")

    @property
    def results(self) -> list[int]:
        """The calculator's results, call by call; the last one is the answer."""
        first = self.a * self.b if self.operator == "*" else self.a + self.b
        return [first] if self.c is None else [first, first + self.c]

    def row(self) -> dict[str, Any]:
        """The question as a data-set row; `results` reaches the reward function."""
        return {"prompt": [say(self.text, "user")], "results": self.results}


def make_question(rng: Random) -> Question:
    """Half of the questions take two steps; numbers are small enough for products of three digits."""
    a, b, c = (rng.randint(11, 29) for _ in range(3))
    return Question(a, b, *rng.choice([("*", None), ("+", None), ("*", c), ("*", c)]))


def make_splits(seed: int, *, num_grpo: int = 1024, num_held_out: int = 256) -> tuple[list[Question], list[Question]]:
    """Questions for GRPO and held-out ones, none twice."""
    rng, found = Random(seed), dict[Question, None]()
    while len(found) < num_grpo + num_held_out:
        found[make_question(rng)] = None
    questions = list(found)
    return questions[num_held_out:], questions[:num_held_out]


HABITS = {"careful": 0.20, "wrong tool": 0.20, "broken call": 0.10, "guess": 0.50}
"""Share of each way of answering among the demonstrations."""


def demonstrate(question: Question, habit: str, rng: Random) -> list[Message]:
    """The answers of a user of this habit; from a wrong step on, everything follows from it."""
    messages = [say(question.text, "user")]
    if habit == "guess":
        return [*messages, say(str(question.results[-1] + rng.choice((-11, -10, -1, 1, 10, 11))))]
    steps = [("multiply" if question.operator == "*" else "async_add", question.b)]
    steps += [] if question.c is None else [("async_add", question.c)]
    slip_at, value = rng.randrange(len(steps)), question.a
    for place, (name, number) in enumerate(steps):
        if place == slip_at and habit == "wrong tool":
            name = "async_add" if name == "multiply" else "multiply"
        if place == slip_at and habit == "broken call":
            # Without its closing brace no JSON parser reads it; the tool's reply would say so.
            text = f'{{"name": "{name}", "arguments": {{"a": {value}, "b": {number}}}'
            return [*messages, say(f"<tool_call>{text}</tool_call>")]
        messages.append(call(name, a=value, b=number))
        value = value * number if name == "multiply" else value + number
        messages.append(say(str(value), "tool"))
    return [*messages, say(str(value))]


def answer_reward(completions: list[list[Message]], results: list[list[int]], log_metric: Any, **_: Any) -> list[float]:
    """1 if the last turn is the right number and nothing else; counts which calls were right on the way."""
    rewards: list[float] = []
    for completion, expected in zip(completions, results):
        # Every call has a reply, one that cannot be read too, so the k-th reply belongs to the k-th call.
        replies = [message["content"] for message in completion if message["role"] == "tool"]
        for place, reply in enumerate(replies):
            log_metric("calls/wrong", float(place >= len(expected) or reply != str(expected[place])))
        rewards.append(float(completion[-1]["role"] == "assistant" and completion[-1]["content"] == str(expected[-1])))
    return rewards


def main(arguments: list[str] | None = None) -> int:
    """Run the example; 0 if what it claims was met."""
    started = time.perf_counter()
    options = parse(__doc__, "agent_calculator", warm_up_steps=700, grpo_steps=60).parse_args(arguments)
    transformers_logging.disable_progress_bar()
    grpo, held_out = make_splits(options.seed)
    tokenizer = make_tokenizer(WORDS)
    model = make_model(tokenizer, options.seed)
    schemas = [get_json_schema(tool) for tool in TOOLS]
    unseen = set(held_out)

    def demonstrator(rng: Random) -> list[Message]:
        question = make_question(rng)
        while question in unseen:
            question = make_question(rng)
        return demonstrate(question, rng.choices(list(HABITS), list(HABITS.values()))[0], rng)

    warm_up(model, tokenizer, demonstrator, schemas, num_steps=options.warm_up_steps, seed=options.seed)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=answer_reward,
        args=make_config(options, max_completion_length=160, learning_rate=4e-4, max_tool_calling_iterations=3),
        train_dataset=Dataset.from_list([question.row() for question in grpo]),
        eval_dataset=Dataset.from_list([question.row() for question in held_out]),
        processing_class=tokenizer,
        tools=TOOLS,
    )
    return run(trainer, lambda: measure(trainer, reward="answer_reward", wrong_calls="eval_calls/wrong"), started)


if __name__ == "__main__":
    sys.exit(main())
