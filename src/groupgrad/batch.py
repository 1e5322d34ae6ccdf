"""The ragged micro-batch and its algebra: moving, selecting and concatenating rows.

Shapes are named as in `types.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch

from groupgrad.types import Branch, Media

_Sequence = TypeVar("_Sequence", bytes, tuple[int, ...])


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
    """Ranks whose losses are averaged; ranks that compute rows together count as one."""
    entropy_threshold: float | None = None
    """Entropy (nats) from which a token of the step is kept, when only the most uncertain tokens are trained."""
    entropy_tokens: float | None = None
    """Loss tokens of the step at or above `entropy_threshold`."""
    drift_cutoff: float | None = None
    """Up to where an off-policy mask keeps tokens of the step (`Mask.cutoff`); None: it keeps all."""


@dataclass(slots=True)
class Batch:
    """A ragged batch: all completions end to end, each distinct prompt once. Nothing is padded."""

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
    """(B,) int64, the prompt that each row continues."""
    trained: torch.Tensor
    """(L,) bool, the loss mask m: sampled by the policy and not masked out as truncated."""
    advantages: torch.Tensor
    """(B,) float32. With `token_advantages` their means over the tokens that the policy sampled."""
    totals: StepTotals
    old_logprobs: torch.Tensor | None = None
    """(L,) float32, policy at sampling time; None means "the present policy" (ratio 1)."""
    ref_logprobs: torch.Tensor | None = None
    """(L,) float32, reference model; None if no KL term is used."""
    sampling_logprobs: torch.Tensor | None = None
    """(L,) float32, as the sampling engine reported them, NaN where it reported none; None if it never does."""
    row_index: torch.Tensor | None = None
    """(B,) int64, the rows' numbers in the generation batch; -1 where unknown."""
    step_row: torch.Tensor | None = None
    """(B,) int64, the rows' places in this rank's batch of the optimizer step; None before the step has one."""
    sampling_entropy: torch.Tensor | None = None
    """(L,) float32, as the sampling engine reported them, NaN where it reported none; None if it never does."""
    temperatures: torch.Tensor | None = None
    """(L,) float32, the temperature that each token was sampled at and is scored at; NaN: the policy's. None: the
    policy's for all."""
    token_advantages: torch.Tensor | None = None
    """(L,) float32, where the turns of a completion have advantages of their own; None: all tokens have their row's."""
    selected: torch.Tensor | None = None
    """(L,) bool, the tokens that a loss treats otherwise (`Method.select`); None: none."""
    policy_version: torch.Tensor | None = None
    """(B,) int64, the optimizer step whose weights sampled the row; -1 where unknown, None if nowhere known."""
    media: tuple[Media | None, ...] | None = None
    """Q entries, the images of each distinct prompt; None if no prompt of the batch has any. Never moved by `to`."""
    row_media: tuple[Media | None, ...] | None = None
    """B entries, all images of a row, its prompt's included, where its completion has some (`Rollout.media`); None if
    no row has any of its own. Never moved by `to`."""
    branches: tuple[tuple[Branch, ...], ...] | None = None
    """B entries, the parts of each row that continue tokens of their own (`Rollout.branches`); None if no row has any.
    Never moved by `to`."""

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
    def loss_tokens(self) -> torch.Tensor:
        """(B,) int64, tokens of each row that the loss is over; 0 for rows that are empty or masked out."""
        return torch.zeros_like(self.prompt_of_row).index_add(0, self.row_of_token, self.trained.long())

    @property
    def has_images(self) -> bool:
        """True if a prompt or a completion has images."""
        return self.media is not None or self.row_media is not None

    def __getitem__(self, *_: object) -> Any:
        raise TypeError(
            "a batch is no dict of padded tensors, as it is in TRL: its rows lie end to end, and fields are attributes "
            "(batch.advantages is (B,), batch.completion_ids (L,)). To change advantages define compute_advantages, "
            "for another loss batch_loss (docs/from-trl.md)"
        )

    __contains__ = get = __getitem__

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device` (see `to_device`)."""
        moved = {
            f.name: to_device(value, device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)

    def select(self, rows: torch.Tensor | Sequence[int]) -> Batch:
        """The batch of these rows alone, in the given order, without prompts that none of them continues.

        `rows` (B',) are places in this batch and may repeat. The totals stay those of the optimizer step.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.offsets.device)
        distinct = cast(Any, self.prompt_of_row[rows]).unique(return_inverse=True)
        prompts, prompt_of_row = cast(tuple[torch.Tensor, torch.Tensor], distinct)
        tokens, offsets = _tokens_of(self.offsets, rows)
        prompt_tokens, prompt_offsets = _tokens_of(self.prompt_offsets, prompts)
        selected: dict[str, Any] = {}
        for names, places in ((_TOKEN_FIELDS, tokens), (_ROW_FIELDS, rows)):
            for name in names:
                values = getattr(self, name)
                selected[name] = None if values is None else values[places]
        return dataclasses.replace(
            self,
            offsets=offsets,
            row_of_token=rows_of(offsets),
            prompt_ids=self.prompt_ids[prompt_tokens],
            prompt_offsets=prompt_offsets,
            prompt_of_row=prompt_of_row,
            media=_selected(self.media, prompts),
            row_media=_selected(self.row_media, rows),
            branches=_selected(self.branches, rows),
            **selected,
        )

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """The rows of several batches of one optimizer step as one batch, each distinct prompt (ids, images) once.

        Numbers that only some of the batches know are NaN or -1 for the others; old and reference log-probs must be set
        in all or in none, and there must be at least one batch. The totals are those of the first.
        """
        if any(batch.token_advantages is not None for batch in batches):
            batches = [batch.with_token_advantages() for batch in batches]
        places: dict[tuple[tuple[int, ...], str], int] = {}
        media: list[Media | None] = []
        prompt_of_row: list[torch.Tensor] = []
        for batch in batches:
            images = batch.media or (None,) * batch.num_prompts
            identities = [(ids, "" if item is None else item.key) for ids, item in zip(batch.prompts(), images)]
            media += [item for identity, item in zip(identities, images) if identity not in places]
            numbers = [places.setdefault(identity, len(places)) for identity in identities]
            prompt_of_row.append(torch.tensor(numbers, dtype=torch.int64)[batch.prompt_of_row.cpu()])
        device = batches[0].offsets.device
        offsets = offsets_of(torch.cat([batch.offsets.diff() for batch in batches]))
        prompts = [torch.tensor(ids, dtype=torch.int64) for ids, _ in places]
        row_media = [item for batch in batches for item in batch.row_media or (None,) * batch.num_rows]
        branches = [item for batch in batches for item in batch.branches or ((),) * batch.num_rows]
        return cls(
            offsets=offsets,
            row_of_token=rows_of(offsets),
            prompt_ids=torch.cat([torch.zeros(0, dtype=torch.int64), *prompts]).to(device),
            prompt_offsets=offsets_of(torch.tensor([len(ids) for ids in prompts], dtype=torch.int64)).to(device),
            media=tuple(media) if any(media) else None,
            row_media=tuple(row_media) if any(row_media) else None,
            branches=tuple(branches) if any(branches) else None,
            prompt_of_row=torch.cat(prompt_of_row).to(device),
            totals=batches[0].totals,
            **{name: _joined(name, batches) for name in (*_TOKEN_FIELDS, *_ROW_FIELDS)},  # pyright: ignore[reportArgumentType]
        )

    def with_token_advantages(self) -> Batch:
        """The batch with the advantages of its tokens, those of their rows where turns have none of their own."""
        if self.token_advantages is not None:
            return self
        return dataclasses.replace(self, token_advantages=self.advantages[self.row_of_token])

    def by_branch(self) -> Batch:
        """The batch as a forward pass sees it: each branch of a row is a row that continues the branch's context.

        The tokens keep their order, so what is known of them, (L,), fits both; a row's numbers stand at its branches.
        Rows with branches have no images.
        """
        if self.branches is None:
            return self
        prompts = self.prompts()
        places = {ids: place for place, ids in enumerate(prompts)}
        starts: list[int] = []
        prompt_of: list[int] = []
        row_of: list[int] = []
        prompt_of_row = integers(self.prompt_of_row)
        for row, ((start, end), branches) in enumerate(zip(pairwise(integers(self.offsets)), self.branches)):
            begins = [start + branch.start for branch in branches]
            assert all(a < b for a, b in pairwise([start - 1, *begins, end])), "a branch begins outside its row"
            for branch in branches:
                if branch.context not in places:
                    places[branch.context] = len(prompts)
                    prompts.append(branch.context)
            has_trunk = begins[:1] != [start]  # tokens that continue the row's prompt
            starts += [start] * has_trunk + begins
            prompt_of += [prompt_of_row[row]] * has_trunk + [places[branch.context] for branch in branches]
            row_of += [row] * (has_trunk + len(branches))
        device = self.offsets.device
        offsets = torch.tensor([*starts, self.num_tokens], dtype=torch.int64, device=device)
        of_rows: dict[str, Any] = {name: getattr(self, name) for name in _ROW_FIELDS}
        return dataclasses.replace(
            self,
            offsets=offsets,
            row_of_token=rows_of(offsets),
            prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.int64, device=device),
            prompt_offsets=offsets_of(torch.tensor([len(ids) for ids in prompts], dtype=torch.int64, device=device)),
            prompt_of_row=torch.tensor(prompt_of, dtype=torch.int64, device=device),
            branches=None,
            **{name: None if values is None else values[row_of] for name, values in of_rows.items()},
        )

    def common_beginning(self) -> int:
        """Number of tokens that all distinct prompts begin with; 0 if there are fewer than `LEAST_SHARED`."""
        bounds, ids = integers(self.prompt_offsets), on_host(self.prompt_ids).numpy()
        prompts = sorted((ids[start:end] for start, end in pairwise(bounds)), key=np.ndarray.tobytes)
        common = num_common(prompts[0], prompts[-1]) if len(prompts) > 1 else 0
        return common if common >= LEAST_SHARED else 0

    def prompts(self) -> list[tuple[int, ...]]:
        """The token ids of the Q distinct prompts."""
        ids, bounds = integers(self.prompt_ids), integers(self.prompt_offsets)
        return [tuple(ids[start:end]) for start, end in pairwise(bounds)]


_TOKEN_FIELDS = (
    "completion_ids",
    "trained",
    "old_logprobs",
    "ref_logprobs",
    "sampling_logprobs",
    "sampling_entropy",
    "temperatures",
    "token_advantages",
    "selected",
)
_ROW_FIELDS = ("advantages", "row_index", "step_row", "policy_version")
_UNKNOWN = {
    "selected": False,
    "sampling_logprobs": float("nan"),
    "sampling_entropy": float("nan"),
    "temperatures": float("nan"),
    "row_index": -1,
    "step_row": -1,
    "policy_version": -1,
}
"""Fills a field in the rows of a batch that lacks it, when batches with and without it are joined."""


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`. A copy to a GPU makes nobody wait, and `on_host` gives its original back."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    copy: Any = tensor.pin_memory().to(device, non_blocking=True)
    copy.original = tensor, copy._version
    return copy


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, without a wait for a GPU that has it by `to_device`, unless it was changed there."""
    if tensor.device.type == "cpu":
        return tensor
    original, version = getattr(tensor, "original", (None, 0))
    return tensor.cpu() if original is None or tensor._version != version else original


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """(n+1,) where each of n parts of these lengths begins when they lie end to end, and where the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def rows_of(offsets: torch.Tensor) -> torch.Tensor:
    """(L,) the number of the part that each element belongs to, from the (n+1,) offsets of the parts."""
    return torch.repeat_interleave(torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff())


