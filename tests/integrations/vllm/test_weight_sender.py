"""The trainer's side of the backend of vLLM's weight transfer, against workers without vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_server import Model, Receiver, SimulatedServer, Worker, pretend_vllm, pretend_weight_transfer, servers_of

from groupgrad.integrations.vllm import weight_sender
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import ServerRefused
from groupgrad.integrations.vllm.policy_sender import sender_of
from groupgrad.integrations.vllm.weight_receiver import REFUSED
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, WeightSender
from groupgrad.integrations.vllm.wire import SHARED_MEMORY
from groupgrad.models.weights import checkpoint_weights


class Source:
    """In place of vLLM's `ModuleSource`."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.num_read = tensors, 0

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name, dtype=it.dtype, shape=it.shape) for name, it in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_read = 0
        for pair in self.tensors.items():
            self.num_read += 1
            yield pair


class Client:
    """vLLM's `VLLMWeightSyncClient` for one worker; `change` may alter an update on its way."""

    def __init__(self, worker: Worker):
        self.worker, self.versions = worker, []
        self.change: Any = lambda update_info: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.worker.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.change(update_info)
        self.worker.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.worker.finish_weight_update()
        self.versions.append(weight_version)


@pytest.fixture
def client(model: Any, monkeypatch: pytest.MonkeyPatch) -> Client:
    pretend_weight_transfer(monkeypatch)
    return Client(Worker(Receiver(Model(model))))


@pytest.fixture
def server(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedServer]:
    pretend_vllm(monkeypatch)
    for servers in servers_of(model, 1):
        yield servers[0]


class TrainerEngine:
    """In place of vLLM's `TrainerWeightTransferEngine`."""


class Factory:
    """In place of vLLM's two factories."""

    registry: dict[str, tuple[str, str]]

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        cls.registry[name] = module, class_name

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any) -> Any:
        module, name = cls.registry[init_info.backend]
        return getattr(importlib.import_module(module), name).trainer_init(init_info, client=client, source=source)


@pytest.fixture
def factory(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's factory, as a process with vLLM finds it."""

    @dataclass
    class TrainerInitInfo:
        rank: int
        is_sender = True

    base: Any = sys.modules["vllm.distributed.weight_transfer.base"]
    base.TrainerInitInfo, base.TrainerWeightTransferEngine = TrainerInitInfo, TrainerEngine
    base.WeightTransferEngine = type("WeightTransferEngine", (), {})
    name = "vllm.distributed.weight_transfer.factory"
    module: Any = ModuleType(name)
    module.WeightTransferTrainerFactory = type("Trainers", (Factory,), {"registry": {}})
    module.WeightTransferEngineFactory = type("Workers", (Factory,), {"registry": {}})
    monkeypatch.setitem(sys.modules, name, module)
    yield
    sys.modules.pop("groupgrad.integrations.vllm.transfer_engine", None)


def sender(client: Any, source: Any, *, rank: int = 0, by_reference: bool = False) -> WeightSender:
    init = SimpleNamespace(rank=rank, is_sender=rank == 0, by_reference=by_reference)
    return WeightSender.trainer_init(init, client=client, source=source)


def has(model: Model, source: Source) -> bool:
    return all(torch.equal(model.weights[name], tensor) for name, tensor in source.tensors.items())


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_push_through_any_client_of_vllms_is_whole(client: Client, model: Any, by_reference: bool) -> None:
    source = Source(model.state_dict())
    sender(client, source, by_reference=by_reference).send_weights("3-a")
    assert has(client.worker.receiver.model, source) and client.versions == ["3-a"]


def test_a_push_that_arrives_changed_is_refused_and_ended(client: Client, model: Any) -> None:
    source = Source(model.state_dict())

    def change(update_info: dict[str, Any]) -> None:
        if "shared" in update_info:
            path = SHARED_MEMORY / update_info["shared"]
            data = bytearray(path.read_bytes())
            data[0] ^= 1
            path.write_bytes(data)

    push = sender(client, source)
    client.change = change
    with pytest.raises(RuntimeError, match=f"{REFUSED} 0 refuses the push: its bytes have the checksum"):
        push.send_weights()
    assert client.versions == [] and not client.worker.is_active
    client.change = lambda update_info: None
    push.send_weights()
    assert has(client.worker.receiver.model, source) and client.versions == [None]


@pytest.mark.parametrize("by_reference", [False, True])
def test_weights_that_the_source_leaves_out_are_refused(client: Client, model: Any, by_reference: bool) -> None:
    source = Source(model.state_dict())
    name, _ = source.tensors.popitem()
    with pytest.raises(RuntimeError, match=f"nothing was sent for {name}"):
        sender(client, source, by_reference=by_reference).send_weights()
    assert not client.worker.is_active


def test_a_source_whose_order_is_not_its_metadatas_is_refused(client: Client, model: Any) -> None:
    source = Source(model.state_dict())
    announced = source.metadata()
    source.metadata = lambda: announced[::-1]  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=f"gave {announced[0].name}, and its metadata announced {announced[-1].name}"
    ):
        sender(client, source, by_reference=True).send_weights()
    assert source.num_read == len(announced), "other ranks take part in the rest"
    assert not client.worker.is_active


