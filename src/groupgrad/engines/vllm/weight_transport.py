"""How buckets of weights get to the workers of a server."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from groupgrad.engines.vllm.http import LEFT, Address, ServerRefused, call
from groupgrad.engines.vllm.weight_group import (
    Backend,
    DeviceBucket,
    GroupBroken,
    WeightGroup,
    describe,
    open_store,
    pack_on,
)
from groupgrad.engines.vllm.wire import Bucket, TensorSpec, pack, remove_shared, remove_stale, write_shared

logger = logging.getLogger(__name__)

GROUP_PORT = 51216
MEETING_S = 60.0
"""Longest that trainer and workers wait for each other to form a group."""


class Transport(Protocol):
    """Carries buckets to the workers of a server."""

    def pack(self, notes: list[TensorSpec], tensors: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[Any]:
        """Buckets with a running `checksum`, as `send` takes them."""
        ...

    def send(self, address: Address, weight_version: str, bucket: Any, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        ...

    def close(self) -> None:
        """The server is to be left alone from now on; nothing is waited for."""
        ...


class HttpTransport:
    """Buckets as bodies of HTTP calls, which the server hands to its workers; works everywhere."""

    def pack(self, notes: list[TensorSpec], tensors: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[Bucket]:
        """Buckets in host memory."""
        return pack(notes, tensors, bucket_bytes=bucket_bytes)

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        query = {"weight_version": weight_version, "first": bucket.first, "count": bucket.count}
        call(address, "bucket", bucket.data, query=query, timeout_s=timeout_s)

    def close(self) -> None:
        """There is nothing to close."""


class SharedMemoryTransport(HttpTransport):
    """Buckets in memory that the workers read themselves, where they run on the trainer's machine."""

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        name = write_shared(bucket.data)
        try:
            query = {"weight_version": weight_version, "first": bucket.first, "count": bucket.count, "shared": name}
            call(address, "bucket", b"", query=query, timeout_s=timeout_s)
        finally:
            remove_shared(name)


