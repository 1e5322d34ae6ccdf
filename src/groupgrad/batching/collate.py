"""Turns rollouts into a ragged batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from groupgrad.batch import Batch, StepTotals, offsets_of, rows_of
from groupgrad.types import Rollout


def collate(
    rollouts: Sequence[Rollout],
    advantages: torch.Tensor | Sequence[float],
    by_turn: Sequence[torch.Tensor] | None = None,
    *,
    mask_truncated: bool,
    totals: StepTotals | None = None,
) -> Batch:
    """A batch of the rollouts, each distinct prompt once, on the CPU.

    `advantages` are (B,); `by_turn` has (T,) of the turns of each rollout, where they differ. `mask_truncated` takes
    the tokens of truncated rollouts out of the loss; their rows still count as rows. `totals` may be filled in later,
    when the optimizer step is known.
    """
    # Environments may begin each rollout of a group with another prompt, so prompts are told apart by their tokens.
    identities = [rollout.prompt.identity for rollout in rollouts]
    prompts = {identity: rollout.prompt for identity, rollout in zip(identities, rollouts)}
    numbers = {identity: number for number, identity in enumerate(prompts)}
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    offsets = offsets_of(_integers(lengths))
    media, row_media = tuple(prompt.media for prompt in prompts.values()), tuple(r.media for r in rollouts)
    return Batch(
        completion_ids=_integers(_joined(rollout.completion_ids for rollout in rollouts)),
        row_of_token=rows_of(offsets),
        offsets=offsets,
        prompt_ids=_integers(_joined(prompt.ids for prompt in prompts.values())),
        prompt_offsets=offsets_of(_integers([len(prompt.ids) for prompt in prompts.values()])),
        prompt_of_row=_integers([numbers[identity] for identity in identities]),
        trained=torch.tensor(_joined(_loss_mask(rollout, mask_truncated) for rollout in rollouts), dtype=torch.bool),
        advantages=torch.as_tensor(advantages, dtype=torch.float32),
        totals=totals or StepTotals(rows=float(len(rollouts)), tokens=0.0),
        sampling_logprobs=_reported([rollout.sampling_logprobs for rollout in rollouts], lengths),
        row_index=_integers([rollout.index for rollout in rollouts]),
        sampling_entropy=_reported([rollout.sampling_entropy for rollout in rollouts], lengths),
        temperatures=_reported([rollout.temperatures for rollout in rollouts], lengths),
        media=media if any(media) else None,
        row_media=row_media if any(row_media) else None,
        policy_version=_integers([rollout.policy_version for rollout in rollouts]),
        branches=tuple(rollout.branches for rollout in rollouts) if any(r.branches for r in rollouts) else None,
        token_advantages=None if by_turn is None else _of_tokens(rollouts, by_turn),
    )


def _joined(rows: Iterable[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(rows))


def _integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _loss_mask(rollout: Rollout, mask_truncated: bool) -> Sequence[bool]:
    if mask_truncated and rollout.is_truncated:
        return [False] * len(rollout.completion_ids)
    return [True] * len(rollout.completion_ids) if rollout.sampled is None else rollout.sampled


def _of_tokens(rollouts: Sequence[Rollout], by_turn: Sequence[torch.Tensor]) -> torch.Tensor:
    """(L,) the values of their turns; 0 for tokens that the policy did not sample."""
    values = torch.zeros(sum(len(rollout.completion_ids) for rollout in rollouts))
    first = 0
    for rollout, of_turns in zip(rollouts, by_turn):
        for (start, end), value in zip(rollout.turns, of_turns.tolist(), strict=True):
            values[first + start : first + end] = value
        first += len(rollout.completion_ids)
    return values


def _reported(rows: Sequence[list[float] | None], lengths: Sequence[int]) -> torch.Tensor | None:
    """(L,) numbers that the engine reported for the tokens, NaN in rows without any; None if no row has any."""
    if all(row is None for row in rows):
        return None
    values = _joined(row or [float("nan")] * length for row, length in zip(rows, lengths))
    return torch.tensor(values, dtype=torch.float32)
