"""Pushes within a process, and of other trainers to a server, against workers without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_server import Model, Receiver, SimulatedServer, Worker, pretend_weight_transfer

from groupgrad.integrations.vllm import weight_sender
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import Address, ServerRefused
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, push_in_process
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


def has(model: Model, source: Source) -> bool:
    return all(torch.equal(model.weights[name], tensor) for name, tensor in source.tensors.items())


def test_a_push_within_the_process_is_whole_or_refused(llm: LLM, model: Any) -> None:
    source = Source(model.state_dict())
    push_in_process(llm, source, "3-a")
    assert has(llm.worker.receiver.model, source) and llm.versions == ["3-a"]
    announced = source.metadata()
    source.metadata = lambda: announced[::-1]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=f"tensor 0 is {announced[0].name} .*, but {announced[-1].name} of shape"):
        push_in_process(llm, source)
    assert source.num_read == len(announced), "other ranks take part in the rest"
    del source.metadata
    name, _ = source.tensors.popitem()
    with pytest.raises(RuntimeError, match=f"nothing was sent for {name}"):
        push_in_process(llm, source)
    assert llm.versions == ["3-a"] and not llm.worker.is_active


def test_scales_that_quantization_makes_of_the_weights_are_not_missed(llm: LLM, model: Any) -> None:
    """vLLM quantizes a layer as soon as its weights are there, and keeps the scales as further parameters."""
    receiver = llm.worker.receiver
    load = receiver.load

    def quantize(tensors: list[tuple[str, torch.Tensor]]) -> None:
        load(tensors)
        receiver.model.weights["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(3)

    receiver.load = quantize  # type: ignore[method-assign]
    push_in_process(llm, Source(model.state_dict()), "3-a")
    assert llm.versions == ["3-a"]


def test_a_server_takes_the_weights_of_another_trainer_verified(server: SimulatedServer, model: Any) -> None:
    source, client = Source(model.state_dict()), ServerClient(server.address, timeout_s=5.0)
    client.push_weights(source, "3-a")
    assert has(server.engine.model, source) and client.look()["weight_version"] == "3-a"
    source.tensors.popitem()
    with pytest.raises(ServerRefused, match="nothing was sent for"):
        client.push_weights(source, "4-a")
    assert not client.look()["complete"], "nothing is sampled from half a push"
    client.close()


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
