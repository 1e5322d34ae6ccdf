"""Transports that carry buckets of weights to the workers of a vLLM server, and the process group of one of them.

The group is separate from those of training and of vLLM. Its ranks are the trainer (0) and the workers (1, 2, ...),
which meet at a port of the server's machine. Both sides use torch's classes, so the trainer needs no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as torch_dist

from groupgrad.concurrency.daemon_threads import DaemonThreads
from groupgrad.integrations.vllm.http import Address, ServerRefused, call
from groupgrad.integrations.vllm.wire import Bucket, remove_stale, shared_file

logger = logging.getLogger(__name__)

GROUP_PORT = 51216

Backend = Literal["nccl", "gloo"]

MEETING_POLL_S = 0.02

RENDEZVOUS_S = 60.0
"""Longest that trainer and workers wait for each other to form a group."""

_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Environment in which an NCCL group is made, which reads it then.

By default NCCL's watchdog ends the whole process when a transfer fails or takes too long, because later work could use
its data. Here a transfer is waited for on the host, and its failure is a `GroupBroken` from which both sides recover.
"""

_MAKING = threading.Lock()
"""Held while the environment is changed: groups with several servers are formed on threads."""

_THREADS = DaemonThreads("vllm-weights")


class GroupBroken(ConnectionError):
    """The group could not be formed, or data sent over it did not arrive."""


class SharedMemoryTransport:
    """Sends buckets in shared memory, which workers on the trainer's machine read directly."""

    device = torch.device("cpu")
    """Device of the buckets that `send` takes."""

    def connect(self, address: Address, num_workers: int, *, timeout_s: float) -> None:
        """Prepares to send a push to a server with so many workers."""

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Returns when all workers have loaded the bucket."""
        with shared_file(bucket.data.numpy().data) as name:
            query = _query(weight_version, bucket, shared=name)
            call(address, "update", b"", query=query, timeout_s=timeout_s)

    def close(self) -> None:
        """Leaves the server without waiting for anything."""


class GroupTransport(SharedMemoryTransport):
    """Broadcasts buckets over a process group of this rank and all workers: NCCL from a GPU, gloo from the CPU.

    The group is formed before the first push, at `port` of the server's machine, which its first worker opens. After an
    error of `send` the group is closed, and another push, if there is one, forms another.
    """

    def __init__(self, port: int = GROUP_PORT, device: torch.device | None = None):
        self._port, self.device = port, device or torch.device("cpu")
        self._backend: Backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._group: WeightGroup | None = None

    def connect(self, address: Address, num_workers: int, *, timeout_s: float) -> None:
        """Forms the group with the workers, unless there is one. GroupBroken if that fails."""
        if self._group is not None:
            return
        rendezvous_s, size = min(timeout_s, RENDEZVOUS_S), 1 + num_workers
        try:
            call(address, "init", {"port": self._port, "timeout_s": rendezvous_s}, timeout_s=timeout_s)
        except ServerRefused as refused:
            raise GroupBroken(f"the server says: {refused}") from None
        body = {"backend": self._backend, "port": self._port, "size": size, "timeout_s": timeout_s}
        body["peer"] = describe_device(self.device)

        def join_here() -> None:
            store = open_store(address.host, self._port, serves=False, timeout_s=rendezvous_s)
            self._group = WeightGroup(self._backend, store, 0, size, timeout_s=timeout_s, device=self.device)

        _run_both(join_here, lambda: call(address, "init", body, timeout_s=timeout_s), rendezvous_s + 5.0)

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Returns when all workers have loaded the bucket."""
        group = self._group
        assert group is not None, "a transport is connected before it sends"
        try:
            sending = group.begin(bucket.data)
            # The workers begin to receive at this call, and it is answered when they have loaded the bucket.
            query = _query(weight_version, bucket, group=True)
            call(address, "update", b"", query=query, timeout_s=timeout_s)
            group.finish(sending)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the group; workers that wait for a bucket notice, and leave it when a trainer meets them again."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def choose_transport(
    address: Address,
    num_workers: int,
    *,
    timeout_s: float,
    device: torch.device | None = None,
    group_port: int = GROUP_PORT,
) -> SharedMemoryTransport:
    """The fastest transport that works for a policy on `device` (None: the CPU).

    NCCL if the policy and the workers are on different GPUs, else shared memory if all workers see this machine's, else
    gloo. An NCCL group that cannot be formed logs one warning.
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
        return GroupTransport(group_port)
    return SharedMemoryTransport()


def _query(weight_version: str, bucket: Bucket, **more: Any) -> dict[str, Any]:
    return {"weight_version": weight_version, "first": bucket.first, "count": bucket.count, **more}


def _run_both(here: Callable[[], None], there: Callable[[], Any], timeout_s: float) -> None:
    """Runs both actions at once. GroupBroken, with the state of both, as soon as one fails or after `timeout_s`."""
    sides = {"here": _THREADS.submit(here), "the server": _THREADS.submit(there)}
    wait(sides.values(), timeout_s, return_when=FIRST_EXCEPTION)
    wait(sides.values(), 0.2)  # the other side may be about to report its reason
    states = {name: side.exception() if side.done() else "still waiting" for name, side in sides.items()}
    problems = [f"{name}: {state}" for name, state in states.items() if state is not None]
    if problems:
        raise GroupBroken("; ".join(problems))


class WeightGroup:
    """One rank's end of the group; `store` is from `open_store`. GroupBroken if other ranks do not come in time."""

    def __init__(
        self,
        backend: Backend,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        device: torch.device | None = None,
    ):
        self._timeout, rendezvous_s = timedelta(seconds=timeout_s), min(timeout_s, RENDEZVOUS_S)
        self.device = device or torch.device("cpu")
        self._store = store
        self._group: Any = None
        try:
            _meet(store, rank, size, rendezvous_s)
            self._group = _make_group(backend, store, rank, size, self._timeout)
            # NCCL connects lazily, at the first transfer.
            hello = torch.full((1,), rank, dtype=torch.uint8, device=self.device)
            self._group.broadcast(hello, 0, timedelta(seconds=rendezvous_s)).wait(timedelta(seconds=rendezvous_s))
        except (RuntimeError, OSError) as error:
            raise GroupBroken(f"rank {rank} of {size} met nobody over {backend}: {error}") from None
        if int(hello[0]):
            raise GroupBroken(f"rank {rank} of {size} got {int(hello[0])} over {backend} where 0 was sent")

    def begin(self, data: torch.Tensor) -> Any:
        """Begins to broadcast (bytes,) uint8 data from rank 0 to all others; GroupBroken if it cannot."""
        with _broken():
            return self._group.broadcast(data, 0, self._timeout)

    def finish(self, transfer: Any) -> None:
        """Waits for a transfer. GroupBroken if it fails, or does not end in time."""
        with _broken():
            transfer.wait(self._timeout)

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Other ranks: the next bytes from rank 0, (num_bytes,) uint8. GroupBroken if they do not come in time."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.finish(self.begin(data))
        return data

    def close(self) -> None:
        """Aborts whatever is under way and leaves the group."""
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            self._group.abort()
        self._group = self._store = None


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """Turns torch's errors into GroupBroken."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken(f"bytes of weights did not arrive over the process group: {error}") from None


def describe_device(device: torch.device) -> dict[str, Any]:
    """The GPU's id and the NCCL release, which decide whether two processes can meet over NCCL; None on a CPU."""
    if device.type != "cuda":
        return {"device": None, "nccl": None}
    return {
        "device": str(getattr(torch.cuda.get_device_properties(device), "uuid", device)),
        "nccl": list(torch.cuda.nccl.version()),  # pyright: ignore[reportAttributeAccessIssue]
    }


