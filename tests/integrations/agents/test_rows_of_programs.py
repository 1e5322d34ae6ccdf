"""Programs over the real address and engine: every token and log-prob is that of a plain pass over what they read."""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from datasets import Dataset
from openai import APIStatusError, APITimeoutError
from simulated_vllm import simulate_vllm
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.engines.native import session as native_session
from groupgrad.engines.native.session import NativeSession
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.errors import ConfigError, RolloutError
from groupgrad.integrations.agents import rollouts
from groupgrad.integrations.agents.server import Address
from groupgrad.rollout import driver
from groupgrad.rollout.requests import GenerationRequest
from groupgrad.types import Rollout

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    },
}


def contexts(rollout: Rollout) -> list[list[int]]:
    """What the model read before each token of the completion."""
    branches = list(rollout.branches)
    found, before = [], list(rollout.prompt.ids)
    for place, token in enumerate(rollout.completion_ids):
        if branches and branches[0].start == place:
            before = list(branches.pop(0).context)
        found.append(list(before))
        before.append(token)
    return found


def assert_exact(model: Any, rollout: Rollout) -> None:
    """Log-probs of the row are those of plain passes in float64, each at its temperature."""
    assert rollout.sampled is not None and rollout.sampling_logprobs is not None
    model = model.double()
    for place, context in enumerate(contexts(rollout)):
        if not rollout.sampled[place]:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context])).logits[0, -1]
        if rollout.temperatures is not None and not math.isnan(rollout.temperatures[place]):
            logits = logits / rollout.temperatures[place]
        logprobs = logits.log_softmax(-1)
        assert rollout.sampling_logprobs[place] == pytest.approx(
            float(logprobs[rollout.completion_ids[place]]), abs=1e-4
        )
    model.float()


