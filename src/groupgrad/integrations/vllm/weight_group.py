"""Process group that carries weights from the pushing rank to the workers of a vLLM server.

The group is separate from those of training and of vLLM. Its ranks are the trainer (0) and the workers (1, 2, ...),
which meet at a port of the server's machine. Both sides use torch's own classes, so the trainer needs no vLLM.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as torch_dist

Backend = Literal["nccl", "gloo"]

POLL_S, MEETING_POLL_S = 0.001, 0.02

RENDEZVOUS_S = 60.0
"""Longest that trainer and workers wait for each other to form a group."""

_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Environment in which an NCCL group is made, which reads it then.

By default NCCL's watchdog ends the whole process when a transfer fails or takes too long, because later work could use
its data. Here a transfer is waited for on the host, and its failure is a `GroupBroken` from which both sides recover.
"""

_MAKING = threading.Lock()
"""Held while the environment is changed: groups with several servers are formed on threads."""


class GroupBroken(ConnectionError):
    """The group could not be formed, or data sent over it did not arrive."""


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

    def send(self, data: torch.Tensor, problem: Callable[[], BaseException | None]) -> None:
        """Rank 0: broadcast (bytes,) uint8 data to all others; GroupBroken if they do not take it in time.

        An exception that `problem` returns, because the receivers refused the data, is raised at once.
        """
        timeout_s = self._timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        try:
            work = self._group.broadcast(data, 0, self._timeout)
            while not work.is_completed():
                error = problem()
                if error is not None:
                    raise error
                if time.monotonic() > deadline:
                    raise GroupBroken(f"{len(data)} bytes were not taken within {timeout_s:g} s")
                time.sleep(POLL_S)
            work.wait(self._timeout)
        except RuntimeError as error:
            raise GroupBroken(f"{len(data)} bytes were not sent: {error}") from None

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Other ranks: the next bytes from rank 0, (num_bytes,) uint8. GroupBroken if they do not come in time."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        try:
            self._group.broadcast(data, 0, self._timeout).wait(self._timeout)
        except RuntimeError as error:
            raise GroupBroken(f"{num_bytes} bytes did not come: {error}") from None
        return data

    def close(self) -> None:
        """Aborts whatever is under way and leaves the group."""
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            self._group.abort()
        self._group = self._store = None


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
