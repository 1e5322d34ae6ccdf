"""Collectives, in one process and between two."""

from __future__ import annotations

from typing import Any

import dist_worker
import pytest
import torch
from forked_ranks import on_ranks

from groupgrad import dist


def test_alone_every_collective_is_the_identity():
    values = torch.arange(3.0, requires_grad=True)
    assert (dist.is_active(), dist.world_size(), dist.rank(), dist.is_main()) == (False, 1, 0, True)
    assert dist.all_gather_objects("x") == ["x"]
    assert dist.all_gather_rows(values) is values
    assert dist.all_sum([1, 2.5]) == [1.0, 2.5]
    assert dist.exchange_objects({}, []) == {}
    dist.raise_on_all_ranks(None)
    with pytest.raises(KeyError, match="mine"):
        dist.raise_on_all_ranks(KeyError("mine"))
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad = torch.full((1, 1), 3.0)
    dist.average_gradients(layer.parameters())
    assert layer.weight.grad.item() == 3.0
    assert layer.bias.grad is None


@pytest.mark.parametrize(
    ("backends", "options"),
    [("cuda:nccl", {"use_batch": True}), ("cpu:gloo,cuda:nccl", {"use_batch": True}), ("cpu:gloo", {})],
)
def test_no_pair_of_gpus_is_connected_for_objects_alone(backends, options, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    assert dist._object_options() == options


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two processes."""
    return on_ranks(dist_worker.main, tmp_path_factory.mktemp("ranks"), 2)


def both(ranks: list[dict[str, Any]], key: str) -> Any:
    """Returns a result that is the same on both ranks."""
    assert ranks[0][key] == ranks[1][key]
    return ranks[0][key]


def test_rank_and_world_size(ranks):
    assert [rank["where"] for rank in ranks] == [[True, 2, 0, True], [True, 2, 1, False]]


def test_objects_come_in_rank_order(ranks):
    assert both(ranks, "objects") == [{"rank": 0}, {"rank": 1}]


def test_rows_are_concatenated_in_rank_order(ranks):
    assert both(ranks, "rows") == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [20.0, 22.0]]
    assert both(ranks, "rows_gradient") is False
    assert both(ranks, "no_rows") == [7]
    assert both(ranks, "half") == "torch.bfloat16"


def test_sums_are_in_float64(ranks):
    assert both(ranks, "sums") == [3.0, 0.2, 2.0**54]


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    assert ranks[1]["failure"] == ["ValueError", "bad reward"]
    assert ranks[0]["failure"] == ["RankError", "stopped because rank 1 failed with ValueError: bad reward"]
    assert [rank["both"][0] for rank in ranks] == ["KeyError", "KeyError"]
    assert both(ranks, "no_failure") is None
    assert both(ranks, "still_in_step") == [2.0]


@pytest.mark.parametrize("bucket", [1, 100, 300, 10**6])
def test_gradients_become_the_mean_of_all_ranks(ranks, bucket):
    """Exactly the mean of two in float64, rounded once. A rank without a gradient counts as 0."""
    first, second = (rank["averaged"][bucket] for rank in ranks)
    assert list(first) == ["large", "wide", "small", "one", "bare", "double", "half", "mine"]
    for name, (before, after) in first.items():
        other_before, other_after = second[name]
        if name == "bare":
            assert after is None
            assert other_after is None
            continue
        zero = torch.zeros_like(other_before)
        mean = ((zero if before is None else before).double() + other_before.double()) / 2
        assert after.dtype == other_before.dtype
        assert torch.equal(after, mean.to(after.dtype)), name
        assert torch.equal(other_after, after), name
        assert float(after.double().abs().max()) > 0.01


def test_rank_0s_model_is_broadcast(ranks):
    weight, bias, flag, half, kept = both_but_last(ranks, "copied")
    assert (weight, bias, flag) == ([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [0.0] * 3, True)
    assert half == [[1.5, 1.5], [1.5, 1.5]]
    assert kept == [[True, half], [False, [[0.5, 0.5], [0.5, 0.5]]]]  # without buffers


def both_but_last(ranks: list[dict[str, Any]], key: str) -> list[Any]:
    """Returns the parts of a result that are the same on both ranks, then the last part of each."""
    assert ranks[0][key][:-1] == ranks[1][key][:-1]
    return [*ranks[0][key][:-1], [rank[key][-1] for rank in ranks]]


def test_different_models_are_refused(ranks):
    for rank, other in ((0, 1), (1, 0)):
        error, text = ranks[rank]["different"]
        assert error == "RuntimeError"
        assert f"ranks {rank} and {other} have different models: bias is ({3 + rank},)" in text
        assert "bias is (3,) torch.float32 frozen here" in ranks[1]["freeze"][1]
        assert "the ranks train different parameters: 2, 1 of them" in ranks[rank]["uneven"][1]


def test_objects_are_exchanged_in_the_way_of_each_backend(ranks):
    assert [rank["exchanged"] for rank in ranks] == [[{1: "from 1"}] * 2, [{0: "from 0"}] * 2]


def test_processes_with_gloo_sleep_once_at_exit(ranks):
    """Without the sleep about every third process aborted whose group still existed at the end."""
    assert both(ranks, "at_exit") == [0, 1, 1]
    assert dist.GLOO_EXIT_DELAY_S <= 0.5


def test_a_rank_that_is_waited_for_too_long_is_an_error(ranks):
    kind, message = ranks[0]["late"]
    assert kind == "RuntimeError"
    assert "Timed out waiting" in message
    assert ranks[1]["late"] is not None  # the other rank has gone