class Wanderer:
    """Plays one of several moves a turn, as a stream of random numbers says. `seen` has what it asked and got."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[list[dict[str, Any]], list[str]]]] = {}

    async def __call__(self, row: dict[str, Any], session: Any) -> float:
        client, dice = session.async_openai(), random.Random(f"{row['number']}/{session.api_key}")
        asked = self.seen.setdefault(session.api_key, [])

        async def ask(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
            answer = await client.chat.completions.create(
                model=session.model, messages=messages, max_tokens=dice.randint(1, 6), logprobs=True, **options
            )
            choices = answer.choices
            for choice in choices:
                asked.append((messages, [entry.token for entry in choice.logprobs.content]))
            return choices[0].message.model_dump(exclude_none=True)

        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{row['number']}?"}]
        for _ in range(6):
            move = dice.choice(["go on", "go on", "again", "drop", "edit", "both", "sub", "two"])
            if move == "go on":
                messages = [*messages, await ask(messages), {"role": "user", "content": f"{dice.randint(0, 9)}+"}]
            elif move == "again":  # the same question
                await ask(messages)
            elif move == "drop" and len(messages) > 2:
                messages = messages[2:]
            elif move == "edit" and len(messages) > 2:
                messages = [{"role": "user", "content": "1+1="}, *messages[1:]]
            elif move == "both":  # two questions at once behind the same history
                ends = [{"role": "user", "content": text} for text in ("2", "3")]
                await asyncio.gather(*(ask([*messages[:-1], end]) for end in ends))
            elif move == "sub":  # a sub-agent with a system prompt of its own
                await ask([{"role": "system", "content": "7"}, {"role": "user", "content": "8"}])
            elif move == "two":
                await ask(messages, n=2)
        messages = [*messages, await ask(messages)]
        return float(len(messages))


def test_random_programs_have_exact_rows(play: Any) -> None:
    agent = Wanderer()
    trainer, found = play(agent, per_device_train_batch_size=8, num_generations=4, seed=3, learning_rate=0.0)
    assert len(found) == 8 and sum(len(rollout.branches) for rollout in found) > 8
    tokenizer = trainer.processing_class
    asked = sorted(len(tokens) for session in agent.seen.values() for _, tokens in session)
    assert asked == sorted(end - start for rollout in found for start, end in rollout.turns)
    for rollout in found:
        assert_exact(trainer.model, rollout)
        (session,) = [  # the requests of this rollout, by what was sampled
            requests
            for requests in agent.seen.values()
            if sorted("".join(tokens) for _, tokens in requests)
            == sorted(tokenizer.decode(rollout.completion_ids[start:end]) for start, end in rollout.turns)
        ]
        # Each request was answered from what its messages render to; texts and ids of this tokenizer are one to one.
        read = sorted(plain(tokenizer, contexts(rollout)[start]) for start, _ in rollout.turns)
        assert read == sorted(plain(tokenizer, rendered(tokenizer, messages)) for messages, _ in session)


def plain(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]


# --- what programs may do, and what becomes of those that fail ---


def ask(session: Any, *messages: dict[str, Any], **options: Any) -> Any:
    return session.openai().chat.completions.create(model="any name", messages=list(messages), **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def two_turns(row: dict[str, Any], session: Any) -> float:
    client, messages = session.async_openai(), [user(f"{row['number']}?")]
    for _ in range(2):
        answer = await client.chat.completions.create(model="any name", messages=messages, max_tokens=4)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), user("+")]
    return float(len(str(messages)) % 5)


def test_a_plain_function_its_reward_and_the_messages_of_reward_functions(play: Any) -> None:
    read: list[Any] = []

    def look(completions: Any, prompts: Any, number: Any, **_: Any) -> list[float]:
        read.extend(zip(prompts, completions, number))
        return [0.5] * len(completions)

    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), max_tokens=4).choices[0].message.model_dump(exclude_none=True)
        ask(session, user("a"), first, user("b"), max_tokens=4)
        return float(row["number"])

    trainer, found = play(solve, reward_funcs=look)
    log = trainer.state.log_history[0]
    assert log["rewards/look/mean"] == 0.5 and "rewards/solve/mean" in log and log["rollouts/turns"] == 2
    assert log["sampling/logp_mismatch"] == pytest.approx(0.0, abs=1e-6)
    for prompt, completion, _ in read:
        assert prompt == [user("a")] and [message["role"] for message in completion] == [
            "assistant",
            "user",
            "assistant",
        ]
    assert all(not rollout.branches and len(rollout.turns) == 2 for rollout in found)


def test_rewards_by_name_and_by_turn(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> dict[str, float]:
        ask(session, user("a"), max_tokens=4)
        session.log_reward(0.25, "early", turn=0)
        ask(session, user("b"), max_tokens=4)
        session.log_reward(1.0)
        with pytest.raises(ValueError, match="has answered 2 requests"):
            session.log_reward(1.0, turn=2)
        return {"late": 2.0, "none": None}

    trainer, found = play(solve, advantage_estimator="turn_returns")
    assert [rollout.environment_rewards for rollout in found] == [{"solve": [0.25, 3.0]}] * 4
    log = trainer.state.log_history[0]
    assert (log["rewards/solve/early"], log["rewards/solve/late"], log["rewards/solve/mean"]) == (0.25, 2.0, 3.25)
    assert [len(rollout.branches) for rollout in found] == [1] * 4


def test_tools_stop_texts_and_streams(play: Any, caplog: Any) -> None:
    heard: list[Any] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), max_tokens=8, tools=[SCHEMA], tool_choice="required").choices[0].message
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
        said = {"role": "assistant", "content": first.content, "tool_calls": [call]}
        ask(
            session,
            user("a"),
            said,
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            max_tokens=4,
            tools=[SCHEMA],
        )
        whole = ask(session, user("s"), max_tokens=30).choices[0].message.content
        cut = ask(session, user("s"), max_tokens=30, stop=list("0123456789+=")).choices[0]
        events = list(ask(session, user("t"), max_tokens=4, stream=True, stream_options={"include_usage": True}))
        heard.append((whole, cut, "".join(e.choices[0].delta.content or "" for e in events[:-1]), events[-1].usage))
        text = session.openai().completions.create(model="m", prompt="1+1=", max_tokens=3, logprobs=1)
        assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens <= 3
        assert [model.id for model in session.openai().models.list()] == ["policy"]
        return 1.0

    trainer, found = play(solve, learning_rate=0.0)
    for rollout in found:
        assert rollout.trace is not None and rollout.trace.num_turns == 6
        assert_exact(trainer.model, rollout)
    assert caplog.text.count("tool_choice asks for a call") == 1
    for _, cut, _, usage in heard:
        assert not set(cut.message.content) & set("0123456789+=")
        assert cut.finish_reason in ("stop", "length") and usage.completion_tokens <= 4


def test_a_turn_is_sampled_up_to_its_stop_text_and_then_continued(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), max_tokens=60, stop=list("0123456789+=")).choices[0].message
        ask(session, user("a"), first.model_dump(exclude_none=True), user("b"), max_tokens=4)
        return 1.0

    trainer, found = play(solve, learning_rate=0.0)
    statistics = trainer.components.collector.rollouts.engine.statistics
    assert statistics.num_decoded == sum(rollout.num_sampled for rollout in found) - 8  # but for first tokens
    assert statistics.num_restored > 0
    for rollout in found:
        assert_exact(trainer.model, rollout)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.3}, "temperature=0.3, and the policy samples at temperature=1"),
        ({"top_p": 0.5}, "agent_sampling='policy'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 cannot be honoured"),
        ({"response_format": {"type": "json_object"}}, "ask for the format in the prompt"),
        ({"max_tokens": 0}, "max_tokens=0 is no positive"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], said: str, play: Any) -> None:
    errors: list[str] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        with pytest.raises(APIStatusError) as error:
            ask(session, user("a"), **{"max_tokens": 2, **options})
        errors.append(error.value.message)
        ask(session, user("a"), max_tokens=2)
        return 1.0

    play(solve)
    assert len(errors) == 4 and all(said in error for error in errors)


@pytest.mark.parametrize(
    "function",
    [
        {"parameters": 7},
        {"parameters": {"properties": 7}},
        {"parameters": {"properties": {"at": {"anyOf": 7}}}},
        {"parameters": {"properties": {"at": {"enum": 7}}}},
        {"name": ["look"], "parameters": {}},
    ],
)
def test_tools_that_are_none_are_a_bad_request(function: dict[str, Any], play: Any) -> None:
    """They ended the run when the first answer was read."""

    def solve(row: dict[str, Any], session: Any) -> float:
        tool = {"type": "function", "function": {"name": "look", **function}}
        with pytest.raises(APIStatusError, match="cannot be given these tools"):
            ask(session, user("a"), max_tokens=2, tools=[tool])
        ask(session, user("a"), max_tokens=2)
        return 1.0

    _, found = play(solve)
    assert all(rollout.finish_reason != "error" for rollout in found)


def test_an_image_and_a_foreign_key_are_refused(play: Any) -> None:
    import openai

    def solve(row: dict[str, Any], session: Any) -> float:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(APIStatusError, match="'image_url' cannot be read"):
            ask(session, {"role": "user", "content": [image]})
        with pytest.raises(openai.AuthenticationError, match="opens no session"):
            session.openai(api_key="another").models.list()
        ask(
            session,
            {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
            max_tokens=2,
        )
        return 1.0

    _, found = play(solve)
    assert found[0].prompt.row["prompt"] == [user("1\n2")]


def test_another_temperature_may_be_sampled_as_the_policy(make_programs: Any, play: Any, caplog: Any) -> None:
    refused: list[Any] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        ask(session, user("a"), max_tokens=2)
        try:
            ask(session, user("a"), max_tokens=2, temperature=0.0)
        except APIStatusError as error:
            refused.append(error)
        return 1.0

    _, found = play(solve, agent_sampling="policy")
    assert not refused
    assert len(found) == 4 and caplog.text.count("asks for temperature=0") == 1
    with pytest.raises(ConfigError, match="agent_sampling='maybe'"):
        make_programs(solve, agent_sampling="maybe")


def test_requests_are_sampled_and_trained_at_their_own_temperatures(play: Any) -> None:
    most_likely: list[tuple[str, str, float]] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), max_tokens=6, temperature=0.4).choices[0].message
        messages = [user("a"), first.model_dump(exclude_none=True), user("b")]
        one, two = (ask(session, *messages, max_tokens=6, temperature=0.0, logprobs=True).choices[0] for _ in range(2))
        logprob = sum(entry.logprob for entry in one.logprobs.content)
        most_likely.append((one.message.content, two.message.content, logprob))
        session.log_reward(0.5, turn=1)  # a turn that is not trained: its reward is the whole rollout's
        session.log_reward(0.125, turn=0)
        ask(session, *messages, max_tokens=6, temperature=2.5)
        ask(session, user("c"), max_tokens=6)
        with pytest.raises(APIStatusError, match=r"top_p=0\.5"):
            ask(session, user("a"), max_tokens=2, top_p=0.5)
        with pytest.raises(APIStatusError, match="temperature=-1 cannot be sampled with"):
            ask(session, user("a"), max_tokens=2, temperature=-1)
        return float(row["number"])

    trainer, found = play(solve, agent_sampling="request", advantage_estimator="turn_returns", learning_rate=0.0)
    # Training scores the tokens at the temperatures at which they were sampled.
    assert trainer.state.log_history[0]["sampling/logp_mismatch"] == pytest.approx(0.0, abs=1e-6)
    assert len(most_likely) == 4 and all(one == two for one, two, _ in most_likely)
    assert [logprob for _, _, logprob in most_likely] == pytest.approx([0.0] * 4, abs=1e-6)
    for rollout in found:
        assert rollout.temperatures is not None and rollout.sampled is not None
        pairs = zip(rollout.sampled, rollout.temperatures, strict=True)
        kinds = [(sampled, None if math.isnan(t) else t) for sampled, t in pairs]
        assert {*kinds} == {(True, 0.4), (False, None), (True, 2.5), (True, None)}
        assert_exact(trainer.model, rollout)
        assert rollout.trace is not None and (len(rollout.turns), rollout.trace.num_turns) == (3, 5)
        ((_, by_turn),) = rollout.environment_rewards.items()
        assert by_turn == [0.125, None, rollout.prompt.row["number"] + 0.5]


def test_an_engine_of_one_temperature_is_named(make_programs: Any) -> None:
    with pytest.raises(ValueError, match="agent_sampling='request' does not work with TransformersEngine"):
        make_programs(lambda row, session: 1.0, agent_sampling="request", rollout_engine="transformers")


def test_a_budget_that_is_used_up(play: Any) -> None:
    """The program is told as OpenAI's API tells it, and the rollout is truncated, not failed, if that ends it."""
    codes: list[Any] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        messages = [user("a")]
        while True:
            try:
                said = ask(session, *messages).choices[0].message.model_dump(exclude_none=True)
            except APIStatusError as error:
                codes.append(error.code)
                raise
            messages = [*messages, said, user("b")]

    _, found = play(solve, budget=40)
    assert codes == ["context_length_exceeded"] * 4
    assert [rollout.finish_reason for rollout in found] == ["length"] * 4
    assert all(len(rollout.completion_ids) <= 40 for rollout in found)
    assert all(rollout.environment_rewards == {"solve": None} for rollout in found)


