"""How buckets of weights get to the workers of a server."""

from __future__ import annotations

from typing import Protocol

from groupgrad.engines.vllm.http import Address, call
from groupgrad.engines.vllm.wire import Bucket, remove_shared, remove_stale, write_shared


class Transport(Protocol):
    """Carries buckets to the workers of a server. One over NCCL, from GPU to GPU, would be another class like these."""

    def send(self, address: Address, stamp: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        ...


class HttpTransport:
    """Buckets as bodies of HTTP calls, which the server hands to its workers; works everywhere."""

    def send(self, address: Address, stamp: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        query = {"stamp": stamp, "first": bucket.first, "count": bucket.count}
        call(address, "bucket", bucket.data, query=query, timeout_s=timeout_s)


class SharedMemoryTransport:
    """Buckets in memory that the workers read themselves, where they run on the trainer's machine."""

    def send(self, address: Address, stamp: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Return when all workers have loaded the bucket."""
        name = write_shared(bucket.data)
        try:
            query = {"stamp": stamp, "first": bucket.first, "count": bucket.count, "shared": name}
            call(address, "bucket", b"", query=query, timeout_s=timeout_s)
        finally:
            remove_shared(name)


def choose_transport(address: Address, *, timeout_s: float) -> Transport:
    """Shared memory if all workers of the server see this machine's, otherwise HTTP."""
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
