"""Assigns the rows of a generation batch to ranks and micro-batches.

A generation batch holds `N = b*n*S` rows (b rows a micro-batch, n ranks, S micro-batches a generation batch), numbered
0 to N-1 in group order: row i belongs to group i // G. Optimizer steps take rows in that order, and within a step each
rank takes a contiguous share. So the rows of a step depend on the step's size alone, not on b, n or the accumulation.
With a `shuffle_seed` the rows are dealt to steps at random instead; those of one step keep their ascending order.

A rank samples and scores the rows that it trains if these are whole groups, else N/n consecutive ones, so that reward
functions get whole groups wherever G divides N/n. The rows then move to the ranks that train them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationPlan:
    """Sizes of a generation batch; all are positive, and `num_generations` divides `generation_batch_size`."""

    micro_batch_rows: int
    """b, rows of one forward and backward pass on one rank."""
    world_size: int
    """n, ranks."""
    accumulation: int
    """Micro-batches of one optimizer step on one rank."""
    steps_per_generation: int
    """S, micro-batches of one generation batch on one rank."""
    num_iterations: int
    """mu, the number of times that a generation batch is trained on."""
    num_generations: int
    """G, completions a prompt."""
    shuffle_seed: int | None = None
    """Seed by which the rows of each generation batch are dealt to its steps; None keeps groups whole."""

    @functools.cached_property
    def generation_batch_size(self) -> int:
        """N, rows of one generation batch over all ranks."""
        return self.micro_batch_rows * self.world_size * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """U, distinct prompts of one generation batch over all ranks."""
        return self.generation_batch_size // self.num_generations

    @functools.cached_property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches that each rank trains on before the next generation batch is sampled."""
        return self.steps_per_generation * self.num_iterations

    def generations_after(self, num_micro_batches: int) -> int:
        """Number of further generation batches that a rank trains on within `num_micro_batches` micro-batches.

        The first of these micro-batches is the first one of the present generation batch, which does not count.
        """
        return max(0, -(-num_micro_batches // self.micro_batches_per_generation) - 1)

    @functools.cached_property
    def is_on_policy(self) -> bool:
        """True if each generation batch is used up within one optimizer step.

        The policy that trains is then the one that sampled, and the old log-probs are the present ones.
        """
        return self.accumulation % self.micro_batches_per_generation == 0

    @functools.cached_property
    def _window(self) -> int:
        """Micro-batches of a generation batch that belong to one optimizer step."""
        if self.steps_per_generation % self.accumulation == 0:
            return self.accumulation
        if self.accumulation % self.steps_per_generation == 0:
            return self.steps_per_generation
        return 1

    @property
    def num_windows(self) -> int:
        """Parts of a generation batch that different optimizer steps train on."""
        return self.steps_per_generation // self._window

    def slice_rows(self, rank: int, slice_index: int, generation: int = 0) -> Sequence[int]:
        """Row numbers of micro-batch `slice_index` (0 to S-1) of a generation batch on `rank`, ascending."""
        window, place = divmod(slice_index, self._window)
        share = self._window * self.micro_batch_rows
        start = window * share * self.world_size + rank * share + place * self.micro_batch_rows
        end = start + self.micro_batch_rows
        if self.shuffle_seed is None:
            return range(start, end)
        order = _shuffled(f"rows/{self.shuffle_seed}/{generation}", self.generation_batch_size, share * self.world_size)
        return order[start:end]

    def rank_rows(self, rank: int, generation: int = 0) -> list[int]:
        """All row numbers of a generation batch that `rank` trains, ascending."""
        slices = (self.slice_rows(rank, index, generation) for index in range(self.steps_per_generation))
        return sorted(row for rows in slices for row in rows)

    @functools.cached_property
    def moves_rows(self) -> bool:
        """True if ranks train other rows than they sample."""
        share = self._window * self.micro_batch_rows
        trains_whole_groups = self.shuffle_seed is None and share % self.num_generations == 0
        return self.world_size > 1 and self.num_windows > 1 and not trains_whole_groups

    @property
    def samples_whole_groups(self) -> bool:
        """True if each rank samples and scores whole groups."""
        return self.rows_per_rank % self.num_generations == 0

    @property
    def rows_per_rank(self) -> int:
        """N/n, rows that one rank samples."""
        return self.micro_batch_rows * self.steps_per_generation

    def sampled_rows(self, rank: int, generation: int = 0) -> list[int]:
        """All row numbers of a generation batch that `rank` samples and scores, ascending."""
        if not self.moves_rows:
            return self.rank_rows(rank, generation)
        return list(range(rank * self.rows_per_rank, (rank + 1) * self.rows_per_rank))

    def places(self, rank: int, position: int, generation: int = 0) -> list[int]:
        """Indices, within `rank_rows`, of the rows in the `position`-th micro-batch trained on a generation batch."""
        place_of = {row: place for place, row in enumerate(self.rank_rows(rank, generation))}
        return [place_of[row] for row in self.slice_rows(rank, position % self.steps_per_generation, generation)]

    def rank_groups(self, rank: int, generation: int = 0) -> list[int]:
        """Groups of a generation batch of which `rank` samples at least one row, ascending."""
        return sorted({row // self.num_generations for row in self.sampled_rows(rank, generation)})

    def prompts_used(self, step: int, num_rows: int | None, *, drop_last: bool, is_shifted: bool = False) -> int:
        """Prompts that `step` optimizer steps have trained on, over all ranks and epochs, rounded up.

        A run that resumes with other batch sizes skips this many prompts. An epoch over a data set of `num_rows` rows
        counts as `num_rows` prompts, although its last generation batch may be filled up or dropped. If a resumed run
        began at an offset (`is_shifted`), an epoch counts the prompts of its generation batches. A stream
        (`num_rows` None) has no epochs.
        """
        size, per_generation = self.prompts_per_generation, self.micro_batches_per_generation
        if num_rows is None:
            return -(-step * self.accumulation * size // per_generation)
        generations = max(1, num_rows // size if drop_last else -(-num_rows // size))
        per_epoch = generations * size if is_shifted else num_rows
        epoch, rest = divmod(step, -(-generations * per_generation // self.accumulation))
        return epoch * per_epoch + min(per_epoch, -(-rest * self.accumulation * size // per_generation))


@functools.lru_cache(maxsize=8)
def _shuffled(seed: str, size: int, step_rows: int) -> list[int]:
    """A random permutation of 0 to `size` - 1, in which each run of `step_rows` numbers is then sorted."""
    order = random.Random(seed).sample(range(size), size)
    return [row for start in range(0, size, step_rows) for row in sorted(order[start : start + step_rows])]
