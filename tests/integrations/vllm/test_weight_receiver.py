"""The backend of vLLM's weight transfer in one worker, by vLLM's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_server import Model, Receiver, Worker, pretend_weight_transfer

from groupgrad.integrations.vllm.weight_receiver import REFUSED
from groupgrad.integrations.vllm.wire import TensorSpec, pack, specs_to_json


@pytest.fixture
def worker(model: Any, monkeypatch: pytest.MonkeyPatch) -> Worker:
    pretend_weight_transfer(monkeypatch)
    return Worker(Receiver(Model(model)))


def send(worker: Worker, tensors: list[tuple[str, torch.Tensor]]) -> int:
    """Start a push and send these tensors in small buckets; returns their checksum."""
    specs, checksum = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors], 0
    worker.start_weight_update()
    for bucket in pack(specs, tensors, bucket_bytes=20_000):
        own = specs_to_json(specs[bucket.first : bucket.first + bucket.count])
        worker.update_weights({"specs": own, "body": bucket.data.numpy().tobytes()})
        checksum = bucket.checksum
    return checksum


def test_scales_that_quantization_makes_of_the_weights_are_not_missed(worker: Worker, model: Any) -> None:
    """vLLM quantizes a layer as soon as its weights are there, and keeps the scales as further parameters."""
    tensors = list(model.state_dict().items())
    checksum = send(worker, tensors)
    worker.receiver.model.weights["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(3)
    worker.update_weights({"checksum": checksum})
    worker.finish_weight_update()


def test_what_is_not_whole_is_refused_and_the_next_push_begins(worker: Worker, model: Any) -> None:
    tensors = list(model.state_dict().items())
    checksum = send(worker, tensors)
    with pytest.raises(RuntimeError, match=f"{REFUSED} 0 refuses the push: its bytes have the checksum .*, those sent"):
        worker.update_weights({"checksum": checksum ^ 1})
    name, _ = tensors[3]
    checksum = send(worker, tensors[:3] + tensors[4:])
    with pytest.raises(RuntimeError, match=f"{REFUSED} 0 refuses the push: nothing was sent for {name}"):
        worker.update_weights({"checksum": checksum})
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        worker.finish_weight_update()
    checksum = send(worker, tensors)
    worker.update_weights({"checksum": checksum})
    worker.finish_weight_update()
    assert all(torch.equal(worker.receiver.model.weights[name], tensor) for name, tensor in tensors)


def test_a_push_that_is_not_finished_is_ended_by_an_empty_update(worker: Worker, model: Any) -> None:
    tensors = list(model.state_dict().items())
    send(worker, tensors)
    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    with pytest.raises(RuntimeError, match="abandoned"):
        worker.update_weights({})
    worker.start_weight_update()
    worker.update_weights({"tensors": tensors})
    worker.update_weights({"checksum": None})
    worker.finish_weight_update()
