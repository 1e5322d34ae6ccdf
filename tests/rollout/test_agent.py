"""Rollouts of several turns: sampled and tool tokens, environments, finish reasons."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from example_tools import async_add, multiply
from scripted_agents import EOS, PlayingEngine, ask, call, make_agents, user, with_tools

from groupgrad.chat import ChatFormat
from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.rollout.statistics import agent_metrics


def play(
    tokenizer: Any,
    script: dict[int, list[str]],
    tools: Any,
    data: Any = None,
    *,
    size: int = 1,
    sampling: Any = None,
    **options: Any,
) -> Any:
    engine = PlayingEngine(with_tools(tokenizer), script)
    agents = make_agents(engine, tokenizer, tools, **options)
    request = replace(ask(data or {row: user("go") for row in script}, size=size), sampling=sampling or {})
    try:
        return agents(request), engine
    finally:
        agents.close()


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_turn_a_reply_and_an_answer(tokenizer):
    (rollout,), engine = play(tokenizer, {0: [call("multiply", a=6, b=7), "it is 42"]}, [multiply])
    whole = text_of(tokenizer, rollout.completion_ids)
    assert whole == (
        '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><eos>'
        "\n<tool>42<eos>\n<assistant>it is 42<eos>"
    )
    sampled = [i for i, flag in zip(rollout.completion_ids, rollout.sampled) if flag]
    replied = [i for i, flag in zip(rollout.completion_ids, rollout.sampled) if not flag]
    assert text_of(tokenizer, sampled) == call("multiply", a=6, b=7) + "<eos>it is 42<eos>"
    assert text_of(tokenizer, replied) == "\n<tool>42<eos>\n<assistant>"
    assert rollout.finish_reason == "eos"
    first, second = engine.asked
    assert "multiply" in text_of(tokenizer, first.prompt_ids)
    assert second.prompt_ids == first.prompt_ids + rollout.completion_ids[: -len("it is 42") - 1]
    assert second.max_new_tokens == 1000 - (len(rollout.completion_ids) - len("it is 42") - 1)
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[0]["tool_calls"][0]["function"] == {"name": "multiply", "arguments": {"a": 6, "b": 7}}
    assert rollout.completion[1] == {"role": "tool", "name": "multiply", "content": "42"}
    assert rollout.completion[2]["content"] == "it is 42"


def test_logprobs_of_tool_tokens_are_unknown(tokenizer):
    (rollout,), _ = play(tokenizer, {0: [call("multiply", a=1, b=1), "ok"]}, [multiply])
    for values, known in ((rollout.sampling_logprobs, -0.5), (rollout.sampling_entropy, 0.25)):
        assert [v == known for v in values] == rollout.sampled
        assert [v != v for v in values] == [not flag for flag in rollout.sampled]
    assert rollout.num_sampled == sum(rollout.sampled) < len(rollout.completion_ids)
    assert rollout.policy_version == 3 and rollout.policy_versions is None


def test_a_reply_has_the_version_of_the_token_before_it(tokenizer, monkeypatch):
    """The weights change in the middle of the first turn, and before the second."""
    sample = PlayingEngine._sample

    def updated(self: PlayingEngine, request: Request) -> Sample:
        turn = sample(self, request)
        rest = len(turn.ids) - 2
        return replace(turn, policy_versions=[3, 3] + [4] * rest if len(self.asked) == 1 else [5] * len(turn.ids))

    monkeypatch.setattr(PlayingEngine, "_sample", updated)
    (rollout,), _ = play(tokenizer, {0: [call("multiply", a=1, b=1), "ok"]}, [multiply])
    first = rollout.sampled.index(False)
    reply = rollout.sampled.index(True, first) - first
    expected = [3, 3] + [4] * (first - 2 + reply) + [5] * (len(rollout.completion_ids) - first - reply)
    assert rollout.policy_version == 3 and rollout.policy_versions == expected


def test_a_group_shares_its_prompt(tokenizer):
    data = {0: user("a"), 1: user("b")}
    rollouts, _ = play(tokenizer, {row: ["ok"] for row in range(4)}, [multiply], data, size=2)
    assert [r.index for r in rollouts] == [0, 1, 2, 3]
    assert rollouts[0].prompt is rollouts[1].prompt
    assert rollouts[2].prompt is rollouts[3].prompt
    assert rollouts[0].prompt.ids != rollouts[2].prompt.ids


# --- finish reasons ---


def test_the_budget_counts_tool_tokens_and_a_reply_that_does_not_fit_is_left_out(tokenizer):
    first = call("multiply", a=6, b=7)
    reply = len("\n<tool>42") + 1 + len("\n<assistant>")
    for budget, reason, words in ((len(first) + 1 + reply, "tool_budget", 0), (len(first) + 2 + reply, "length", 1)):
        (rollout,), _ = play(tokenizer, {0: [first, "it is 42"]}, [multiply], budget=budget)
        assert rollout.finish_reason == reason
        assert rollout.is_truncated
        assert rollout.num_sampled == len(first) + 1 + words
        assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"][: 1 + 2 * words]
        assert len(rollout.completion_ids) == (budget if words else len(first) + 1)


def test_a_request_may_change_the_sampling(tokenizer):
    """As an evaluation does: the budget ends the rollout, and the engine gets the options."""
    changes = {"max_new_tokens": 5, "temperature": 0.5}
    (rollout,), engine = play(tokenizer, {0: ["a longer answer"]}, [multiply], sampling=changes)
    assert (rollout.finish_reason, len(rollout.completion_ids)) == ("length", 5)
    assert engine.options == SamplingOptions(5, temperature=0.5, eos_ids=(EOS,))


def test_the_context_ends_a_rollout(tokenizer):
    first = call("multiply", a=6, b=7)
    (rollout,), engine = play(tokenizer, {0: [first, "it is 42"]}, [multiply])
    prompt = len(engine.asked[0].prompt_ids)
    budget = len(rollout.completion_ids) - 3
    (truncated,), _ = play(tokenizer, {0: [first, "it is 42"]}, [multiply], max_context=prompt + budget)
    assert (truncated.finish_reason, len(truncated.completion_ids)) == ("context", budget)
    (truncated,), _ = play(tokenizer, {0: [first, "it is 42"]}, [multiply], max_context=prompt + len(first) + 5)
    assert (truncated.finish_reason, len(truncated.completion_ids)) == ("context", len(first) + 1)


def test_a_truncated_call_is_not_made(tokenizer):
    made: list[int] = []

    def note(n: int) -> int:
        """Notes.

        Args:
            n: A number.
        """
        made.append(n)
        return n

    (rollout,), _ = play(tokenizer, {0: [call("note", n=1) + " and..."]}, [note])
    assert (rollout.finish_reason, made) == ("length", [])


# --- problems are replies to the model ---


def hanging(n: int) -> int:
    """Hangs.

    Args:
        n: A number.
    """
    time.sleep(30)
    return n


def raising(n: int) -> int:
    """Raises.

    Args:
        n: A number.
    """
    raise KeyError(f"no {n}")


def test_the_problem_of_a_call_is_its_reply(tokenizer):
    problems = {
        call("nothing", a=1): "there is no tool 'nothing'; the tools are: multiply, raising",
        call("multiply", a=1): "b",
        call("multiply", a=1, b=2, c=3): "c",
        call("multiply", a="one", b=2): "integer",
        call("raising", n=5): "no 5",
        "<tool_call>{oops</tool_call>": "JSON",
    }
    script = {row: [text, "ok"] for row, text in enumerate(problems)}
    rollouts, _ = play(tokenizer, script, [multiply, raising])
    for rollout, expected in zip(rollouts, problems.values(), strict=True):
        assert rollout.finish_reason == "eos"
        (use,) = rollout.trace.tool_uses
        assert use.failed
        assert expected in rollout.completion[1]["content"]
        assert rollout.completion[1]["content"].replace(";", "<unk>") in text_of(tokenizer, rollout.completion_ids)


def test_a_hanging_tool_is_answered_and_delays_no_other_rollout(tokenizer):
    started = time.perf_counter()
    rollouts, _ = play(
        tokenizer,
        {0: [call("hanging", n=1), "gave up"], 1: [call("multiply", a=2, b=2), "four"]},
        [hanging, multiply],
        timeout_s=0.3,
    )
    assert time.perf_counter() - started < 5
    assert [r.finish_reason for r in rollouts] == ["eos", "eos"]
    assert [use.timed_out for r in rollouts for use in r.trace.tool_uses] == [True, False]
    assert "0.3" in rollouts[0].completion[1]["content"]


# --- environments ---


class Counter:
    """Counts; `life` has its resets and closes."""

    made: ClassVar[list[Counter]] = []

    def __init__(self) -> None:
        self.life: list[Any] = []
        Counter.made.append(self)

    def reset(self, start: int = 0, **row: Any) -> str:
        if start < 0:
            raise RuntimeError(f"cannot start at {start}")
        self.value = start
        self.life.append(("reset", start, sorted(row)))
        return f" (from {start})"

    def add(self, step: int) -> int:
        """Adds.

        Args:
            step: How much.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value)

    def close(self) -> None:
        self.life.append("close")


