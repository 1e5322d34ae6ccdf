"""Choice of the transport to a server, and process groups: what they carry, and how they fail."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_server import Receiver
from waiting import free_port

from groupgrad.integrations.vllm import weight_receiver
from groupgrad.integrations.vllm import weight_transport as transports
from groupgrad.integrations.vllm.http import Address, ServerRefused
from groupgrad.integrations.vllm.weight_receiver import Rendezvous
from groupgrad.integrations.vllm.weight_transport import (
    GroupBroken,
    GroupTransport,
    SharedMemoryTransport,
    WeightGroup,
    choose_transport,
    open_store,
)
from groupgrad.integrations.vllm.wire import Bucket

SERVER = Address.of(port=9)
GPU = {"device": "GPU-a", "nccl": [2, 27]}


@pytest.mark.parametrize(
    ("own", "works"),
    [
        ({"device": "GPU-b", "nccl": [2, 27]}, True),
        # NCCL connects no GPU with itself, and no CPU.
        ({"device": "GPU-a", "nccl": [2, 27]}, False),
        ({"device": None, "nccl": None}, False),
        ({"device": "GPU-b", "nccl": [2, 21]}, False),
    ],
)
def test_who_can_meet_over_nccl(own: dict[str, Any], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr(weight_receiver, "describe_device", lambda device: own)
    monkeypatch.setattr(weight_receiver, "open_store", lambda *where, **options: "store")
    monkeypatch.setattr(weight_receiver, "WeightGroup", lambda *given, **options: met.append(given))
    rendezvous = Rendezvous(backend="nccl", host="127.0.0.1", port=5, size=2, timeout_s=1.0, peer=GPU)
    if works:
        receiver = Receiver(None)
        receiver.init_transfer_engine(Rendezvous(host="127.0.0.1", port=5, timeout_s=1.0))
        receiver.init_transfer_engine(rendezvous)
        assert met == [("nccl", "store", 1, 2)]
    else:
        with pytest.raises(RuntimeError, match="NCCL connects different GPUs of one release of it, not"):
            Receiver(None).init_transfer_engine(rendezvous)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_worker_that_meets_nobody_closes_its_port(backend: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    receiver, place = Receiver(None), {"host": "127.0.0.1", "port": port, "timeout_s": 0.5}
    receiver.init_transfer_engine(Rendezvous(**place))
    socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    with pytest.raises((RuntimeError, GroupBroken)):
        receiver.init_transfer_engine(Rendezvous(backend=backend, size=2, peer=GPU, **place))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)


class Answers:
    """Scripted answers of a server, by route."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any):
        self.answers: dict[str, Any] = answers
        self.routes: list[str] = []
        monkeypatch.setattr(transports, "call", self._call)
        monkeypatch.setattr(transports, "describe_device", lambda device: GPU)

    def _call(self, address: Address, route: str, body: Any = None, *, query: Any = None, timeout_s: float) -> Any:
        self.routes.append(route)
        answer = self.answers.get(route, {})
        if isinstance(answer, Exception):
            raise answer
        return answer(body) if callable(answer) else answer


CUDA = torch.device("cuda", 0)


def test_a_policy_on_a_gpu_meets_a_server_on_others_and_if_it_cannot_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        if "port" in body:
            raise ServerRefused(500, "port 51216 is taken")
        return {}

    Answers(monkeypatch, init=refuse)
    with monkeypatch.context() as patch:
        met: list[Address] = []
        patch.setattr(GroupTransport, "connect", lambda self, address, workers, *, timeout_s: met.append(address))
        transport = choose_transport(SERVER, 1, timeout_s=1.0, device=CUDA)
        assert isinstance(transport, GroupTransport) and transport._backend == "nccl" and met == [SERVER]
    with caplog.at_level(logging.WARNING):
        transport = choose_transport(SERVER, 1, timeout_s=1.0, device=CUDA)
    assert type(transport) is SharedMemoryTransport
    assert "without NCCL, which is slower: the server says: port 51216 is taken" in caplog.text


@pytest.mark.parametrize(
    ("answer", "kind"),
    [({}, SharedMemoryTransport), (ServerRefused(500, "this worker does not see"), GroupTransport)],
)
def test_a_policy_on_a_cpu_uses_shared_memory_or_gloo(answer: Any, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, init=answer)
    transport = choose_transport(SERVER, 1, timeout_s=1.0, device=torch.device("cpu"))
    assert type(transport) is kind and transport.device.type == "cpu"
    assert answers.routes == ["init"]


def test_a_worker_that_cannot_join_is_no_reason_to_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        if "backend" in body:
            raise ServerRefused(500, "rank 1 of 2 met nobody")
        return {}

    Answers(monkeypatch, init=refuse)
    monkeypatch.setattr(transports, "open_store", lambda *where, **options: time.sleep(5.0))
    started = time.monotonic()
    with pytest.raises(GroupBroken, match="here: still waiting; the server: rank 1 of 2 met nobody"):
        GroupTransport().connect(SERVER, 1, timeout_s=30.0)
    assert time.monotonic() - started < 3.0


def test_a_bucket_that_the_server_does_not_take_ends_the_group_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, update=ServerRefused(409, "another push is under way"))
    transport, done = GroupTransport(), []
    group = SimpleNamespace(begin=done.append, finish=done.append, close=lambda: done.append("closed"))
    transport._group = group  # type: ignore[assignment]
    bucket = Bucket(0, 1, torch.zeros(64, dtype=torch.uint8), 0)
    with pytest.raises(ServerRefused, match="another push is under way"):
        transport.send(SERVER, "0-a", bucket, timeout_s=5.0)
    assert done[1:] == ["closed"] and answers.routes == ["update"] and transport._group is None


# --- The process group ---


def together(trainer: Callable[[Any], Any], worker: Callable[[Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """Result or exception of the trainer and of one worker, each in a thread."""
    results: list[Any] = [None, None]
    worker_store = open_store("127.0.0.1", free := free_port(), serves=True, timeout_s=timeout_s)
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
        group.finish(group.begin(sent))
        group.finish(group.begin(sent[:8]))

    _, received = together(trainer, lambda group: (group.receive(256), group.receive(8)))
    assert torch.equal(received[0], sent) and torch.equal(received[1], sent[:8])


def test_a_receiver_that_nothing_comes_to_gives_up_in_time() -> None:
    started = time.monotonic()
    _, error = together(lambda group: time.sleep(1.5), lambda group: group.receive(8), timeout_s=1.0)
    assert isinstance(error, GroupBroken) and "did not arrive over the process group" in str(error)
    assert time.monotonic() - started < 15.0


@pytest.mark.slow
def test_a_port_that_is_taken_or_that_nobody_opens_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(GroupBroken, match=f"port {taken} of 127.0.0.1.* cannot be opened.*set vllm_group_port"):
            open_store("127.0.0.1", taken, serves=True, timeout_s=1.0)
    with pytest.raises(GroupBroken, match="was not reached"):
        open_store("127.0.0.1", free_port(), serves=False, timeout_s=1.0)


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

    monkeypatch.setattr(transports.torch_dist, "ProcessGroupNCCL", Group, raising=False)
    transports._make_group("nccl", None, 0, 2, timedelta(seconds=30))
    assert made == [(["0", "0"], timedelta(seconds=60))]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
