"""Large tensors of passes over long rows are given back at once, not kept in gaps of the heap."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from bigram_step import as_step

from groupgrad.batching.micro_batches import MicroBatchRules, assign_micro_batches
from groupgrad.modeling.systems import heap, oom_retry
from groupgrad.modeling.systems.oom_retry import MemoryGuard
from groupgrad.objectives import OnPolicyInfo, PolicyLoss, PolicyOptions

SCRIPT = """
import torch
from groupgrad.modeling.systems.heap import large_tensors_mapped

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20

def left():
    before = resident()
    blocks = [(torch.ones(2 * 2**20), torch.ones(2**10)) for _ in range(16)]  # 8 MB and 4 KB in turn
    kept = [small for _, small in blocks]
    del blocks
    return resident() - before, kept

torch.empty(2**23 - 2**11)  # freed: from here on glibc takes blocks of nearly 32 MB from the heap
with large_tensors_mapped():
    inside, kept = left()
outside, others = left()
print(inside, outside)
"""


@pytest.mark.skipif(heap._glibc() is None, reason="glibc's allocator alone, where the environment does not set it")
def test_large_tensors_between_small_ones_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    inside, outside = map(int, done.stdout.split())
    assert inside < 16  # megabytes of 128
    assert outside > 64  # as ever, once the setting is undone


def test_only_passes_over_long_rows_map_their_tensors(policy, sample, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    inner = oom_retry.large_tensors_mapped
    monkeypatch.setattr(oom_retry, "large_tensors_mapped", lambda: entered.append(1) or inner())
    batch, planned = as_step(sample(policy))
    parts = assign_micro_batches(batch, planned, MicroBatchRules(PolicyOptions(), aux_loss=True), OnPolicyInfo(5, True))
    longest = max(part.max_row_tokens for part in parts)
    lengths = batch.offsets.diff() + batch.prompt_offsets.diff()[batch.prompt_of_row]
    assert longest == int(lengths.max())
    for limit, expected in ((longest, True), (longest + 1, False), (None, False)):
        entered.clear()
        guard = MemoryGuard(policy.zero_grad, long_row=limit)
        for part in parts:
            guard.train(part, lambda _: PolicyLoss(torch.zeros((), requires_grad=True), {}), lambda loss, _: None)
        assert bool(entered) == expected
