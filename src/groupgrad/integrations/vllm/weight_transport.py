"""Transports that carry buckets of weights to the workers of a vLLM server."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch

from groupgrad.concurrency.daemon_threads import DaemonThreads
from groupgrad.integrations.vllm.http import GROUP_LEFT_STATUS, Address, ServerRefused, call
from groupgrad.integrations.vllm.weight_group import (
    RENDEZVOUS_S,
    Backend,
    GroupBroken,
    WeightGroup,
    describe_device,
    open_store,
)
from groupgrad.integrations.vllm.wire import Bucket, remove_stale, shared_file

logger = logging.getLogger(__name__)

GROUP_PORT = 51216

_THREADS = DaemonThreads("vllm-weights")


class HttpTransport:
    """Sends buckets as bodies of HTTP calls, which the server hands to its workers; works everywhere."""

    device = torch.device("cpu")
    """Device of the buckets that `send` takes."""

    def connect(self, address: Address, num_workers: int, *, timeout_s: float) -> None:
        """Prepares to send a push to a server with so many workers."""

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Returns when all workers have loaded the bucket."""
        call(address, "update", bucket.data.numpy().data, query=_query(weight_version, bucket), timeout_s=timeout_s)

    def close(self) -> None:
        """Leaves the server without waiting for anything."""


class SharedMemoryTransport(HttpTransport):
    """Sends buckets in shared memory, which workers on the trainer's machine read directly."""

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Returns when all workers have loaded the bucket."""
        with shared_file(bucket.data.numpy().data) as name:
            query = _query(weight_version, bucket, shared=name)
            call(address, "update", b"", query=query, timeout_s=timeout_s)


class GroupTransport(HttpTransport):
    """Broadcasts buckets over a process group of this rank and all workers: NCCL from a GPU, gloo from the CPU.

    The group is formed before the first push, at `port` of the server's machine, which its first worker opens. `send`
    raises GroupBroken, with both sides' errors, if a bucket does not arrive in time or the workers have joined another
    trainer since; the group is closed then, and the next push forms another.
    """

    def __init__(self, port: int = GROUP_PORT, device: torch.device | None = None):
        self._port, self.device = port, device or torch.device("cpu")
        self._backend: Backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._group: WeightGroup | None = None
        self._address: Address | None = None
        self._name = ""

    def connect(self, address: Address, num_workers: int, *, timeout_s: float) -> None:
        """Forms the group with the workers, unless there is one. GroupBroken if that fails."""
        if self._group is not None:
            return
        rendezvous_s, size = min(timeout_s, RENDEZVOUS_S), 1 + num_workers
        try:
            call(address, "init", {"port": self._port, "timeout_s": rendezvous_s}, timeout_s=timeout_s)
        except ServerRefused as refused:
            raise GroupBroken(f"the server says: {refused}") from None
        self._address, self._name = address, uuid.uuid4().hex[:8]
        body = {"group": self._name, "backend": self._backend, "port": self._port, "size": size, "timeout_s": timeout_s}
        body["peer"] = describe_device(self.device)

        def join_here() -> None:
            store = open_store(address.host, self._port, serves=False, timeout_s=rendezvous_s)
            self._group = WeightGroup(self._backend, store, 0, size, timeout_s=timeout_s, device=self.device)

        _run_both(join_here, lambda: call(address, "init", body, timeout_s=timeout_s), rendezvous_s + 5.0)

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Returns when all workers have loaded the bucket."""
        group = self._group
        assert group is not None, "a transport is connected before it sends"
        query = _query(weight_version, bucket, group=self._name)
        loading = _THREADS.submit(call, address, "update", b"", query=query, timeout_s=timeout_s)
        try:
            group.send(bucket.data, lambda: _error(loading))
            if not wait([loading], timeout_s).done:
                raise GroupBroken(f"the server did not say within {timeout_s:g} s that it has loaded a bucket")
            loading.result()
        except BaseException as error:
            self.close()
            if isinstance(error, ServerRefused) and error.status == GROUP_LEFT_STATUS:
                raise GroupBroken(f"{len(bucket.data)} bytes were not taken; the server says: {error}") from None
            if isinstance(error, GroupBroken) and _error(loading) is not None:
                raise GroupBroken(f"{error}; the server says: {_error(loading)}") from None
            raise

    def close(self) -> None:
        """Leaves the group on both sides."""
        group, self._group = self._group, None
        if group is None or self._address is None:
            return
        group.close()
        with contextlib.suppress(ConnectionError, ServerRefused):
            call(self._address, "shutdown", {"group": self._name}, timeout_s=5.0)


def choose_transport(
    address: Address,
    num_workers: int,
    *,
    timeout_s: float,
    device: torch.device | None = None,
    group_port: int = GROUP_PORT,
) -> HttpTransport:
    """The fastest transport that works for a policy on `device` (None: do not try a process group).

    NCCL if the policy and the workers are on different GPUs, else shared memory if all workers see this machine's, else
    HTTP. A group that cannot be formed logs one warning.
    """
    if device is not None and device.type == "cuda":
        transport = GroupTransport(group_port, device)
        try:
            transport.connect(address, num_workers, timeout_s=timeout_s)
            return transport
        except GroupBroken as broken:
            logger.warning("weights go to the vLLM server %s without NCCL, which is slower: %s", address, broken)
    remove_stale()
    try:
        with shared_file(b"seen") as name:
            call(address, "init", {"shared": name}, timeout_s=timeout_s)
    except ConnectionError:
        raise
    except (OSError, ServerRefused):  # no shared memory here, or another machine's there
        return HttpTransport()
    return SharedMemoryTransport()


def _query(weight_version: str, bucket: Bucket, **more: Any) -> dict[str, Any]:
    return {"weight_version": weight_version, "first": bucket.first, "count": bucket.count, **more}


def _error(future: Future[Any]) -> BaseException | None:
    """The exception that the future's function has raised so far."""
    return future.exception() if future.done() else None


def _run_both(here: Callable[[], None], there: Callable[[], Any], timeout_s: float) -> None:
    """Runs both actions at once. GroupBroken, with the state of both, as soon as one fails or after `timeout_s`."""
    sides = {"here": _THREADS.submit(here), "the server": _THREADS.submit(there)}
    if wait(sides.values(), timeout_s, return_when=FIRST_EXCEPTION).not_done or any(map(_error, sides.values())):
        # The other side may be about to report its reason.
        wait(sides.values(), 0.2)
        states = {name: _error(side) if side.done() else "still waiting" for name, side in sides.items()}
        problems = [f"{name}: {state}" for name, state in states.items() if state is not None]
        if problems:
            raise GroupBroken("; ".join(problems))
