"""vLLM's options from the training configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.config.sampling import sampling_options
from groupgrad.errors import RankError
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
    monkeypatch.setattr(vllm_setup, "check_memory", lambda model, chosen, *, training: None)

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


@pytest.fixture
def counted(make_model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bytes of training that are counted by configuration fields, over those of a model's weights; under this
    stage of DeepSpeed ZeRO."""

    def count(model: Any = None, *, stage: int | None = None, **fields: Any) -> tuple[float, float, float]:
        model = model or make_model()
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, **fields)
        if stage is not None:
            monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
            monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
        found, held = vllm_setup.training_bytes(config, model), sum(p.nbytes for p in model.parameters())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        return (found.weights - buffers) / held, found.gradients / held, found.optimizer / held

    return count


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"optim": "adamw_torch"}, (1, 1, 2)),
        ({"optim": "adamw_torch_fused"}, (1, 1, 2)),
        # These keep less state, or keep it elsewhere; unknown ones are not counted.
        ({"optim": "sgd"}, (1, 1, 0)),
        ({"optim": "adafactor"}, (1, 1, 0)),
        ({"optim": "adamw_torch_8bit"}, (1, 1, 0)),
        ({"optim": "paged_adamw_32bit"}, (1, 1, 0)),
        ({"beta": 0.1}, (2, 1, 2)),  # a reference model
    ],
)
def test_training_is_counted_with_what_its_optimizer_keeps(fields: Any, expected: Any, counted: Any) -> None:
    assert counted(**fields) == expected


def test_training_is_counted_by_the_parameters_of_the_policy(counted: Any, make_model: Any) -> None:
    assert counted(make_model().requires_grad_(False), beta=0.1) == (2, 0, 0)
    half = make_model().to(torch.bfloat16)
    sums = {kind: counted(half, gradient_dtype=kind)[1] for kind in ("auto", "float32", "weights")}
    assert sums == {"auto": 2, "float32": 2, "weights": 1}


@pytest.mark.parametrize(("stage", "gradients"), [(1, 1), (2, 0), (3, 0)])
def test_what_zero_spreads_over_ranks_is_not_counted(stage: int, gradients: int, counted: Any) -> None:
    assert counted(stage=stage)[1:] == (gradients, 0)


def test_vllm_computes_in_the_types_of_training(start: Any) -> None:
    assert start().dtype == "float32"
    assert start(bf16=True).dtype == "bfloat16"


def test_no_rank_starts_vllm_when_memory_does_not_suffice_on_another(start: Any, monkeypatch: Any) -> None:
    """Starting vLLM is a collective, in which the other ranks would wait for the one that refuses."""

    @contextmanager
    def fails_elsewhere() -> Iterator[None]:
        yield
        raise RankError("stopped because rank 1 failed with ValueError: vLLM needs at least 9 GiB")

    monkeypatch.setattr(dist, "errors_on_all_ranks", fails_elsewhere)
    with pytest.raises(RankError, match="rank 1 failed"):
        start()
