"""Distributes the rows of a step over micro-batches of similar cost that keep groups together.

The micro-batch of a row changes no result: the denominators are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from groupgrad.batch import Batch
from groupgrad.objectives import FORWARD, FORWARD_AND_BACKWARD

# A backward pass costs about two forward passes (arXiv:2001.08361, sec. 2.1).
_WEIGHTS = {FORWARD_AND_BACKWARD: 3, FORWARD: 1}
# A group above a fair share stays whole, or is cut into pieces of a fair share, half of it, and so on. The best wins.
_FINENESS = (0, 1, 2, 4, 1 << 30)
_MOST_REPEATED = 0.05
"""Share of a group's cost that computing its prompt again may add where the group is cut for its size."""


@dataclass(slots=True, frozen=True)
class RowCost:
    """Cost of a row in a micro-batch; the unit is the forward pass of one token."""

    completion: int
    """Cost of the completion."""
    prompt: int
    """Cost of the prompt; rows of one group in one micro-batch pay the largest of theirs, once."""
    group: int
    """Rows with the same number share their prompt."""
    beginning: int = 0
    """Cost of what all prompts begin with, which is not in `prompt`; the rows of a micro-batch pay it once."""


def row_costs(
    batch: Batch, passes: Sequence[int], attention_cost: float = 0.0, *, shares_beginnings: bool = False
) -> list[RowCost]:
    """The cost of each row of a batch, whose (B,) `passes` are `NO_PASS` (costs 0), `FORWARD` and so on.

    `attention_cost` is that of one token's attention to another, in forward passes of a token; a token attends to its
    prompt, the tokens before it and itself. With `shares_beginnings` a pass computes once what prompts begin with.
    """
    completions, prompts = batch.offsets.diff().tolist(), batch.prompt_offsets.diff().tolist()
    for row, branches in enumerate(batch.branches or ()):
        completions[row] += sum(len(branch.context) for branch in branches)
    weights = [_WEIGHTS.get(needed, 0) for needed in passes]
    groups = batch.prompt_of_row.tolist()
    common = batch.common_beginning() if shares_beginnings and not batch.has_images else 0

    def cost(length: int, before: int) -> int:
        return length + round(attention_cost * length * (before + (length + 1) / 2))

    return [
        RowCost(w * cost(length, prompts[g]), w * (cost(prompts[g], 0) - common), g, w * common)
        for w, length, g in zip(weights, completions, groups)
    ]


def total_cost(costs: Iterable[RowCost]) -> int:
    """The cost of a micro-batch of these rows."""
    prompts: dict[int, int] = {}
    completions = beginning = 0
    for cost in costs:
        completions += cost.completion
        beginning = max(beginning, cost.beginning)
        prompts[cost.group] = max(prompts.get(cost.group, 0), cost.prompt)
    return completions + sum(prompts.values()) + beginning


