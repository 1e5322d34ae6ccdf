"""Rows shared out over the micro-batches of a step, so that these cost alike and groups stay together.

Which micro-batch a row is in changes no result: the denominators are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from groupgrad.batch import FORWARD, FORWARD_AND_BACKWARD, Batch

# A backward pass costs about two forward passes (arXiv:2001.08361, sec. 2.1).
_WEIGHTS = {FORWARD_AND_BACKWARD: 3, FORWARD: 1}
# A group above a fair share stays whole or is cut into pieces of a fair share, of half of it, and so on; the best wins.
_FINENESS = (0, 1, 2, 4, 1 << 30)


@dataclass(slots=True, frozen=True)
class RowCost:
    """What a row costs in a micro-batch, in units of a forward pass of one token."""

    own: int
    """For its completion."""
    prompt: int
    """For its prompt; rows of one group in one micro-batch pay it once (the largest of theirs)."""
    group: int
    """Rows with the same number share their prompt."""


def row_costs(batch: Batch) -> list[RowCost]:
    """The cost of each row of a batch by the passes it needs; 0 for rows that the model does not see."""
    completions, prompts = batch.offsets.diff().tolist(), batch.prompt_offsets.diff().tolist()
    passes = [FORWARD_AND_BACKWARD] * batch.num_rows if batch.passes is None else batch.passes.tolist()
    weights = [_WEIGHTS.get(needed, 0) for needed in passes]
    groups = batch.prompt_of_row.tolist()
    return [RowCost(w * length, w * prompts[g], g) for w, length, g in zip(weights, completions, groups)]


def total_cost(costs: Iterable[RowCost]) -> int:
    """The cost of a micro-batch of these rows."""
    prompts: dict[int, int] = {}
    own = 0
    for cost in costs:
        own += cost.own
        prompts[cost.group] = max(prompts.get(cost.group, 0), cost.prompt)
    return own + sum(prompts.values())


def pack(costs: Sequence[RowCost], plan: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows (places in `costs`) of each of as many micro-batches as `plan` has; every row once, ascending.

    The sum of loads, which is time, is as small as was found, and then the largest load, which is memory; neither is
    above that of `plan`, a valid sharing out. So prompts are computed as seldom as memory allows, and what is left is
    balanced. A group is cut only if it costs more than a fair share, and no micro-batch is empty if there are rows
    enough, unless `plan` is kept. The result is a function of the arguments alone.
    """
    loads = _loads(costs, plan)
    best, best_score = [list(rows) for rows in plan], (sum(loads), max(loads, default=0))
    for bins in _candidates(costs, len(plan)):
        found = _loads(costs, bins)
        score = (sum(found), max(found))
        if score < best_score and score[1] <= max(loads):
            best, best_score = bins, score
    return best


def split(costs: Sequence[RowCost], parts: int) -> list[list[int]]:
    """All rows in `parts` non-empty parts (from 1 to the number of rows), the largest load as small as was found."""
    candidates = _candidates(costs, parts)
    return min(candidates, key=lambda bins: (max(_loads(costs, bins)), sum(_loads(costs, bins))))


def _loads(costs: Sequence[RowCost], bins: Sequence[Sequence[int]]) -> list[int]:
    return [total_cost(costs[row] for row in rows) for rows in bins]


def _candidates(costs: Sequence[RowCost], num_bins: int) -> list[list[list[int]]]:
    """Ways to share the rows out; none without bins."""
    if not num_bins:
        return []
    return [_longest_first(costs, _pieces(costs, num_bins, fineness), num_bins) for fineness in _FINENESS]


def _pieces(costs: Sequence[RowCost], num_bins: int, fineness: int) -> list[list[int]]:
    """The groups, those above a fair share cut into pieces of about a `fineness`-th of it; 0 cuts none."""
    groups: dict[int, list[int]] = {}
    for row, cost in enumerate(costs):
        groups.setdefault(cost.group, []).append(row)
    whole = sum(total_cost(costs[row] for row in rows) for rows in groups.values())
    pieces: list[list[int]] = []
    for rows in groups.values():
        size = total_cost(costs[row] for row in rows)
        if size * num_bins <= whole or not fineness:
            pieces.append(rows)
        else:
            count = min(len(rows), -(-size * num_bins * fineness // max(whole, 1)))
            pieces += _longest_first(costs, [[row] for row in rows], count)
    return pieces


def _longest_first(costs: Sequence[RowCost], pieces: list[list[int]], num_bins: int) -> list[list[int]]:
    """The pieces in bins, each, from the most expensive on, where the load is then least."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    prompts: list[dict[int, int]] = [{} for _ in range(num_bins)]
    for rows in sorted(pieces, key=lambda rows: (-total_cost(costs[row] for row in rows), rows)):
        own = sum(costs[row].own for row in rows)
        group, prompt = costs[rows[0]].group, max(costs[row].prompt for row in rows)
        after = [loads[b] + own + max(0, prompt - prompts[b].get(group, 0)) for b in range(num_bins)]
        chosen = after.index(min(after))
        bins[chosen] += rows
        loads[chosen] = after[chosen]
        prompts[chosen][group] = max(prompt, prompts[chosen].get(group, 0))
    return [sorted(rows) for rows in _filled(costs, bins)]


def _filled(costs: Sequence[RowCost], bins: list[list[int]]) -> list[list[int]]:
    """The bins, an empty one given the cheapest row of the fullest as long as that keeps another."""
    for empty in (b for b in bins if not b):
        fullest = max(bins, key=len)
        if len(fullest) > 1:
            row = min(fullest, key=lambda row: (costs[row].own + costs[row].prompt, row))
            fullest.remove(row)
            empty.append(row)
    return bins
