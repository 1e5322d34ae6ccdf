"""The records."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupgrad.batch import Batch, StepTotals
from groupgrad.errors import ConfigError
from groupgrad.types import Branch, Prompt, Rollout


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


# --------------------------------------------------------------------------------------------- select and concat


@st.composite
def ragged_batches(draw: st.DrawFn, max_rows: int = 6) -> Batch:
    """Rows of 0 to 4 tokens over prompts that no two of are equal; every field filled with numbers of its own."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=3, unique_by=tuple))
    lengths = draw(st.lists(st.integers(0, 4), max_size=max_rows))
    owners = [draw(st.integers(0, len(prompts) - 1)) for _ in lengths]
    tokens, rows = sum(lengths), len(lengths)
    start = draw(st.integers(0, 10**6))
    numbers = torch.arange(start, start + tokens)
    return Batch(
        completion_ids=numbers,
        row_of_token=torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths, dtype=torch.int64)),
        offsets=torch.tensor([0, *accumulate(lengths)]),
        prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.int64),
        prompt_offsets=torch.tensor([0, *accumulate(map(len, prompts))]),
        prompt_of_row=torch.tensor(owners, dtype=torch.int64),
        trained=numbers % 3 > 0,
        advantages=torch.arange(start, start + rows).float() / 8,
        totals=StepTotals(rows=7.0, tokens=9.0),
        sampling_logprobs=-numbers.float() / 16,
        sampling_entropy=numbers.float() / 32,
        row_index=torch.arange(start, start + rows),
        policy_version=torch.full((rows,), start),
    )


def row_records(batch: Batch) -> list[dict[str, object]]:
    """One record a row, without offsets."""
    records = []
    for row in range(batch.num_rows):
        tokens, prompt = batch.row_of_token == row, int(batch.prompt_of_row[row])
        assert tokens.nonzero().flatten().tolist() == list(range(*batch.offsets[row : row + 2].tolist()))
        record: dict[str, object] = {
            "prompt": batch.prompt_ids[batch.prompt_offsets[prompt] : batch.prompt_offsets[prompt + 1]].tolist()
        }
        for name in ("completion_ids", "trained", "sampling_logprobs", "sampling_entropy"):
            record[name] = getattr(batch, name)[tokens].tolist()
        for name in ("advantages", "row_index", "policy_version"):
            record[name] = getattr(batch, name)[row].item()
        records.append(record)
    return records


@given(ragged_batches(), st.data())
def test_selected_rows_are_what_they_were(whole: Batch, data: st.DataObject):
    places = st.lists(st.integers(0, whole.num_rows - 1), unique=True) if whole.num_rows else st.just([])
    rows = data.draw(places)
    part, records = whole.select(rows), row_records(whole)
    assert row_records(part) == [records[row] for row in rows]
    assert sorted(set(part.prompt_of_row.tolist())) == list(range(len(part.prompt_offsets) - 1))
    assert part.totals is whole.totals
    assert part.old_logprobs is None


@given(st.lists(ragged_batches(), min_size=1, max_size=3))
def test_joined_batches_hold_every_row_and_each_prompt_once(parts: list[Batch]):
    whole = Batch.concat(parts)
    assert row_records(whole) == [record for part in parts for record in row_records(part)]
    assert len(set(whole.prompts())) == len(whole.prompts())
    assert set(whole.prompts()) == {ids for part in parts for ids in part.prompts()}
    again = Batch.concat([whole.select(range(1)), whole.select(range(1, whole.num_rows))]) if whole.num_rows else whole
    assert row_records(again) == row_records(whole)


def test_what_one_batch_does_not_know_is_marked():
    known = batch(sampling_logprobs=torch.tensor([-1.0, -2.0, -3.0]), policy_version=torch.tensor([4, 4]))
    whole = Batch.concat([known, batch()])
    assert whole.sampling_logprobs is not None and whole.policy_version is not None
    assert whole.sampling_logprobs[:3].tolist() == [-1.0, -2.0, -3.0]
    assert bool(whole.sampling_logprobs[3:].isnan().all())
    assert whole.policy_version.tolist() == [4, 4, -1, -1]
    assert (whole.sampling_entropy, whole.row_index, whole.old_logprobs) == (None, None, None)