class GlooTransport:
    """Buckets broadcast to all workers by a process group of this rank and them, made at the first bucket.

    They meet at `port` of the server's machine, whose first worker opens it. Over gloo buckets are in host memory.
    `send` raises GroupBroken, with both sides' story, if a bucket does not arrive in time or the workers have met
    another trainer since; the group is gone then.
    """

    backend: Backend = "gloo"

    def __init__(self, port: int = GROUP_PORT, device: torch.device | None = None):
        self._port, self._device = port, device or torch.device("cpu")
        self._group: WeightGroup | None = None
        self._address: Address | None = None
        self._name = ""

    def pack(
        self, notes: list[TensorSpec], tensors: Iterable[torch.Tensor], bucket_bytes: int
    ) -> Iterator[DeviceBucket]:
        """Buckets on the device that sends them."""
        return pack_on(self._device, notes, tensors, bucket_bytes=bucket_bytes)

    def meet(self, address: Address, *, timeout_s: float) -> None:
        """Form the group with the workers. GroupBroken if that fails."""
        self.close()
        waits_s = min(timeout_s, MEETING_S)
        try:
            size = 1 + len(call(address, "devices", timeout_s=timeout_s)["workers"])
            call(address, "open", {"port": self._port, "timeout_s": waits_s}, timeout_s=timeout_s)
        except ServerRefused as refused:
            raise GroupBroken(f"the server says: {refused}") from None
        self._address, self._name = address, uuid.uuid4().hex[:8]
        told = {"name": self._name, "backend": self.backend, "host": address.host, "port": self._port, "size": size}
        told["timeout_s"] = timeout_s

        def here() -> None:
            store = open_store(address.host, self._port, serves=False, timeout_s=waits_s)
            self._group = WeightGroup(self.backend, store, 0, size, timeout_s=timeout_s, device=self._device)

        _side_by_side(here, lambda: call(address, "join", told, timeout_s=timeout_s), waits_s + 5.0)
        if self._group is None:
            raise GroupBroken("the group was not formed")

    def send(self, address: Address, weight_version: str, bucket: DeviceBucket, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        if self._group is None:
            self.meet(address, timeout_s=timeout_s)
        group = self._group
        assert group is not None
        query = {"weight_version": weight_version, "first": bucket.first, "count": bucket.count}
        query |= {"group": self._name, "num_bytes": len(bucket.data)}
        there = _Side(lambda: call(address, "bucket", b"", query=query, timeout_s=timeout_s))
        try:
            group.send(bucket.data, lambda: there.problem)
            there.finish(timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, ServerRefused) and error.status == LEFT:
                raise GroupBroken(f"{len(bucket.data)} bytes were not taken; the server says: {error}") from None
            if isinstance(error, GroupBroken) and there.problem is not None:
                raise GroupBroken(f"{error}; the server says: {there.problem}") from None
            raise

    def close(self) -> None:
        """Leave the group, here and there."""
        group, self._group = self._group, None
        if group is None or self._address is None:
            return
        group.close()
        with contextlib.suppress(ConnectionError, ServerRefused):
            call(self._address, "leave", b"", query={"group": self._name}, timeout_s=5.0)


class NcclTransport(GlooTransport):
    """The same between GPUs: buckets are made, sent and checked there, and never come to host memory."""

    backend: Backend = "nccl"


class _Side:
    """Something done in a thread of its own, which ends by its own deadline."""

    def __init__(self, action: Callable[[], Any]):
        self.problem: Exception | None = None
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def run() -> None:
            try:
                action()
            except Exception as error:  # told to the thread that waits
                self.problem = error
            self._ended.put(None)

        self._thread = threading.Thread(target=run, name="vllm-weights", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        """Wait for its end, and raise what it raised."""
        try:
            self._ended.get(timeout=timeout_s)
        except queue.Empty:
            raise GroupBroken(f"the server did not say within {timeout_s:g} s that it has loaded a bucket") from None
        if self.problem is not None:
            raise self.problem


def _side_by_side(here: Callable[[], None], there: Callable[[], Any], timeout_s: float) -> None:
    """Do both at once; GroupBroken, with both stories, as soon as one fails."""
    sides = {"here": _Side(here), "the server": _Side(there)}
    deadline = time.monotonic() + timeout_s
    while not all(side.is_done for side in sides.values()):
        failed = any(side.problem is not None for side in sides.values())
        if failed or time.monotonic() > deadline:
            # The other one may be about to say why.
            time.sleep(0.2)
            break
        time.sleep(0.01)
    stories = [f"{name}: {side.problem or 'still waiting'}" for name, side in sides.items() if not _is_well(side)]
    if stories:
        raise GroupBroken("; ".join(stories))


def _is_well(side: _Side) -> bool:
    return side.is_done and side.problem is None


def choose_transport(
    address: Address, *, timeout_s: float, device: torch.device | None = None, group_port: int = GROUP_PORT
) -> Transport:
    """NCCL if the policy's device and the workers' are different GPUs, otherwise shared memory if all workers of the
    server see this machine's, otherwise HTTP. A group that cannot be formed is one warning, and another way."""
    if device is not None and device.type == "cuda" and _can_meet(address, device, timeout_s):
        transport = NcclTransport(group_port, device)
        try:
            transport.meet(address, timeout_s=timeout_s)
            return transport
        except GroupBroken as broken:
            logger.warning("weights go to the vLLM server %s without NCCL, which is slower: %s", address, broken)
    remove_stale()
    try:
        name = write_shared(b"seen")
    except OSError:
        return HttpTransport()
    try:
        seen = call(address, "reads", {"shared": name}, timeout_s=timeout_s)["reads"]
    finally:
        remove_shared(name)
    return SharedMemoryTransport() if seen else HttpTransport()


def _can_meet(address: Address, device: torch.device, timeout_s: float) -> bool:
    return can_meet(describe(device), call(address, "devices", timeout_s=timeout_s)["workers"])


def can_meet(ours: dict[str, Any], workers: list[dict[str, Any]]) -> bool:
    """True if NCCL can connect our device with those of all workers: GPUs, none of them ours, one release of NCCL."""
    if ours["device"] is None or sorted(worker["rank"] for worker in workers) != list(range(len(workers))):
        return False
    return all(worker["device"] not in (None, ours["device"]) and worker["nccl"] == ours["nccl"] for worker in workers)
