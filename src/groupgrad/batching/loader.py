"""The training data as a stream of ticks: one tick a micro-batch, of which the first of each round brings prompts.

Rows are read from the data set once per round and rank (not once per completion or micro-batch), and once more for each
round before in which they are sampled ahead. The order is a pure function of (seed, epoch), so a resumed run sees what
an uninterrupted one sees.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.data.columns import read_row

logger = logging.getLogger(__name__)

SHUFFLE_BUFFER_ROWS = 10_000


@dataclass(slots=True, frozen=True)
class MicroBatchKey:
    """One micro-batch's turn."""

    round: int
    """Number of the generation round since the run began; rounds of different epochs have different numbers."""
    position: int
    """Place in the round, 0 to micro_steps_per_round-1."""
    rows: dict[int, dict[str, Any]] | None
    """On a round's first tick: the data-set rows that this rank needs, by group. None on the others."""
    indices: tuple[int, ...] | None = None
    """Data-set indices of the round's prompts, by group; None for streams."""
    ahead: tuple[dict[int, dict[str, Any]], ...] = ()
    """On a round's first tick: the same rows of the rounds that follow, as many as are sampled ahead."""


class GenerationSampler:
    """Yields the ticks of one epoch as keys into the data set.

    With `drop_last` the prompts that do not fill a round are left out of the epoch; otherwise the last round is filled
    up from the front of the epoch's order, so that every prompt has its turn in every epoch.
    """

    def __init__(
        self, num_rows: int, plan: GenerationPlan, *, shuffle: bool, seed: int, drop_last: bool, ahead: int = 0
    ):
        self.num_rows, self.plan, self.shuffle, self.seed, self.drop_last = num_rows, plan, shuffle, seed, drop_last
        self.ahead, self.epoch = ahead, 0

    @property
    def rounds_per_epoch(self) -> int:
        """Generation rounds of one epoch."""
        whole, rest = divmod(self.num_rows, self.plan.prompts_per_generation)
        return whole + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration takes."""
        self.epoch = epoch

    def order(self, epoch: int | None = None) -> list[int]:
        """Data-set indices of an epoch, by default the one chosen, one per prompt of its rounds."""
        if self.shuffle:
            epoch = self.epoch if epoch is None else epoch
            generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
            indices = torch.randperm(self.num_rows, generator=generator).tolist()
        else:
            indices = list(range(self.num_rows))
        wanted = self.rounds_per_epoch * self.plan.prompts_per_generation
        while len(indices) < wanted:
            indices += indices[: wanted - len(indices)]
        return indices[:wanted]

    def __len__(self) -> int:
        return self.rounds_per_epoch * self.plan.micro_batches_per_generation

    def __iter__(self) -> Iterator[list[SamplerKey]]:
        order, size = self.order(), self.plan.prompts_per_generation
        # Rounds that are sampled ahead may be those of the epochs that follow.
        for later in range(1, 1 + -(-self.ahead // max(1, self.rounds_per_epoch))):
            order += self.order(self.epoch + later)
        rounds = [tuple(order[start : start + size]) for start in range(0, len(order), size)]
        for number in range(self.rounds_per_epoch):
            for position in range(self.plan.micro_batches_per_generation):
                ahead = tuple(rounds[number + 1 : number + 1 + self.ahead]) if position == 0 else ()
                yield [(self.epoch * self.rounds_per_epoch + number, position, rounds[number], ahead)]


SamplerKey = tuple[int, int, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Of a tick: its round, its place there, the round's data-set indices, and those of the rounds sampled ahead."""


class GenerationRows(torch.utils.data.Dataset):
    """Turns a sampler key into a tick, reading only what this rank needs."""

    def __init__(self, dataset: Any, groups: list[int]):
        self.dataset, self.groups = dataset, groups

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sampled: SamplerKey) -> MicroBatchKey:
        number, position, indices, later = sampled
        key = MicroBatchKey(number, position, None, indices)
        if position:
            return key
        ahead = tuple({group: read_row(self.dataset, chosen[group]) for group in self.groups} for chosen in later)
        return replace(key, rows=rows_of(key, self.dataset, self.groups), ahead=ahead)


def rows_of(key: MicroBatchKey, dataset: Any, groups: list[int]) -> dict[int, dict[str, Any]]:
    """The rows of these groups of the tick's round, by group: those that it brings, or read anew.

    A tick within a round brings none; they are asked for only when the round's rollouts are missing, after a resume
    from a checkpoint that holds weights alone. A stream cannot be read again (ValueError).
    """
    if key.rows is not None:
        return key.rows
    if key.indices is None:
        raise ValueError(
            "the checkpoint lies within a generation round but holds none of its rollouts, and a stream cannot be read "
            "again; resume from a checkpoint that was saved with save_only_model=False"
        )
    if key.position:
        logger.warning(
            "the checkpoint lies within generation round %d but holds none of its rollouts; they are sampled again, "
            "from the weights as they are now",
            key.round,
        )
    return {group: read_row(dataset, key.indices[group]) for group in groups}


class GenerationLoader(DataLoader):
    """A data loader of ticks that tells its sampler the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration takes."""
        self.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


class StreamKeys(torch.utils.data.IterableDataset):
    """Endless ticks from an iterable data set; each pass over it is shuffled anew and rests carry over to the next."""

    def __init__(self, dataset: IterableDataset, plan: GenerationPlan, groups: list[int], options: LoaderOptions):
        self.dataset = dataset
        if options.shuffle:
            self.dataset = dataset.shuffle(seed=options.seed, buffer_size=SHUFFLE_BUFFER_ROWS)
        self.plan, self.groups, self.ahead = plan, groups, options.ahead

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
        rows, number = self._rows(), 0
        rounds: deque[dict[int, dict[str, Any]]] = deque()
        while True:
            while len(rounds) <= self.ahead:
                prompts = [next(rows) for _ in range(self.plan.prompts_per_generation)]
                rounds.append({group: prompts[group] for group in self.groups})
            yield MicroBatchKey(number, 0, rounds.popleft(), ahead=tuple(rounds))
            for position in range(1, self.plan.micro_batches_per_generation):
                yield MicroBatchKey(number, position, None)
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
    ahead: int = 0
    """Rounds whose rows each round's first tick brings too, for those that are sampled ahead."""


def make_train_loader(dataset: Any, plan: GenerationPlan, rank: int, options: LoaderOptions) -> DataLoader:
    """A loader of ticks for `rank`, over a map-style or an iterable data set. Every rank reads the same stream."""
    groups = plan.rank_groups(rank)
    if isinstance(dataset, IterableDataset):
        if options.num_workers:
            logger.warning(
                "dataloader_num_workers=%d is not used for a streaming train_dataset: several workers would read the "
                "same rows; it is read in the main process",
                options.num_workers,
            )
        return DataLoader(StreamKeys(dataset, plan, groups, options), batch_size=None)
    sampler = GenerationSampler(
        len(dataset),
        plan,
        shuffle=options.shuffle,
        seed=options.seed,
        drop_last=options.drop_last,
        ahead=options.ahead,
    )
    return GenerationLoader(
        GenerationRows(dataset, groups),
        batch_sampler=sampler,  # pyright: ignore[reportArgumentType]
        collate_fn=_only,
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers and options.num_workers > 0,
        multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
    )


def _only(items: list[MicroBatchKey]) -> MicroBatchKey:
    return items[0]


def _mix(seed: int, epoch: int) -> int:
    """A generator seed for (seed, epoch); distinct pairs give unrelated streams."""
    return (seed * 1_000_003 + epoch * 7_919 + 12_345) % (2**63 - 1)