@pytest.fixture(autouse=True)
def _forget() -> None:
    Counter.made = []


def test_an_environment_may_score_each_turn_and_say_its_state(tokenizer, caplog):
    class Scored(Counter):
        def get_reward(self, num_turns: int) -> list[float | None]:
            return [float(self.value), None, float(num_turns)]

    script = {0: [call("add", step=2), call("add", step=3), "5"], 1: ["nothing"]}
    data = {0: user("count", start=0), 1: user("count", start=4)}
    rollouts, _ = play(tokenizer, script, [], data, environment=Scored, state="value")
    assert rollouts[0].environment_rewards == {"Scored": [5.0, None, 3.0]}
    assert [len(rollout.turns) for rollout in rollouts] == [3, 1]
    assert [len(set(rollout.states)) for rollout in rollouts] == [3, 1]
    again, _ = play(tokenizer, {0: ["2"]}, [], {0: user("count", start=2)}, environment=Scored, state="value")
    assert again[0].states == rollouts[0].states[1:2], "the same value is the same state, in any rollout"
    assert rollouts[1].environment_rewards == {"Scored": None}
    assert rollouts[1].finish_reason == "eos"
    for text in (rollouts[1].trace.problem, caplog.text):
        assert "returned 3 rewards by turn, but there were 1" in text
    problems = {"place": "AttributeError: 'Counter' object has no", "add": "is a method, which cannot"}
    for state, problem in problems.items():
        failed, _ = play(tokenizer, script, [], data, environment=Counter, state=state)
        assert [rollout.finish_reason for rollout in failed] == ["error"] * 2
        assert problem in failed[0].trace.problem


