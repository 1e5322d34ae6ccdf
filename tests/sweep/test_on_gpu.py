"""Arms on a simulated CUDA device share frozen weights."""

from __future__ import annotations

import torch
from simulated_cuda import SimulatedTensor, to_cuda, trainers_on_simulated_cuda

from groupgrad.apps.sweep import sharing
from groupgrad.apps.sweep.sharing import SharedWeights


def test_frozen_weights_are_shared_on_their_device_alone(make_model, monkeypatch):
    monkeypatch.setattr(sharing, "_PLAIN_TENSORS", (torch.Tensor, SimulatedTensor))
    with trainers_on_simulated_cuda():
        models = [
            make_model(0).requires_grad_(False),
            *(to_cuda(make_model(0).requires_grad_(False)) for _ in range(2)),
        ]
        shared = SharedWeights()
        held = []
        for model in models:
            shared.share(model)
            held.append(sum(map(len, shared._known.values())))
    assert held[1] == 2 * held[0] > 0, "the first model is on the CPU"
    assert held[2] == held[1]