def test_a_program_that_never_answers_is_named_and_ends_at_its_deadline(make_programs: Any, caplog: Any) -> None:
    stop = threading.Event()

    def solve(row: dict[str, Any], session: Any) -> float:
        ask(session, user("a"), max_tokens=2)
        if row["number"] == 0:
            stop.wait(30)
        return 1.0

    trainer, found = make_programs(solve, agent_timeout_s=3.0, per_device_train_batch_size=8)
    began = time.monotonic()
    trainer.train()
    stop.set()
    assert time.monotonic() - began < 25
    failed = [rollout for rollout in found if rollout.finish_reason == "error"]
    assert [rollout.prompt.row["number"] for rollout in failed] == [0, 0]
    assert all("agent_timeout_s=3" in rollout.trace.problem for rollout in failed)
    assert "agent of row" in caplog.text


CHILD = """
from openai import OpenAI
messages = [{"role": "user", "content": "a"}]
print(OpenAI(max_retries=0).chat.completions.create(model="m", messages=messages, max_tokens=3).usage.completion_tokens)
"""


def test_a_child_process_finds_the_session_in_its_environment(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> float:
        environment = {"PATH": os.environ["PATH"], **session.env}
        said = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, check=True, text=True
        )
        return float(said.stdout)

    _, found = play(solve, per_device_train_batch_size=2)
    assert [rollout.num_sampled for rollout in found] == [rollout.environment_rewards["solve"] for rollout in found]


