"""The share of a device that `groupgrad plan` recommends for vLLM is one that the trainer accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen2Config

from groupgrad.apps.plan.fitting import choices, predicted_training_bytes, recommended, vllm_share
from groupgrad.apps.plan.memory import RunSizes, predict
from groupgrad.apps.plan.shapes import ModelShape, model_shape
from groupgrad.integrations.vllm import memory_check
from groupgrad.integrations.vllm.colocate_start import ColocateOptions

SIZES = RunSizes(
    prompt=512, completion=256, group=8, rows=16, micro_batch=8, weight_bytes=2, half=True, accumulates=True
)


@pytest.fixture(scope="module")
def seven_billion() -> ModelShape:
    """The shape of Qwen2.5-7B."""
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    return model_shape("7B", config, half=True)


def problem_of(shape: ModelShape, sizes: RunSizes, device: int, share: Any) -> str | None:
    """The trainer's objection to a share of a device."""
    options = ColocateOptions(
        max_num_seqs=16, max_model_len=share.max_model_length, memory_utilization=share.utilization, dtype="bfloat16"
    )
    served = memory_check.ServedBytes.of_config(2 * shape.parameters, shape.text, options)
    training = predicted_training_bytes(predict(shape, replace(sizes, samples=False)))
    return memory_check.memory_problem(served, training, memory_check.DeviceMemory(device, int(0.92 * device)), options)


@pytest.mark.parametrize(
    ("gigabytes", "further"),
    [
        (80, {}),
        (141, {}),
        (192, {"accumulates": False}),
        (80, {"adapter": "lora"}),
        (48, {"adapter": "lora", "checkpointing": True, "rows": 4, "micro_batch": 1}),
    ],
)
def test_the_trainer_accepts_the_recommended_share(
    gigabytes: int, further: dict[str, Any], seven_billion: ModelShape
) -> None:
    device = gigabytes * 10**9
    best = recommended(choices(seven_billion, replace(SIZES, **further), device))
    assert best is not None
    share = vllm_share(seven_billion, best.sizes, device)
    assert share is not None
    assert problem_of(seven_billion, best.sizes, device, share) is None


def test_a_shorter_context_is_recommended_where_the_models_does_not_fit(seven_billion: ModelShape) -> None:
    """Between the two needs there are devices on which only rows of the run's length fit."""
    sizes = replace(SIZES, adapter="lora", rows=1, micro_batch=1, checkpointing=True)
    found = [(vllm_share(seven_billion, sizes, gigabytes * 10**9), gigabytes) for gigabytes in range(30, 60)]
    lengths = [share.max_model_length if share else 0 for share, _ in found]
    assert lengths == sorted(lengths, key=(0, 768, None).index)
    assert {*lengths} == {0, 768, None}
    for share, gigabytes in found:
        assert share is None or problem_of(seven_billion, sizes, gigabytes * 10**9, share) is None
