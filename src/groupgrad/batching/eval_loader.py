"""Loads evaluation batches: each prompt of the data set exactly once, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader


@dataclass(slots=True, frozen=True)
class EvalBatch:
    """Some prompts with their groups numbered from 0; the last batch may have fewer than `prompts_per_batch`."""

    number: int
    rows: list[dict[str, Any]]
    prompts_per_batch: int

    def rank_rows(self, rank: int, world_size: int, num_generations: int) -> range:
        """This rank's completions; may be empty. Groups are whole if each rank has room for one."""
        size = num_generations if self.prompts_per_batch >= world_size else 1
        shares = len(self.rows) * num_generations // size
        return range(rank * shares // world_size * size, (rank + 1) * shares // world_size * size)


class EvalLoader(DataLoader):
    """An evaluation set in its own order, `prompts_per_batch` prompts at a time, the last batch with the rest.

    It has the attributes of a data loader, which scripts and callbacks read. Rows are read in this process
    (`num_workers` is 0), one after the other, since sampling takes longer by far.
    """

    def __init__(self, dataset: Any, prompts_per_batch: int):
        super().__init__(dataset, prompts_per_batch, collate_fn=list)
        self.prompts_per_batch = prompts_per_batch

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.prompts_per_batch)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[EvalBatch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows: list[dict[str, Any]] = []
        number = 0
        for row in self.dataset:
            rows.append(row)
            if len(rows) == self.prompts_per_batch:
                yield EvalBatch(number, rows, self.prompts_per_batch)
                rows, number = [], number + 1
        if rows:
            yield EvalBatch(number, rows, self.prompts_per_batch)


def checked_batches(loader: Iterable[Any]) -> Iterator[EvalBatch]:
    """The batches of a loader. TypeError if it yields anything else, as a script's own may do."""
    for batch in loader:
        if not isinstance(batch, EvalBatch):
            raise TypeError(
                f"get_eval_dataloader returned a loader that yields a {type(batch).__name__}, and an evaluation needs "
                "the batches of whole groups that the trainer's own loader yields. Return "
                "super().get_eval_dataloader(eval_dataset); to choose or order rows, change the data set"
            )
        yield batch
