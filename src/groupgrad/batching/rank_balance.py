"""Moves rows between ranks: to those that train them, and within a step so that all ranks have about the same cost.

How long a rank trains depends on the completions of its rows, and the gradient exchange waits for the slowest. The
denominators are those of the whole step, so it changes no result which rank trains a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.batching.packing import RowCost, filled, row_costs, split, total_cost

LEAST_GAINS = ((1.03, 0.03), (1.05, 0.01), (math.inf, 0.0))
"""(bound, gain): if the slowest rank costs at most `bound` times the mean, a move must save this share of its cost."""


def balance_over_ranks(
    batch: Batch, passes: Sequence[int], least_rows: int = 1, *, attention_cost: float = 0.0, may_move: bool = True
) -> Batch:
    """Redistributes a step's rows over ranks for equal cost; returns this rank's, at least `least_rows`. Collective.

    `batch` has this rank's rows, on the CPU, and `passes` (B,) the passes that each of them needs. Rows that stay keep
    their order and come first. `attention_cost` is as in `row_costs`. No row moves if `may_move` is False on any rank.
    """
    described = dist.all_gather_objects(_described(batch, passes, attention_cost) if may_move else None)
    if any(rows is None for rows in described):
        return batch
    costs = _with_common_groups([rows for rows in described if rows is not None])
    holders = [rank for rank, rows in enumerate(costs) for _ in rows]
    chosen = assign_to_ranks([cost for rows in costs for cost in rows], holders, len(costs), least_rows)
    return _move_rows(batch, holders, chosen)


def rows_to_trainers(batch: Batch, plan: GenerationPlan, generation: int) -> Batch:
    """The rows of a generation batch that this rank trains, ascending, from those that it has sampled. Collective."""
    if not plan.moves_rows:
        return batch
    holders, chosen = (
        [rank for _, rank in sorted((row, rank) for rank in range(plan.world_size) for row in rows(rank, generation))]
        for rows in (plan.sampled_rows, plan.rank_rows)
    )
    moved = _move_rows(batch, holders, chosen)
    assert moved.row_index is not None
    return moved.select(moved.row_index.argsort())


def _move_rows(batch: Batch, holders: Sequence[int], chosen: Sequence[int]) -> Batch:
    """This rank's rows after each row of all ranks has gone from its holder to its chosen rank. Collective.

    The rows of `batch` are those of which this rank is the holder, in their order.
    """
    rank = dist.rank()
    targets = [new for holder, new in zip(holders, chosen) if holder == rank]
    with dist.errors_on_all_ranks():  # another rank could not leave the exchange
        outgoing = {
            other: batch.select([place for place, target in enumerate(targets) if target == other])
            for other in sorted(set(targets))
        }
    kept = outgoing.pop(rank, batch.select([]))
    senders = sorted({holder for holder, new in zip(holders, chosen) if new == rank != holder})
    routes = sorted({(holder, new) for holder, new in zip(holders, chosen) if holder != new})
    received = dist.exchange_objects(outgoing, routes)
    parts = [kept, *(received[sender] for sender in senders)]
    if not routes:
        return batch
    return Batch.concat(parts) if senders else kept


def assign_to_ranks(costs: Sequence[RowCost], holders: Sequence[int], num_ranks: int, least_rows: int = 1) -> list[int]:
    """The rank that trains each row; `holders` are the ranks that have the rows now.

    Lowers the largest cost of a rank, first by moving single rows, then by dealing all of them anew with groups kept
    together; either only if it wins enough. The result is a function of the arguments alone.
    """
    best = [[row for row, holder in enumerate(holders) if holder == rank] for rank in range(num_ranks)]
    least, mean = _largest_and_mean(costs, best)
    if (1.0 - LEAST_GAINS[0][1]) * least * num_ranks <= total_cost(costs):  # equal costs, each prompt on one rank
        return list(holders)
    for bins in (best, split(costs, num_ranks, keeps_groups=True)):
        candidate = _refined(costs, filled(costs, bins, least_rows), least_rows)
        largest, new_mean = _largest_and_mean(costs, candidate)
        least_gain = next(gain for bound, gain in LEAST_GAINS if least <= bound * mean)
        if min(map(len, candidate)) >= least_rows and largest < (1.0 - least_gain) * least:
            best, least, mean = candidate, largest, new_mean
    chosen = list(holders)
    for rank, rows in enumerate(_renamed(costs, best, holders)):
        for row in rows:
            chosen[row] = rank
    return chosen


def _described(batch: Batch, passes: Sequence[int], attention_cost: float) -> list[tuple[RowCost, str]]:
    """The cost of each row, and a name of its prompt that is the same on all ranks."""
    images = batch.media or (None,) * batch.num_prompts
    names = [
        blake2b(repr((ids, item and item.key)).encode(), digest_size=12).hexdigest()
        for ids, item in zip(batch.prompts(), images)
    ]
    return [(cost, names[cost.group]) for cost in row_costs(batch, passes, attention_cost)]


def _with_common_groups(described: Sequence[Sequence[tuple[RowCost, str]]]) -> list[list[RowCost]]:
    """The costs of each rank's rows, with groups numbered over all ranks."""
    numbers: dict[str, int] = {}
    return [
        [RowCost(cost.completion, cost.prompt, numbers.setdefault(name, len(numbers))) for cost, name in rows]
        for rows in described
    ]


