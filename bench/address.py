"""Prints what an OpenAI-compatible address costs an agent, beside the same turns without it.

    python bench/address.py [--sessions 64] [--turns 8] [--max_tokens 16] [--repetitions 3] [--socket]

SmolLM2-135M-Instruct samples. An async program asks by the client of its session, or with `--socket` by an `openai`
client over a connection, as programs do that bring a client of their own; all sessions run at once. Beside it, in turn,
coroutines of the same engine sample the very same tokens: seeds, messages and limits are equal, and so are the ids,
which is checked. The columns: seconds of both, their ratio, milliseconds more for each request, how much of the
processor's time the program with its client took for each request, and the server, and the decode steps of both:
requests that come back one after the other share fewer of them.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

from plumbing import set_environment, table

if __name__ == "__main__":
    set_environment()

import hashlib
import tempfile

from datasets import Dataset
from materials import load_smollm2
from openai import AsyncOpenAI

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.engines.base import Request
from groupgrad.integrations.agents.rollouts import ProgramRollouts, answer_seed
from groupgrad.integrations.agents.wire import Question
from groupgrad.rollout.driver import Driver, sample_turn
from groupgrad.rollout.requests import GenerationRequest

FIRST, NEXT = {"role": "user", "content": "Let us count. You begin."}, {"role": "user", "content": "And then?"}


def make_rollouts(options: argparse.Namespace) -> ProgramRollouts:
    """The rollouts of a trainer whose agent takes the turns that are asked for."""

    over_socket: list[AsyncOpenAI] = []  # one for all sessions, since making one takes up to 50 ms

    async def talk(row: dict[str, Any], session: Any) -> float:
        client, messages = session.async_openai(), [FIRST]
        if options.socket:
            over_socket[:] = over_socket or [AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0)]
            client = over_socket[0].with_options(api_key=session.api_key)
        for _ in range(options.turns):
            asked = {"model": session.model, "messages": messages, "max_tokens": options.max_tokens}
            answer = await client.chat.completions.create(**asked)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages = [*messages, said, NEXT]
        return 1.0

    tokenizer, model, _ = load_smollm2()
    trainer = GRPOTrainer(
        model,
        agent=talk,
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_completion_length=options.turns * (options.max_tokens + 32),
        ),
        train_dataset=Dataset.from_list([{"number": number} for number in range(64)]),
    )
    found: Any = trainer.components.collector.rollouts
    return found


def beside(rollouts: ProgramRollouts, request: GenerationRequest, options: argparse.Namespace) -> list[list[int]]:
    """The completion ids of the same turns by coroutines of the engine."""

    async def talk(row: int) -> list[int]:
        context = rollouts.formats.prompt_ids(Question([FIRST]))
        start, ticket = len(context), None
        for turn in range(options.turns):
            digest = hashlib.blake2b(repr(context).encode(), digest_size=16).digest()
            seed = answer_seed(request.seed_of(row, rollouts.seed), digest, 1)
            ticket, sample = await sample_turn(Request(context, seed, options.max_tokens, continues=ticket, keep=True))
            context = context + sample.ids
            if turn < options.turns - 1:
                context = context + rollouts.formats.between(sample.ids, [NEXT], [])
        return context[start:]

    with rollouts.engine.session(rollouts.sampling) as session:
        return Driver(session, [talk(row) for row in request.rows]).run()


def processor_seconds(thread: str) -> float:
    """The processor time of a thread of this process, which is found by its name."""
    (found,) = (one for one in threading.enumerate() if one.name == thread)
    assert found.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(found.ident))


def measure(rollouts: ProgramRollouts, count: int, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    seconds: dict[str, list[float]] = {"address": [], "beside": []}
    threads: dict[str, list[float]] = {"async-functions": [], "agent-address": []}
    engine: Any = rollouts.engine
    steps: dict[str, int] = {}
    for number in range(options.repetitions + 1):
        request = GenerationRequest({0: {"number": 0}}, range(count), count, count, "train", number, 0)
        before = [processor_seconds(name) if number else 0.0 for name in threads]
        began = time.perf_counter()
        over_address = [rollout.completion_ids for rollout in rollouts(request)]
        middle = time.perf_counter()
        steps["address"] = engine.statistics.num_steps
        assert over_address == beside(rollouts, request, options), "the address sampled other tokens"
        steps["beside"] = engine.statistics.num_steps
        if number:  # the first warms up
            for start, (name, values) in zip(before, threads.items()):
                values.append(processor_seconds(name) - start)
            seconds["address"].append(middle - began)
            seconds["beside"].append(time.perf_counter() - middle)
    address, without = (statistics.median(values) for values in seconds.values())
    ratios = [a / b for a, b in zip(*seconds.values())]
    to_ms = 1000 / (count * options.turns)
    program, server = (f"{statistics.median(values) * to_ms:.2f}" for values in threads.values())
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return [
        str(count),
        f"{address:.2f}",
        f"{without:.2f}",
        f"{statistics.median(ratios):.2f} ({spread})",
        f"{(address - without) * to_ms:.2f}",
        program,
        server,
        f"{steps['address']} / {steps['beside']}",
    ]


def main() -> None:
    """Prints a row for one session and one for all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--max_tokens", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--socket", action="store_true")
    options = parser.parse_args()
    rollouts = make_rollouts(options)
    rows = [measure(rollouts, count, options) for count in (1, options.sessions)]
    header = ["sessions", "address, s", "beside, s", "ratio", "ms a request more"]
    header += ["ms of the program", "of the server", "decode steps"]
    print(table(header, rows))
    rollouts.close()


if __name__ == "__main__":
    main()
