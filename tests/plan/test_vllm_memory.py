"""The memory check of colocated vLLM, with numbers worked by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from groupgrad.apps.plan.vllm_memory import (
    GIB,
    ServedBytes,
    TrainingBytes,
    cache_bytes,
    memory_problem,
)
from groupgrad.integrations.vllm.colocate_start import ColocateOptions, check_tensor_parallel

OPTIONS = ColocateOptions(max_num_seqs=8, memory_utilization=0.3)
SERVED = ServedBytes(weights=10 * GIB, one_row=1 * GIB, context=4096)
"""12 GiB with the workspace, a tenth of the weights."""
TRAINING = TrainingBytes(weights=10 * GIB, gradients=10 * GIB, optimizer=20 * GIB, activations=5 * GIB)
GPU = {"total": 80 * GIB, "available": 78 * GIB}


@pytest.mark.parametrize(
    ("share", "sleeps", "words"),
    [
        # Training takes 45 of 78 GiB, so 33 are left: 0.4125 of 80. vLLM needs 12: 0.15.
        (0.41, False, None),
        (0.42, False, r"too much for both; set vllm_gpu_memory_utilization between 0\.15 and 0\.412"),
        (0.14, False, r"too little for vLLM; set vllm_gpu_memory_utilization between 0\.15 and 0\.412 or lower"),
        # With sleep only 30 GiB of weights and optimizer stay beside it: 48 are left, 0.6.
        (0.6, True, None),
        (0.61, True, r"between 0\.15 and 0\.6"),
    ],
)
def test_the_share_that_fits_is_named(share: float, sleeps: bool, words: str | None) -> None:
    problem = memory_problem(SERVED, TRAINING, replace(OPTIONS, memory_utilization=share, sleep_mode=sleeps), **GPU)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert re.search(words, problem), problem


def test_the_numbers_are_in_the_error() -> None:
    problem = memory_problem(SERVED, TRAINING, replace(OPTIONS, memory_utilization=0.5), **GPU)
    assert problem is not None and problem.startswith(
        "vLLM needs at least 12 GiB (weights 10 GiB, one row of 4096 tokens 1 GiB), takes 40 GiB, and training takes "
        "45 GiB beside it, of 78 GiB that this process may have: too much"
    )


def test_what_no_share_helps_is_said() -> None:
    tight = {**GPU, "available": 50 * GIB}
    problem = memory_problem(SERVED, TRAINING, OPTIONS, **tight)
    assert problem is not None and "whatever share vLLM is given; set vllm_enable_sleep_mode=True" in problem
    # 30 GiB stay while vLLM is awake, so both fit in turns.
    assert memory_problem(SERVED, TRAINING, replace(OPTIONS, memory_utilization=0.25, sleep_mode=True), **tight) is None
    alone = memory_problem(SERVED, TRAINING, replace(OPTIONS, sleep_mode=True), **{**GPU, "available": 44 * GIB})
    assert alone is not None and "training alone needs 45 GiB: set gradient_checkpointing=True" in alone


def test_keys_and_values_by_kind_of_layer() -> None:
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, num_hidden_layers=3)
    assert cache_bytes(config, 100, 2) == 100 * 3 * 2 * 2 * 8 * 2
    assert cache_bytes(config, 100, 2, tensor_parallel_size=2) == 100 * 3 * 2 * 1 * 8 * 2
    # Each rank has a whole head where there are fewer heads than ranks.
    assert cache_bytes(config, 100, 2, tensor_parallel_size=4) == 100 * 3 * 2 * 1 * 8 * 2
    config.head_dim, config.sliding_window = 16, 10
    config.layer_types = ["full_attention", "sliding_attention", "linear_attention"]
    assert cache_bytes(config, 100, 2) == (100 + 10) * 2 * 2 * 16 * 2
    config.kv_lora_rank, config.qk_rope_head_dim = 5, 3
    assert cache_bytes(config, 100, 2) == (100 + 10) * 8 * 2
    assert cache_bytes(SimpleNamespace(), 100, 2) == 0


def test_keys_and_values_of_layers_with_their_own_heads(build: Any) -> None:
    """Gemma 4: the first layer has a window of 3 and 2 heads of 8, the second one has 1 head of 16."""
    config = build("gemma4 (two sizes of heads)", num_key_value_heads=2).config
    assert cache_bytes(config, 100, 2) == (3 * 2 * 2 * 8 + 100 * 2 * 1 * 16) * 2
    shared = build("gemma4 (shared keys and values)").config
    assert cache_bytes(shared, 100, 2) == (3 * 2 * 1 * 8 + 100 * 2 * 1 * 16) * 2  # two of four layers have their own
    check_tensor_parallel(config, 2, ranks=2)
    with pytest.raises(ValueError, match="4 attention heads cannot be shared out in 3"):
        check_tensor_parallel(config, 3, ranks=3)
