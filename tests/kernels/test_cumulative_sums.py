"""Cumulative sums on a GPU under deterministic algorithms: numbers and gradients of PyTorch's, and nothing raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from simulated_cuda import GPU, SimulatedTensor, simulated_cuda, to_cuda
from tiny_hybrids import make_hybrid

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.kernels.cumulative_sums import cumulative_sum
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.scoring.self_check import build_batch

REQUESTS = [Request([5, 6, 7 + i % 2], i, 6) for i in range(4)]
OPTIONS = SamplingOptions(max_new_tokens=6, eos_ids=(1,), pad_id=0)


@contextmanager
def deterministic_gpu() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        with simulated_cuda():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", [1, 3, 65])
def test_sums_and_their_gradients_are_those_of_cumsum(length: int, dim: int):
    torch.manual_seed(0)
    values = torch.randn(length, length, 3 if dim != -1 else length, dtype=torch.float64)
    of_output, expected = torch.randn_like(values), values.clone().requires_grad_()
    expected.cumsum(dim).backward(of_output)
    with deterministic_gpu():
        with pytest.raises(RuntimeError, match="deterministic"):
            SimulatedTensor(values).cumsum(dim)
        inputs: Any = SimulatedTensor(values.clone()).requires_grad_()
        sums = cumulative_sum(inputs, dim)
        (gradient,) = torch.autograd.grad(sums, inputs, SimulatedTensor(of_output))
    torch.testing.assert_close(sums.detach().inner, values.cumsum(dim), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient.inner, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("qwen3", TransformersEngine), ("qwen3.5 (linear attention)", NativeEngine)],
)
def test_the_same_tokens_are_sampled(name: str, engine: Any, build: Any):
    expected = [sample.ids for sample in engine(build(name)).sample(REQUESTS, OPTIONS)]
    with deterministic_gpu():
        assert [sample.ids for sample in engine(to_cuda(build(name))).sample(REQUESTS, OPTIONS)] == expected


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_recurrent_layers_give_the_same_scores(name: str):
    batch = build_batch([[5, 6, 7, 8, 9], [10, 11, 12]], (0, 1, 0, 1), [[13, 14, 15, 16], [17, 18], [19], [20, 21]])
    expected = score_tokens(make_hybrid(name), batch, ForwardOptions()).logprobs
    with deterministic_gpu():
        actual: Any = score_tokens(to_cuda(make_hybrid(name)), batch.to(GPU), ForwardOptions()).logprobs
    torch.testing.assert_close(actual.detach().inner, expected.detach(), rtol=0, atol=1e-5)
