"""The share of a device for a colocated vLLM, with numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen3Config

from groupgrad.apps.plan.fitting import vllm_bytes, vllm_share
from groupgrad.apps.plan.memory import Colocate, RunSizes, predict
from groupgrad.apps.plan.shapes import ModelShape, model_shape
from groupgrad.integrations.vllm.colocate_start import check_tensor_parallel

SIZES = RunSizes(prompt=10, completion=4086, group=4, rows=8, micro_batch=8, samples=False, on_gpu=False)
ROW = 4096 * 24 * 2 * 2 * 64 * 4
"""Bytes of the keys and values of 4,096 tokens: 24 layers, keys and values, 2 heads of 64, float32."""


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    """Some 400 million parameters, so that a thousandth of the device is little beside a row."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
    return model_shape("middling", Qwen3Config(**sizes, **heads))


def test_vllm_needs_its_weights_a_workspace_and_the_rows(shape: ModelShape) -> None:
    weights = 1.1 * 4 * shape.parameters
    assert vllm_bytes(shape, SIZES) == pytest.approx((weights + ROW, weights + 8 * ROW), abs=1)
    halved = replace(SIZES, colocate=Colocate(max_model_length=8192, tensor_parallel_size=2))
    assert vllm_bytes(shape, halved) == pytest.approx((weights / 2 + ROW, weights / 2 + 8 * ROW), abs=1)
    half = replace(SIZES, half=True)
    assert vllm_bytes(shape, half) == pytest.approx((weights / 2 + ROW / 2, weights / 2 + 4 * ROW), abs=1)


def test_the_share_that_fits_is_named(shape: ModelShape) -> None:
    """It has all rows where there is room for them beside training, else the room, but at least one row's."""
    training, (least, wanted) = predict(shape, SIZES).training, vllm_bytes(shape, SIZES)
    roomy = int((training + wanted) / 0.9)
    share = vllm_share(shape, SIZES, roomy)
    assert share is not None and wanted <= share * roomy <= wanted + roomy / 1000
    tight = int((training + (least + wanted) / 2) / 0.92)
    share = vllm_share(shape, SIZES, tight)
    assert share is not None and least <= share * tight <= 0.92 * tight - training < wanted
    assert vllm_share(shape, SIZES, int((training + 0.9 * least) / 0.92)) is None


def test_a_vllm_that_sleeps_shares_the_device_in_turns(shape: ModelShape) -> None:
    memory, (_, wanted) = predict(shape, SIZES), vllm_bytes(shape, SIZES)
    device = int((memory.held + wanted) / 0.9)
    assert memory.held < memory.training and vllm_share(shape, SIZES, device) is None
    share = vllm_share(shape, replace(SIZES, colocate=Colocate(sleeps=True)), device)
    assert share is not None and share * device >= wanted


def test_heads_that_cannot_be_shared_out_are_refused(build: Any) -> None:
    """Gemma 4 has layers with 4 heads of two sizes."""
    config = build("gemma4 (two sizes of heads)", num_key_value_heads=2).config
    check_tensor_parallel(config, 2, ranks=2)
    with pytest.raises(ValueError, match="4 attention heads cannot be shared out in 3"):
        check_tensor_parallel(config, 3, ranks=3)