def test_a_run_of_programs_goes_on_where_it_was_saved(play: Any, make_programs: Any, tmp_path: Path) -> None:
    config = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    whole, _ = play(two_turns, **config)
    again, _ = make_programs(two_turns, **config)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters()))


def test_vllm_answers_programs_from_the_weights_of_each_step(play: Any, monkeypatch: Any) -> None:
    _, expected = play(two_turns, max_steps=2)
    served = simulate_vllm(monkeypatch)
    trainer, found = play(two_turns, max_steps=2, use_vllm=True, vllm_max_model_length=64)
    assert served[0].pushes == [("weights", 0), ("weights", 1)]
    assert [rollout.completion_ids for rollout in found] == [rollout.completion_ids for rollout in expected]
    key = "sampling/sampling_logp_difference/max"
    # Stale weights would be off by far more after a step of this size.
    assert max(entry[key] for entry in trainer.state.log_history if key in entry) < 1e-5


def test_programs_may_close_their_clients(play: Any) -> None:
    async def solve(row: dict[str, Any], session: Any) -> float:
        with session.openai() as client:
            assert client.models.list().data
        async with session.async_openai() as client:
            await client.chat.completions.create(model="m", messages=[user("a")], max_tokens=2)
        return 1.0

    _, found = play(solve, max_steps=2)
    assert [rollout.finish_reason for rollout in found] == ["eos"] * 8


