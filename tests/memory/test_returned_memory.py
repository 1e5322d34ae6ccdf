"""Memory of tensors that are gone is given back before a backward pass."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from bigram_step import as_step

from groupgrad import GRPOConfig
from groupgrad.batch import Batch
from groupgrad.batching.micro_batches import MicroBatch, MicroBatchRules, assign_micro_batches
from groupgrad.memory import free_memory, oom_retry
from groupgrad.memory.oom_retry import MemoryGuard, memory_guard
from groupgrad.objectives import OnPolicyInfo, PolicyLoss, PolicyOptions

FREE = """
import sys
import torch
from groupgrad.memory.free_memory import return_free_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20

torch.empty(2**23 - 2**11)  # freed: from here on glibc takes blocks of nearly 32 MB from the heap
filled = [torch.empty(2**10) for _ in range(2**13)]  # gaps that imports left, where the small ones would go
before = resident()
blocks = [(torch.ones(2**20), torch.ones(2**10)) for _ in range(int(sys.argv[1]))]  # 4 MB and 4 KB in turn
kept = [small for _, small in blocks]
del blocks
left = resident() - before
return_free_memory()
print(left, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(free_memory._glibc(), "mallinfo2"), reason="glibc 2.33 or newer alone says how much is free"
)
def test_free_blocks_of_the_heap_are_given_back_where_they_are_many() -> None:
    def megabytes(blocks: int) -> list[int]:
        command = [sys.executable, "-c", FREE, str(blocks)]
        return [int(x) for x in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]

    left, after = megabytes(32)
    assert left > 112  # megabytes of 128
    assert after < 16
    left, after = megabytes(8)
    assert left > 24  # of 32, which are not worth new pages
    assert after > 24


def step_of(policy, sample) -> tuple[Batch, list[MicroBatch]]:
    """A step's batch and its micro-batches."""
    batch, planned = as_step(sample(policy))
    rules = MicroBatchRules(PolicyOptions(), aux_loss=True)
    return batch, assign_micro_batches(batch, planned, rules, OnPolicyInfo(5, True))


def train(guard: MemoryGuard, parts: list[MicroBatch]) -> None:
    """Passes that compute nothing."""
    for part in parts:
        guard.train(part, lambda _: PolicyLoss(torch.zeros((), requires_grad=True), {}), lambda loss, _: None)


def test_only_guards_of_large_models_return_free_memory(policy, sample, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(oom_retry, "return_free_memory", lambda: returned.append(1))
    _, parts = step_of(policy, sample)
    size = sum(parameter.numel() for parameter in policy.parameters())
    for large_model, expected in ((size, True), (size + 1, False)):
        monkeypatch.setattr(oom_retry, "LARGE_MODEL", large_model)
        guard = memory_guard(policy, GRPOConfig(use_cpu=True, report_to="none"), policy.zero_grad, aux_loss=True)
        returned.clear()
        train(guard, parts)
        assert bool(returned) == expected
