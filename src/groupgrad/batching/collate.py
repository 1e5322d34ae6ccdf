"""Rollouts to a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from groupgrad.batch import Batch, StepTotals
from groupgrad.types import Prompt, Rollout


def collate(
    rollouts: Sequence[Rollout], advantages: Sequence[float], *, mask_truncated: bool, totals: StepTotals | None = None
) -> Batch:
    """A batch of the rollouts, each distinct prompt once, on the CPU.

    `mask_truncated` takes the tokens of truncated rollouts out of the loss; their rows still count as rows. `totals`
    may be filled in later, when the optimizer step is known.
    """
    # By what the model sees, not by its group: an environment may begin each rollout of a group in another way.
    prompts: dict[tuple[tuple[int, ...], str], Prompt] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.prompt.identity, rollout.prompt)
    numbers = {identity: number for number, identity in enumerate(prompts)}
    prompt_of_row = [numbers[rollout.prompt.identity] for rollout in rollouts]
    media, own = tuple(prompt.media for prompt in prompts.values()), tuple(rollout.media for rollout in rollouts)
    lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts], dtype=torch.int64)
    return Batch(
        completion_ids=_flat([rollout.completion_ids for rollout in rollouts]),
        row_of_token=torch.repeat_interleave(torch.arange(len(rollouts)), lengths),
        offsets=_offsets(lengths.tolist()),
        prompt_ids=_flat([prompt.ids for prompt in prompts.values()]),
        prompt_offsets=_offsets([len(prompt.ids) for prompt in prompts.values()]),
        prompt_of_row=torch.tensor(prompt_of_row, dtype=torch.int64),
        trained=_trained(rollouts, mask_truncated),
        advantages=torch.tensor(list(advantages), dtype=torch.float32),
        totals=totals or StepTotals(rows=float(len(rollouts)), tokens=0.0),
        sampling_logprobs=_reported([rollout.sampling_logprobs for rollout in rollouts], lengths.tolist()),
        row_index=torch.tensor([rollout.index for rollout in rollouts], dtype=torch.int64),
        sampling_entropy=_reported([rollout.sampling_entropy for rollout in rollouts], lengths.tolist()),
        media=media if any(media) else None,
        row_media=own if any(own) else None,
        policy_version=torch.tensor([rollout.policy_version for rollout in rollouts], dtype=torch.int64),
    )


def _flat(parts: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for part in parts for token in part], dtype=torch.int64)


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)])


def _trained(rollouts: Sequence[Rollout], mask_truncated: bool) -> torch.Tensor:
    flags: list[bool] = []
    for rollout in rollouts:
        if mask_truncated and rollout.is_truncated:
            flags += [False] * len(rollout.completion_ids)
        else:
            flags += rollout.sampled if rollout.sampled is not None else [True] * len(rollout.completion_ids)
    return torch.tensor(flags, dtype=torch.bool)


def _reported(rows: Sequence[list[float] | None], lengths: Sequence[int]) -> torch.Tensor | None:
    """(L,) what the engine said of the tokens, NaN in rows of which it said nothing; None if of all."""
    if all(row is None for row in rows):
        return None
    values: list[float] = []
    for row, length in zip(rows, lengths):
        values += row or [float("nan")] * length
    return torch.tensor(values, dtype=torch.float32)
