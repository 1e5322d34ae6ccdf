"""Who samples and who trains which row of a generation round.

A round holds `N = b*n*S` rows (b rows a micro-batch, n ranks, S micro-batches a round), numbered 0 to N-1 in group
order: row i belongs to group i // G. Optimizer steps take rows in that order, and within a step each rank takes a
contiguous share. So what a step trains on depends on the step's size alone, not on b, n or the accumulation, and
groups stay whole on a rank wherever the sizes allow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class GenerationPlan:
    """Sizes of a generation batch; all are positive, and `num_generations` divides `generation_batch_size`."""

    micro_batch_rows: int
    """b, rows of one forward and backward pass on one rank."""
    world_size: int
    """n, ranks."""
    accumulation: int
    """Micro-batches of one optimizer step on one rank."""
    steps_per_generation: int
    """S, micro-batches that one round fills on one rank."""
    num_iterations: int
    """How often a round is trained on (mu)."""
    num_generations: int
    """G, completions a prompt."""

    @property
    def generation_batch_size(self) -> int:
        """N, rows of one round over all ranks."""
        return self.micro_batch_rows * self.world_size * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """U, distinct prompts of one round over all ranks."""
        return self.generation_batch_size // self.num_generations

    @property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches that each rank trains on before the next round is sampled."""
        return self.steps_per_generation * self.num_iterations

    def generations_after(self, micro_steps: int) -> int:
        """Rounds that begin after the present one within the next `micro_steps` micro-batches, its own counted."""
        return max(0, -(-micro_steps // self.micro_batches_per_generation) - 1)

    @property
    def is_on_policy(self) -> bool:
        """True if every round is used up within one optimizer step, so that the policy that trains is the one that
        sampled and the old log-probs are the present ones."""
        return self.accumulation % self.micro_batches_per_generation == 0

    @property
    def _window(self) -> int:
        """Micro-batches of a round that belong to one optimizer step."""
        if self.steps_per_generation % self.accumulation == 0:
            return self.accumulation
        if self.accumulation % self.steps_per_generation == 0:
            return self.steps_per_generation
        return 1

    def slice_rows(self, rank: int, slice_index: int) -> range:
        """Row numbers of micro-batch `slice_index` (0 to S-1) on `rank`."""
        window, place = divmod(slice_index, self._window)
        share = self._window * self.micro_batch_rows
        start = window * share * self.world_size + rank * share + place * self.micro_batch_rows
        return range(start, start + self.micro_batch_rows)

    def rank_rows(self, rank: int) -> list[int]:
        """All row numbers that `rank` samples and trains, ascending."""
        return [row for s in range(self.steps_per_generation) for row in self.slice_rows(rank, s)]

    def rank_groups(self, rank: int) -> list[int]:
        """Groups with at least one row on `rank`, ascending."""
        return sorted({row // self.num_generations for row in self.rank_rows(rank)})
