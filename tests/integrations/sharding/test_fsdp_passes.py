"""A rank whose pass has failed makes the rest of the pass's collectives, and the micro-batch is cut.

What several ranks compute so is for `tests/trainer/test_sharded.py`; here one process takes the place of all.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bigram_step import as_step, scored
from torch import nn

from groupgrad.batching.micro_batches import MicroBatch, MicroBatchRules, assign_micro_batches
from groupgrad.integrations.sharding.fsdp_passes import FSDPPassCollectives, _Counted
from groupgrad.integrations.sharding.joint_oom_retry import JointMemoryGuard
from groupgrad.integrations.sharding.pass_collectives import PassCollectives
from groupgrad.memory import memory_guards
from groupgrad.objectives import OnPolicyInfo, PolicyLoss, PolicyOptions, policy_loss


class Model:
    resets = 0

    def reset_iter_state(self) -> None:
        self.resets += 1


def test_after_a_failed_pass_the_collectives_that_it_made_are_left_out():
    made: list[torch.Tensor] = []
    collectives = FSDPPassCollectives(model := Model())
    gather = _Counted(collectives, lambda output, own, group: made.append(output))

    def calls(count: int) -> list[torch.Tensor]:
        made.clear()
        outputs = [torch.ones(2) for _ in range(count)]
        for output in outputs:
            gather(output, torch.ones(1), None)
        return outputs

    collectives.begin_pass()
    calls(3)
    assert len(made) == 3
    collectives.begin_rest()
    outputs = calls(5)
    assert model.resets == 1
    assert len(made) == 2 and made[0] is outputs[3]
    assert [float(output.sum()) for output in outputs] == [0.0, 0.0, 0.0, 2.0, 2.0], "what is left out gives zeros"
    collectives.begin_pass()
    calls(5)
    assert len(made) == 5


class Machine:
    """Trains a step's micro-batches, and runs out of memory above so many tokens in the forward or backward pass."""

    def __init__(self, policy: Any, most: int, where: str):
        self.policy, self.most, self.where = policy, most, where
        self.tokens: list[int] = []
        self.guard = JointMemoryGuard(policy.zero_grad, PassCollectives())

    def forward(self, part: MicroBatch) -> PolicyLoss:
        batch, scores = scored(part, self.policy)
        self.tokens.append(batch.num_tokens)
        self.fail_in("forward")
        return policy_loss(scores, batch, PolicyOptions())

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()
        self.fail_in("backward")

    def fail_in(self, where: str) -> None:
        if where == self.where and self.tokens[-1] > self.most:
            raise MemoryError("full")

    def step(self, micro_batches: list[MicroBatch]) -> tuple[float, torch.Tensor]:
        self.policy.zero_grad()
        self.guard.begin_step()
        losses = [loss for each in micro_batches for loss in self.guard.train(each, self.forward, self.backward)]
        return float(sum(loss.loss for loss in losses)), self.policy.gradient()


@pytest.fixture
def micro_batches(policy, sample) -> list[MicroBatch]:
    batch, planned = as_step(sample(policy))
    rules = MicroBatchRules(PolicyOptions(), aux_loss=False)
    return assign_micro_batches(batch, planned, rules, OnPolicyInfo(5, True), every_row=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_parts_sum_to_the_whole(policy, micro_batches, where):
    loss, gradient = Machine(policy, 10**9, where).step(micro_batches)
    machine = Machine(policy, 12, where)
    cut_loss, cut_gradient = machine.step(micro_batches)
    assert max(machine.tokens) > 12 and 0 in machine.tokens, "a pass has failed, and one without tokens followed"
    assert cut_loss == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-9)
    machine.tokens.clear()
    machine.step(micro_batches)
    assert max(machine.tokens) <= 12, "the next step is cut beforehand"


def test_a_row_that_does_not_fit_is_an_error(policy, micro_batches):
    with pytest.raises(RuntimeError, match=r"one row alone \(1 completions, \d tokens .*\) does not fit into memory"):
        Machine(policy, 0, "forward").step(micro_batches)


def test_a_torch_that_cannot_recover_from_a_failed_pass_cuts_nothing(monkeypatch):
    monkeypatch.setattr(memory_guards, "is_sharded", lambda model: True)
    args = SimpleNamespace(optim="sgd", deepspeed=None, max_tokens_per_pass=8, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"max_tokens_per_pass=8 .* after a failed pass .* update it to 2\.13"):
        memory_guards.memory_guard(nn.Linear(1, 1), args, list, aux_loss=False)
