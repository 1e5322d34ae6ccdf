"""The rows of a step as the run folder stores them: tokens, scores, and which rollouts taught the step.

`stored_rows` turns a generation batch into rows, on the folder's own thread. `GradientShares` observes the hidden
states at the output head and their gradients, and gives each token its share of the step's gradient by the formula of
`objectives/gradient_share.py`. Passes are observed, none is added and no number of training changes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from groupgrad import dist
from groupgrad.batch import Batch, TokenScores
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.metrics import Metric, mean_of
from groupgrad.objectives import FORWARD_AND_BACKWARD
from groupgrad.objectives.gradient_share import gradient_shares, layer_gradient, signal_and_noise
from groupgrad.rollout.collector import Experience
from groupgrad.run_folder.rollout_table import TRAINING, StoredRows
from groupgrad.scoring.head_hook import StatesTap

logger = logging.getLogger(__name__)

RowKey = tuple[int, bytes, bytes]
"""A row's number in its generation batch, its prompt's tokens and its own: several generation batches have the same
numbers."""


def stored_rows(
    experience: Experience,
    scores: Mapping[RowKey, np.ndarray],
    texts_of: Callable[[np.ndarray], list[str]],
    shares: Mapping[RowKey, np.ndarray],
    *,
    num_generations: int,
    phase: str = TRAINING,
    first_row: int = 0,
) -> StoredRows:
    """Converts a generation batch for storage; log-probs and entropies come from the engine, or else from `scores`.

    `shares` are the gradient shares of the tokens of rows. An evaluation has a `phase`, and numbers its rows from
    `first_row` on.
    """
    batch = experience.batch
    ids, offsets = batch.completion_ids.numpy(), batch.offsets.numpy()
    logprobs, entropy = _array(batch.sampling_logprobs), _array(batch.sampling_entropy)
    if scores and (logprobs is None or entropy is None):
        trained = _of_rows(batch, scores, 2)
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
        gradient_shares=_of_rows(batch, shares, 1)[0] if shares else None,
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


def _of_rows(batch: Batch, numbers_of_rows: Mapping[RowKey, np.ndarray], count: int) -> np.ndarray:
    """(count, L) numbers of the tokens, from (count, l) or (l,) of each row that has some; NaN in other rows."""
    values = np.full((count, batch.num_tokens), np.nan, np.float32)
    for key, (start, end) in places_of_rows(batch).items():
        if key in numbers_of_rows:
            values[:, start:end] = numbers_of_rows[key]
    return values


GroupName = tuple[int, bytes]
"""A group's number and its prompt's tokens: generation batches number their groups alike."""


@dataclass(slots=True, frozen=True)
class _Observed:
    """One backward pass: `places` (L',) are the tokens of `batch` that the rows of the tensors belong to."""

    batch: Batch
    places: np.ndarray
    states: torch.Tensor
    """(L', H), on the CPU."""
    errors: torch.Tensor
    """(L', H), on the CPU: the gradient of the loss with respect to the states."""


@dataclass(slots=True)
class _Group:
    """The tokens of a group in this step, as slices of what was observed."""

    rows: list[tuple[RowKey, int, np.ndarray, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """For each row: its key, its number of tokens, the (l,) positions observed, their (l, H) errors and states."""

    def tensors(self, device: torch.device, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(L, H) errors and states of all rows."""
        errors, states = (torch.cat(parts) for parts in zip(*((row[3], row[4]) for row in self.rows)))
        return errors.to(device, kind), states.to(device, kind)


class GradientShares:
    """Observes the backward passes of a step, and then gives the share of each token.

    `group_size` is the number of completions of a prompt.
    """

    def __init__(self, group_size: int):
        self._group_size = group_size
        self._observed: list[_Observed] = []
        self._has_warned = False

    def begin_step(self) -> None:
        """Drops the observations of a step that was not finished."""
        self._observed = []

    def tap(self, batch: Batch) -> StatesTap | None:
        """The function that the output head calls with the states of `batch` in a pass with gradients."""
        if batch.row_index is None:
            return None

        def observe(states: torch.Tensor, places: torch.Tensor | None) -> None:
            kept = states.detach().cpu()
            found = np.arange(batch.num_tokens) if places is None else places.cpu().numpy()

            def receive(gradient: torch.Tensor) -> None:
                self._observed.append(_Observed(batch, found, kept, gradient.detach().cpu()))

            states.register_hook(receive)

        return observe

    def end_step(
        self, micro_batches: Sequence[MicroBatch], device: torch.device
    ) -> tuple[Mapping[RowKey, np.ndarray], dict[str, Metric]]:
        """Collective. The shares of the tokens of each row of the step, and `gradient/signal_to_noise`.

        No shares where the model's output head cannot be observed, or where the step had no finite gradient.
        """
        groups, self._observed = self._groups(), []
        batch = micro_batches[0].step_rows.batch if micro_batches else None
        places_of_row = {} if batch is None or batch.row_index is None else places_of_rows(batch)
        names = set() if batch is None or not places_of_row else set(self._group_names(batch).values())
        wants = any(FORWARD_AND_BACKWARD in part.step_rows.passes for part in micro_batches[:1]) and bool(places_of_row)
        first = next((group.rows[0][3] for group in groups.values()), torch.zeros(0, 0))
        width, is_double = max(dist.all_gather_objects((first.shape[1], first.dtype == torch.float64)))
        if not width:
            self._warn_unseen(wants)
            return {}, {}
        kind = torch.float64 if is_double else torch.float32
        gradient, squares = torch.zeros(width, width, device=device, dtype=kind), 0.0
        every, cut = _names_of_ranks(names)
        for name, group in groups.items():
            part = layer_gradient(*group.tensors(device, kind))
            gradient += part
            squares += 0.0 if name in cut else float(part.square().sum(dtype=torch.float64))
        for name in cut:  # one after another: each is as large as the gradient
            part = torch.zeros_like(gradient)
            if name in groups:
                part += layer_gradient(*groups[name].tensors(device, kind))
            dist.sum_tensor(part)
            squares += float(part.square().sum(dtype=torch.float64)) if dist.is_main() else 0.0
        dist.sum_tensor(gradient)
        (squares,) = dist.all_sum([squares])
        shares = {key: np.zeros(end - start, np.float32) for key, (start, end) in places_of_row.items()}
        for group in groups.values():
            values = gradient_shares(*group.tensors(device, kind), gradient).float().cpu().numpy()
            for key, length, places, errors, _ in group.rows:
                row = np.zeros(length, np.float32)
                row[places], values = values[: len(errors)], values[len(errors) :]
                shares[key] = row
        # A row may be trained on another rank than the one that sampled and records it.
        shares = {key: row for part in dist.all_gather_objects(shares) for key, row in part.items()}
        square = float(gradient.square().sum(dtype=torch.float64))
        return (shares if np.isfinite(square) and square > 0 else {}), _signal_metrics(square, squares, every)

    def _groups(self) -> dict[GroupName, _Group]:
        """The observations by group. A pass that was repeated because memory ran out replaces the earlier one."""
        groups: dict[GroupName, _Group] = {}
        seen: set[RowKey] = set()
        for part in reversed(self._observed):
            names = self._group_names(part.batch)
            for key, (start, end) in places_of_rows(part.batch).items():
                if key in seen:
                    continue
                seen.add(key)
                rows = np.nonzero((part.places >= start) & (part.places < end))[0]
                if len(rows):
                    chosen = torch.from_numpy(rows)
                    entry = (key, end - start, part.places[rows] - start, part.errors[chosen], part.states[chosen])
                    groups.setdefault(names[key], _Group()).rows.append(entry)
        return groups

    def _group_names(self, batch: Batch) -> dict[RowKey, GroupName]:
        """The group of each row."""
        return {key: (key[0] // self._group_size, key[1]) for key in places_of_rows(batch)}

    def _warn_unseen(self, wants: bool) -> None:
        if wants and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "record_gradient_share=True, but the input of this model's output head is not seen, or needs no "
                "gradient, so no shares are recorded; said once"
            )


def _names_of_ranks(names: set[GroupName]) -> tuple[int, list[GroupName]]:
    """Collective. The number of groups of the step, and the sorted names of groups with rows on several ranks."""
    counts = Counter(name for names_of_rank in dist.all_gather_objects(names) for name in names_of_rank)
    return len(counts), sorted(name for name, count in counts.items() if count > 1)


def _signal_metrics(square: float, squares: float, num_groups: int) -> dict[str, Metric]:
    """The metric of a step; none with fewer than two groups."""
    if num_groups < 2 or not np.isfinite([square, squares]).all():
        return {}
    signal, noise = signal_and_noise(square, squares, num_groups)
    # A ratio of sums over the steps between two logs, since each step's estimates are noisy.
    return {"gradient/signal_to_noise": mean_of(signal, noise)}
