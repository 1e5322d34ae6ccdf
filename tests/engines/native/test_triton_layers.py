"""Norms, rotary embeddings and gates of decode steps by Triton's kernels, against torch's operations in float64.

`make test-triton` runs these on a CPU, where Triton interprets its kernels; elsewhere they are skipped.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from known_decoders import CHANGES, make
from noted_calls import note_calls
from sample_checks import assert_same_samples
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, attention_layouts, decode_kernels, runner
from groupgrad.engines.native.direct_step import DirectModel, direct_model
from groupgrad.scoring.attention_layout import AttentionCall

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set (make test-triton)", allow_module_level=True)
pytest.importorskip("triton")
from groupgrad.engines.native import triton_layers

TYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""Largest accepted difference, relative to the largest number. Triton's interpreter cuts bfloat16 off, so that a result
that is rounded twice, as a gate, may be two steps of 1/128 too small; a GPU rounds."""


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= TYPES[dtype] * expected.abs().max()


def normed(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    rows, weight = rows.double(), weight.double()
    return rows * (rows.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


@pytest.mark.parametrize("width", [1, 48, 512, 3000])
@pytest.mark.parametrize("dtype", TYPES)
def test_residuals_and_norms(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    hidden, added = torch.randn(2, 5, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    total, found = triton_layers.add_and_norm(hidden, added, weight, 1e-5, dtype)
    close(total, (hidden + added).double(), dtype)
    assert dtype == torch.bfloat16 or torch.equal(total, hidden + added)
    close(found, normed(total, weight, 1e-5), dtype)
    same, found = triton_layers.add_and_norm(hidden, None, weight, 1e-5, dtype)
    assert same is hidden
    close(found, normed(hidden, weight, 1e-5), dtype)


def test_a_residual_in_float32_takes_what_half_precision_adds() -> None:
    """As under mixed precision: float32 weights and residuals, products in half precision."""
    torch.manual_seed(0)
    hidden, added, weight = torch.randn(4, 40), torch.randn(4, 40).half(), torch.randn(40)
    total, found = triton_layers.add_and_norm(hidden, added, weight, 1e-6, torch.float16)
    assert total.dtype == torch.float32 and torch.equal(total, hidden + added)
    close(found, normed(total, weight, 1e-6), torch.float16)


@pytest.mark.parametrize("width", [6, 64, 80])
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_rotary_embeddings(width: int, part: float, has_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    half = int(width * part) // 2
    query, key = torch.randn(3, 6, width).to(dtype), torch.randn(3, 2, width).to(dtype)
    angles = torch.rand(3, half).repeat(1, 2) * 6
    weights = torch.randn(2, width)
    norms = (weights[0], weights[1], 1e-6) if has_norm else None
    signed = torch.cat([-angles[:, :half].sin(), angles[:, half:].sin()], dim=-1)
    found = triton_layers.rotate(query, key, angles.cos(), signed, norms)
    for given, weight, ours in zip((query, key), weights, found):
        rows = normed(given, weight, 1e-6) if has_norm else given.double()
        turned, rest = rows[..., : 2 * half], rows[..., 2 * half :]
        crossed = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
        sine, cosine = (x.double()[:, None] for x in (angles.sin(), angles.cos()))
        close(ours, torch.cat([turned * cosine + crossed * sine, rest], dim=-1), dtype)


def test_tensors_with_gaps_give_the_same() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 5, 96)
    hidden, added = wide[:, :, :40]
    weight = torch.randn(40)
    found = triton_layers.add_and_norm(hidden, added, weight, 1e-5, torch.float32)
    for ours, whole in zip(
        found, triton_layers.add_and_norm(hidden.clone(), added.clone(), weight, 1e-5, torch.float32)
    ):
        assert torch.equal(ours, whole)
    heads, angles = torch.randn(5, 7, 24)[..., :16], torch.rand(2, 5, 16)
    query, key = heads[:, :4], heads[:, 4:]
    found = triton_layers.rotate(query, key, *angles, None)
    for ours, whole in zip(found, triton_layers.rotate(query.clone(), key.clone(), *angles, None)):
        assert torch.equal(ours, whole)
    assert torch.equal(triton_layers.gate(hidden, added), triton_layers.gate(hidden.clone(), added.clone()))


@pytest.mark.parametrize("shape", [(1, 3), (7, 640)])
@pytest.mark.parametrize("dtype", TYPES)
def test_gates(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gates, values = torch.randn(2, *shape).to(dtype) * 4
    close(triton_layers.gate(gates, values), (F.silu(gates) * values).double(), dtype)


OPTIONS = SamplingOptions(max_new_tokens=8, eos_ids=(1,), pad_id=0)


def requests() -> list[Request]:
    return [Request([3 + i % 2] * (1 + 5 * (i % 2)), i, 4 + 2 * i) for i in range(3)]


class Steps:
    """Counts the decode steps of a form, and lets tensors of the CPU pass for those of a GPU while `on_gpu` is true.

    Attention is left to products, which are faster than interpreted kernels.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_gpu = True
        monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "0")
        monkeypatch.setattr(decode_kernels, "_is_on_gpu", lambda tensor: self.on_gpu)
        monkeypatch.setattr(attention_layouts, "has_attention_kernels", lambda query: False)
        self.direct = note_calls(monkeypatch, DirectModel, "__call__")
        self.own = note_calls(monkeypatch, runner, "step_logits")


def of_groupgrad(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("groupgrad")]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.mark.parametrize("family", sorted(CHANGES))
@pytest.mark.parametrize("adapted", [False, True])
def test_models_say_the_same(family: str, adapted: bool, steps: Steps, caplog: pytest.LogCaptureFixture) -> None:
    model = make(family, adapted=adapted)
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        native = NativeEngine(model)
        found = native.sample(requests(), OPTIONS)
    assert not of_groupgrad(caplog)
    assert (len(steps.own), len(steps.direct)) == (0, native.statistics.num_steps)
    steps.on_gpu = False
    assert_same_samples(found, NativeEngine(model).sample(requests(), OPTIONS), absolute=2e-5, relative=0.0)


def test_half_precision(steps: Steps, caplog: pytest.LogCaptureFixture) -> None:
    model = make("Qwen3").half()
    given = [Request([5, 6, 7], i, 1) for i in range(4)]
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        found = NativeEngine(model).sample(requests() + given, OPTIONS)
    assert not of_groupgrad(caplog) and len(steps.direct) > 1
    steps.on_gpu = False
    for ours, theirs in zip(found, NativeEngine(model).sample(requests() + given, OPTIONS)):
        assert ours.logprobs is not None and theirs.logprobs is not None
        assert ours.logprobs[:2] == pytest.approx(theirs.logprobs[:2], abs=0.02)


def test_recorded_steps_take_the_direct_form(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, num_recorded = make("Qwen2"), 0

    def record(work: Callable[[], Any], owned: Iterable[torch.Tensor], trial: Callable[[], Any]) -> Callable[[], Any]:
        nonlocal num_recorded
        num_recorded += 1
        trial()
        return work

    native = NativeEngine(model)
    monkeypatch.setattr(native, "_recorder", lambda devices: record)
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        found = native.sample(requests(), OPTIONS)
    assert not of_groupgrad(caplog) and num_recorded > 1
    # Each recording is tried first.
    assert (len(steps.own), len(steps.direct)) == (0, native.statistics.num_steps + num_recorded)
    steps.on_gpu = False
    assert [s.ids for s in found] == [s.ids for s in NativeEngine(model).sample(requests(), OPTIONS)]


def test_models_with_other_layers_keep_their_modules(build: Any, steps: Steps) -> None:
    for name in ("gemma2 (soft caps)", "qwen3-moe"):
        NativeEngine(build(name)).sample(requests(), OPTIONS)
    assert len(steps.direct) == 0


class Launches(TorchDispatchMode):
    """Counts the operations that would be launched on a GPU: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns
        )
        name = func._schema.name.removeprefix("aten::")
        if not is_view and not name.startswith(("empty", "promote_types")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_layer_takes_fourteen_launches(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven products, three of attention, two of residuals and norms, one each of rotary embeddings and gates."""

    class Attention:
        """The output of attention, without its three launches."""

        def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Any) -> torch.Tensor:
            return query.transpose(0, 1)

    def as_one_launch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            launches.names.append(function.__name__)
            with _disable_current_modes():
                return function(*arguments)

        return call

    for name in ("add_and_norm", "rotate", "gate"):
        monkeypatch.setattr(triton_layers, name, as_one_launch(getattr(triton_layers, name)))
    counts, tokens = [], torch.tensor([5, 6])
    for num_layers in (2, 3):
        model = make("Qwen3", num_hidden_layers=num_layers).bfloat16()
        direct = direct_model(model, {layer: AttentionCall(layer, 1.0) for layer in range(num_layers)})
        assert isinstance(direct, DirectModel)
        with torch.no_grad(), Launches() as launches:
            direct(tokens, tokens, Attention())  # pyright: ignore[reportArgumentType]
        counts.append(Counter(launches.names))
    assert counts[1] - counts[0] == {"mm": 7, "add_and_norm": 2, "rotate": 1, "gate": 1}