def test_an_environment_for_each_rollout(tokenizer):
    script = {0: [call("add", step=2), call("add", step=3), "5"], 1: ["nothing"]}
    data = {0: user("count", start=0), 1: user("count", start=4)}
    rollouts, engine = play(tokenizer, script, [], data, environment=Counter)
    assert [m["content"] for m in rollouts[0].completion if m["role"] == "tool"] == ["2", "5"]
    assert [r.environment_rewards for r in rollouts] == [{"Counter": 5.0}, {"Counter": 4.0}]
    assert [r.extra["environments"].value for r in rollouts] == [5, 4]
    assert rollouts[0].extra["environments"] is not rollouts[1].extra["environments"]
    assert "<user>count (from 4)" in text_of(tokenizer, rollouts[1].prompt.ids)
    assert rollouts[1].prompt.ids in [request.prompt_ids for request in engine.asked]
    assert rollouts[1].prompt.row["prompt"] == [{"role": "user", "content": "count (from 4)"}]
    assert data[1] == user("count", start=4)
    assert all(env.life.count("close") == 1 for env in Counter.made)


def test_environments_of_generation_batches_not_yet_scored_are_not_reset(tokenizer):
    agents = make_agents(PlayingEngine(with_tools(tokenizer), {}), tokenizer, [], Counter, ahead=1)

    def played(number: int, phase: str = "train") -> Counter:
        agents.engine = PlayingEngine(tokenizer, {0: ["ok"]}, phase, number)
        (rollout,) = agents(ask({0: user("x", start=number)}, number=number, phase=phase))
        return rollout.extra["environments"]

    # With ahead=1 a batch begins before the previous one has been scored, but after the one before that.
    first, second = played(0), played(1)
    assert (first.value, second.value) == (0, 1)
    third = played(2)
    assert third is first
    assert second.value == 1
    # An evaluation in between does not reset those that training has not scored yet.
    evaluated = [played(0, "eval"), played(0, "eval")]
    assert evaluated[0] is evaluated[1]
    assert (second.value, third.value) == (1, 2)
    # A batch that is sampled again needs no further instances.
    assert (played(2).value, second.value) == (2, 1)
    assert len(Counter.made) == 3
    agents.close()
    assert [env.life.count("close") for env in Counter.made] == [1, 1, 1]