def test_a_client_that_goes_away_ends_nothing_else(play: Any) -> None:
    """And another engine, which samples whole batches, answers."""

    async def solve(row: dict[str, Any], session: Any) -> float:
        impatient = session.async_openai(timeout=0.001)
        with pytest.raises(APITimeoutError):
            await impatient.chat.completions.create(model="m", messages=[user("gone")], max_tokens=40)
        await session.async_openai().chat.completions.create(model="m", messages=[user("a")], max_tokens=2)
        return 1.0

    _, found = play(solve, rollout_engine="transformers")
    assert [rollout.finish_reason != "error" for rollout in found] == [True] * 4


@pytest.fixture
def aborted(monkeypatch: Any) -> list[int]:
    """The tickets of requests that ended early, with steps of the engine that take a while."""
    found: list[int] = []
    advance, abort = NativeSession.advance, NativeSession.abort

    def slowly(session: Any) -> Any:
        time.sleep(0.05)
        return advance(session)

    def noted(session: Any, tickets: Any) -> None:
        found.extend(tickets)
        abort(session, tickets)

    monkeypatch.setattr(native_session, "RUN_SECONDS", 1e-9)
    monkeypatch.setattr(NativeSession, "advance", slowly)
    monkeypatch.setattr(NativeSession, "abort", noted)
    return found


def test_what_a_program_gives_up_leaves_no_trace(play: Any, aborted: list[int]) -> None:
    """The same conversation then goes on where it was."""

    async def solve(row: dict[str, Any], session: Any) -> float:
        client, messages = session.async_openai(), [user("a")]
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), user("b")]
        with pytest.raises(APITimeoutError):
            await client.chat.completions.create(model="m", messages=messages, max_tokens=100, timeout=0.2)
        await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
        return 1.0

    trainer, found = play(solve, learning_rate=0.0, generation_kwargs={"min_new_tokens": 100})
    assert len(aborted) == 4
    for rollout in found:
        assert not rollout.branches and len(rollout.turns) == rollout.trace.num_turns == 2
        assert all(end - start <= 2 for start, end in rollout.turns)
        assert_exact(trainer.model, rollout)


