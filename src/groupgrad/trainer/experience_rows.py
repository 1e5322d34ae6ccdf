"""Turns a generation batch into the rows of a run folder; runs on the folder's own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from groupgrad.batch import Batch, TokenScores
from groupgrad.rollout.collector import Experience
from groupgrad.run_folder.rollout_table import StoredRows

RowKey = tuple[int, bytes, bytes]
"""A row's number in its generation batch, its prompt's tokens and its own: several generation batches have the same
numbers."""
Numbers = tuple[np.ndarray, np.ndarray]
"""(l,) log-probs and entropies of the tokens of a row."""


def stored_rows(
    experience: Experience,
    scores: Mapping[RowKey, Numbers],
    texts_of: Callable[[np.ndarray], list[str]],
    shares: Mapping[RowKey, np.ndarray],
    *,
    num_generations: int,
) -> StoredRows:
    """Converts a generation batch for storage; log-probs and entropies come from the engine, or else from `scores`.

    `shares` are the gradient shares of the tokens of rows.
    """
    batch, table = experience.batch, experience.table
    ids, offsets = batch.completion_ids.numpy(), batch.offsets.numpy()
    logprobs, entropy = _array(batch.sampling_logprobs), _array(batch.sampling_entropy)
    if scores and (logprobs is None or entropy is None):
        known = _known_by_passes(batch, scores)
        logprobs, entropy = (known[0] if logprobs is None else logprobs), (known[1] if entropy is None else entropy)
    return StoredRows(
        rollouts=experience.rollouts,
        ids=ids,
        offsets=offsets,
        texts=texts_of(ids),
        advantages=experience.advantages.tolist(),
        reward_names=table.names,
        rewards=table.rewards.tolist(),
        combined=experience.combined_rewards,
        num_generations=num_generations,
        reward_seconds=table.seconds,
        columns=table.columns,
        logprobs=logprobs,
        entropy=entropy,
        gradient_shares=_shares(batch, shares) if shares else None,
    )


def _shares(batch: Batch, shares: Mapping[RowKey, np.ndarray]) -> np.ndarray:
    """(L,) gradient shares, NaN in rows that have none."""
    values = np.full(batch.num_tokens, np.nan, np.float32)
    for key, (start, end) in places_of_rows(batch).items():
        if key in shares:
            values[start:end] = shares[key]
    return values


def places_of_rows(batch: Batch) -> dict[RowKey, tuple[int, int]]:
    """Maps each row's number and tokens to the places where its tokens begin and end."""
    assert batch.row_index is not None
    ids, offsets = batch.completion_ids.cpu().numpy(), batch.offsets.tolist()
    prompts = [np.asarray(prompt, np.int64).tobytes() for prompt in batch.prompts()]
    rows = enumerate(zip(batch.row_index.tolist(), batch.prompt_of_row.tolist()))
    return {
        (number, prompts[prompt], ids[offsets[row] : offsets[row + 1]].tobytes()): (offsets[row], offsets[row + 1])
        for row, (number, prompt) in rows
    }


def numbers_by_row(scores: Sequence[tuple[Batch, TokenScores]]) -> dict[RowKey, Numbers]:
    """The log-probs and entropies that passes have given to rows."""
    found: dict[RowKey, Numbers] = {}
    for part, numbers in scores:
        logprobs, entropy = (values.float().cpu().numpy() for values in (numbers.logprobs, numbers.entropy))
        for key, (start, end) in places_of_rows(part).items():
            found[key] = (logprobs[start:end], entropy[start:end])
    return found


def _array(values: torch.Tensor | None) -> np.ndarray | None:
    return None if values is None else values.numpy()


def _known_by_passes(batch: Batch, scores: Mapping[RowKey, Numbers]) -> list[np.ndarray]:
    """(L,) log-probs and entropies of the rows of `batch` that `scores` has; else NaN."""
    known = [np.full(batch.num_tokens, np.nan, np.float32) for _ in range(2)]
    for key, (start, end) in places_of_rows(batch).items():
        for values, found in zip(known, scores.get(key, ())):
            values[start:end] = found
    return known
