"""Rows that are long beside their prompt are trained in passes of a set size, with the same result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_hybrids import make_hybrid
from torch import nn

from groupgrad.batching.packing import RowCost, split_to_size, total_cost
from groupgrad.memory.oom_retry import memory_guard


def long_rows(make_policy: Any) -> nn.Module:
    """A policy whose completions nearly all reach the limit."""
    policy = make_policy()
    policy.generation_config.eos_token_id = 1
    return policy


def passes_of(trainer: Any) -> list[tuple[int, int, int]]:
    """Prompt tokens, rows and completion tokens of each pass that `trainer` makes from now on."""
    passes: list[tuple[int, int, int]] = []
    inner = trainer.batch_loss

    def watched(model: nn.Module, batch: Any, **options: Any) -> Any:
        passes.append((len(batch.prompt_ids), batch.num_rows, batch.num_tokens))
        return inner(model, batch, **options)

    trainer.batch_loss = watched
    return passes


def test_rows_of_a_group_are_cut_into_passes(make_trainer: Any, make_policy: Any) -> None:
    settings = {"max_completion_length": 200, "max_steps": 1, "per_device_train_batch_size": 4}
    whole = make_trainer(model=long_rows(make_policy), **settings)
    cut = make_trainer(model=long_rows(make_policy), max_tokens_per_pass=300, **settings)
    taken = []
    for trainer in (whole, cut):
        passes = passes_of(trainer)
        trainer.train()
        taken.append(passes)
    (single,), parts = taken
    assert single[1] == 4 and 400 < single[2] < 500
    assert len(parts) == 2
    assert sum(tokens for _, _, tokens in parts) == single[2]
    assert all(prompt + tokens <= 300 for prompt, _, tokens in parts)


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["attention", "qwen3_5"])
def test_the_size_of_a_pass_changes_no_weight(
    family: str, make_trainer: Any, make_policy: Any, tools: Any, tmp_path: Any
) -> None:
    weights, numbers = [], []
    for number, size in enumerate((None, 250, 1)):
        policy = long_rows(make_policy) if family == "attention" else make_hybrid(family, vocab_size=92)
        trainer = make_trainer(
            model=policy,
            max_tokens_per_pass=size,
            max_completion_length=100,
            max_steps=2,
            beta=0.05,
            optim="sgd",
            output_dir=str(tmp_path / str(number)),
        )
        passes, start = passes_of(trainer), tools.weights(policy)
        trainer.train()
        weights.append(tools.weights(trainer.model))
        numbers.append(len(passes))
        assert tools.relative(weights[-1], start) > 1e-5
    assert numbers[0] < numbers[1] <= numbers[2]
    for other in weights[1:]:
        assert tools.relative(weights[0] - start, other - start) < 1e-3
        assert tools.relative(other, weights[0]) < 1e-6


def test_a_prompt_is_not_computed_again_where_that_costs_much() -> None:
    short = [RowCost(completion=10, prompt=100, group=0)] * 8
    assert split_to_size(short, limit=50) == [list(range(8))]
    long = [RowCost(completion=1000, prompt=100, group=0)] * 8
    parts = split_to_size(long, limit=2000)
    assert sorted(row for part in parts for row in part) == list(range(8))
    assert len(parts) == 5  # four prompts more are 400 of 8,100
    repeated = sum(total_cost(long[row] for row in part) for part in parts) / total_cost(long) - 1
    assert 0.04 < repeated < 0.05
    assert [len(part) for part in split_to_size([RowCost(1000, 0, 0)] * 4, limit=1)] == [1, 1, 1, 1]


def test_cut_groups_stand_beside_whole_ones() -> None:
    costs = [RowCost(900, 10, 0), RowCost(50, 10, 1), RowCost(900, 10, 0), RowCost(50, 10, 1), RowCost(50, 10, 2)]
    assert split_to_size(costs, limit=1000) == [[1, 3, 4], [0], [2]]


@pytest.mark.parametrize(
    ("changes", "aux_loss", "reason"),
    [
        ({"deepspeed": {}}, False, "DeepSpeed keeps the gradients"),
        ({"optim": "adalomo"}, False, "changes weights while"),
        ({}, True, "load-balancing loss"),
    ],
)
def test_it_is_refused_where_micro_batches_cannot_be_cut(changes: Any, aux_loss: bool, reason: str) -> None:
    settings = {"device": torch.device("cpu"), "deepspeed": None, "optim": "adamw_torch", "max_tokens_per_pass": 512}
    settings["context_parallel_size"] = 1
    with pytest.raises(ValueError, match=rf"max_tokens_per_pass=512 cuts micro-batches, and .*{reason}"):
        memory_guard(nn.Linear(1, 1), SimpleNamespace(**{**settings, **changes}), list, aux_loss=aux_loss)