def test_each_rollout_of_a_group_may_begin_in_its_own_way(tokenizer):
    """Every completion is trained after the prompt that it was sampled from."""
    places = iter(range(4))
    lock = threading.Lock()

    class Maze:
        def reset(self, **row: Any) -> str:
            with lock:
                return f" at {next(places)}"

        def look(self) -> str:
            """Looks."""
            return "wall"

    script = {row: ["ok"] for row in range(4)}
    rollouts, engine = play(tokenizer, script, [], {0: user("go")}, size=4, environment=Maze)
    asked = {request.seed: request.prompt_ids for request in engine.asked}
    assert len({tuple(r.prompt.ids) for r in rollouts}) == 4
    assert sorted(map(tuple, asked.values())) == sorted(tuple(r.prompt.ids) for r in rollouts)
    texts = [text_of(tokenizer, r.prompt.ids) for r in rollouts]
    assert all(f"go at {text.rsplit('at ', 1)[1][0]}" in text for text in texts)


def test_a_rollout_whose_environment_fails_or_hangs_ends_as_error(tokenizer):
    class Slow(Counter):
        def reset(self, start: int = 0, **row: Any) -> str:
            time.sleep(30 if start > 0 else 0)
            return super().reset(start, **row)

    data = {row: user("x", start=start) for row, start in enumerate((0, -1, 0, 1))}
    started = time.perf_counter()
    rollouts, _ = play(tokenizer, {row: ["ok"] for row in data}, [], data, environment=Slow, timeout_s=0.3)
    assert time.perf_counter() - started < 8
    assert [r.finish_reason for r in rollouts] == ["eos", "error", "eos", "error"]
    assert rollouts[1].completion_ids == []
    assert not rollouts[1].is_scorable
    assert "cannot start at -1" in rollouts[1].trace.problem
    assert all(env.life[-1] == "close" for env in Counter.made if env.life)


def test_rows_choose_their_environment(tokenizer):
    class Other(Counter):
        def subtract(self, step: int) -> int:
            """Subtracts.

            Args:
                step: How much.
            """
            self.value -= step
            return self.value

        add = None  # pyright: ignore

    script = {0: [call("add", step=2), "ok"], 1: [call("subtract", step=2), "ok"]}
    data = {0: user("x", environment="up"), 1: user("x", environment="down")}
    rollouts, engine = play(tokenizer, script, [], data, environment={"up": Counter, "down": Other})
    assert [m["content"] for r in rollouts for m in r.completion if m["role"] == "tool"] == ["2", "-2"]
    assert [r.environment_rewards for r in rollouts] == [{"Counter": 2.0}, {"Other": -2.0}]
    prompts = [text_of(tokenizer, rollout.prompt.ids) for rollout in rollouts]
    assert {tuple(r.prompt.ids) for r in rollouts} <= {tuple(request.prompt_ids) for request in engine.asked}
    assert ["subtract" in prompt for prompt in prompts] == [False, True]


