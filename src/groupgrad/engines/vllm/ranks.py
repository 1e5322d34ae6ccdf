"""vLLM in the processes of several ranks: what its launcher reads, which ranks share a model, and their joint session.

With a tensor parallel size of t, each t ranks in a row hold one model together, a part each. vLLM's "external launcher"
runs the same engine in every one of them: all must be given the same rows in the same order, and step together.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from groupgrad import dist
from groupgrad.engines.base import Request, Sample

MASTER_ADDR = "localhost"
"""Where ranks meet that no launcher has told."""


def check_tensor_parallel(config: Any, size: int, *, ranks: int) -> None:
    """ValueError if `size` of the `ranks` cannot share a model of this transformers config."""
    if size == 1:
        return
    if size > ranks or ranks % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, but {ranks} training {'rank' if ranks == 1 else 'ranks'} cannot be "
            f"shared out in groups of {size}: set it to a number that divides {ranks}, start more ranks, or use "
            'vllm_mode="server" and give it to `groupgrad vllm-serve`'
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(text, "num_attention_heads", None) or size)
    if heads % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, but the model's {heads} attention heads cannot be shared out in "
            f"{size} equal parts: set it to a number that divides {heads}"
        )
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size}, which neither divides the model's {kv_heads} key-value heads nor is "
            f"a multiple of them: set it to one that does"
        )


@contextmanager
def launcher_environment() -> Iterator[None]:
    """Collective. What vLLM reads of its launcher is in the environment.

    What torchrun or the user has set stays; what was added (a free port among it) is gone afterwards.
    """
    port = dist.all_gather_objects(_free_port())[0]
    local = torch.cuda.current_device() if torch.cuda.is_available() else dist.rank()
    wanted = {
        "RANK": str(dist.rank()),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(dist.world_size()),
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(port),
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class _Inner(Protocol):
    def submit(self, request: Request) -> int: ...

    def advance(self) -> list[tuple[int, Sample]]: ...

    def give_up(self, tickets: list[int]) -> None: ...

    def close(self) -> None: ...


class JointSession:
    """A session that the ranks of one model hold together: every rank's rows are sampled by all of them.

    `advance` and `close` are collectives of these ranks: each call of one is met by one of all others, whichever it is.
    So a rank that has nothing left to sample goes on for the others in `close`, until all have come there.
    `gather` gives what each of them has given, in the same order everywhere.
    """

    def __init__(self, inner: _Inner, rank: int, gather: Callable[[Any], list[Any]]):
        self._inner, self._rank, self._gather = inner, rank, gather
        self._waiting: list[tuple[int, Request]] = []
        self._open: set[int] = set()
        self._owners: dict[int, tuple[int, int]] = {}
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """The ticket of a request that the next `advance` hands to all ranks."""
        ticket = self._num_submitted
        self._num_submitted += 1
        self._waiting.append((ticket, request))
        self._open.add(ticket)
        return ticket

    @property
    def num_open(self) -> int:
        """Requests of this rank that have not ended."""
        return len(self._open)

    def release(self, ticket: int) -> None:
        """Nothing is kept but what vLLM's prefix cache holds, so nothing happens."""

    def advance(self) -> list[tuple[int, Sample]]:
        """Collective. About a token for each request of all ranks; those of this one that ended, in ticket order."""
        ended, _ = self._step(closing=False)
        return ended

    def close(self) -> None:
        """Collective. Give up what has not ended here, and sample on until the other ranks are done."""
        self._waiting.clear()
        self._open.clear()
        try:
            while not self._step(closing=True)[1]:
                pass
        finally:
            self._inner.close()

    def _step(self, *, closing: bool) -> tuple[list[tuple[int, Sample]], bool]:
        """Rows that ended here, and whether all ranks are closing."""
        told = self._gather((closing, self._waiting))
        self._waiting = []
        if all(other_closing for other_closing, _ in told):
            return [], True
        gone = {rank for rank, (other_closing, _) in enumerate(told) if other_closing}
        given_up = [ticket for ticket, (owner, _) in self._owners.items() if owner in gone]
        for ticket in given_up:
            del self._owners[ticket]
        self._inner.give_up(given_up)
        for owner, (_, requests) in enumerate(told):
            for ticket, request in requests:
                self._owners[self._inner.submit(request)] = (owner, ticket)
        ended: list[tuple[int, Sample]] = []
        for ticket, sample in self._inner.advance():
            owner, own_ticket = self._owners.pop(ticket)
            if owner == self._rank:
                self._open.discard(own_ticket)
                ended.append((own_ticket, sample))
        return sorted(ended, key=lambda pair: pair[0]), False
