"""One generation batch, from data-set rows to a collated batch with advantages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from collectors import make_collector
from scripted_agents import PlayingEngine, ask, call, make_agents, user, with_tools

from groupgrad.activity import Timings
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Sample, SamplingOptions
from groupgrad.errors import RolloutError
from groupgrad.objectives import compute_advantages
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.collector import Experience, ScoringOptions, turns_of
from groupgrad.rollout.requests import GenerationRequest, report_failures
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.types import RewardTable

TEXTS = ["ab", "a", "cab", ""]
ROWS = {0: {"prompt": "x", "answer": 1}, 1: {"prompt": "yy", "answer": 2}}


def request(rows: Any = range(4), **changes: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"num_rows": 4, "num_generations": 2, "phase": "train", "number": 0, "step": 5}
    return GenerationRequest(ROWS, rows, **{**settings, **changes})


def make_generation(
    functions: Any, play: Any, tokenizer: Any, batch_request: GenerationRequest | None = None, **options: Any
) -> Experience:
    """A generation batch whose four completions are `TEXTS`; the third is truncated."""
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    engine = play([Sample([*text, 1], "eos") if i != 2 else Sample(text, "length") for i, text in enumerate(ids)])
    rewards = RewardRunner(functions)
    scoring = ScoringOptions(reward_weights=options.pop("reward_weights", (1.0,) * len(rewards.names)), **options)
    rollouts = SingleTurnRollouts(PromptMaker(tokenizer), engine, SamplingOptions(8), seed=0)
    collector = make_collector(rollouts, rewards, scoring)
    return collector(batch_request or request(), trainer_state=None)


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_advantages_are_those_of_the_groups(play, tokenizer):
    """Lengths 2, 1 | 3, 0: deviations +-0.5 and +-1.5, sample std 0.5*sqrt(2) and 1.5*sqrt(2)."""
    experience = make_generation(length, play, tokenizer)
    a, b = 0.5 / (0.5 * 2**0.5 + 1e-4), 1.5 / (1.5 * 2**0.5 + 1e-4)
    assert experience.advantages.tolist() == pytest.approx([a, -a, b, -b], rel=1e-9)
    assert experience.mean_reward == 1.5
    assert [rollout.text for rollout in experience.rollouts] == TEXTS
    metrics = {key: metric.read() for key, metric in experience.metrics.items()}
    assert metrics["reward"] == metrics["rewards/length/mean"] == 1.5
    assert metrics["reward_std"] == pytest.approx((5 / 3) ** 0.5)
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/mean_length"] == (3 + 2 + 3 + 1) / 4
    assert experience.num_tokens == (1 + 3) + (1 + 2) + (2 + 3) + (2 + 1), "every row's prompt counts"


def add(step: int) -> int:
    """Adds.

    Args:
        step: How much.
    """
    return step


def rollouts_of_two_turns(tokenizer: Any, *steps: int) -> Any:
    """A group of rollouts, each of which adds one of these steps, and ends."""
    script = {row: [call("add", step=step), "end"] for row, step in enumerate(steps)}
    agents = make_agents(PlayingEngine(with_tools(tokenizer), script), tokenizer, [add])
    rollouts = agents(ask({0: user("go")}, size=len(steps)))
    agents.close()
    return rollouts


def test_turns_have_advantages_of_their_own(tokenizer):
    """Two agents add 1 to a counter from 0, one of them twice; each turn's reward is the count that it began with."""
    script = {0: [call("add", step=1), call("add", step=1), "2"], 1: [call("add", step=1), "1"]}
    tools = with_tools(tokenizer)

    def counts(completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
        return [[0.0, 1.0, 4.0], [2.0, 1.0]]

    engine = PlayingEngine(tools, script)
    agents = make_agents(engine, tools, [add])
    rewards = RewardRunner(counts)
    options = ScoringOptions((1.0,), scale_rewards="none", estimator="turn_returns")
    experience = make_collector(agents, rewards, options)(ask({0: user("go")}, size=2), trainer_state=None)
    agents.close()
    # Returns: (5, 5, 4) and (3, 1).
    assert [values.tolist() for values in experience.by_turn or []] == [[1.0, 2.0, 0.0], [-1.0, -2.0]]
    for index, rollout in enumerate(experience.rollouts):
        start, end = experience.batch.offsets.tolist()[index : index + 2]
        expected = torch.zeros(end - start)
        for (first, last), value in zip(rollout.turns, experience.by_turn[index].tolist()):
            expected[first:last] = value
        assert torch.equal(experience.batch.token_advantages[start:end], expected)
        mean = expected.sum() / rollout.num_sampled
        assert experience.advantages[index].item() == pytest.approx(mean.item())
    plain = make_collector(make_agents(engine, tools, [add]), rewards, ScoringOptions((1.0,), scale_rewards="none"))
    summed = plain(ask({0: user("go")}, size=2), trainer_state=None)
    assert summed.advantages.tolist() == [1.0, -1.0] and summed.batch.token_advantages is None, "sums of 5 and 3"


def test_a_row_whose_advantage_alone_was_changed_is_an_error(tokenizer):
    """Its turns are what trains. The rewards of a subclass are those of its turns, though."""

    def scaled(rewards: Any, num_generations: int, **more: Any) -> Any:
        result = compute_advantages(rewards, [1.0], num_generations, "none", estimator="turn_returns", **more)
        return replace(result, advantages=result.advantages * 2)

    agents = make_agents(PlayingEngine(with_tools(tokenizer), {0: ["a"], 1: ["b"]}), tokenizer, [])
    rewards = RewardRunner(lambda completion_ids, **_: [[1.0], [0.0]])
    options = ScoringOptions((1.0,), scale_rewards="none", estimator="turn_returns")
    with pytest.raises(ValueError, match=r"gave row 0 the advantage 1, but the mean .* is 0\.5\. The turns are what"):
        make_collector(agents, rewards, options, compute_advantages=scaled)(
            ask({0: user("go")}, size=2), trainer_state=None
        )
    agents.close()
    (rollout,) = rollouts_of_two_turns(tokenizer, 1)
    table = RewardTable(torch.tensor([[4.0, 2.0, math.nan]]).double(), ["f", "g", "h"])
    table.by_turn[0] = torch.tensor([[1.0, math.nan, 5.0], [2.0, 2.0, 6.0]]).double()
    found = turns_of(rollout, table, 0).rewards.nan_to_num(nan=99.0).tolist()
    assert found == [[1.0, 99.0, 99.0], [3.0, 2.0, 99.0]], "a penalty or bonus of the whole rollout is at its last turn"


def test_states_are_what_was_read_since_the_last_turn(tokenizer):
    rollouts = rollouts_of_two_turns(tokenizer, 1, 1, 2)
    table = RewardTable(torch.tensor([[1.0], [2.0], [3.0]]).double(), ["f"])
    turns = [turns_of(rollout, table, row) for row, rollout in enumerate(rollouts)]
    assert [one.rewards.nan_to_num(nan=99.0).tolist() for one in turns] == [[[99.0], [float(n)]] for n in (1, 2, 3)]
    assert [one.lengths for one in turns] == [[end - start for start, end in rollout.turns] for rollout in rollouts]
    first, second, third = (one.states for one in turns)
    assert first == second and first[0] == third[0] and first[1] != third[1] and first[0] != first[1]


def test_rows_that_nothing_scores_move_nothing(play, tokenizer):
    def long_ones(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None if len(text) == 1 else float(len(text)) for text in completions]

    experience = make_generation(long_ones, play, tokenizer)
    assert experience.advantages.tolist()[:2] == [0.0, 0.0], "one scored row in its group: no baseline"
    assert experience.advantages.tolist()[2] == pytest.approx(1.5 / (1.5 * 2**0.5 + 1e-4))
    assert experience.mean_reward == pytest.approx(5 / 3)
    metrics = {key: metric.read() for key, metric in experience.metrics.items()}
    assert metrics["frac_reward_zero_std"] == 0.5
    nothing = make_generation(lambda completions, **kwargs: [None] * 4, play, tokenizer)
    assert nothing.advantages.tolist() == [0.0] * 4
    assert math.isnan(nothing.mean_reward)
    assert nothing.metrics["reward"].read() is None


def test_a_rank_without_rows_takes_part(play, tokenizer):
    calls: list[int] = []

    def note(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        return [0.0] * len(completions)

    experience = make_generation(note, play, tokenizer, request(rows=[]))
    assert (experience.rollouts, experience.advantages.tolist(), experience.num_tokens, calls) == ([], [], 0, [])


def test_timings_tell_sampling_from_scoring(play, tokenizer):
    ids = tokenizer("ab")["input_ids"]
    timings = Timings()
    rollouts = SingleTurnRollouts(PromptMaker(tokenizer), play([Sample(ids, "eos")] * 4), SamplingOptions(8), seed=0)
    collector = make_collector(rollouts, RewardRunner(length), ScoringOptions((1.0,)), timings)
    collector(request(), trainer_state=None)
    assert list(timings.take()) == ["sampling", "rewards"]


def test_half_of_a_generation_batch_may_fail(caplog):
    training, evaluation = GenerationRequest({}, [], 4, 2, "train", 0, 5), GenerationRequest({}, [], 1, 1, "eval", 0, 5)
    report_failures({3: "late", 1: "no such level"}, training)
    assert "step 5: 2 of 4 rollouts failed and are not scored; the first (row 1): no such level" in caplog.text
    with pytest.raises(RolloutError, match=r"3 of 4 rollouts of step 5 failed, more than half; the first \(row 0\): x"):
        report_failures({0: "x", 1: "y", 2: "z"}, training)
    report_failures({0: "the only row"}, evaluation)
    assert "1 of 1 rollouts failed" in caplog.text


def test_a_generation_batch_is_sampled_in_the_context_given(play, tokenizer):
    events: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    class NotingEngine(play):
        def sample(self, *args: Any) -> Any:
            events.append("sample")
            return super().sample(*args)

    rollouts = SingleTurnRollouts(PromptMaker(tokenizer), NotingEngine([]), SamplingOptions(8), seed=0)
    collector = make_collector(rollouts, RewardRunner(length), ScoringOptions((1.0,)), around=around)
    collector(request(rows=[]), trainer_state=None)
    assert events == ["in", "sample", "out"]