def wholes_of(sequences: Mapping[int, _Sequence]) -> dict[int, int]:
    """For each sequence that is the beginning of others, by number: one of these that is the beginning of none.

    `{0: (5,), 1: (5, 6), 2: (5, 6, 7), 3: (8,)}` gives `{0: 2, 1: 2}`.
    """
    # In this order, a sequence comes directly before the ones that it is the beginning of.
    order = sorted(sequences, key=sequences.__getitem__)
    wholes: dict[int, int] = {}
    for number, following in reversed(list(pairwise(order))):
        if sequences[following][: len(sequences[number])] == sequences[number]:
            wholes[number] = wholes.get(following, following)
    return wholes


LEAST_SHARED = 64
"""Tokens that prompts must begin with alike to be computed once, in training and in groupgrad's engine. Chat templates
begin all prompts with a few equal tokens, which would save nothing."""


def num_common(some: np.ndarray, others: np.ndarray) -> int:
    """Number of tokens with which both begin."""
    length = min(len(some), len(others))
    different = np.flatnonzero(some[:length] != others[:length])
    return int(different[0]) if len(different) else length


def _tokens_of(offsets: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the elements of the chosen parts, and the offsets of these parts laid end to end."""
    new_offsets = offsets_of(offsets.diff()[parts])
    part = rows_of(new_offsets)
    places = torch.arange(part.shape[0], device=offsets.device) - new_offsets[part] + offsets[parts][part]
    return places, new_offsets


def _selected(items: tuple[Any, ...] | None, places: torch.Tensor) -> tuple[Any, ...] | None:
    """The items at these places; None if all are empty."""
    selected = () if items is None else tuple(items[place] for place in integers(places))
    return selected if any(selected) else None


def integers(values: torch.Tensor) -> list[int]:
    """The integers of a tensor of one dimension."""
    return cast(list[int], values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _joined(name: str, batches: Sequence[Batch]) -> torch.Tensor | None:
    """The field `name` of all batches end to end; None if none has it."""
    values: list[torch.Tensor | None] = [getattr(batch, name) for batch in batches]
    present = [value for value in values if value is not None]
    if not present:
        return None
    parts: list[torch.Tensor] = []
    for batch, value in zip(batches, values):
        size = batch.num_tokens if name in _TOKEN_FIELDS else batch.num_rows
        parts.append(present[0].new_full((size,), _UNKNOWN[name]) if value is None else value)
    return torch.cat(parts)


@dataclass(slots=True)
class TokenScores:
    """Log-probs and entropies that a model gives the completion tokens of a batch."""

    logprobs: torch.Tensor
    """(L,) float32, log-probability (nats) of each completion token at the temperature that it was sampled at."""
    entropy: torch.Tensor
    """(L,) float32, entropy (nats) of the distribution that each token was drawn from."""
    aux_loss: torch.Tensor | None = None
    """() load-balancing loss of a mixture of experts, or None."""