def open_store(host: str, port: int, *, serves: bool, timeout_s: float) -> Any:
    """TCP store for the ranks' rendezvous; with `serves` this process hosts it, at that address alone.

    GroupBroken, naming the port, if it is taken or not opened in time.
    """
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    try:
        if serves:  # a socket that the store opens would listen at all addresses
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            options["master_listen_fd"] = socket.create_server((host, port), family=family).detach()
        return torch_dist.TCPStore(host, port, is_master=serves, **options)
    except (RuntimeError, OSError) as error:
        what = "cannot be opened" if serves else "was not reached"
        raise GroupBroken(
            f"port {port} of {host}, where trainer and server meet to transfer weights, {what}: {error}; set "
            "vllm_group_port to a free port that both machines reach"
        ) from None


def _meet(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Waits until all ranks are about to form the group; RuntimeError if they are not in time.

    Without this wait, forming the group blocks in native code, in a thread that cannot be stopped; a process that went
    on without the group has crashed there.
    """
    store.set(f"here/{rank}", "")
    keys = [f"here/{number}" for number in range(size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [number for number, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(f"ranks {missing} did not come within {timeout_s:g} s")
        time.sleep(MEETING_POLL_S)


def _make_group(backend: Backend, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return torch_dist.ProcessGroupGloo(store, rank, size, timeout)
    from accelerate.utils import patch_environment

    options = torch_dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = 2 * timeout  # this module's own waits end before
    with _MAKING, patch_environment(**_NCCL_SETTINGS):
        return torch_dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportAttributeAccessIssue]
