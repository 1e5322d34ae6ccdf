"""Rollouts to batches and back."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import torch

from groupgrad.batch import Batch, StepTotals
from groupgrad.batching.buffer import GenerationBuffer
from groupgrad.batching.collate import collate
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.types import Prompt, Rollout

PROMPTS = {5: Prompt([10, 11], {"prompt": "x"}, 5), 2: Prompt([20], {"prompt": "y"}, 2)}


def rollout(group: int, index: int, ids: list[int], reason: Any = "eos", **fields: Any) -> Rollout:
    return Rollout(PROMPTS[group], index, ids, reason, "text", "text", **fields)


def ragged() -> list[Rollout]:
    """Two groups out of order, an empty completion, tool tokens, a truncated row."""
    return [
        rollout(5, 10, [7, 8, 1]),
        rollout(2, 4, []),
        rollout(5, 11, [9, 9, 9, 1], sampled=[True, False, False, True]),
        rollout(2, 5, [6, 6], "length"),
    ]


def test_flat_tensors_by_hand():
    batch = collate(ragged(), [0.5, -1.0, 2.0, 0.0], mask_truncated=False)
    assert batch.completion_ids.tolist() == [7, 8, 1, 9, 9, 9, 1, 6, 6]
    assert batch.row_of_token.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 3]
    assert batch.offsets.tolist() == [0, 3, 3, 7, 9]
    assert batch.prompt_ids.tolist() == [10, 11, 20]
    assert batch.prompt_offsets.tolist() == [0, 2, 3]
    assert batch.prompt_of_row.tolist() == [0, 1, 0, 1]
    assert batch.trained.tolist() == [True, True, True, True, False, False, True, True, True]
    assert batch.advantages.tolist() == [0.5, -1.0, 2.0, 0.0]
    assert batch.row_index.tolist() == [10, 4, 11, 5]
    assert batch.sampling_logprobs is None
    assert (batch.num_rows, batch.num_tokens, batch.totals.rows) == (4, 9, 4.0)


def test_truncated_rows_leave_the_loss_but_stay_rows():
    rollouts = [*ragged(), rollout(2, 6, [3, 1], "tool_limit"), rollout(2, 7, [3], "context")]
    batch = collate(rollouts, [0.0] * 6, mask_truncated=True)
    assert batch.trained.tolist() == [True, True, True, True, False, False, True] + [False] * 5
    assert batch.num_rows == 6
    assert batch.totals.rows == 6.0


def test_sampling_logprobs_are_nan_where_none_were_reported():
    rollouts = [rollout(5, 0, [7, 1], sampling_logprobs=[-0.5, -0.25]), rollout(5, 1, [7]), rollout(5, 2, [])]
    values = collate(rollouts, [0.0] * 3, mask_truncated=False).sampling_logprobs
    assert values is not None
    assert values[:2].tolist() == [-0.5, -0.25]
    assert math.isnan(values[2])
    assert values.shape == (3,)


def test_entropies_and_versions_come_along():
    rollouts = [
        rollout(5, 0, [7, 1], sampling_entropy=[0.5, 0.25], policy_version=3),
        rollout(5, 1, [7], sampling_entropy=[1.0], policy_version=4),
        rollout(2, 2, [6]),
    ]
    batch = collate(rollouts, [0.0] * 3, mask_truncated=False)
    assert batch.sampling_entropy is not None and batch.policy_version is not None
    assert batch.sampling_entropy[:3].tolist() == [0.5, 0.25, 1.0]
    assert math.isnan(batch.sampling_entropy[3])
    assert batch.policy_version.tolist() == [3, 4, 0]
    assert collate(rollouts[2:], [0.0], mask_truncated=False).sampling_entropy is None


def test_no_rollouts_make_an_empty_batch():
    batch = collate([], [], mask_truncated=True)
    assert (batch.num_rows, batch.num_tokens) == (0, 0)
    assert batch.offsets.tolist() == batch.prompt_offsets.tolist() == [0]
    assert (batch.completion_ids.dtype, batch.trained.dtype) == (torch.int64, torch.bool)


def assert_equal(first: Batch, second: Batch) -> None:
    for f in dataclasses.fields(Batch):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, f.name
            assert torch.equal(a, b), f.name
        else:
            assert a == b, f.name


def test_a_generation_batch_survives_being_saved():
    batches = {
        7: dataclasses.replace(
            collate(ragged(), [0.1, 0.2, 0.3, 0.4], mask_truncated=True),
            old_logprobs=torch.linspace(-1, 0, 9),
            totals=StepTotals(8.0, 7.0, 2, 3, entropy_threshold=0.5, entropy_tokens=4.0),
        ),
        8: collate([rollout(2, 0, [])], [0.0], mask_truncated=False),
    }
    buffer = GenerationBuffer()
    buffer.batches |= batches
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    restored = GenerationBuffer()
    restored.load_state_dict(torch.load(file, weights_only=True))
    for number, batch in batches.items():
        assert_equal(batch, restored.batches[number])
    assert set(restored.batches) == set(batches)


def test_a_generation_batch_for_other_sizes_is_dropped_with_the_reason():
    sizes = {"accumulation": 2, "steps_per_generation": 2, "num_iterations": 1, "num_generations": 2}
    saved = GenerationBuffer(GenerationPlan(micro_batch_rows=2, world_size=1, **sizes))
    saved.batches[0] = collate(ragged(), [0.1, 0.2, 0.3, 0.4], mask_truncated=False)
    restored = GenerationBuffer(GenerationPlan(micro_batch_rows=4, world_size=1, **sizes))
    restored.load_state_dict(saved.state_dict())
    assert restored.batches == {}
    assert restored.incompatibility == "for other sizes (micro_batch_rows: 2 then, 4 now)"


def test_a_generation_batch_of_an_older_checkpoint_lacks_what_was_not_known_then():
    buffer = GenerationBuffer()
    buffer.batches[0] = collate([rollout(5, 0, [7, 1], sampling_entropy=[0.5, 0.25])], [1.0], mask_truncated=False)
    state = buffer.state_dict()
    for name in ("sampling_entropy", "policy_version"):
        del state["rounds"]["0"][0][name]
    restored = GenerationBuffer()
    restored.load_state_dict(state)
    found = restored.batches[0]
    assert (found.sampling_entropy, found.policy_version) == (None, None)
    assert found.completion_ids.tolist() == [7, 1]


def test_a_checkpoint_with_one_batch_a_micro_batch_is_read():
    batch = collate(ragged(), [0.1, 0.2, 0.3, 0.4], mask_truncated=True)
    state = GenerationBuffer().state_dict()
    for number, rows in enumerate(([0, 1], [2, 3])):
        part = GenerationBuffer()
        part.batches[0] = batch.select(rows)
        (fields,) = part.state_dict()["rounds"]["0"]
        state["rounds"].setdefault("0", []).append({**fields, "passes": None})
        assert len(state["rounds"]["0"]) == number + 1
    restored = GenerationBuffer()
    restored.load_state_dict(state)
    assert_equal(restored.batches[0], batch)
