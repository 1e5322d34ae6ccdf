"""vLLM in the training processes of several ranks: launcher variables, tensor-parallel groups, and their session.

With a tensor parallel size of t, t consecutive ranks hold one model together, a shard each. vLLM's "external launcher"
runs the same engine in each of them: all must be given the same rows in the same order, and step together.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import patch_environment

from groupgrad import dist
from groupgrad.engines.base import Sample, TicketSession
from groupgrad.models.layer_configs import layer_configs


def check_tensor_parallel(config: Any, size: int, *, ranks: int) -> None:
    """ValueError if groups of `size` of the `ranks` cannot share a text model with this transformers config."""
    if size == 1:
        return
    if size > ranks or ranks % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, but {ranks} training {'rank' if ranks == 1 else 'ranks'} cannot be "
            f"shared out in groups of {size}: set it to a number that divides {ranks}, start more ranks, or use "
            'vllm_mode="server" and give it to `groupgrad vllm-serve`'
        )
    for layer in layer_configs(config) or [config]:
        _check_heads(layer, size)


def _check_heads(config: Any, size: int) -> None:
    """ValueError if the heads of a layer cannot be divided over `size` ranks."""
    heads = int(getattr(config, "num_attention_heads", None) or size)
    if heads % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, but the model's {heads} attention heads cannot be shared out in "
            f"{size} equal parts: set it to a number that divides {heads}"
        )
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, which neither divides the model's {kv_heads} key-value heads nor is "
            f"a multiple of them: set it to one that does"
        )


def launcher_environment() -> AbstractContextManager[None]:
    """Collective. Sets the launcher's environment variables that vLLM reads, where torchrun or the user has not.

    Added variables, a free port among them, are removed afterwards.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = dist.all_gather_objects(probe.getsockname()[1])[0]
    defaults = {
        "RANK": dist.rank(),
        "LOCAL_RANK": torch.cuda.current_device() if torch.cuda.is_available() else dist.rank(),
        "WORLD_SIZE": dist.world_size(),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    return patch_environment(**{name: value for name, value in defaults.items() if name not in os.environ})


class TensorParallelSession(TicketSession):
    """A session of the ranks that hold one model together: the rows of every rank are sampled by all of them.

    `advance` and `close` are collectives of these ranks, in any combination: a rank without rows goes on sampling for
    the others in `close`, until all have called it. `local` is this rank's `ColocateSession`; `gather` returns each
    rank's object, in the same order everywhere.
    """

    def __init__(self, local: Any, rank: int, gather: Callable[[Any], list[Any]]):
        super().__init__()
        self._local, self._rank, self._gather = local, rank, gather
        self._owners: dict[int, tuple[int, int]] = {}
        """Rank, and ticket of that rank, by the local session's ticket."""

    def advance(self) -> list[tuple[int, Sample]]:
        """Collective. Samples about a token for the requests of all ranks; returns this rank's rows that ended."""
        return self._step(closing=False) or []

    def close(self) -> None:
        """Collective. Aborts this rank's open rows, and goes on sampling until the other ranks are done."""
        self._unsent.clear()
        self._open.clear()
        try:
            while self._step(closing=True) is not None:
                pass
        finally:
            self._local.close()

    def _step(self, *, closing: bool) -> list[tuple[int, Sample]] | None:
        """This rank's rows that ended, in ticket order; None once all ranks are closing."""
        gathered = self._gather((closing, [(ticket, self._open[ticket]) for ticket in self._unsent]))
        self._unsent = []
        if all(is_closing for is_closing, _ in gathered):
            return None
        closed = {rank for rank, (is_closing, _) in enumerate(gathered) if is_closing}
        aborted = [ticket for ticket, (owner, _) in self._owners.items() if owner in closed]
        for ticket in aborted:
            del self._owners[ticket]
        self._local.abort(aborted)
        for owner, (_, requests) in enumerate(gathered):
            for ticket, request in requests:
                self._owners[self._local.submit(request)] = (owner, ticket)
        ended: list[tuple[int, Sample]] = []
        for local_ticket, sample in self._local.advance():
            owner, ticket = self._owners.pop(local_ticket)
            if owner == self._rank:
                self._open.pop(ticket, None)
                ended.append((ticket, sample))
        return sorted(ended, key=lambda pair: pair[0])
