"""The order of prompts, and keys of micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from accelerate import skip_first_batches
from datasets import Dataset, Image, IterableDataset

from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.batching.loader import GenerationSampler, LoaderOptions, MicroBatchKey, make_train_loader
from groupgrad.data.images import ImageError

# 8 rows, 2 prompts and 4 micro-steps a generation batch; rank 0 has group 0, rank 1 group 1.
PLAN = GenerationPlan(2, 2, 2, 2, 2, 4)


class CountingRows:
    """A map-style data set that counts how often each row is read."""

    def __init__(self, size: int):
        self.size, self.reads = size, Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return {"prompt": f"p{index}"}


def sampler(num_rows: int = 10, *, shuffle: bool = True, seed: int = 1, drop_last: bool = False, epoch: int = 0):
    made = GenerationSampler(num_rows, PLAN, LoaderOptions(shuffle=shuffle, seed=seed, drop_last=drop_last))
    made.set_epoch(epoch)
    return made


def rows(size: int) -> Dataset:
    return Dataset.from_list([{"prompt": f"p{i}"} for i in range(size)])


def stream(size: int) -> IterableDataset:
    return IterableDataset.from_generator(lambda: ({"prompt": f"p{i}"} for i in range(size)))


def test_an_epoch_is_a_permutation():
    """Or its rows as they are, where nothing is shuffled; fewer rows than a generation batch are repeated."""
    order = sampler().order()
    assert sorted(order) == list(range(10))
    assert order != list(range(10))
    assert sampler(4, shuffle=False).order() == [0, 1, 2, 3]
    assert sampler(1, shuffle=False).order() == [0, 0]


def test_orders_are_equal_for_equal_seeds_and_differ_between_epochs_and_seeds():
    """They do not depend on the epochs before."""
    used = sampler()
    for epoch in range(3):
        used.set_epoch(epoch)
        list(used)
    assert used.order() == sampler(epoch=2).order()
    orders = [tuple(sampler(seed=seed, epoch=epoch).order()) for seed in (1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6


def test_the_last_generation_batch_is_filled_from_the_front_or_left_out():
    filled = sampler(7)
    assert len(filled.order()) == 8
    assert filled.order()[7] == filled.order()[0]
    assert sorted(filled.order()[:7]) == list(range(7))
    assert len(filled) == 4 * 4
    dropped = sampler(7, drop_last=True)
    assert dropped.order() == filled.order()[:6]
    assert len(dropped) == 3 * 4


def test_every_iteration_gives_one_generation_batch_after_the_other():
    keys = [key for batch in sampler(6, shuffle=False, epoch=0) for key in batch]
    assert [(number, position) for number, position, *_ in keys] == [(r, p) for r in range(3) for p in range(4)]
    assert [indices for _, position, indices, _ in keys if position == 0] == [(0, 1), (2, 3), (4, 5)]


def test_numbers_of_generation_batches_go_on_over_epochs():
    later = [key[0][0] for key in sampler(6, epoch=2)]
    assert later == [6] * 4 + [7] * 4 + [8] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_rows_once_a_generation_batch(rank: int):
    dataset = CountingRows(6)
    loader = make_train_loader(dataset, PLAN, rank, LoaderOptions(shuffle=False))
    keys = list(loader)
    assert len(keys) == len(loader) == 12
    assert dataset.reads == {2 * number + rank: 1 for number in range(3)}
    firsts = [key for key in keys if key.position == 0]
    assert [key.rows for key in firsts] == [{rank: {"prompt": f"p{2 * number + rank}"}} for number in range(3)]
    assert all(key.rows is None for key in keys if key.position)
    assert all(key.indices == (2 * key.generation, 2 * key.generation + 1) for key in keys)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_key_of_a_generation_batch_brings_the_rows_of_batches_sampled_ahead(rank: int):
    # Generation batches of two prompts in file order; after the last one of an epoch come those of the next.
    keys = list(make_train_loader(CountingRows(6), PLAN, rank, LoaderOptions(shuffle=False, ahead=2)))
    ahead = [[rows[rank]["prompt"] for rows in key.ahead] for key in keys if key.position == 0]
    assert ahead == [[f"p{2 + rank}", f"p{4 + rank}"], [f"p{4 + rank}", f"p{rank}"], [f"p{rank}", f"p{2 + rank}"]]
    assert all(key.ahead == () for key in keys if key.position)


@pytest.mark.parametrize("make_rows", [rows, stream])
def test_a_rank_gets_the_groups_of_its_shuffled_rows(make_rows):
    plan = GenerationPlan(2, 2, 1, 4, 1, 4, shuffle_seed=1)  # 16 rows, 4 prompts, two for each rank
    options, groups = LoaderOptions(shuffle=False, ahead=1), []
    for rank in (0, 1):
        keys = list(islice(make_train_loader(make_rows(12), plan, rank, options), 12))
        firsts = [key for key in keys if key.position == 0]
        groups.append([list(key.rows) for key in firsts])
        assert groups[-1] == [plan.rank_groups(rank, number) for number in range(3)]
        assert [key.ahead[0] for key in firsts[:-1]] == [key.rows for key in firsts[1:]]
    assert groups == [[[0, 1]] * 3, [[2, 3]] * 3]


def test_the_rows_brought_ahead_are_those_of_the_generation_batches_that_follow():
    loader = make_train_loader(rows(10), PLAN, 0, LoaderOptions(seed=5, ahead=1))
    firsts = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        firsts += [key for key in loader if key.position == 0]
    assert [key.ahead[0] for key in firsts[:-1]] == [key.rows for key in firsts[1:]]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_row_whose_image_cannot_be_decoded_is_named_ahead_too(ahead: int):
    images = [None, None, None, {"bytes": b"broken", "path": None}]
    dataset = Dataset.from_list([{"prompt": "p", "image": image} for image in images]).cast_column("image", Image())
    loader = make_train_loader(dataset, PLAN, 1, LoaderOptions(shuffle=False, ahead=ahead))
    with pytest.raises(ImageError, match="row 3 of the data set cannot be read"):
        list(loader)


def test_an_offset_moves_all_generation_batches_in_the_order_of_all_epochs():
    plain = [row for epoch in range(5) for row in sampler(6, epoch=epoch).order()]
    for offset in (-4, 1, 5, 8):
        moved = GenerationSampler(6, PLAN, LoaderOptions(seed=1, offset=offset))
        found = []
        for epoch in (1, 2):
            moved.set_epoch(epoch)
            found += [row for [(_, position, rows, _)] in moved if position == 0 for row in rows]
        assert found == plain[6 + offset : 18 + offset]


def test_an_offset_moves_a_stream():
    plain = take_prompts(make_train_loader(stream(50), ALONE, 0, LoaderOptions(shuffle=False)), 8)
    ahead = make_train_loader(stream(50), ALONE, 0, LoaderOptions(shuffle=False, offset=3))
    assert take_prompts(ahead, 5) == plain[3:13]
    behind = islice(make_train_loader(stream(50), ALONE, 0, LoaderOptions(shuffle=False, offset=-3)), 20)
    batches = [[row.get("prompt") for row in key.rows.values()] for key in behind if key.rows is not None]
    assert batches == [[None, None], [None, "p0"], ["p1", "p2"], ["p3", "p4"], ["p5", "p6"]]


def test_prompts_are_counted_over_epochs():
    two = replace(PLAN, accumulation=2)
    for plan in (PLAN, two):
        size, per_epoch = plan.prompts_per_generation, -(-10 // plan.prompts_per_generation)
        steps = per_epoch * plan.micro_batches_per_generation // plan.accumulation
        assert plan.prompts_used(0, 10, drop_last=False) == 0
        assert plan.prompts_used(steps, 10, drop_last=False) == 10
        assert plan.prompts_used(3 * steps, 10, drop_last=False) == 30
        edge = plan.micro_batches_per_generation // plan.accumulation
        assert plan.prompts_used(2 * edge, 10, drop_last=False) == 2 * size
        assert plan.prompts_used(20 * edge, None, drop_last=False) == 20 * size


@pytest.mark.parametrize("skipped", [0, 1, 7])
def test_skipping_gives_the_keys_of_an_uninterrupted_run(skipped: int):
    def loader():
        made = make_train_loader(rows(10), PLAN, 0, LoaderOptions(seed=3))
        made.set_epoch(2)  # pyright: ignore[reportAttributeAccessIssue]
        return made

    assert list(skip_first_batches(loader(), skipped)) == list(loader())[skipped:]


def test_a_skipped_loader_still_takes_an_epoch():
    loader = make_train_loader(rows(10), PLAN, 0, LoaderOptions(seed=3))
    skipping = skip_first_batches(loader, 4)
    loader.set_epoch(2)  # pyright: ignore[reportAttributeAccessIssue]
    expected = sampler(seed=3, epoch=2).order()[2:]
    assert [index for key in skipping if key.position == 0 for index in key.indices] == expected


def test_workers_read_the_same_keys():
    plain = make_train_loader(rows(8), PLAN, 1, LoaderOptions(seed=4))
    worked = make_train_loader(rows(8), PLAN, 1, LoaderOptions(seed=4, num_workers=1, prefetch_factor=2))
    assert list(worked) == list(plain)


def take_prompts(loader: Any, num_batches: int) -> list[str]:
    """The prompts of the first generation batches of a plan whose rank 0 has all groups."""
    keys: list[MicroBatchKey] = list(islice(loader, num_batches * PLAN.micro_batches_per_generation))
    assert [(key.generation, key.position) for key in keys] == [(r, p) for r in range(num_batches) for p in range(4)]
    found = [[row["prompt"] for _, row in sorted(key.rows.items())] for key in keys if key.rows is not None]
    assert len(found) == num_batches
    return [prompt for part in found for prompt in part]


ALONE = GenerationPlan(4, 1, 2, 2, 2, 4)  # 2 prompts a generation batch, one rank


def test_a_stream_is_endless_and_rests_carry_over_to_its_next_pass():
    prompts = take_prompts(make_train_loader(stream(3), ALONE, 0, LoaderOptions(shuffle=False)), 5)
    assert prompts == ["p0", "p1", "p2"] * 3 + ["p0"]


def test_a_stream_is_shuffled_anew_in_each_pass_and_equally_for_equal_seeds():
    def prompts(seed: int) -> list[str]:
        return take_prompts(make_train_loader(stream(8), ALONE, 0, LoaderOptions(seed=seed)), 8)

    first = prompts(1)
    assert sorted(first[:8]) == sorted(first[8:]) == [f"p{i}" for i in range(8)]
    assert first[:8] != first[8:]
    assert first == prompts(1)
    assert first != prompts(2)


def test_ranks_share_out_a_streams_prompts():
    parts = []
    for rank in (0, 1):
        keys = list(islice(make_train_loader(stream(6), PLAN, rank, LoaderOptions(seed=9)), 12))
        parts.append([key.rows for key in keys if key.rows is not None])
    joined = [{**a, **b} for a, b in zip(*parts)]
    assert [sorted(part) for part in joined] == [[0, 1]] * 3
    assert sorted(row["prompt"] for part in joined for row in part.values()) == [f"p{i}" for i in range(6)]


def test_skipping_in_a_stream_gives_the_keys_of_an_uninterrupted_run():
    def loader():
        return make_train_loader(stream(5), ALONE, 0, LoaderOptions(seed=7))

    whole = list(islice(loader(), 24))
    assert list(islice(skip_first_batches(loader(), 6), 18)) == whole[6:]


def test_an_empty_stream_is_an_error_and_no_endless_loop():
    empty = stream(3).filter(lambda row: False)
    with pytest.raises(ValueError, match="yielded no row"):
        next(iter(make_train_loader(empty, ALONE, 0, LoaderOptions())))
