"""Loads the training data: one key per micro-batch; the first key of a generation batch brings its data-set rows.

Rows are read once per generation batch and rank (not once per completion or micro-batch), and once more for each
earlier generation batch during which they are sampled ahead. The order is a pure function of (seed, epoch), so a
resumed run reads the same rows as an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from groupgrad import dist
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.data.columns import read_row

logger = logging.getLogger(__name__)

SHUFFLE_BUFFER_ROWS = 10_000


@dataclass(slots=True, frozen=True)
class MicroBatchKey:
    """Identifies a micro-batch by its generation batch and its position there."""

    generation: int
    """Number of the generation batch since the run began, counted over all epochs."""
    position: int
    """Position in the generation batch, 0 to `micro_batches_per_generation` - 1."""
    rows: dict[int, dict[str, Any]] | None
    """At position 0 the data-set rows that this rank needs, by group; None elsewhere."""
    indices: tuple[int, ...] | None = None
    """Data-set indices of the generation batch's prompts, by group; None for streams."""
    ahead: tuple[dict[int, dict[str, Any]], ...] = ()
    """At position 0 the rows of the generation batches that are sampled ahead."""


def keys_of_step(loader: Iterator[Any], count: int) -> tuple[MicroBatchKey, ...]:
    """The next keys of a loader, up to `count`. TypeError if it yields anything else, as a script's own may do."""
    keys = tuple(islice(loader, count))
    for key in keys:
        if not isinstance(key, MicroBatchKey):
            raise TypeError(
                f"get_train_dataloader returned a loader that yields a {type(key).__name__}, and a step needs the keys "
                "that the trainer's own loader yields, which say what is sampled and trained when. Return "
                "super().get_train_dataloader(); to choose or order rows, change the data set and set "
                "shuffle_dataset=False"
            )
    return keys


@dataclass(slots=True, frozen=True)
class LoaderOptions:
    """Options of the data loader."""

    shuffle: bool = True
    seed: int = 42
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: str | None = None
    ahead: int = 0
    """Generation batches to sample ahead, whose rows the first key of each generation batch brings too."""
    offset: int = 0
    """Prompts by which a resumed run is further in the data than its steps say; other sizes made them."""