def _largest_and_mean(costs: Sequence[RowCost], bins: Sequence[Sequence[int]]) -> tuple[int, float]:
    bin_costs = [total_cost(costs[row] for row in rows) for rows in bins]
    return max(bin_costs), sum(bin_costs) / len(bin_costs)


def _refined(costs: Sequence[RowCost], bins: Sequence[Sequence[int]], least_rows: int) -> list[list[int]]:
    """Moves rows one by one from the fullest bin to the lightest, as long as that lowers the larger of the two."""
    found = [list(rows) for rows in bins]
    bin_costs = [total_cost(costs[row] for row in rows) for rows in found]
    for _ in costs:
        source, target = bin_costs.index(max(bin_costs)), bin_costs.index(min(bin_costs))
        there, here = _prompts(costs, found[source]), _prompts(costs, found[target])
        best: tuple[int, int, int] | None = None
        for row in found[source] if len(found[source]) > least_rows else ():
            cost = costs[row]
            others = sorted(there[cost.group])
            others.remove(cost.prompt)
            left = bin_costs[source] - cost.completion - max(0, cost.prompt - max(others, default=0))
            joined = (
                bin_costs[target] + cost.completion + max(0, cost.prompt - max(here.get(cost.group, ()), default=0))
            )
            best = min(best or (max(left, joined), left + joined, row), (max(left, joined), left + joined, row))
        if best is None or best[0] >= bin_costs[source]:
            return found
        found[source].remove(best[2])
        found[target].append(best[2])
        for place in (source, target):
            bin_costs[place] = total_cost(costs[row] for row in found[place])
    return found


def _prompts(costs: Sequence[RowCost], rows: Sequence[int]) -> dict[int, list[int]]:
    """The prompt costs of the rows of each group."""
    prompts: dict[int, list[int]] = {}
    for row in rows:
        prompts.setdefault(costs[row].group, []).append(costs[row].prompt)
    return prompts


def _renamed(costs: Sequence[RowCost], bins: Sequence[Sequence[int]], holders: Sequence[int]) -> list[list[int]]:
    """The same bins in an order by which ranks keep as much of their own rows as a greedy choice finds."""
    kept: dict[tuple[int, int], int] = {}
    for place, rows in enumerate(bins):
        for row in rows:
            kept[place, holders[row]] = kept.get((place, holders[row]), 0) + 1 + costs[row].completion
    free_ranks, free_bins = set(range(len(bins))), set(range(len(bins)))
    rank_of: dict[int, int] = {}
    for place, rank in sorted(kept, key=lambda pair: (-kept[pair], pair)):
        if place in free_bins and rank in free_ranks:
            rank_of[place] = rank
            free_bins.remove(place)
            free_ranks.remove(rank)
    rank_of.update(zip(sorted(free_bins), sorted(free_ranks)))
    ordered: list[list[int]] = [[] for _ in bins]
    for place, rows in enumerate(bins):
        ordered[rank_of[place]] = sorted(rows)
    return ordered
