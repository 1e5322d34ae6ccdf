"""Groups without a signal give place to groups of other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from collectors import make_collector
from datasets import Dataset

from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import BatchEngine, Sample, SamplingOptions
from groupgrad.objectives import Advantages, compute_advantages
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.collector import Experience, ScoringOptions
from groupgrad.rollout.dynamic_sampling import DynamicSampling
from groupgrad.rollout.requests import GenerationRequest
from groupgrad.rollout.single_turn import SingleTurnRollouts

DATA = Dataset.from_dict({"prompt": list("abcdefgh"), "row": list(range(8))})


class Asked(BatchEngine):
    """An engine whose completions are the prompt, once for each row of a group, and notes the seeds of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def sample(self, requests: Sequence[Any], options: SamplingOptions) -> list[Sample]:
        self.calls.append([request.seed for request in requests])
        return [Sample([*request.prompt_ids, 1], "eos") for request in requests]


class Rewards:
    """Rewards of 0, but 1 for the second row of each prompt in `varied`. Notes the rows it sees."""

    def __init__(self, *varied: int):
        self.varied, self.seen = varied, []
        self.__name__ = "score"

    def __call__(self, row: list[int], log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        self.seen.append(row)
        log_extra("seen", list(row))
        log_metric("calls", 1.0)
        found, met = [], set()
        for number in row:
            found.append(1.0 if number in self.varied and number in met else 0.0)
            met.add(number)
        return found


def collect(
    tokenizer: Any,
    rewards: Rewards,
    num_rounds: int,
    *,
    dataset: Any = DATA,
    phase: str = "train",
    groups: int = 3,
    number: int = 4,
    **more: Any,
) -> tuple[Experience, Asked]:
    """A generation batch of groups of two whose loader has brought the first rows of `DATA`."""
    engine = Asked()
    rollouts = SingleTurnRollouts(PromptMaker(tokenizer), engine, SamplingOptions(8), seed=0)
    dynamic = DynamicSampling(num_rounds, dataset, seed=3) if num_rounds else None
    scoring = ScoringOptions((1.0,), scale_rewards="none")
    collector = make_collector(rollouts, RewardRunner([rewards]), scoring, dynamic=dynamic, **more)
    rows = {group: DATA[group] for group in range(groups)}
    size = 2 * groups
    return collector(GenerationRequest(rows, range(size), size, 2, phase, number, 9), trainer_state=None), engine


def values(experience: Experience) -> dict[str, Any]:
    return {name: metric.read() for name, metric in experience.metrics.items()}


def test_groups_without_a_signal_are_replaced_whole(tokenizer):
    """Group 1 varies at once. The others do once their new prompts are drawn, since all prompts but 0 and 2 vary."""
    rewards = Rewards(1, 3, 4, 5, 6, 7)
    experience, engine = collect(tokenizer, rewards, 20)
    assert rewards.seen[0] == [0, 0, 1, 1, 2, 2]
    assert [rollout.index for rollout in experience.rollouts] == list(range(6))
    prompts = [DATA["prompt"].index(rollout.prompt.row["prompt"]) for rollout in experience.rollouts]
    assert prompts[2:4] == [1, 1], "its group had a signal, so it stays"
    assert prompts[0] == prompts[1] and prompts[4] == prompts[5]
    assert not {0, 2} & set(prompts)
    assert experience.advantages.tolist() == [-0.5, 0.5] * 3
    assert experience.combined_rewards == [0.0, 1.0] * 3
    assert experience.table.rewards.flatten().tolist() == [0.0, 1.0] * 3
    assert experience.table.columns["seen"] == prompts, "what a function logged of a row goes with its row"
    assert len(engine.calls[0]) == 6 and all(len(call) in (2, 4) for call in engine.calls[1:])
    assert len(engine.calls) == len(rewards.seen) > 1


def test_estimators_get_the_lengths_of_the_groups_that_stay(tokenizer):
    def advantages(rewards: torch.Tensor, num_generations: int, lengths: torch.Tensor) -> Advantages:
        given.append(lengths.tolist())
        return compute_advantages(rewards, [1.0], num_generations, estimator="opo", lengths=lengths)

    given: list[list[float]] = []
    longer = Dataset.from_dict({"prompt": [name * (2 + row) for row, name in enumerate("abcdefgh")], "row": range(8)})
    experience, _ = collect(tokenizer, Rewards(1, 3, 4, 5, 6, 7), 20, dataset=longer, compute_advantages=advantages)
    assert given[0] == [2.0] * 6, "a prompt of one token, and the end"
    assert given[-1] == [float(rollout.num_sampled) for rollout in experience.rollouts]
    assert given[-1][2:4] == [2.0, 2.0] and len(set(given[-1])) > 1


def test_metrics_say_what_it_cost(tokenizer):
    """One group of three is replaced in one round: 8 completions in all, of rewards 0, 0 and three times 0, 1."""
    experience, engine = collect(tokenizer, Rewards(1, 2, 3, 4, 5, 6, 7), 20)
    rounds, found = len(engine.calls) - 1, values(experience)
    assert rounds == 1, "the prompt that this seed draws is another than 0"
    assert found["dynamic_sampling/rounds"] == 1
    assert found["dynamic_sampling/discarded"] == pytest.approx(1 / 3)
    assert found["dynamic_sampling/reward"] == pytest.approx(3 / 8)
    assert found["reward"] == pytest.approx(3 / 6)
    assert found["frac_reward_zero_std"] == 0.0
    assert found["calls"] == 1.0, "a metric that functions log is the mean over both rounds"
    assert experience.num_tokens == 8 * 3, "a prompt token, its copy and the end, discarded completions included"


def test_rounds_end_with_their_number(tokenizer):
    """No prompt varies: after two further rounds the groups of the last one stay, with advantages of 0."""
    rewards = Rewards()
    experience, engine = collect(tokenizer, rewards, 2)
    assert [len(call) for call in engine.calls] == [6, 6, 6]
    assert experience.advantages.tolist() == [0.0] * 6
    assert values(experience)["frac_reward_zero_std"] == 1.0
    assert values(experience)["dynamic_sampling/rounds"] == 2
    assert values(experience)["dynamic_sampling/discarded"] == 2.0
    assert rewards.seen[1][::2] == rewards.seen[1][1::2], "both rows of a group have its prompt"
    assert len(set(rewards.seen[1])) == 3, "the groups of a round have distinct prompts"
    assert rewards.seen[1] != rewards.seen[2], "each round draws anew"
    seeds = [seed for call in engine.calls for seed in call]
    assert len(set(seeds)) == len(seeds), "every row of every round has a random stream of its own"


def test_groups_stay_whole_where_advantages_flag_single_rows(tokenizer):
    """A subclass may find no signal in one row of a group: the group stays."""

    def advantages(rewards: torch.Tensor, num_generations: int) -> Advantages:
        result = compute_advantages(rewards, [1.0], num_generations)
        return replace(result, zero_std=torch.tensor([True, False, True, True, False, False]))

    rewards = Rewards()
    experience, engine = collect(tokenizer, rewards, 1, compute_advantages=advantages)
    assert [len(call) for call in engine.calls] == [6, 2]
    prompts = [rollout.prompt.row["row"] for rollout in experience.rollouts]
    assert prompts[:2] == [0, 0] and prompts[4:] == [2, 2] and prompts[2:4] == rewards.seen[1]


def test_each_generation_batch_draws_prompts_of_its_own(tokenizer):
    """The same ones come again."""
    first, again, second = Rewards(), Rewards(), Rewards()
    collect(tokenizer, first, 3)
    collect(tokenizer, again, 3)
    collect(tokenizer, second, 3, number=5)
    assert first.seen == again.seen
    assert first.seen[0] == second.seen[0], "those that the loader has brought"
    assert first.seen[1:] != second.seen[1:]


@pytest.mark.parametrize(("num_rounds", "phase"), [(0, "train"), (5, "eval")])
def test_without_rounds_and_in_evaluation_nothing_is_replaced(tokenizer, num_rounds, phase):
    experience, engine = collect(tokenizer, Rewards(), num_rounds, phase=phase)
    assert len(engine.calls) == 1
    assert not any(name.startswith("dynamic_sampling") for name in experience.metrics)


def test_a_batch_whose_groups_all_vary_is_sampled_once(tokenizer):
    experience, engine = collect(tokenizer, Rewards(*range(8)), 5)
    assert len(engine.calls) == 1
    assert values(experience)["dynamic_sampling/rounds"] == 0
    assert values(experience)["dynamic_sampling/discarded"] == 0
    assert torch.equal(experience.advantages, torch.tensor([-0.5, 0.5] * 3, dtype=torch.float64))


def test_as_many_groups_as_prompts(tokenizer):
    """Every draw is a permutation of all rows."""
    rewards = Rewards()
    collect(tokenizer, rewards, 1, groups=8)
    assert sorted(rewards.seen[1][::2]) == list(range(8))
