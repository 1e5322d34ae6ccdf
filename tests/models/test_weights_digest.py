"""The digest of weights changes with every bit, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from groupgrad.models.weights import weights_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 3), (), (0,)])
def test_every_bit_of_every_number_counts(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)

    def digest(changed: torch.Tensor) -> str:
        own = changed.clone().view(dtype).reshape(shape)
        named = [("first", nn.Parameter(torch.ones(2))), ("second", nn.Parameter(own, requires_grad=False))]
        return weights_digest(named)

    before = digest(data)
    assert digest(data) == before and len(before) == 16
    width = torch.empty(0, dtype=dtype).element_size()
    for number in range(size // width):
        for _ in range(5):
            changed = data.clone()
            changed[number * width : (number + 1) * width] = torch.randint(0, 256, (width,), generator=generator)
            assert (digest(changed) == before) == torch.equal(changed, data)
        for bit in range(8 * width):
            changed = data.clone()
            changed[number * width + bit // 8] ^= 1 << bit % 8
            assert digest(changed) != before


def test_names_shapes_and_places_in_memory(model):
    named = dict(model.named_parameters())
    before = weights_digest(named.items())
    shifted = torch.empty(9)[1:]  # its storage begins at 4 bytes
    shifted.copy_(torch.arange(8.0))
    one, two = (weights_digest([("w", nn.Parameter(t))]) for t in (shifted, torch.arange(8.0)))
    assert one == two
    assert weights_digest([("w", nn.Parameter(torch.arange(8.0).view(2, 4)))]) != one
    assert weights_digest([("v", nn.Parameter(torch.arange(8.0)))]) != one
    assert weights_digest([("w", nn.Parameter(torch.arange(8.0).view(2, 4).t()))]) != one
    assert weights_digest(named.items()) == before
