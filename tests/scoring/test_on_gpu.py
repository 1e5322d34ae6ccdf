"""The training pass on a simulated CUDA device: no tensor of the CPU among its own, and the numbers of the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from simulated_cuda import GPU, SimulatedTensor, simulated_cuda, to_cuda, with_random_adapters
from torch import nn
from vlm_batches import make_batch, make_vlm_setup

from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.block_attention import BlockLayout
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.forward import ForwardOptions, score_tokens

KINDS = [
    "gpt2",
    "phi (head bias)",
    "gemma2 (soft caps)",
    "granite (logit scale)",
    "gpt-oss (experts, sinks)",
]
WAYS = [
    ForwardOptions(entropy_gradient=True),
    ForwardOptions(layout="packed"),
    ForwardOptions(layout="dense"),
    ForwardOptions(tiled_head=False),
]


def numbers(model: nn.Module, batch: Any, way: ForwardOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and the gradients of all that trains, end to end."""
    model.zero_grad()
    scores = score_tokens(model, batch, way)
    total = scores.logprobs.sum()
    if way.entropy_gradient and scores.entropy is not None:
        total = total + 0.1 * scores.entropy.sum()
    total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return scores.logprobs.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def compare(model: nn.Module, batch: Any, way: ForwardOptions) -> None:
    expected = numbers(model, batch, way)
    on_gpu = to_cuda(copy.deepcopy(model))
    with simulated_cuda():
        actual = numbers(on_gpu, batch.to(GPU), way)
    logprobs, gradient = actual
    assert isinstance(logprobs, SimulatedTensor)
    assert isinstance(gradient, SimulatedTensor)
    torch.testing.assert_close(logprobs.inner, expected[0], rtol=1e-5, atol=1e-5)
    assert float((gradient.inner - expected[1]).norm() / expected[1].norm()) < 1e-5


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_heads_compute_on_the_gpu_alone(kind: str, build, batch):
    model = build(kind)
    for way in WAYS:
        compare(model, batch, way)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_adapters_and_gradient_checkpointing_do(use_reentrant: bool, build, batch):
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"])
    model: Any = with_random_adapters(get_peft_model(build("llama"), config))
    model.enable_input_require_grads()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    compare(model, batch, ForwardOptions())


def attended(query: Any, key: Any, value: Any, of_output: Any) -> list[torch.Tensor]:
    """Outputs of two rows behind a prompt, with sinks, and the gradients of queries, keys and values."""
    prompt = TokenSpan(0, 5)
    attention = BlockLayout(
        [prompt, TokenSpan(5, 7, 5, row=0, shared=prompt), TokenSpan(12, 4, 5, row=1, shared=prompt)]
    )
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    sinks = query.new_zeros(len(query))
    output = attention.attend(*inputs, AttentionCall(0, 0.25, sinks=sinks))
    return [output.detach(), *torch.autograd.grad(output, inputs, of_output)]


def test_scores_of_training_are_not_rounded_to_half_precision():
    """Scores are near 12, where numbers of bfloat16 are 1/16 apart."""
    stream = torch.Generator().manual_seed(0)
    shapes = (4, 16, 16), (2, 16, 16), (2, 16, 16), (16, 4, 16)
    query, key, value, of_output = (torch.randn(shape, generator=stream).bfloat16() for shape in shapes)
    query, key = query + 1.75, key + 1.75
    expected = attended(*(x.float() for x in (query, key, value, of_output)))
    with simulated_cuda():
        actual = attended(*(SimulatedTensor(x) for x in (query, key, value, of_output)))
    errors = [float((ours.inner.float() - theirs).norm() / theirs.norm()) for ours, theirs in zip(actual, expected)]
    assert errors[0] < 0.006
    assert max(errors[1:]) < 0.02


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "llava_next"])
def test_images_are_computed_on_the_gpu(name: str):
    vlm = make_vlm_setup(name)
    batch = make_batch(vlm)
    for way in (ForwardOptions(), ForwardOptions(layout="dense")):
        compare(vlm.model, batch, way)
