"""vLLM's options from the training configuration."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.config import GRPOConfig
from groupgrad.config.sampling import sampling_options
from groupgrad.integrations.vllm import setup as vllm_setup
from groupgrad.integrations.vllm.colocate_start import ColocateOptions


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, make_model: Any, tmp_path: Any) -> Any:
    """The options with which colocated vLLM would be started, by configuration fields."""
    started_with: list[ColocateOptions] = []

    class Engine:
        def __init__(self, model: Any, tokenizer: Any, chosen: ColocateOptions):
            started_with.append(chosen)

        def check(self, sampling: Any, *, num_tokens: int) -> None:
            assert num_tokens == 9  # a prompt has at least one token

        def plain_logprobs(self, sampling: Any) -> bool:
            return True

    monkeypatch.setattr(vllm_setup, "VLLMColocateEngine", Engine)

    def start(**fields: Any) -> ColocateOptions:
        settings = {"bf16": False, "per_device_train_batch_size": 8, "max_completion_length": 8, **fields}
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, **settings)
        vllm_setup._colocate_policy(config, make_model(), None, sampling_options(config, eos_ids=[1], pad_id=0))
        return started_with[-1]

    return start


def test_colocate_is_started_as_the_configuration_says(start: Any) -> None:
    chosen = start(
        vllm_max_model_length=512,
        vllm_gpu_memory_utilization=0.45,
        vllm_tensor_parallel_size=2,
        vllm_model_impl="transformers",
        vllm_enable_sleep_mode=True,
        vllm_sleep_level=1,
        vllm_importance_sampling_correction=False,
        vllm_structured_outputs_regex="[ab]+",
        steps_per_generation=4,
    )
    assert chosen == ColocateOptions(
        max_num_seqs=32,
        max_model_len=512,
        memory_utilization=0.45,
        dtype="float32",
        model_impl="transformers",
        sleep_mode=True,
        sleep_level=1,
        tensor_parallel_size=2,
        regex="[ab]+",
    )


@pytest.mark.parametrize(
    ("drawn", "mode"),
    [({"temperature": 0.7}, "processed_logprobs"), ({"top_p": 0.9}, "raw_logprobs")],
)
def test_log_probs_are_told_as_training_scores_them(drawn: dict[str, float], mode: str, start: Any) -> None:
    assert start(**drawn).logprobs_mode == mode


def test_vllm_computes_in_the_types_of_training(start: Any) -> None:
    assert start().dtype == "float32"
    assert start(bf16=True).dtype == "bfloat16"
