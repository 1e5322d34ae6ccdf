"""The ragged micro-batch and its algebra: moving, selecting and joining rows.

Shapes are named as in `types.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch

from groupgrad.types import Media


@dataclass(slots=True, frozen=True)
class StepTotals:
    """Denominators of the optimizer step that a micro-batch belongs to, over all ranks and micro-batches."""

    rows: float
    """Completions in the optimizer step, truncated and masked ones included."""
    tokens: float
    """Loss tokens (`trained`) in the optimizer step."""
    micro_batches: float = 1
    """Micro-batches of this rank in the optimizer step. A batch that is the share f of a micro-batch's loss tokens has
    1/f times as many, so that what is measured once a micro-batch weighs f there (`even_share`)."""
    world_size: int = 1
    """Ranks whose gradients are averaged."""
    entropy_threshold: float | None = None
    """Entropy (nats) from which a token of the step is kept, when only the most uncertain tokens are trained."""
    entropy_tokens: float | None = None
    """Loss tokens of the step at or above `entropy_threshold`."""


@dataclass(slots=True)
class Batch:
    """A ragged micro-batch: all completions end to end, each distinct prompt once. Nothing is padded."""

    completion_ids: torch.Tensor
    """(L,) int64."""
    row_of_token: torch.Tensor
    """(L,) int64, the row that each completion token belongs to, ascending."""
    offsets: torch.Tensor
    """(B+1,) int64, row i owns tokens offsets[i]:offsets[i+1]; rows may be empty."""
    prompt_ids: torch.Tensor
    """(P,) int64, the distinct prompts end to end."""
    prompt_offsets: torch.Tensor
    """(Q+1,) int64."""
    prompt_of_row: torch.Tensor
    """(B,) int64, which prompt each row continues."""
    trained: torch.Tensor
    """(L,) bool, the loss mask m: sampled by the policy and not masked out as truncated."""
    advantages: torch.Tensor
    """(B,) float32."""
    totals: StepTotals
    old_logprobs: torch.Tensor | None = None
    """(L,) float32, policy at sampling time; None means "the present policy" (ratio 1)."""
    ref_logprobs: torch.Tensor | None = None
    """(L,) float32, reference model; None if no KL term is used."""
    sampling_logprobs: torch.Tensor | None = None
    """(L,) float32, as the sampling engine reported them, NaN where it reported none; None if it never does."""
    row_index: torch.Tensor | None = None
    """(B,) int64, the rows' numbers in the generation round; -1 where unknown."""
    sampling_entropy: torch.Tensor | None = None
    """(L,) float32, as the sampling engine reported them, NaN where it reported none; None if it never does."""
    policy_version: torch.Tensor | None = None
    """(B,) int64, the optimizer step whose weights sampled the row; -1 where unknown, None if nowhere known."""
    passes: torch.Tensor | None = None
    """(B,) int64, how much of the model each row needs: FORWARD_AND_BACKWARD, FORWARD or NO_PASS; None: all of it."""
    media: tuple[Media | None, ...] | None = None
    """Q entries, the images of each distinct prompt; None if no prompt of the batch has any. Never moved by `to`."""
    row_media: tuple[Media | None, ...] | None = None
    """B entries, all images of a row, its prompt's counted, where its completion has some (`Rollout.media`); None if
    no row has any of its own. Never moved by `to`."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.advantages.shape[0]

    @property
    def num_prompts(self) -> int:
        """Q."""
        return self.prompt_offsets.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.completion_ids.shape[0]

    @property
    def num_forward_tokens(self) -> int:
        """Tokens that a forward pass sees when each row is computed with its own copy of the prompt."""
        return int(self.prompt_offsets.diff()[self.prompt_of_row].sum()) + self.num_tokens

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)

    def select(self, rows: torch.Tensor | Sequence[int]) -> Batch:
        """The batch of these rows alone, in the order given; prompts that no row continues are left out.

        `rows` (B',) are places in this batch. The totals stay those of the optimizer step.
        """
        picked = torch.as_tensor(rows, dtype=torch.int64, device=self.offsets.device)
        owners = self.prompt_of_row[picked]
        kept = torch.zeros(self.prompt_offsets.shape[0] - 1, dtype=torch.bool, device=picked.device)
        kept[owners] = True
        kept_prompts, rows_picked = _whole_numbers(kept.nonzero().flatten()), _whole_numbers(picked)
        media = None if self.media is None else tuple(self.media[prompt] for prompt in kept_prompts)
        tokens, offsets = _parts(self.offsets, picked)
        prompt_tokens, prompt_offsets = _parts(self.prompt_offsets, kept.nonzero().flatten())
        own = None if self.row_media is None else tuple(self.row_media[row] for row in rows_picked)
        changes: dict[str, Any] = {
            "media": None if media is None or not any(media) else media,
            "row_media": None if own is None or not any(own) else own,
            "offsets": offsets,
            "row_of_token": _rows_of(offsets),
            "prompt_ids": self.prompt_ids[prompt_tokens],
            "prompt_offsets": prompt_offsets,
            "prompt_of_row": (kept.cumsum(0) - 1)[owners],
        }
        for names, places in ((_TOKEN_FIELDS, tokens), (_ROW_FIELDS, picked)):
            for name in names:
                value = getattr(self, name)
                if value is not None:
                    changes[name] = value[places]
        return dataclasses.replace(self, **changes)

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """The rows of several batches of one optimizer step as one batch, each distinct prompt (ids, images) once.

        What only some of them know is NaN or -1 in the others; old and reference log-probs and `passes` must be set in
        all or in none (ValueError), as must be at least one batch. The totals are those of the first.
        """
        if not batches:
            raise ValueError("there is no batch to join; give at least one")
        numbers: dict[tuple[tuple[int, ...], str], int] = {}
        media: dict[str, Media | None] = {"": None}
        prompt_of_row: list[torch.Tensor] = []
        for batch in batches:
            own = batch.media or (None,) * batch.num_prompts
            media |= {item.key: item for item in own if item is not None}
            names = [(ids, "" if item is None else item.key) for ids, item in zip(batch.prompts(), own)]
            places = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)
            prompt_of_row.append(places[batch.prompt_of_row.cpu()])
        device = batches[0].offsets.device
        lengths = torch.cat([batch.offsets.diff() for batch in batches])
        offsets = _offsets_of(lengths)
        return cls(
            offsets=offsets,
            row_of_token=_rows_of(offsets),
            prompt_ids=torch.tensor([token for ids, _ in numbers for token in ids], dtype=torch.int64, device=device),
            prompt_offsets=_offsets_of(
                torch.tensor([len(ids) for ids, _ in numbers], dtype=torch.int64, device=device)
            ),
            media=tuple(media[key] for _, key in numbers) if len(media) > 1 else None,
            row_media=_joined_media(batches),
            prompt_of_row=torch.cat(prompt_of_row).to(device),
            totals=batches[0].totals,
            **{name: _joined(name, batches) for name in (*_TOKEN_FIELDS, *_ROW_FIELDS)},  # pyright: ignore[reportArgumentType]
        )

    def prompts(self) -> list[tuple[int, ...]]:
        """The token ids of the Q distinct prompts."""
        ids, bounds = _whole_numbers(self.prompt_ids), _whole_numbers(self.prompt_offsets)
        return [tuple(ids[start:end]) for start, end in pairwise(bounds)]


NO_PASS = 0
"""The row's scores are known or do not matter: the model does not see it."""
FORWARD = 1
"""The row's scores are measured, but no gradient comes from it."""
FORWARD_AND_BACKWARD = 2

_TOKEN_FIELDS = (
    "completion_ids",
    "trained",
    "old_logprobs",
    "ref_logprobs",
    "sampling_logprobs",
    "sampling_entropy",
)
_ROW_FIELDS = ("advantages", "row_index", "policy_version", "passes")
_UNKNOWN = {
    "sampling_logprobs": float("nan"),
    "sampling_entropy": float("nan"),
    "row_index": -1,
    "policy_version": -1,
}
"""What stands for "unknown" where batches with and without a field are joined."""


def _joined_media(batches: Sequence[Batch]) -> tuple[Media | None, ...] | None:
    if all(batch.row_media is None for batch in batches):
        return None
    return tuple(item for batch in batches for item in batch.row_media or (None,) * batch.num_rows)


def _whole_numbers(values: torch.Tensor) -> list[int]:
    return cast(list[int], values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _parts(offsets: torch.Tensor, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the picked parts' elements are, and the offsets of these parts end to end."""
    new_offsets = _offsets_of(offsets.diff()[picked])
    part = _rows_of(new_offsets)
    places = torch.arange(part.shape[0], device=offsets.device) - new_offsets[part] + offsets[picked][part]
    return places, new_offsets


def _offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _rows_of(offsets: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff())


def _joined(name: str, batches: Sequence[Batch]) -> torch.Tensor | None:
    """The field `name` of all batches end to end; None if none has it."""
    values: list[torch.Tensor | None] = [getattr(batch, name) for batch in batches]
    known = [value for value in values if value is not None]
    if not known:
        return None
    if len(known) < len(values) and name not in _UNKNOWN:
        raise ValueError(
            f"{len(known)} of {len(values)} batches have {name}, so they cannot be joined; set it in all of them or in "
            "none"
        )
    whole: list[torch.Tensor] = []
    for batch, value in zip(batches, values):
        size = batch.num_tokens if name in _TOKEN_FIELDS else batch.num_rows
        whole.append(known[0].new_full((size,), _UNKNOWN[name]) if value is None else value)
    return torch.cat(whole)


@dataclass(slots=True)
class TokenScores:
    """What a model says of the completion tokens of a batch."""

    logprobs: torch.Tensor
    """(L,) float32, log-probability (nats) of each completion token at the sampling temperature."""
    entropy: torch.Tensor
    """(L,) float32, entropy (nats) of the distribution that each token was drawn from."""
    aux_loss: torch.Tensor | None = None
    """() load-balancing loss of a mixture of experts, or None."""
