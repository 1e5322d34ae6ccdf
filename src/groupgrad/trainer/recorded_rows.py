"""The rows of a step as the run folder stores them: tokens and scores.

`stored_rows` turns a generation batch into rows, on the folder's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from groupgrad.batch import Batch, TokenScores
from groupgrad.rollout.collector import Experience
from groupgrad.run_folder.rollout_table import TRAINING, StoredRows

RowKey = tuple[int, bytes, bytes]
"""A row's number in its generation batch, its prompt's tokens and its own: several generation batches have the same
numbers."""


def stored_rows(
    experience: Experience,
    scores: Mapping[RowKey, np.ndarray],
    texts_of: Callable[[np.ndarray], list[str]],
    *,
    num_generations: int,
    phase: str = TRAINING,
    first_row: int = 0,
) -> StoredRows:
    """Converts a generation batch for storage; log-probs and entropies come from the engine, or else from `scores`.

    An evaluation has a `phase`, and numbers its rows from `first_row` on.
    """
    batch = experience.batch
    ids, offsets = batch.completion_ids.numpy(), batch.offsets.numpy()
    logprobs, entropy = _array(batch.sampling_logprobs), _array(batch.sampling_entropy)
    if scores and (logprobs is None or entropy is None):
        trained = _of_rows(batch, scores)
        logprobs, entropy = (trained[0] if logprobs is None else logprobs), (trained[1] if entropy is None else entropy)
    return StoredRows(
        rollouts=experience.rollouts,
        ids=ids,
        offsets=offsets,
        texts=texts_of(ids),
        advantages=experience.advantages.tolist(),
        table=experience.table,
        combined=experience.combined_rewards,
        num_generations=num_generations,
        turn_advantages=None if experience.by_turn is None else [values.tolist() for values in experience.by_turn],
        logprobs=logprobs,
        entropy=entropy,
        phase=phase,
        first_row=first_row,
    )


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


def numbers_by_row(scores: Sequence[tuple[Batch, TokenScores]]) -> dict[RowKey, np.ndarray]:
    """(2, l) log-probs and entropies that passes have given to the tokens of each row."""
    found: dict[RowKey, np.ndarray] = {}
    for part, numbers in scores:
        both = torch.stack([numbers.logprobs.float(), numbers.entropy.float()]).cpu().numpy()
        found |= {key: both[:, start:end] for key, (start, end) in places_of_rows(part).items()}
    return found


def _array(values: torch.Tensor | None) -> np.ndarray | None:
    return None if values is None else values.numpy()


def _of_rows(batch: Batch, numbers_of_rows: Mapping[RowKey, np.ndarray]) -> np.ndarray:
    """(2, L) numbers of the tokens, from (2, l) of each row that has some; NaN in other rows."""
    values = np.full((2, batch.num_tokens), np.nan, np.float32)
    for key, (start, end) in places_of_rows(batch).items():
        if key in numbers_of_rows:
            values[:, start:end] = numbers_of_rows[key]
    return values