def pack(costs: Sequence[RowCost], plan: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows (places in `costs`) of as many micro-batches as `plan` has; every row once, ascending.

    Minimises the sum of the micro-batches' costs (time), then the largest cost (memory), over a few candidates; neither
    exceeds that of `plan`, a valid assignment. So prompts are computed as seldom as memory allows. A group is cut only
    if it costs more than a fair share. No micro-batch is empty if there are rows enough, unless `plan` is kept. The
    result is a function of the arguments alone.
    """
    bin_costs = _bin_costs(costs, plan)
    best, best_score = [list(rows) for rows in plan], (sum(bin_costs), max(bin_costs, default=0))
    for bins in _candidates(costs, len(plan)):
        found = _bin_costs(costs, bins)
        score = (sum(found), max(found))
        if score < best_score and score[1] <= max(bin_costs):
            best, best_score = bins, score
    return best


def split(costs: Sequence[RowCost], parts: int, *, keeps_groups: bool = False) -> list[list[int]]:
    """All rows in `parts` non-empty parts (from 1 to the number of rows), with the smallest largest cost found.

    With `keeps_groups` a group is cut only if it costs more than a fair share.
    """
    candidates = _candidates(costs, parts)
    if not keeps_groups:
        candidates.append(_longest_first(costs, [[row] for row in range(len(costs))], parts))
    return min(candidates, key=lambda bins: (max(_bin_costs(costs, bins)), sum(_bin_costs(costs, bins))))


def split_to_size(costs: Sequence[RowCost], limit: int) -> list[list[int]]:
    """All rows in parts of similar cost, each at most `limit`, where that costs little.

    A group above the limit is cut into as many parts as it needs, or as many as repeat its prompt for less than
    `_MOST_REPEATED` of its cost.
    """
    groups: list[list[int]] = []
    cut: list[list[int]] = []
    for rows in _rows_by_group(costs).values():
        pieces = _pieces_to_size(costs, rows, limit)
        (groups if len(pieces) == 1 else cut).extend(pieces)
    return [*_split_between_groups(costs, groups, limit), *cut]


def _pieces_to_size(costs: Sequence[RowCost], rows: list[int], limit: int) -> list[list[int]]:
    """The rows of one group, cut for its size."""
    size, prompt = total_cost(costs[row] for row in rows), max(costs[row].prompt + costs[row].beginning for row in rows)
    count = min(len(rows), -(-size // limit))
    if prompt:
        count = min(count, 1 + int(_MOST_REPEATED * size / prompt))
    return _longest_first(costs, [[row] for row in rows], count) if count > 1 else [rows]


def _split_between_groups(costs: Sequence[RowCost], groups: list[list[int]], limit: int) -> list[list[int]]:
    """The rows of whole groups in parts of similar cost, each at most `limit` or one group."""
    if not groups:
        return []
    beginning = max(costs[row].beginning for rows in groups for row in rows)
    limit = max(1, limit - beginning)
    sizes = [total_cost(replace(costs[row], beginning=0) for row in rows) for rows in groups]
    fair = sum(sizes) / max(1, -(-sum(sizes) // limit))
    parts: list[list[int]] = [[]]
    without = 0  # beside the beginning whole groups share nothing, so that their costs add up
    for rows, size in zip(groups, sizes):
        joined = without + size
        if parts[-1] and (joined > limit or abs(joined - fair) > abs(without - fair)):
            parts.append([])
            joined = size
        parts[-1] += rows
        without = joined
    return [sorted(rows) for rows in parts]


def _rows_by_group(costs: Sequence[RowCost]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for row, cost in enumerate(costs):
        groups.setdefault(cost.group, []).append(row)
    return groups


def _bin_costs(costs: Sequence[RowCost], bins: Sequence[Sequence[int]]) -> list[int]:
    return [total_cost(costs[row] for row in rows) for rows in bins]


def _candidates(costs: Sequence[RowCost], num_bins: int) -> list[list[list[int]]]:
    """Assignments of the rows to bins, one for each fineness; none without bins."""
    if not num_bins:
        return []
    return [_longest_first(costs, _pieces(costs, num_bins, fineness), num_bins) for fineness in _FINENESS]


def _pieces(costs: Sequence[RowCost], num_bins: int, fineness: int) -> list[list[int]]:
    """The groups, those above a fair share cut into pieces of about a `fineness`-th of it; 0 cuts none."""
    groups = _rows_by_group(costs)
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
    """Puts each piece, from the most expensive on, into the bin whose cost it leaves least."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    bin_costs = [0] * num_bins
    prompts: list[dict[int, int]] = [{} for _ in range(num_bins)]
    for rows in sorted(pieces, key=lambda rows: (-total_cost(costs[row] for row in rows), rows)):
        completion = sum(costs[row].completion for row in rows)
        group, prompt = costs[rows[0]].group, max(costs[row].prompt for row in rows)
        after = [bin_costs[b] + completion + max(0, prompt - prompts[b].get(group, 0)) for b in range(num_bins)]
        chosen = after.index(min(after))
        bins[chosen] += rows
        bin_costs[chosen] = after[chosen]
        prompts[chosen][group] = max(prompt, prompts[chosen].get(group, 0))
    return [sorted(rows) for rows in filled(costs, bins)]


def filled(costs: Sequence[RowCost], bins: Sequence[Sequence[int]], least_rows: int = 1) -> list[list[int]]:
    """Moves the cheapest rows of the largest bins to bins with fewer than `least_rows` rows."""
    found = [list(rows) for rows in bins]
    for rows in found:
        while len(rows) < least_rows < len(longest := max(found, key=len)):
            row = min(longest, key=lambda row: (costs[row].completion + costs[row].prompt, row))
            longest.remove(row)
            rows.append(row)
    return found
