"""Plans the micro-batches of an optimizer step: their rows, and the passes through the model that each row needs.

A step is one `Batch`. Its micro-batches, and the parts that they are cut into, are lists of rows; `MicroBatch.batch`
makes a `Batch` of one when it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.batching.packing import RowCost, pack, row_costs, split, split_to_size, total_cost
from groupgrad.batching.rank_balance import balance_over_ranks
from groupgrad.objectives import (
    FORWARD,
    FORWARD_AND_BACKWARD,
    NO_PASS,
    OnPolicyInfo,
    PolicyOptions,
    find_method,
    required_passes,
)


@dataclass(slots=True, frozen=True)
class StepRows:
    """This rank's rows of an optimizer step."""

    batch: Batch
    """All rows, on the CPU, with the totals of the step."""
    passes: list[int]
    """(B,) `NO_PASS`, `FORWARD` or `FORWARD_AND_BACKWARD`."""
    costs: list[RowCost]
    """(B,)."""
    loss_tokens: list[int]
    """(B,) tokens of each row that the loss is over."""
    num_tokens: list[int]
    """(B,) tokens of each row and its prompt."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are trained together: a micro-batch of the step, or a part of one."""

    step_rows: StepRows
    rows: list[int]
    """Places in the step's batch, ascending."""
    share: float = 1.0
    """The part's share of its micro-batch's loss tokens; the shares of all parts add up to 1."""
    least_passes: int = NO_PASS
    """Passes that are made even if no row needs them, since other ranks make them."""

    @property
    def passes(self) -> int:
        """The most that any of the rows needs."""
        return max((self.step_rows.passes[row] for row in self.rows), default=self.least_passes)

    @property
    def cost(self) -> int:
        """Cost in forward passes of one token (see `RowCost`)."""
        return total_cost(self._costs())

    @property
    def num_forward_tokens(self) -> int:
        """Prompt and completion tokens, each row with its own copy of the prompt."""
        return sum(self.step_rows.num_tokens[row] for row in self.rows)

    @cached_property
    def batch(self) -> Batch:
        """The rows as a batch, on the CPU; losses of all parts of a micro-batch add up to the micro-batch's loss."""
        batch = self.step_rows.batch
        if len(self.rows) < batch.num_rows:
            batch = batch.select(self.rows)
        count = batch.totals.micro_batches / self.share if self.share else float("inf")
        return replace(batch, totals=replace(batch.totals, micro_batches=count))

    def by_passes(self) -> list[MicroBatch]:
        """Parts whose rows all need the same passes, fewest first; one empty part if there are no rows."""
        rows = {passes: [row for row in self.rows if self.step_rows.passes[row] == passes] for passes in range(3)}
        return self._parts([part for part in rows.values() if part] or [[]])

    def split(self, num_parts: int) -> list[MicroBatch]:
        """`num_parts` parts of similar cost, from 1 to the number of rows."""
        return self._parts(self._rows_of(split(self._costs(), num_parts)))

    def without_rows(self) -> MicroBatch:
        """A part without rows that gets a backward pass nevertheless."""
        return replace(self, rows=[], share=0.0, least_passes=FORWARD_AND_BACKWARD)

    def split_to_size(self, limit: int) -> list[MicroBatch]:
        """Parts that cost at most `limit`; a group is cut only where computing its prompt again costs little."""
        costs = self._costs()
        if total_cost(costs) <= limit:
            return [self]
        return self._parts(self._rows_of(split_to_size(costs, limit)))

    def _costs(self) -> list[RowCost]:
        return [self.step_rows.costs[row] for row in self.rows]

    def _rows_of(self, parts: Iterable[Sequence[int]]) -> list[list[int]]:
        return [[self.rows[place] for place in part] for part in parts]

    def _parts(self, parts: Sequence[list[int]]) -> list[MicroBatch]:
        if len(parts) == 1:
            return [self]
        counts = [sum(self.step_rows.loss_tokens[row] for row in rows) for rows in parts]
        shares = [count / sum(counts) if sum(counts) else 1 / len(parts) for count in counts]
        return [replace(self, rows=rows, share=self.share * share) for rows, share in zip(parts, shares)]


@dataclass(slots=True, frozen=True)
class MicroBatchRules:
    """Decides, for all steps of a run, which passes rows need and which ranks train them."""

    policy: PolicyOptions
    aux_loss: bool
    """A load-balancing loss gives every row a gradient."""
    backward_everywhere: bool = False
    """Each micro-batch has at least one row with a gradient. Otherwise at least one micro-batch has, so that the
    optimizer decays its moments and weights also in a step without any signal."""
    one_pass: bool = False
    """Rows that need a forward pass get a backward pass too, so that ranks which hold parts of one model make equally
    many passes."""
    balance_ranks: bool = False
    """The ranks first give rows to each other (`balance_over_ranks`)."""
    attention_cost: float = 0.0
    """Cost of one token's attention to another; the unit is the forward pass of a token (`row_costs`)."""
    shares_beginnings: bool = False
    """A pass computes once what several prompts begin with."""
    rank_group: dist.RankGroup | None = None
    """Ranks that make their passes together, so that each of them has the rows of all; None: each has its own."""


