"""What a reward of weight 0 may be, which values and callables are rewards, and what is said of dropped names."""

from __future__ import annotations

import asyncio
import functools
import math
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from datasets import Dataset

from groupgrad.apps.check.round_findings import _rewards
from groupgrad.apps.check.small_round import Round, Usage

INF, NAN = math.inf, math.nan


def by_row(*rewards: Any, name: str = "judge") -> Any:
    """A reward function that gives the completions of every group these rewards."""

    def reward(completions: list[Any], **kwargs: Any) -> list[Any]:
        return [rewards[place % len(rewards)] for place in range(len(completions))]

    reward.__name__ = name
    return reward


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_reward_of_weight_0_is_logged_and_counts_for_nothing(make_trainer, aggregation, caplog):
    """The fourth row of each group has no reward of the first function; the others have 1, 2 and 3.

    GDPO divides by the deviation of the batch too, here of six values -1, 0 and 1: sqrt(4 / 5).
    """
    found: list[Any] = []
    trainer = make_trainer(
        reward_funcs=[by_row(1.0, 2.0, 3.0, None), by_row(INF, -5.0, None, 7.0, name="seen"), by_row(NAN, name="none")],
        reward_weights=[2.0, 0.0, 0.0],
        multi_objective_aggregation=aggregation,
        log_completions=True,
        max_steps=1,
        num_completions_to_print=0,
    )
    trainer.on_experience = found.append
    trainer.train()
    scale = {"sum_then_normalize": 2 / (2 + 1e-4)}.get(aggregation)
    if scale is None:
        z = 1 / (1 + 1e-4)
        scale = 2 * z / (2 * z * math.sqrt(4 / 5) + 1e-4)
    (experience,) = found
    assert experience.advantages.tolist() == pytest.approx([-scale, 0, scale, 0] * 2, abs=1e-12)
    assert experience.combined_rewards == pytest.approx([2, 4, 6, NAN] * 2, nan_ok=True)
    log = trainer.state.log_history[0]
    assert (log["reward"], log["rewards/judge/mean"], log["rewards/seen/mean"]) == (4, 2, INF)
    assert log["frac_reward_zero_std"] == 0
    assert "rewards/none/mean" not in log
    assert math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"])
    assert "2 of 8 completions got no reward, since 'judge' returned None or NaN" in caplog.text
    (file,) = Path(trainer.args.output_dir, "completions").glob("*.parquet")
    assert Dataset.from_parquet(str(file))["seen"][:4] == [INF, -5.0, None, 7.0]  # pyright: ignore


def test_check_reports_a_round_that_only_a_reward_of_weight_0_scored():
    metrics = {"rewards/seen/mean": 3.0, "frac_reward_zero_std": 1.0, "time/rewards": 0.1, "step_time": 1.0}
    done = Round(metrics, rows=8, micro_batch_rows=8, sample="", memory=Usage("host", False, 2, 1, 4))
    (first, *_) = _rewards(done, {}, ["judge", "seen"])
    assert first.status == "error" and "judge gave no number for any completion" in first.text


def test_numbers_and_callables_of_many_kinds_are_rewards(train):
    """Decimals are numbers, and what can be called is a function although it has `__fspath__`, as mock objects do."""
    mock = MagicMock(side_effect=lambda completions, **_: [Decimal("0.5"), Decimal("nan")] * (len(completions) // 2))
    trainer = train(reward_funcs=[mock], max_steps=1)
    assert trainer.state.log_history[0]["reward"] == 0.5
    assert mock.call_count == 1 and len(mock.call_args.kwargs["completions"]) == 8


def test_a_rollout_function_replaces_no_argument_of_the_trainer(train):
    seen: list[Any] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[5 + i, 6, 1] for i in range(len(prompts))]
        extra = {"completions": ["x"] * len(ids), "prompts": prompts, "log_metric": [1] * len(ids), "mine": 3}
        return {"prompt_ids": [[9]] * len(ids), "completion_ids": ids, "logprobs": None, **extra}

    def reward(completions: list[str], mine: list[int], **kwargs: Any) -> list[float]:
        seen.append(SimpleNamespace(completions=completions, mine=mine))
        return [1.0] * len(completions)

    train(reward_funcs=reward, max_steps=2, trainer={"rollout_func": rollout})
    assert seen[0].mine == [3] * 8 and "x" not in seen[0].completions


class Client:
    """A client as libraries have them: it belongs to the event loop of its first request."""

    def __init__(self) -> None:
        self.loops: list[Any] = []

    async def ask(self, who: str) -> float:
        self.loops.append(asyncio.get_running_loop())
        if self.loops[0] is not self.loops[-1]:
            raise RuntimeError(f"{who} is bound to a different event loop")
        await asyncio.sleep(0)
        return float(len(self.loops) % 3)


def test_rewards_tools_and_environments_of_all_trainers_share_an_event_loop(train):
    client, asked = Client(), set()

    class Office:
        async def reset(self, **columns: Any) -> str:
            asked.add("reset")
            await client.ask("reset")
            return "hello"

        async def get_reward(self) -> float:
            asked.add("get_reward")
            return await client.ask("get_reward")

    async def polite(completions: list[Any], **kwargs: Any) -> list[float]:
        asked.add("reward")
        return [await client.ask("reward") for _ in completions]

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}] * 2)
    for _ in range(2):
        train(
            reward_funcs=[polite, lambda completions, **_: polite(completions)],
            train_dataset=rows,
            max_steps=1,
            trainer={"environment_factory": Office},
        )
    assert asked == {"reset", "get_reward", "reward"}
    assert len(client.loops) == 2 * 8 * 4 and len(set(client.loops)) == 1


def test_a_partial_with_the_name_of_its_function_needs_no_column_for_what_it_sets(train):
    """`update_wrapper` gives it the function's signature too, in which `scale` is required."""

    def lengths(completions, scale, **kwargs):
        return [float(scale * len(text)) for text in completions]

    named = functools.update_wrapper(functools.partial(lengths, scale=2), lengths)
    trainer = train(reward_funcs=[named, functools.partial(lengths, scale=1)], max_steps=1)
    logged = trainer.state.log_history[0]
    assert logged["rewards/lengths/mean"] == 2 * logged["rewards/lengths_2/mean"] > 0
