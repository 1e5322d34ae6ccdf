"""The training data as a stream of ticks: one tick a micro-batch, of which the first of each round brings prompts.

Rows are read from the data set once per round and rank (not once per completion or micro-batch). The order is a pure
function of (seed, epoch), so a resumed run sees what an uninterrupted one sees.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from groupgrad.data.plan import RoundPlan

logger = logging.getLogger(__name__)

SHUFFLE_BUFFER_ROWS = 10_000


@dataclass(slots=True, frozen=True)
class Tick:
    """One micro-batch's turn."""

    round: int
    """Number of the generation round since the run began; rounds of different epochs have different numbers."""
    position: int
    """Place in the round, 0 to micro_steps_per_round-1."""
    rows: dict[int, dict[str, Any]] | None
    """On a round's first tick: the data-set rows that this rank needs, by group. None on the others."""
    indices: tuple[int, ...] | None = None
    """Data-set indices of the round's prompts, by group; None for streams."""


class RoundSampler:
    """Yields the ticks of one epoch as keys into the data set.

    With `drop_last` the prompts that do not fill a round are left out of the epoch; otherwise the last round is filled
    up from the front of the epoch's order, so that every prompt has its turn in every epoch.
    """

    def __init__(self, num_rows: int, plan: RoundPlan, *, shuffle: bool, seed: int, drop_last: bool):
        self.num_rows, self.plan, self.shuffle, self.seed, self.drop_last = num_rows, plan, shuffle, seed, drop_last
        self.epoch = 0

    @property
    def rounds_per_epoch(self) -> int:
        """Generation rounds of one epoch."""
        whole, rest = divmod(self.num_rows, self.plan.prompts_per_round)
        return whole + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration takes."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """Data-set indices of the epoch, one per prompt of its rounds."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mix(self.seed, self.epoch))
            indices = torch.randperm(self.num_rows, generator=generator).tolist()
        else:
            indices = list(range(self.num_rows))
        wanted = self.rounds_per_epoch * self.plan.prompts_per_round
        while len(indices) < wanted:
            indices += indices[: wanted - len(indices)]
        return indices[:wanted]

    def __len__(self) -> int:
        return self.rounds_per_epoch * self.plan.micro_steps_per_round

    def __iter__(self) -> Iterator[list[tuple[int, int, tuple[int, ...]]]]:
        order, size = self.order(), self.plan.prompts_per_round
        for number in range(self.rounds_per_epoch):
            indices = tuple(order[number * size : (number + 1) * size])
            for position in range(self.plan.micro_steps_per_round):
                yield [(self.epoch * self.rounds_per_epoch + number, position, indices)]


class RoundRows(torch.utils.data.Dataset):
    """Turns a sampler key into a tick, reading only what this rank needs."""

    def __init__(self, dataset: Any, groups: list[int]):
        self.dataset, self.groups = dataset, groups

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int, tuple[int, ...]]) -> Tick:
        number, position, indices = key
        tick = Tick(number, position, None, indices)
        return tick if position else replace(tick, rows=rows_of(tick, self.dataset, self.groups))


def rows_of(tick: Tick, dataset: Any, groups: list[int]) -> dict[int, dict[str, Any]]:
    """The rows of these groups of the tick's round, by group: those that it brings, or read anew.

    A tick within a round brings none; they are asked for only when the round's rollouts are missing, after a resume
    from a checkpoint that holds weights alone. A stream cannot be read again (ValueError).
    """
    if tick.rows is not None:
        return tick.rows
    if tick.indices is None:
        raise ValueError(
            "the checkpoint lies within a generation round but holds none of its rollouts, and a stream cannot be read "
            "again; resume from a checkpoint that was saved with save_only_model=False"
        )
    if tick.position:
        logger.warning(
            "the checkpoint lies within generation round %d but holds none of its rollouts; they are sampled again, "
            "from the weights as they are now",
            tick.round,
        )
    return {group: dataset[tick.indices[group]] for group in groups}


class RoundLoader(DataLoader):
    """A data loader of ticks that tells its sampler the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration takes."""
        self.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


class StreamTicks(torch.utils.data.IterableDataset):
    """Endless ticks from an iterable data set; each pass over it is shuffled anew and rests carry over to the next."""

    def __init__(self, dataset: IterableDataset, plan: RoundPlan, groups: list[int], *, shuffle: bool, seed: int):
        self.dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_ROWS) if shuffle else dataset
        self.plan, self.groups = plan, groups

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

    def __iter__(self) -> Iterator[Tick]:
        rows, number = self._rows(), 0
        while True:
            prompts = [next(rows) for _ in range(self.plan.prompts_per_round)]
            for position in range(self.plan.micro_steps_per_round):
                yield Tick(number, position, {g: prompts[g] for g in self.groups} if position == 0 else None)
            number += 1


@dataclass(slots=True, frozen=True)
class LoaderOptions:
    """How ticks are read."""

    shuffle: bool = True
    seed: int = 42
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: str | None = None


def make_round_loader(dataset: Any, plan: RoundPlan, rank: int, options: LoaderOptions) -> DataLoader:
    """A loader of ticks for `rank`, over a map-style or an iterable data set. Every rank reads the same stream."""
    groups = plan.rank_groups(rank)
    if isinstance(dataset, IterableDataset):
        if options.num_workers:
            logger.warning(
                "dataloader_num_workers=%d is not used for a streaming train_dataset: several workers would read the "
                "same rows; it is read in the main process",
                options.num_workers,
            )
        return DataLoader(
            StreamTicks(dataset, plan, groups, shuffle=options.shuffle, seed=options.seed), batch_size=None
        )
    sampler = RoundSampler(len(dataset), plan, shuffle=options.shuffle, seed=options.seed, drop_last=options.drop_last)
    return RoundLoader(
        RoundRows(dataset, groups),
        batch_sampler=sampler,  # pyright: ignore[reportArgumentType]
        collate_fn=_only,
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers and options.num_workers > 0,
        multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
    )


def _only(items: list[Tick]) -> Tick:
    return items[0]


def _mix(seed: int, epoch: int) -> int:
    """A generator seed for (seed, epoch); distinct pairs give unrelated streams."""
    return (seed * 1_000_003 + epoch * 7_919 + 12_345) % (2**63 - 1)
