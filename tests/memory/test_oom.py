"""Out-of-memory errors in passes without gradient."""

from __future__ import annotations

import logging
import traceback
import weakref
from typing import Any

import pytest
import torch
from small_batches import make_batch

from groupgrad.batch import Batch
from groupgrad.memory import oom
from groupgrad.memory.oom import is_out_of_memory
from groupgrad.models.reference import Reference
from groupgrad.scoring import forward
from groupgrad.scoring.forward import ForwardOptions, OldAndRefScorer, score_tokens, score_without_gradient

ERRORS: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    *map(
        RuntimeError,
        [
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 36000000 bytes. Error code 12 (Cannot allocate memory)",
            "could not create a primitive",
            "could not create a memory",
            "could not create a memory object",
            "could not execute a primitive",
            "MPS backend out of memory (MPS allocated: 1 GB)",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        ],
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:30])
def test_out_of_memory_errors(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "could not create a primitive descriptor for a matmul primitive",
        "could not create a memory descriptor",
        "mat1 and mat2 shapes cannot be multiplied",
    ],
)
def test_other_errors_are_no_out_of_memory_errors(text):
    assert not is_out_of_memory(RuntimeError(text))


@pytest.fixture
def batch() -> Batch:
    """Five rows of 4, 0, 6, 3 and 5 tokens that continue prompts of 5 and 3."""
    rows = ((0, 4), (0, 0), (0, 6), (2, 3), (2, 5))
    return make_batch(tuple((group, list(range(20, 20 + length))) for group, length in rows))


@pytest.fixture
def cramped(make_model, monkeypatch):
    """`cramped(most)`: a model that runs out of memory above `most` tokens, and the tokens of its passes."""
    oom._warn_once.cache_clear()

    def make(most: int) -> tuple[Any, list[int]]:
        model, passes = make_model(initializer_range=0.1).eval(), []

        def check(module: Any, arguments: Any, options: dict[str, Any]) -> None:
            passes.append(options["input_ids"].numel())
            if passes[-1] > most:
                raise RuntimeError("could not create a primitive")

        model.register_forward_pre_hook(check, with_kwargs=True)
        return model, passes

    return make


def test_a_batch_that_does_not_fit_is_scored_in_halves(cramped, make_model, batch, caplog):
    expected = score_tokens(make_model(initializer_range=0.1).eval(), batch, ForwardOptions())
    model, passes = cramped(12)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            actual = score_without_gradient(model, batch, ForwardOptions())
            torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=1e-6)
            torch.testing.assert_close(actual.entropy, expected.entropy, rtol=0, atol=1e-6)
    # Prompts, and completions less the last token of each row: 8 + 14 in all; 5 + 3 for the first two rows; 8 + 11 for
    # the others, 5 + 5 for the third and 3 + 6 for the last two.
    assert passes == [22, 8, 19, 10, 9] * 2
    assert caplog.text.count("done in parts, with the same result") == 1


def test_the_reference_too(cramped, make_model, batch):
    plain = make_model(initializer_range=0.1).eval()
    model, _ = cramped(12)
    scorers = [
        OldAndRefScorer(m, Reference(m, adapter_is_fresh=False, is_synced=False), ForwardOptions(), "cpu")
        for m in (plain, model)
    ]
    old, old_in_parts = (scorer.policy(batch).logprobs for scorer in scorers)
    ref, ref_in_parts = (scorer.reference_logprobs(batch) for scorer in scorers)
    torch.testing.assert_close(old_in_parts, old, rtol=0, atol=1e-6)
    torch.testing.assert_close(ref_in_parts, ref, rtol=0, atol=1e-6)


def test_one_row_that_does_not_fit_is_an_error(cramped, batch):
    model, passes = cramped(9)
    with pytest.raises(RuntimeError, match=r"one row alone \(6 tokens besides 5 .*max_completion_length"):
        score_without_gradient(model, batch, ForwardOptions())
    assert passes == [22, 8, 19, 10]


def test_a_sharded_model_is_not_scored_in_parts(cramped, batch, monkeypatch):
    model, passes = cramped(12)
    monkeypatch.setattr(forward, "is_sharded", lambda model: True)
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        score_without_gradient(model, batch, ForwardOptions())
    assert passes == [22]


def test_other_errors_pass(batch):
    passes = []

    def score(part: Batch) -> Any:
        passes.append(part.num_rows)
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        oom.score_in_parts(batch, score)
    assert passes == [5]


class _Large:
    """Replaces a tensor."""


def test_release_frames_frees_the_locals_of_the_failed_functions():
    held: list[Any] = []

    def attempt() -> None:
        large = _Large()
        held.append(weakref.ref(large))
        raise MemoryError("of a device")

    def give_up() -> None:
        try:
            attempt()
        except MemoryError as error:
            raise RuntimeError("one row alone") from error

    with pytest.raises(RuntimeError, match="one row alone") as caught:
        give_up()
    assert held[0]() is not None
    oom.release_frames(caught.value)
    assert held[0]() is None
    assert "raise MemoryError" in "".join(traceback.format_exception(caught.value))
