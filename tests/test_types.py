"""The records."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from groupgrad.errors import ConfigError
from groupgrad.types import Batch, Prompt, Rollout, StepTotals


def batch(**changes: object) -> Batch:
    tensors = {
        "completion_ids": torch.tensor([1, 2, 3]),
        "row_of_token": torch.tensor([0, 0, 1]),
        "offsets": torch.tensor([0, 2, 3]),
        "prompt_ids": torch.tensor([4]),
        "prompt_offsets": torch.tensor([0, 1]),
        "prompt_of_row": torch.tensor([0, 0]),
        "trained": torch.tensor([True, True, False]),
        "advantages": torch.tensor([1.0, -1.0]),
        "totals": StepTotals(2.0, 2.0),
    }
    return Batch(**{**tensors, **changes})  # pyright: ignore[reportArgumentType]


def test_a_batch_moves_every_tensor_and_nothing_else():
    original = batch(old_logprobs=torch.zeros(3))
    moved = original.to("meta")
    for field in dataclasses.fields(Batch):
        value, before = getattr(moved, field.name), getattr(original, field.name)
        if isinstance(before, torch.Tensor):
            assert value.device.type == "meta", field.name
            assert before.device.type == "cpu", field.name
            assert (value.shape, value.dtype) == (before.shape, before.dtype)
        else:
            assert value is before
    assert moved.ref_logprobs is None
    assert (moved.num_rows, moved.num_tokens) == (2, 3)


def rollout(**fields: object) -> Rollout:
    values = {"completion_ids": [7, 8, 1], "finish_reason": "eos", **fields}
    return Rollout(Prompt([1], {"prompt": "x"}, 0), 0, completion="", text="", **values)  # pyright: ignore


def test_anything_but_an_end_of_sequence_is_truncated():
    reasons = ("eos", "length", "tool_budget", "context", "tool_limit", "error")
    assert [rollout(finish_reason=reason).is_truncated for reason in reasons] == [False] + [True] * 5


def test_sampled_tokens_leave_out_what_tools_wrote():
    assert rollout().num_sampled == 3
    assert rollout(sampled=[True, False, True]).num_sampled == 2
    assert rollout(completion_ids=[]).num_sampled == 0


def test_finished_records_cannot_be_edited():
    for record, name in ((rollout(), "completion_ids"), (Prompt([1], {}, 0), "ids"), (StepTotals(1.0, 1.0), "rows")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


def test_a_conversation_is_told_from_a_text():
    assert not Prompt([1], {"prompt": "x"}, 0).is_conversational
    assert Prompt([1], {"prompt": [{"role": "user", "content": "x"}]}, 0).is_conversational


def test_a_config_error_lists_every_problem():
    assert str(ConfigError(["a is 1"])) == "a is 1"
    both = ConfigError(["a is 1", "b is 2"])
    assert str(both) == "2 settings cannot work:\n  1. a is 1\n  2. b is 2"
    assert both.problems == ["a is 1", "b is 2"]
    assert isinstance(both, ValueError)
