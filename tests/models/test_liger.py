"""Liger kernels without a GPU: the calls of the library, and the scores under a forward pass like Liger's."""

from __future__ import annotations

import sys
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from groupgrad.batch import Batch
from groupgrad.errors import ConfigError
from groupgrad.models.liger import apply_kernels, check_liger, configured_kernels, kernel_config
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.scoring.self_check import check_layout


@pytest.fixture
def library(monkeypatch: Any) -> list[tuple[Any, dict[str, Any]]]:
    """A fake liger-kernel with kernels for Llama and Qwen3 that records its calls: (model, keywords)."""
    asked: list[tuple[Any, dict[str, Any]]] = []
    package, kernels, patches = (
        ModuleType(name)
        for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    )
    kernels._apply_liger_kernel_to_instance = lambda model, **given: asked.append((model, given))  # pyright: ignore
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None, "qwen3": None}  # pyright: ignore
    for module in (package, kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("groupgrad.models.liger.liger.is_liger_kernel_available", lambda: True)
    return asked


def test_all_kernels_but_those_of_a_loss_on_labels(build: Any, library: Any) -> None:
    model = build("qwen3")
    apply_kernels(model, None)
    apply_kernels(model, {"rope": False, "fused_linear_cross_entropy": True})
    assert library == [
        (model, {"cross_entropy": False, "fused_linear_cross_entropy": False}),
        (model, {"cross_entropy": False, "fused_linear_cross_entropy": True, "rope": False}),
    ]


def test_the_model_under_an_adapter_gets_the_kernels(build: Any, library: Any) -> None:
    peft = pytest.importorskip("peft")
    base = build("llama")
    apply_kernels(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])), None)
    assert library[0][0] is base


def test_a_model_type_without_kernels_is_rejected(build: Any, library: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no kernels for the model type 'gpt2'.*use_liger_kernel=False"):
        apply_kernels(build("gpt2"), None)
    assert library == []


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_devices_without_triton_are_rejected(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"on the device '{kind}'.*Set use_liger_kernel=False"):
        check_liger(torch.device(kind))


def test_the_trainer_applies_the_same_kernels() -> None:
    args: Any = SimpleNamespace(use_liger_kernel=True, liger_kernel_config=None)
    with pytest.raises(KeyError), configured_kernels(args):
        assert args.liger_kernel_config == kernel_config(None)
        raise KeyError
    assert args.liger_kernel_config is None
    off: Any = SimpleNamespace(use_liger_kernel=False, liger_kernel_config=None)
    with configured_kernels(off):
        assert off.liger_kernel_config is None


def test_a_forward_pass_with_a_fused_loss_keeps_the_tiled_head(build: Any, batch: Batch) -> None:
    """Like Liger's: no logits with labels, else the head's own output."""
    model = build("qwen3")
    expected = score_tokens(model, batch, ForwardOptions()).logprobs
    heights: list[int] = []

    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        output = self.model(input_ids=input_ids, position_ids=position_ids, **given)
        logits = None if self.training and labels is not None else self.lm_head(output[0])
        return SimpleNamespace(logits=logits, past_key_values=output.past_key_values)

    model.forward = MethodType(forward, model)
    report = check_layout(model, ForwardOptions())
    assert (report.layout, report.tiled_head, report.reason) == ("shared", True, None)
    model.lm_head.register_forward_hook(lambda module, inputs, output: heights.append(output.shape[-2]))
    actual = score_tokens(model.train(), batch, ForwardOptions()).logprobs
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert heights == [1]


@pytest.mark.gpu
def test_kernels_change_no_score_beyond_their_tolerance(build: Any, batch: Batch) -> None:
    pytest.importorskip("liger_kernel")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    model, batch = build("qwen3").cuda(), batch.to(torch.device("cuda"))
    expected = score_tokens(model, batch, ForwardOptions())
    expected.logprobs.sum().backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    apply_kernels(model, None)
    assert check_layout(model, ForwardOptions()).reason is None
    actual = score_tokens(model, batch, ForwardOptions())
    actual.logprobs.sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(actual.logprobs, expected.logprobs, atol=1e-3, rtol=0)
    assert float((gradient - reference).norm() / reference.norm()) < 1e-3
