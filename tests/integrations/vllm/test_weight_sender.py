"""Pushes within a process, and vLLM's interface to pushes, against workers without vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_server import Model, Receiver, SimulatedServer, Worker, pretend_weight_transfer

from groupgrad.integrations.vllm import weight_sender
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import Address, ServerRefused
from groupgrad.integrations.vllm.transfer_plugin import register
from groupgrad.integrations.vllm.weight_sender import InProcess, PolicyWeights, WeightSender
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


class LLM:
    """In place of `vllm.LLM` with one worker."""

    def __init__(self, worker: Worker):
        self.worker, self.versions = worker, []
        self.start_weight_update = worker.start_weight_update

    def update_weights(self, request: dict[str, Any]) -> None:
        self.worker.update_weights(request["update_info"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.worker.finish_weight_update()
        self.versions.append(weight_version)


@pytest.fixture
def llm(model: Any, monkeypatch: pytest.MonkeyPatch) -> LLM:
    pretend_weight_transfer(monkeypatch)
    return LLM(Worker(Receiver(Model(model))))


def sender(client: Any, source: Any, *, rank: int = 0) -> WeightSender:
    return WeightSender.trainer_init(SimpleNamespace(rank=rank, is_sender=rank == 0), client=client, source=source)


def has(model: Model, source: Source) -> bool:
    return all(torch.equal(model.weights[name], tensor) for name, tensor in source.tensors.items())


def test_a_push_within_the_process_is_whole_or_refused(llm: LLM, model: Any) -> None:
    source = Source(model.state_dict())
    push = sender(InProcess(llm), source)
    push.send_weights("3-a")
    assert has(llm.worker.receiver.model, source) and llm.versions == ["3-a"]
    announced = source.metadata()
    source.metadata = lambda: announced[::-1]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=f"tensor 0 is {announced[0].name} .*, but {announced[-1].name} of shape"):
        push.send_weights()
    assert source.num_read == len(announced), "other ranks take part in the rest"
    del source.metadata
    name, _ = source.tensors.popitem()
    with pytest.raises(RuntimeError, match=f"nothing was sent for {name}"):
        push.send_weights()
    assert llm.versions == ["3-a"] and not llm.worker.is_active


def test_scales_that_quantization_makes_of_the_weights_are_not_missed(llm: LLM, model: Any) -> None:
    """vLLM quantizes a layer as soon as its weights are there, and keeps the scales as further parameters."""
    receiver = llm.worker.receiver
    load = receiver.load

    def quantize(tensors: list[tuple[str, torch.Tensor]]) -> None:
        load(tensors)
        receiver.model.weights["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(3)

    receiver.load = quantize  # type: ignore[method-assign]
    InProcess(llm).push_weights(Source(model.state_dict()), "3-a")
    assert llm.versions == ["3-a"]


def test_ranks_that_do_not_send_read_the_weights_with_the_one_that_does(model: Any) -> None:
    source = Source(model.state_dict())
    sender(InProcess(None), source, rank=1).send_weights()
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


@pytest.mark.parametrize(
    ("client", "source", "words"),
    [
        (InProcess(None), None, r"pass source=ModuleSource\(model\)"),
        (SimpleNamespace(), Source({}), r"which SimpleNamespace does not; pass client=ServerClient\(address\)"),
    ],
)
def test_a_sender_says_what_it_needs(client: Any, source: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sender(client, source)


def test_vllms_factory_gives_the_sender(llm: LLM, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is that of `transfer_engine`, which vLLM's factory imports by the name that was registered."""

    @dataclass
    class TrainerInitInfo:
        rank: int
        is_sender = True

    base: Any = sys.modules["vllm.distributed.weight_transfer.base"]
    base.TrainerInitInfo, base.TrainerWeightTransferEngine = TrainerInitInfo, type("TrainerEngine", (), {})
    base.WeightTransferEngine = type("WeightTransferEngine", (), {})
    registered: dict[str, tuple[str, str]] = {}

    def register_engine(name: str, module: str, class_name: str) -> None:
        if name in registered:
            raise ValueError("it is already registered")
        registered[name] = module, class_name

    factory: Any = ModuleType("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferEngineFactory = SimpleNamespace(register_engine=lambda *given: None)
    factory.WeightTransferTrainerFactory = SimpleNamespace(register_engine=register_engine)
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    register()
    register()
    try:
        module: Any = importlib.import_module(registered["groupgrad"][0])
        made = getattr(module, registered["groupgrad"][1]).trainer_init(
            module.SenderInit(rank=0), client=InProcess(llm), source=PolicyWeights(model)
        )
    finally:
        sys.modules.pop("groupgrad.integrations.vllm.transfer_engine", None)
    made.send_weights("3-a")
    assert isinstance(made, base.TrainerWeightTransferEngine)
    assert has(llm.worker.receiver.model, Source(model.state_dict())) and llm.versions == ["3-a"]


def test_weights_that_all_ranks_read_are_read_although_the_server_is_gone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(policy: Any, *, shapes_only: bool = False, **options: Any) -> Iterator[Any]:
        for name, tensor in checkpoint_weights(policy, shapes_only=shapes_only, **options):
            read.extend([] if shapes_only else [name])
            yield name, tensor

    monkeypatch.setattr(weight_sender, "checkpoint_weights", counted)
    client = ServerClient(Address.of(port=9), timeout_s=1.0)
    with pytest.raises(ConnectionError):
        client.push_weights(PolicyWeights(model), "0-a")
    assert read == [], "no rank waits for those of a model that is whole on each"
    monkeypatch.setattr(weight_sender, "is_sharded", lambda policy: True)
    with pytest.raises(ConnectionError, match="is not there"):
        client.push_weights(PolicyWeights(model), "0-a")
    assert read == [name for name, _ in checkpoint_weights(model)]