def test_what_a_program_leaves_open_ends_with_it(play: Any, aborted: list[int]) -> None:
    told: list[str] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        def wait() -> None:
            try:
                ask(session, user("b"), max_tokens=100)
            except APIStatusError as error:
                told.append(error.message)

        thread = threading.Thread(target=wait)
        thread.start()
        ask(session, user("a"), max_tokens=1)
        waiting.append(thread)
        return 1.0

    waiting: list[threading.Thread] = []
    _, found = play(solve, generation_kwargs={"min_new_tokens": 100})
    for thread in waiting:
        thread.join(10)
    assert len(aborted) == len(told) == 4 and all("has ended" in text for text in told)
    assert all(rollout.trace.num_turns == 1 and rollout.num_sampled == 1 for rollout in found)


def test_programs_that_fail_or_return_no_reward(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> Any:
        if row["number"] == 0:
            raise KeyError("lost")
        ask(session, user("a"), max_tokens=2)
        return "good" if row["number"] == 1 else 1.0

    _, found = play(solve, per_device_train_batch_size=8)
    problems = {rollout.prompt.row["number"]: rollout.trace.problem for rollout in found}
    assert "KeyError: 'lost'" in problems[0] and "the agent returned 'good'" in problems[1] and problems[2] == ""


def test_a_step_of_which_most_programs_fail_ends_the_run(make_programs: Any) -> None:
    trainer, _ = make_programs(lambda row, session: 1.0)
    with pytest.raises(RolloutError, match="without a request that was answered"):
        trainer.train()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"agent": 3}, "agent is a int"),
        ({"agent": lambda row: 1.0}, r"two arguments, \(row, session\)"),
        ({"agent": lambda row, session: 1.0, "tools": [len]}, "tools cannot be given with it"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sampled(
    arguments: Any, said: str, make_model: Any, make_tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        GRPOTrainer(
            model=make_model(),
            processing_class=make_tokenizer(),
            args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True),
            train_dataset=Dataset.from_list([{"prompt": "?"}] * 8),
            **arguments,
        )


def test_a_thousand_sessions_are_open_at_once(play: Any) -> None:
    most, open_now = 0, 0

    async def solve(row: dict[str, Any], session: Any) -> float:
        nonlocal most, open_now
        open_now += 1
        most = max(most, open_now)
        await session.async_openai().chat.completions.create(model="m", messages=[user("a")], max_tokens=1)
        while most < 1000:
            await asyncio.sleep(0.01)
        open_now -= 1
        return 1.0

    _, found = play(solve, per_device_train_batch_size=1000, num_generations=250, agent_timeout_s=600)
    assert most == 1000 and len(found) == 1000 and all(rollout.finish_reason != "error" for rollout in found)


@pytest.fixture
def sizes(monkeypatch: Any) -> list[int]:
    """The numbers of rows of the calls of the engine that samples whole batches."""
    found: list[int] = []
    sample = TransformersEngine.sample

    def counted(engine: Any, requests: Any, options: Any) -> Any:
        found.append(len(requests))
        return sample(engine, requests, options)

    monkeypatch.setattr(TransformersEngine, "sample", counted)
    return found


def test_whole_batches_wait_for_no_program_that_waits_for_them(
    make_programs: Any, sizes: list[int], monkeypatch: Any
) -> None:
    """They wait for programs that have been answered, but not for further requests of those that have not."""
    monkeypatch.setattr(driver, "LEAST_PATIENCE_S", 30.0)

    async def solve(row: dict[str, Any], session: Any) -> float:
        messages = [user("a")]
        for _ in range(3):
            answer = await session.async_openai().chat.completions.create(model="m", messages=messages, max_tokens=4)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("b")]
        return 1.0

    trainer, _ = make_programs(solve, rollout_engine="transformers")
    sizes.clear()  # the engine has been tried
    began = time.perf_counter()
    trainer.train()
    assert time.perf_counter() - began < 30.0 and sizes == [4, 4, 4]


