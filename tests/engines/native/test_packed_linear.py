"""Linear layers by oneDNN: the same results, and every layer restored afterwards."""

from __future__ import annotations

import pytest
import torch
from sample_checks import assert_same_samples
from torch import nn

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.packed_linear import fast_linears

OPTIONS = SamplingOptions(max_new_tokens=12, eos_ids=(1,), pad_id=0)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33, 1025])
@torch.no_grad()
def test_the_numbers_are_those_of_the_layer(pack: bool, num_tokens: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 7, bias=False)).double()
    inputs = torch.randn(1, num_tokens, 24, dtype=torch.float64)
    expected = model(inputs)
    model.float()
    with fast_linears(model, pack=pack):
        actual = model(inputs.float())
        assert all("forward" in layer.__dict__ for layer in model)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    assert not any("forward" in layer.__dict__ for layer in model)


def test_layers_that_are_not_plain_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    hooked = nn.Linear(4, 4)
    hooked.forward = lambda input: input
    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4).bfloat16(), hooked)
    with fast_linears(model):
        assert ["forward" in layer.__dict__ for layer in model] == [False, False, True]
        assert torch.equal(hooked(torch.ones(1, 4)), torch.ones(1, 4))
    assert "forward" in hooked.__dict__
    with torch.autocast("cpu", torch.bfloat16), fast_linears(plain := nn.Linear(4, 4)):
        assert "forward" not in plain.__dict__


def test_packed_weights_give_the_same_texts_and_follow_the_weights(build):
    model = build("qwen3-tied")
    submitted = [Request([5 + i % 3, 9], i, 12) for i in range(9)]
    engine = NativeEngine(model, pack_weights=True)
    for _ in range(2):
        assert_same_samples(engine.sample(submitted, OPTIONS), NativeEngine(model).sample(submitted, OPTIONS))
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.neg_()
