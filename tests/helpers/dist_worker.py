"""One of two ranks: calls every collective and returns the results."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from groupgrad import dist

SHAPES: dict[str, tuple[int, ...]] = {"large": (40, 9), "wide": (6, 50), "small": (7,), "one": (), "bare": (3,)}
BUCKETS = (1, 100, 300, 10**6)
"""Bucket sizes in bytes: every gradient alone, some together, all together."""


def main(rank: int) -> dict[str, Any]:
    at_exit = [atexit._ncallbacks()]  # pyright: ignore[reportAttributeAccessIssue]
    dist.all_sum([0.0])
    at_exit.append(atexit._ncallbacks())  # pyright: ignore[reportAttributeAccessIssue]
    rows = torch.arange(6.0).view(3, 2) if rank == 0 else torch.tensor([[10.0, 11.0]])
    rows.requires_grad_(True)
    gathered = dist.all_gather_rows(rows * 2)
    results: dict[str, Any] = {
        "where": [dist.is_active(), dist.world_size(), dist.rank(), dist.is_main()],
        "objects": dist.all_gather_objects({"rank": rank}),
        "rows": gathered.tolist(),
        "rows_gradient": gathered.requires_grad,
        "no_rows": dist.all_gather_rows(torch.zeros(0, dtype=torch.int64) if rank else torch.tensor([7])).tolist(),
        "half": str(dist.all_gather_rows(torch.ones(1, dtype=torch.bfloat16)).dtype),
        "sums": dist.all_sum([1.0 + rank, 0.1, 2.0**53]),
        "exchanged": exchanged(rank),
        "failure": failure(ValueError("bad reward") if rank == 1 else None),
        "both": failure(KeyError(f"rank {rank}")),
        "no_failure": failure(None),
        "still_in_step": dist.all_sum([1.0]),
    }
    at_exit.append(atexit._ncallbacks())  # pyright: ignore[reportAttributeAccessIssue]
    results["at_exit"] = [count - at_exit[0] for count in at_exit]
    results["different"] = failure_of(lambda: dist.broadcast_module(nn.Linear(2, 3 + rank)))
    results["uneven"] = failure_of(lambda: dist.average_gradients(list(nn.Linear(2, 3).parameters())[rank:]))
    results["freeze"] = failure_of(lambda: dist.broadcast_module(nn.Linear(2, 3).requires_grad_(rank == 0)))
    results["copied"] = copied(rank)
    dist.limit_waiting(1.0 if rank == 0 else 60.0)
    results["averaged"] = {size: averaged(rank, size) for size in BUCKETS}
    if rank == 1:
        time.sleep(2)
    results["late"] = failure_of(lambda: dist.all_sum([1.0]))
    return results


def exchanged(rank: int) -> list[dict[int, str]]:
    """Returns what the other rank has sent, in the way of each backend."""
    own, found = dist._object_options, []
    for options in ({}, {"use_batch": True}):
        dist._object_options = lambda options=options: options
        found.append(dist.exchange_objects({1 - rank: f"from {rank}"}, [(0, 1), (1, 0)]))
    dist._object_options = own
    return found


def averaged(rank: int, bucket_bytes: int) -> dict[str, list[Any]]:
    """Returns each parameter's gradient before and after."""
    stream = torch.Generator().manual_seed(rank)
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    parameters["double"] = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    parameters["half"] = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    parameters["mine"] = nn.Parameter(torch.zeros(4))
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=stream, dtype=torch.float64).to(parameter.dtype)
        if name == "wide":  # a gradient with other strides than its parameter
            parameter.grad = gradient.t().contiguous().t()
        elif name != "bare" and (name != "mine" or rank == 1):
            parameter.grad = gradient
    before = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    dist.average_gradients(parameters.values(), bucket_bytes=bucket_bytes)
    return {name: [before[name], parameter.grad] for name, parameter in parameters.items()}


def copied(rank: int) -> list[Any]:
    """Returns the module after a broadcast of everything, and its buffers after one of the parameters."""
    module: Any = nn.Linear(2, 3)
    module.register_buffer("flag", torch.tensor(rank == 0))
    module.register_buffer("table", torch.full((2, 2), 1.5 - rank, dtype=torch.bfloat16).t())
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).view(3, 2) + 10 * rank)
        module.weight.data = module.weight.data.t().contiguous().t()
        module.bias.fill_(rank)
    dist.broadcast_module(module, buffers=False)
    kept = [module.flag.item(), module.table.tolist()]
    dist.broadcast_module(module)
    return [module.weight.tolist(), module.bias.tolist(), module.flag.item(), module.table.tolist(), kept]


def failure(error: BaseException | None) -> list[str] | None:
    return failure_of(lambda: dist.raise_on_all_ranks(error))


def failure_of(action: Callable[[], None]) -> list[str] | None:
    try:
        action()
    except Exception as caught:
        return [type(caught).__name__, str(caught)]
    return None