def test_a_template_error_fails_only_its_rollout(tokenizer, monkeypatch):
    def refuse(*arguments: Any) -> list[int]:
        raise ValueError("no such role")

    monkeypatch.setattr(ChatFormat, "reply_ids", refuse)
    rollouts, _ = play(tokenizer, {0: [call("multiply", a=1, b=1), "ok"], 1: ["ok"], 2: ["ok"]}, [multiply])
    assert [r.finish_reason for r in rollouts] == ["error", "eos", "eos"]
    assert "cannot render a tool's reply: ValueError: no such role" in rollouts[0].trace.problem


def test_a_failed_rollout_has_a_prompt_though_its_row_has_none(tokenizer):
    class Fussy(Counter):
        def reset(self, **row: Any) -> None:
            assert "prompt" not in row
            if row["level"] == 0:
                raise ValueError("no such level")
            super().reset()

    script: dict[int, list[str]] = {row: ["ok"] for row in range(3)}
    rollouts, _ = play(tokenizer, script, [], {row: {"level": row} for row in range(3)}, environment=Fussy)
    assert [r.finish_reason for r in rollouts] == ["error", "eos", "eos"]
    assert [r.prompt.row["prompt"] for r in rollouts] == [[{"role": "user", "content": ""}]] * 3


def test_a_text_prompt_late_in_a_stream_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"a row has the text prompt 'abc', but tools and environments need conv"):
        play(tokenizer, {0: ["ok"], 1: ["ok"]}, [multiply], {0: user("go"), 1: {"prompt": "abc"}})


def test_a_turn_that_the_users_parser_cannot_read_is_text(tokenizer, caplog):
    def parse(text: str, ids: list[int]) -> Any:
        raise KeyError("lost")

    with_tools(tokenizer)
    engine = PlayingEngine(tokenizer, {0: ["one"], 1: ["two"]})
    agents = make_agents(engine, tokenizer, [multiply])
    agents.chat = ChatFormat(tokenizer, schemas=[], response_parser=parse)
    rollouts = agents(ask({row: user("go") for row in range(2)}))
    agents.close()
    assert [r.completion[0]["content"] for r in rollouts] == ["one", "two"]
    assert "lost" in rollouts[0].trace.problem
    assert caplog.text.count("a turn could not be read") == 1


# --- metrics ---


def test_metrics_by_hand(tokenizer):
    script = {
        0: [call("multiply", a=1, b=1) + call("nothing"), call("multiply", a=2, b=2), "ok"],
        1: ["ok"],
        2: [call("async_add", a=1, b=1), "cut..."],
        3: ["ok"],
    }
    rollouts, _ = play(tokenizer, script, [multiply, async_add])
    metrics = agent_metrics(rollouts, ["multiply", "async_add"], ["eos", "length", "error"])
    values: dict[str, Any] = {key: metric.read() for key, metric in metrics.items()}
    assert values["tools/call_frequency"] == 4 / 4
    assert values["tools/failure_frequency"] == 1 / 4
    assert values["tools/timeouts"] == 0
    assert values["rollouts/turns"] == (3 + 1 + 2 + 1) / 4
    assert values["tools/multiply/call_frequency"] == 2 / 4
    # Calls of unknown tools are counted, but the names that a model invents are no metrics.
    assert not any("nothing" in key for key in values)
    assert values["tools/async_add/failure_frequency"] == 0
    assert values["tools/multiply/latency_s"] < 1
    assert values["rollouts/eos"] == 3 / 4
    assert values["rollouts/length"] == 1 / 4
    assert values["rollouts/error"] == 0
    assert 0 <= values["tools/wait_hidden"] <= 1


def test_without_calls_frequencies_are_zero_without_weight(tokenizer):
    rollouts, _ = play(tokenizer, {0: ["ok"]}, [multiply])
    metrics = agent_metrics(rollouts, ["multiply"], ["eos"])
    assert metrics["tools/failure_frequency"].read() == 0
    assert 3.0 + float(metrics["tools/failure_frequency"].weight) == 3.0
    assert rollouts[0].completion_ids[-1] == EOS