class GenerationSampler:
    """Yields the micro-batches of one epoch as indices into the data set.

    With `drop_last` prompts that do not fill a generation batch are left out of the epoch. Otherwise the last
    generation batch is filled from the front of the epoch's order, so that every epoch uses every prompt. With an
    `offset` all generation batches lie that many prompts further, or less far, in the order of all epochs.
    """

    def __init__(self, num_rows: int, plan: GenerationPlan, options: LoaderOptions):
        self.num_rows, self.plan, self.options, self.epoch = num_rows, plan, options, 0

    @property
    def generations_per_epoch(self) -> int:
        """Generation batches of one epoch."""
        whole, rest = divmod(self.num_rows, self.plan.prompts_per_generation)
        return whole + (1 if rest and not self.options.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration takes."""
        self.epoch = epoch

    def order(self, epoch: int | None = None) -> list[int]:
        """Data-set indices of an epoch, by default the chosen one, one per prompt of its generation batches."""
        indices = self._permutation(self.epoch if epoch is None else epoch)
        wanted = self.generations_per_epoch * self.plan.prompts_per_generation
        while len(indices) < wanted:
            indices += indices[: wanted - len(indices)]
        return indices[:wanted]

    def _permutation(self, epoch: int) -> list[int]:
        if not self.options.shuffle:
            return list(range(self.num_rows))
        # Distinct pairs of seed and epoch give unrelated streams.
        seed = (self.options.seed * 1_000_003 + epoch * 7_919 + 12_345) % (2**63 - 1)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def _shifted(self, later: int) -> list[int]:
        """Data-set indices of an epoch's generation batches, `offset` prompts further in the order of all epochs."""
        count = self.generations_per_epoch * self.plan.prompts_per_generation
        start = (self.epoch + later) * count + self.options.offset
        first, skipped = divmod(max(0, start), self.num_rows)
        indices: list[int] = []
        while len(indices) < skipped + count:
            indices += self._permutation(first + len(indices) // self.num_rows)
        before = [0] * max(0, -start)  # a resumed run skips them
        return [*before, *indices[skipped:]][:count]

    def __len__(self) -> int:
        return self.generations_per_epoch * self.plan.micro_batches_per_generation

    def __iter__(self) -> Iterator[list[SamplerKey]]:
        size, num_ahead, is_shifted = self.plan.prompts_per_generation, self.options.ahead, self.options.offset != 0
        order: list[int] = []
        # Generation batches that are sampled ahead may belong to later epochs.
        for later in range(1 + -(-num_ahead // max(1, self.generations_per_epoch))):
            order += self._shifted(later) if is_shifted else self.order(self.epoch + later)
        generations = [tuple(order[start : start + size]) for start in range(0, len(order), size)]
        for number in range(self.generations_per_epoch):
            for position in range(self.plan.micro_batches_per_generation):
                ahead = tuple(generations[number + 1 : number + 1 + num_ahead]) if position == 0 else ()
                yield [(self.epoch * self.generations_per_epoch + number, position, generations[number], ahead)]


SamplerKey = tuple[int, int, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""(generation batch, position of the micro-batch in it, data-set indices of its prompts, the same indices for each
generation batch that may be sampled ahead)."""


class GenerationRows(torch.utils.data.Dataset):
    """Turns a sampler key into a micro-batch key, reading only the rows that this rank needs."""

    def __init__(self, dataset: Any, plan: GenerationPlan, rank: int):
        self.dataset, self.plan, self.rank = dataset, plan, rank

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sampled: SamplerKey) -> MicroBatchKey:
        number, position, indices, later = sampled
        key = MicroBatchKey(number, position, None, indices)
        if position:
            return key
        rows, *ahead = (
            {group: read_row(self.dataset, chosen[group]) for group in self.plan.rank_groups(self.rank, generation)}
            for generation, chosen in enumerate((indices, *later), start=number)
        )
        return replace(key, rows=rows, ahead=tuple(ahead))


def reread_rows(
    key: MicroBatchKey, dataset: Any, groups: list[int], incompatibility: str | None = None
) -> dict[int, dict[str, Any]]:
    """Data-set rows of these groups of a generation batch, by group, for a key that does not bring them.

    A run needs them when it resumes inside a generation batch from a checkpoint that holds none of its rollouts, or
    none that fit (`incompatibility` says how). A stream cannot be read again (ValueError).
    """
    found = "holds none of its rollouts" if incompatibility is None else f"holds its rollouts {incompatibility}"
    if key.indices is None:
        raise ValueError(
            f"the checkpoint lies within a generation batch but {found}, and a stream cannot be read again; resume "
            "with the options of the checkpoint, or from a checkpoint that was saved with save_only_model=False"
        )
    if dist.is_main():
        logger.warning(
            "the checkpoint lies within generation batch %d but %s; they are sampled again, from the weights as they "
            "are now",
            key.generation,
            found,
        )
    return {group: read_row(dataset, key.indices[group]) for group in groups}


class GenerationLoader(DataLoader):
    """A data loader of micro-batch keys that passes the epoch to its sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration takes."""
        self.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


class StreamKeys(torch.utils.data.IterableDataset):
    """Endless micro-batch keys from an iterable data set.

    Each pass over the data set is shuffled anew, and rows that do not fill a generation batch carry over to the next.
    """

    def __init__(self, dataset: IterableDataset, plan: GenerationPlan, rank: int, options: LoaderOptions):
        self.dataset = dataset
        if options.shuffle:
            self.dataset = dataset.shuffle(seed=options.seed, buffer_size=SHUFFLE_BUFFER_ROWS)
        self.plan, self.rank, self.ahead, self.offset = plan, rank, options.ahead, options.offset

    def _rows(self) -> Iterator[dict[str, Any]]:
        turn = 0
        while True:
            self.dataset.set_epoch(turn)
            found = False
            for row in self.dataset:
                found = True
                yield row
            if not found:
                raise ValueError("the streaming train_dataset yielded no row; check its source and filters")
            turn += 1

    def __iter__(self) -> Iterator[MicroBatchKey]:
        # A resumed run never takes the rows before a negative offset, so empty ones stand for them.
        rows, number = chain(repeat({}, max(0, -self.offset)), islice(self._rows(), max(0, self.offset), None)), 0
        ahead: deque[dict[int, dict[str, Any]]] = deque()
        while True:
            while len(ahead) <= self.ahead:
                prompts = [next(rows) for _ in range(self.plan.prompts_per_generation)]
                groups = self.plan.rank_groups(self.rank, number + len(ahead))
                ahead.append({group: prompts[group] for group in groups})
            yield MicroBatchKey(number, 0, ahead.popleft(), ahead=tuple(ahead))
            for position in range(1, self.plan.micro_batches_per_generation):
                yield MicroBatchKey(number, position, None)
            number += 1


def make_train_loader(dataset: Any, plan: GenerationPlan, rank: int, options: LoaderOptions) -> DataLoader:
    """A loader of micro-batch keys for `rank`, over a map-style or an iterable data set.

    Every rank reads the same stream, in its main process.
    """
    if isinstance(dataset, IterableDataset):
        return DataLoader(StreamKeys(dataset, plan, rank, options), batch_size=None, generator=torch.Generator())
    return GenerationLoader(
        GenerationRows(dataset, plan, rank),
        batch_sampler=GenerationSampler(len(dataset), plan, options),  # pyright: ignore[reportArgumentType]
        collate_fn=itemgetter(0),
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers and options.num_workers > 0,
        multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
        # A loader without one draws from the global stream whenever it begins, also in a resumed run.
        generator=torch.Generator(),
    )
