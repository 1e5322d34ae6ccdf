"""An agent that learns to find a treasure: `python examples/agent_environment.py`, offline, minutes on two cores.

An environment is a class: `reset` begins an episode, public methods are the model's tools, and what happened so far is
its state. Here it is a field of five by five: the model is told how far away the treasure is, walks there step by step,
and digs. The reward is what `get_reward` says; there is no reward function at all.

1. Warm-up: demonstrations by wanderers, who walk mostly at random, show what a call looks like.
2. GRPO with `environment_factory=TreasureHunt`: the way to the treasure is found by trying.
3. Held-out tasks, before and after: treasures at distances that no training task begins with. A call is correct if the
   environment could do it: it was readable, no edge of the field was in the way, and there was something to dig up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

# Threads that spin while they wait slow everything else down. OpenMP reads this when PyTorch is first imported.
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

SIZE = 5
DIRECTIONS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
SPARE_CALLS = 2
"""Calls that may be wasted: enough for a slip, not for a walk at random."""


class TreasureHunt:
    """A walk on a field to a treasure, with as many calls as the shortest way takes, and few to spare.

    The trainer makes one for each rollout, and resets and uses it again in the next generation batch.
    """

    def reset(self, start: list[int], treasure: list[int], **_: Any) -> str:
        """Begin at `start`; the arguments are the row's columns, and what is returned goes to the end of the prompt."""
        self._place, self._treasure = tuple(start), tuple(treasure)
        # The steps of the shortest way, one call to dig, and the spare ones.
        self._calls_left = sum(ways_to(start, treasure).values()) + 1 + SPARE_CALLS
        self._found = False
        return self._view()

    def move(self, direction: str) -> str:
        """Walk one step.

        Args:
            direction: One of north, south, east and west.

        Returns:
            Where the treasure is, seen from there.
        """
        self._take_turn()
        if direction not in DIRECTIONS:
            raise ValueError("no such direction")
        x, y = (old + by for old, by in zip(self._place, DIRECTIONS[direction]))
        if not (0 <= x < SIZE and 0 <= y < SIZE):
            # Whatever a tool raises is told to the model as the call's reply; the rollout goes on.
            raise ValueError("the field ends here")
        self._place = (x, y)
        return self._view()

    def dig(self) -> str:
        """Dig where you are.

        Returns:
            What you found.
        """
        self._take_turn()
        if self._place != self._treasure:
            raise ValueError("nothing here")
        self._found = True
        return "gold"

    def get_reward(self) -> float:
        """1 for the treasure by the shortest way, a tenth less for each call more, 0 without the treasure.

        It is asked once, at the end of the rollout.
        """
        return 1.0 - 0.1 * (SPARE_CALLS - self._calls_left) if self._found else 0.0

    # A leading underscore keeps a method from being a tool.
    def _view(self) -> str:
        ways = ways_to(self._place, self._treasure)
        return "treasure: " + (", ".join(f"{steps} {direction}" for direction, steps in ways.items()) or "here")

    def _take_turn(self) -> None:
        if self._calls_left == 0:
            raise ValueError("it is dark")
        self._calls_left -= 1


WORDS = (
    *("move", "dig", '{"direction": "', '"}', "{}", "(direction) ", "() "),
    *(*DIRECTIONS, "up", "Find the ", "treasure: ", "here", ", ", "gold", "done", "lost"),
    *("Error: ValueError: ", "no such direction", "the field ends here", "nothing here", "it is dark"),
)
"""Strings that are one token each, so that a call is nine tokens."""


def ways_to(place: Sequence[int], treasure: Sequence[int]) -> dict[str, int]:
    """Steps to walk in each direction, those without steps left out."""
    east, north = (there - here for here, there in zip(place, treasure))
    steps = {"east": east, "west": -east, "north": north, "south": -north}
    return {direction: count for direction, count in steps.items() if count > 0}


def make_splits(seed: int, num_held_out: int = 20) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All pairs of two places as data-set rows, shuffled: those to train on, and held-out ones.

    How far a treasure of a held-out row is to the east and to the north is in no row to train on: there are 80 such
    distances, of which `num_held_out` are held out.
    """
    rng = Random(seed)
    distances = [pair for pair in product(range(1 - SIZE, SIZE), repeat=2) if pair != (0, 0)]
    held_out = set(rng.sample(distances, num_held_out))
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for x, y, to_x, to_y in product(range(SIZE), repeat=4):
        row = {"prompt": [say("Find the ", "user")], "start": [x, y], "treasure": [to_x, to_y]}
        if (x, y) != (to_x, to_y):
            parts[(to_x - x, to_y - y) in held_out].append(row)
    for rows in parts:
        rng.shuffle(rows)
    return parts


def demonstrate(row: dict[str, Any], rng: Random) -> list[Message]:
    """The turns of a wanderer: about half of the steps lead nearer, some calls make no sense, some give up."""
    hunt = TreasureHunt()
    messages = [say(row["prompt"][0]["content"] + hunt.reset(**row), "user")]
    while rng.random() > 0.04:
        nearer = list(ways_to(hunt._place, hunt._treasure))
        if rng.random() < (0.1 if nearer else 0.8):
            messages.append(call("dig"))
        else:
            direction = rng.choice(nearer if nearer and rng.random() < 0.4 else [*DIRECTIONS, "up"])
            messages.append(call("move", direction=direction))
        function = messages[-1]["tool_calls"][0]["function"]
        try:
            reply = getattr(hunt, function["name"])(**function["arguments"])
        except ValueError as error:
            reply = f"Error: ValueError: {error}"
        messages.append(say(reply, "tool"))
        if reply == "gold":
            return [*messages, say("done")]
        if reply.endswith("it is dark"):
            break
    return [*messages, say("lost")]


def main(arguments: list[str] | None = None) -> int:
    """Run the example; 0 if what it claims was met."""
    started = time.perf_counter()
    options = parse(__doc__, "agent_environment", warm_up_steps=200, grpo_steps=100).parse_args(arguments)
    transformers_logging.disable_progress_bar()
    grpo, held_out = make_splits(options.seed)
    tokenizer = make_tokenizer(WORDS)
    model = make_model(tokenizer, options.seed)
    hunt = TreasureHunt()
    warm_up(
        model,
        tokenizer,
        lambda rng: demonstrate(rng.choice(grpo), rng),
        [get_json_schema(tool) for tool in (hunt.move, hunt.dig)],
        num_steps=options.warm_up_steps,
        batch_size=32,
        seed=options.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        args=make_config(options, max_completion_length=320, max_tool_calling_iterations=12),
        train_dataset=Dataset.from_list(grpo),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=tokenizer,
        environment_factory=TreasureHunt,
    )
    return run(
        trainer, lambda: measure(trainer, reward="TreasureHunt", wrong_calls="eval_tools/failure_frequency"), started
    )


if __name__ == "__main__":
    sys.exit(main())