def assign_micro_batches(
    batch: Batch,
    planned: Sequence[Sequence[int]],
    rules: MicroBatchRules,
    on_policy: OnPolicyInfo,
    *,
    entropy_coef: float = 0.0,
    every_row: bool = False,
) -> list[MicroBatch]:
    """The step's micro-batches on this rank, as many as `planned`, of similar cost.

    Collective with `balance_ranks` or `rank_group` in the rules.

    `planned` are the rows of each micro-batch as the generation plan cuts them. Loss, gradient and metrics of the step
    do not depend on the assignment, except for a loss that is defined by the micro-batches of its rows (`bnpo`, load
    balancing), which keeps `planned`. With `every_row` each row gets a backward pass, and none moves to another rank:
    the loss is not known.
    """
    passes_of = partial(_passes_of, rules, on_policy, entropy_coef, every_row)
    is_local = rules.aux_loss or find_method(rules.policy.loss_type).reduction == "local_token_mean"
    assigned = [list(rows) for rows in planned]
    if rules.balance_ranks and not is_local:
        # A script may have replaced the loss on one rank alone, and all must take part in what they send each other.
        batch, assigned = _balanced(batch, assigned, passes_of(batch), rules.attention_cost, may_move=not every_row)
    if rules.rank_group is not None:
        batch, assigned = rows_of_group(batch, assigned, rules.rank_group)
    needed = passes_of(batch)
    if len(assigned) > 1 and not is_local:
        assigned = pack(row_costs(batch, needed, shares_beginnings=rules.shares_beginnings), assigned)
    for rows in assigned:
        if rows and (rules.backward_everywhere or FORWARD_AND_BACKWARD not in needed):
            _keep_a_live_row(batch, rows, needed)
    num_tokens = batch.offsets.diff() + batch.prompt_offsets.diff()[batch.prompt_of_row]
    batch = replace(batch, step_row=torch.arange(batch.num_rows))
    costs = row_costs(batch, needed, shares_beginnings=rules.shares_beginnings)
    step = StepRows(batch, needed, costs, batch.loss_tokens.tolist(), num_tokens.tolist())
    return [MicroBatch(step, rows) for rows in assigned]


def _passes_of(
    rules: MicroBatchRules, on_policy: OnPolicyInfo, entropy_coef: float, every_row: bool, batch: Batch
) -> list[int]:
    # Like a load-balancing loss, one that is not known may have a gradient through every row.
    aux_loss = rules.aux_loss or every_row
    passes = required_passes(batch, rules.policy, on_policy, entropy_coef=entropy_coef, aux_loss=aux_loss)
    if rules.one_pass:
        passes = passes.masked_fill(passes == FORWARD, FORWARD_AND_BACKWARD)
    return passes.tolist()


def _balanced(
    batch: Batch, planned: list[list[int]], passes: Sequence[int], attention_cost: float, *, may_move: bool
) -> tuple[Batch, list[list[int]]]:
    """The rows that this rank trains so that all ranks have equal work, and their micro-batches. Collective."""
    balanced = balance_over_ranks(batch, passes, len(planned), attention_cost=attention_cost, may_move=may_move)
    if balanced is batch:
        return batch, planned
    bounds = [balanced.num_rows * part // len(planned) for part in range(len(planned) + 1)]
    return balanced, [list(range(start, end)) for start, end in pairwise(bounds)]


def rows_of_group(
    batch: Batch, planned: Sequence[Sequence[int]], group: dist.RankGroup
) -> tuple[Batch, list[list[int]]]:
    """The rows of all ranks of a group, and the micro-batches of them, the same on each rank. Collective in the group.

    Ranks that compute rows together are one in the step's mean over ranks.
    """
    parts = dist.all_gather_objects((batch, [list(rows) for rows in planned]), group.handle)
    joined = Batch.concat([part for part, _ in parts])
    assigned: list[list[int]] = [[] for _ in planned]
    first = 0
    for part, its_plan in parts:
        for rows, its_rows in zip(assigned, its_plan):
            rows += [first + row for row in its_rows]
        first += part.num_rows
    num_groups = joined.totals.world_size // group.size
    return replace(joined, totals=replace(joined.totals, world_size=num_groups)), assigned


def _keep_a_live_row(batch: Batch, rows: Sequence[int], passes: list[int]) -> None:
    """Gives the cheapest of `rows`, one with tokens if there is one, a backward pass if none of them has any."""
    if any(passes[row] == FORWARD_AND_BACKWARD for row in rows):
        return
    lengths, prompts = batch.offsets.diff().tolist(), batch.prompt_offsets.diff()[batch.prompt_of_row].tolist()
    passes[min(rows, key=lambda row: (not lengths[row], lengths[row] + prompts[row], row))] = FORWARD_AND_BACKWARD