def test_rows_without_turns_have_their_advantage_beside_rows_that_have_some():
    with_turns = batch(token_advantages=torch.tensor([0.5, 0.0, -1.5]), selected=torch.tensor([True, False, False]))
    plain = batch()
    whole = Batch.concat([plain, with_turns])
    assert whole.token_advantages is not None and whole.selected is not None
    assert whole.token_advantages[:3].tolist() == plain.advantages[plain.row_of_token].tolist()
    assert whole.token_advantages[3:].tolist() == [0.5, 0.0, -1.5]
    assert whole.selected.tolist() == [False] * 3 + [True, False, False]
    assert Batch.concat([plain, plain]).token_advantages is None


BRANCHES = (Branch(1, (7, 8)), Branch(2, (4, 1)))


def test_a_branch_is_a_row_of_its_own_in_a_pass():
    """Row 0 is [1 2 3 5] behind [4]: [2] continues [7 8], [3 5] continues [4 1]; row 1 is [6] behind [4]."""
    whole = batch(
        completion_ids=torch.tensor([1, 2, 3, 5, 6]),
        row_of_token=torch.tensor([0, 0, 0, 0, 1]),
        offsets=torch.tensor([0, 4, 5]),
        trained=torch.ones(5, dtype=torch.bool),
        branches=(BRANCHES, ()),
    )
    found = whole.by_branch()
    assert found.prompts() == [(4,), (7, 8), (4, 1)]
    assert found.prompt_of_row.tolist() == [0, 1, 2, 0]
    assert found.offsets.tolist() == [0, 1, 2, 4, 5]
    assert found.row_of_token.tolist() == [0, 1, 2, 2, 3]
    assert found.completion_ids is whole.completion_ids
    assert found.advantages.tolist() == [1.0, 1.0, 1.0, -1.0]
    assert found.branches is None and found.by_branch() is found
    first = whole.select([1, 0])
    assert first.branches == ((), BRANCHES)
    assert whole.select([1]).branches is None
    joined = Batch.concat([whole.select([1]), whole.select([0])])
    assert joined.branches == ((), BRANCHES)


def test_a_row_may_begin_with_a_branch():
    found = batch(branches=((Branch(0, (9, 9)),), ())).by_branch()
    assert (found.prompts()[int(found.prompt_of_row[0])], found.offsets.tolist()) == ((9, 9), [0, 2, 3])


@pytest.mark.parametrize("start", [-1, 2])
def test_a_branch_begins_inside_its_row(start: int):
    with pytest.raises(AssertionError, match="outside its row"):
        batch(branches=((Branch(start, (9,)),), ())).by_branch()


def test_a_turn_ends_where_a_branch_begins():
    rollout = Rollout(Prompt([4], {"prompt": "p"}, 0), 0, [1, 2, 3, 5], "eos", "", "", branches=BRANCHES)
    assert rollout.turns == [(0, 1), (1, 2), (2, 4)]
    assert dataclasses.replace(rollout, sampled=[True, False, True, True]).turns == [(0, 1), (2, 4)]
    assert dataclasses.replace(rollout, branches=()).turns == [(0, 4)]


@pytest.mark.parametrize(
    "read",
    [
        lambda found: "advantages" in found,
        lambda found: found["advantages"],
        lambda found: found.get("advantages"),
        dict,
    ],
)
def test_a_batch_is_not_the_dict_of_trl(read):
    """A `compute_loss` that was written for TRL looks for padded tensors in its inputs."""
    with pytest.raises(TypeError, match=r"batch\.advantages .*compute_advantages.*batch_loss.*docs/from-trl\.md"):
        read(batch())