def test_ranks_that_do_not_send_read_the_weights_with_the_one_that_does(model: Any) -> None:
    source = Source(model.state_dict())
    sender(None, source, rank=1).send_weights()
    assert source.num_read == len(source.tensors)


def test_a_server_takes_the_weights_of_another_trainer_verified(server: SimulatedServer, model: Any) -> None:
    source, client = Source(model.state_dict()), ServerClient(server.address, timeout_s=5.0)
    push = sender(client, source)
    push.send_weights("3-a")
    assert has(server.engine.model, source) and client.look()["weight_version"] == "3-a"
    push.send_weights()
    assert client.look()["weight_version"] not in ("3-a", None)
    source.tensors.popitem()
    with pytest.raises(ServerRefused, match="nothing was sent for"):
        push.send_weights()
    assert not client.look()["complete"], "nothing is sampled from half a push"
    push.shutdown()


def test_without_a_source_the_sender_says_what_it_needs(client: Client) -> None:
    with pytest.raises(ValueError, match=r"pass source=ModuleSource\(model\)"):
        sender(client, None)


# --- Groupgrad's own pushes ---


def test_the_own_sender_comes_from_vllms_factory(factory: None, client: Client, model: Any) -> None:
    own = sender_of(PolicyWeights(model), client, by_reference=True)
    assert isinstance(own, WeightSender) and isinstance(own, TrainerEngine)
    own.send_weights("3-a")
    assert has(client.worker.receiver.model, Source(model.state_dict())) and client.versions == ["3-a"]


def test_where_vllm_is_not_installed_the_same_class_is_made_directly(client: Client, model: Any) -> None:
    own = sender_of(PolicyWeights(model), client, by_reference=True)
    assert type(own) is WeightSender
    own.send_weights("3-a")
    assert has(client.worker.receiver.model, Source(model.state_dict())) and client.versions == ["3-a"]
    assert sender_of(PolicyWeights(model), client, own) is own, "it has met the workers"
    assert sender_of(PolicyWeights(model, merge=False), client, own) is not own


def test_pushes_to_a_server_are_made_by_a_sender_of_weights(
    server: SimulatedServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[WeightSender, str]] = []
    inner = WeightSender.send_weights

    def counted(self: WeightSender, weight_version: str, **options: Any) -> None:
        sent.append((self, weight_version))
        inner(self, weight_version, **options)

    monkeypatch.setattr(WeightSender, "send_weights", counted)
    engine = server.engine_of()
    versions = [engine.push(model, step) for step in range(2)]
    assert [version for _, version in sent] == versions and sent[0][0] is sent[1][0]
    assert has(server.engine.model, Source(model.state_dict()))


def test_weights_that_all_ranks_read_are_read_although_the_workers_are_not_met(
    client: Client, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(policy: Any, *, shapes_only: bool = False, **options: Any) -> Iterator[Any]:
        for name, tensor in checkpoint_weights(policy, shapes_only=shapes_only, **options):
            read.extend([] if shapes_only else [name])
            yield name, tensor

    def unreachable(init_info: Any) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(weight_sender, "checkpoint_weights", counted)
    monkeypatch.setattr(client, "init_weight_transfer_engine", unreachable)
    with pytest.raises(ConnectionError):
        sender_of(PolicyWeights(model), client)
    assert read == [], "no rank waits for those of a model that is whole on each"
    monkeypatch.setattr(weight_sender, "is_sharded", lambda policy: True)
    with pytest.raises(ConnectionError, match="the server is gone"):
        sender_of(PolicyWeights(model), client)
    assert read == [name for name, _ in checkpoint_weights(model)]
