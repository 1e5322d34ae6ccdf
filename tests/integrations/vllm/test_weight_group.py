"""The process group that carries weights."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from groupgrad.integrations.vllm import weight_transport
from groupgrad.integrations.vllm.weight_transport import GroupBroken, WeightGroup, open_store


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(trainer: Callable[[Any], Any], worker: Callable[[Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """Result or exception of the trainer and of one worker, each in a thread."""
    results: list[Any] = [None, None]
    worker_store = open_store("127.0.0.1", free := port(), serves=True, timeout_s=timeout_s)
    trainer_store = open_store("127.0.0.1", free, serves=False, timeout_s=timeout_s)

    def run(rank: int, store: Any, work: Callable[[Any], Any]) -> None:
        try:
            results[rank] = work(WeightGroup("gloo", store, rank, 2, timeout_s=timeout_s))
        except Exception as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in ((0, trainer_store, trainer), (1, worker_store, worker))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_bytes_arrive_as_they_were_sent() -> None:
    sent = torch.arange(256, dtype=torch.uint8)

    def trainer(group: WeightGroup) -> None:
        group.send(sent, lambda: None)
        group.send(sent[:8], lambda: None)

    _, received = together(trainer, lambda group: (group.receive(256), group.receive(8)))
    assert torch.equal(received[0], sent) and torch.equal(received[1], sent[:8])


def test_a_receiver_that_nothing_comes_to_gives_up_in_time() -> None:
    started = time.monotonic()
    _, error = together(lambda group: time.sleep(1.5), lambda group: group.receive(8), timeout_s=1.0)
    assert isinstance(error, GroupBroken) and "8 bytes did not come" in str(error)
    assert time.monotonic() - started < 15.0


def test_a_sender_gives_up_when_the_receivers_refuse() -> None:
    def trainer(group: WeightGroup) -> None:
        group.send(torch.zeros(64 * 2**20, dtype=torch.uint8), lambda: ValueError("the server said no"))

    error, _ = together(trainer, lambda group: time.sleep(0.5))
    assert isinstance(error, ValueError) and "said no" in str(error)


def test_nobody_to_meet_is_an_error_in_time() -> None:
    store = open_store("127.0.0.1", port(), serves=True, timeout_s=1.0)
    with pytest.raises(GroupBroken, match="rank 0 of 2 met nobody over gloo"):
        WeightGroup("gloo", store, 0, 2, timeout_s=1.0)


def test_workers_wait_a_minute_for_a_trainer_whatever_a_push_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that cannot reach the port takes another way then, and its calls wait for these workers."""
    monkeypatch.setattr(weight_transport, "RENDEZVOUS_S", 0.5)
    store, started = open_store("127.0.0.1", port(), serves=True, timeout_s=1.0), time.monotonic()
    with pytest.raises(GroupBroken, match="rank 1 of 2 met nobody"):
        WeightGroup("gloo", store, 1, 2, timeout_s=30.0)
    assert time.monotonic() - started < 10.0


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(GroupBroken, match=f"port {taken} of 127.0.0.1.* cannot be opened.*set vllm_group_port"):
            open_store("127.0.0.1", taken, serves=True, timeout_s=1.0)


def test_a_port_that_nobody_opens_is_named() -> None:
    with pytest.raises(GroupBroken, match="was not reached"):
        open_store("127.0.0.1", port(), serves=False, timeout_s=1.0)


def test_a_broken_nccl_group_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends a process whose group fails, unless the group is made with these settings."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    made: list[Any] = []

    class Group:
        class Options:
            _timeout = None

        def __init__(self, store: Any, rank: int, size: int, options: Any):
            names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
            made.append(([os.environ.get(name) for name in names], options._timeout))

    monkeypatch.setattr(weight_transport.torch_dist, "ProcessGroupNCCL", Group, raising=False)
    weight_transport._make_group("nccl", None, 0, 2, timedelta(seconds=30))
    assert made == [(["0", "0"], timedelta(seconds=60))]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