@pytest.mark.parametrize(("num_requests", "n"), [(1, 4), (4, 1)])
def test_what_a_program_asks_at_once_is_sampled_at_once(
    make_programs: Any, sizes: list[int], monkeypatch: Any, num_requests: int, n: int
) -> None:
    monkeypatch.setattr(driver, "LEAST_PATIENCE_S", 30.0)
    monkeypatch.setattr(rollouts, "AT_ONCE_S", 2.0)

    async def solve(row: dict[str, Any], session: Any) -> float:
        create = session.async_openai().chat.completions.create
        asked = {"model": "m", "messages": [user("a")], "max_tokens": 4, "n": n}
        await asyncio.gather(*(create(**asked) for _ in range(num_requests)))
        return 1.0

    trainer, _ = make_programs(solve, rollout_engine="transformers")
    sizes.clear()
    trainer.train()
    assert sizes == [16]


def test_a_text_that_cannot_be_tokenised_is_a_bad_request(play: Any) -> None:
    """Half of a surrogate pair, which JSON can hold."""

    def solve(row: dict[str, Any], session: Any) -> float:
        connection = http.client.HTTPConnection(urlsplit(session.base_url).netloc)
        headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", '{"model": "m", "prompt": "\\ud800"}', headers)
        statuses.append(connection.getresponse().status)
        connection.close()
        stopped = '{"model": "m", "prompt": "a", "max_tokens": 2, "stop": "\\ud800"}'
        connection.request("POST", "/v1/completions", stopped, headers)
        assert connection.getresponse().status == 200
        session.openai().completions.create(model="m", prompt="a", max_tokens=2)
        return 1.0

    statuses: list[int] = []
    _, found = play(solve)
    assert statuses == [400] * 4 and all(rollout.finish_reason != "error" for rollout in found)


def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    """The parts of an answer are sent at once, so twenty small requests take far less than their 40 ms each."""

    async def nothing(request: Any) -> Any:
        return JSONResponse({"choices": [], "text": "x" * 2000})

    address = Address(Starlette(routes=[Route("/v1/models", nothing)]))
    try:
        connection, seconds = http.client.HTTPConnection(urlsplit(address.url).netloc), []
        for _ in range(21):
            began = time.perf_counter()
            connection.request("GET", "/v1/models")
            connection.getresponse().read()
            seconds.append(time.perf_counter() - began)
    finally:
        address.close()
    assert sorted(seconds[1:])[10] < 0.03


def test_metrics_are_those_of_their_own_rollouts(make_programs: Any) -> None:
    """Another generation batch may have been sampled meanwhile."""

    def solve(row: dict[str, Any], session: Any) -> float:
        ask(session, user("a"), max_tokens=2)
        session.log_metric("number", row["number"])
        return 0.0

    trainer, _ = make_programs(solve)
    source = trainer.components.collector.rollouts
    try:
        first, second = (source(GenerationRequest({0: {"number": n}}, range(2), 2, 2, "train", n, 0)) for n in (3, 5))
        assert [source.metrics(rollouts)["rewards/solve/number"].read() for rollouts in (first, second)] == [3.0, 5.0]
    finally:
        source.close()


def test_a_first_request_that_is_refused_is_not_the_prompt(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> float:
        with pytest.raises(APIStatusError, match="4096 positions"):
            ask(session, user("a" * 5000), max_tokens=2)
        ask(session, user("b"), max_tokens=2)
        return 1.0

    _, found = play(solve)
    assert [rollout.prompt.row["prompt"] for rollout in found] == [[user("b")]] * 4
    assert [len(rollout.completion) for rollout in found] == [1] * 4


def test_settings_of_agents_without_an_agent_are_named(make_model: Any, make_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="agent_timeout_s=5.0 has no effect: there is no agent"):
        GRPOTrainer(
            make_model(),
            lambda completions, **_: [0.0] * len(completions),
            processing_class=make_tokenizer(),
            args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True, agent_timeout_s=5.0),
            train_dataset=Dataset.from_list([{"prompt": "?"}] * 8),
        )
