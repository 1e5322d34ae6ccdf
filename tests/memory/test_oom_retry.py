"""Micro-batches that run out of memory."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from bigram_step import as_step, scored

from groupgrad.batching.micro_batches import MicroBatch, MicroBatchRules, assign_micro_batches
from groupgrad.batching.totals import step_totals
from groupgrad.memory.oom_retry import MemoryGuard, obstacle_to_cutting, tokens_per_pass
from groupgrad.metrics import merge_all
from groupgrad.objectives import LOSSES, NO_PASS, OnPolicyInfo, PolicyLoss, PolicyOptions, policy_loss


class Machine:
    """Trains batches and runs out of memory above so many tokens with a gradient, forward or backward."""

    def __init__(self, policy, options: PolicyOptions, **terms):
        self.policy, self.options, self.terms = policy, options, terms
        self.max_forward = self.max_backward = 10**9
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.attempts: list[tuple[int, str]] = []
        self.guard = MemoryGuard(policy.zero_grad)

    def forward(self, part: MicroBatch) -> PolicyLoss:
        batch, scores = scored(part, self.policy)
        if part.passes != NO_PASS:
            self.attempts.append((batch.num_tokens, "ok"))
            if batch.num_tokens > self.max_forward:
                self.attempts[-1] = (batch.num_tokens, "forward")
                raise self.error
        return policy_loss(scores, batch, self.options, **self.terms)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        tokens, _ = self.attempts[-1]
        if tokens > self.max_backward:
            self.attempts[-1] = (tokens, "backward")
            self.policy.last.grad = torch.full_like(self.policy.last, 77.0)
            raise self.error
        loss.backward()

    def step(self, micro_batches: list[MicroBatch]):
        """Loss, metrics and gradient of a step."""
        self.policy.zero_grad()
        self.attempts = []
        self.guard.begin_step()
        losses = [loss for each in micro_batches for loss in self.guard.train(each, self.forward, self.backward)]
        metrics = merge_all(loss.metrics for loss in losses)
        total = float(sum(loss.loss for loss in losses))
        return total, {name: metric.read() for name, metric in metrics.items()}, self.policy.gradient()


@pytest.fixture
def make_machine(policy, sample):
    """`make_machine(options)`: a machine and the three micro-batches of a step; without `skip` all rows are live."""

    def make(options: PolicyOptions, *, skip: bool = True, **terms):
        batch, planned = as_step(sample(policy))
        batch = replace(batch, totals=step_totals(batch, len(planned)))
        rules = MicroBatchRules(options, aux_loss=not skip)
        micro_batches = assign_micro_batches(batch, planned, rules, OnPolicyInfo(5, True))
        return Machine(policy, options, **terms), micro_batches

    return make


def assert_same(actual, expected) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=1e-9)
    assert actual[1] == {k: None if v is None else pytest.approx(v, abs=1e-9) for k, v in expected[1].items()}
    torch.testing.assert_close(actual[2], expected[2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", ["max_forward", "max_backward"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_parts_sum_to_the_whole(make_machine, loss_type, where):
    machine, batches = make_machine(PolicyOptions(loss_type=loss_type), skip=loss_type != "dapo")
    expected = machine.step(batches)
    largest = max(batch.batch.num_tokens for batch in batches)
    setattr(machine, where, largest // 2)
    assert_same(machine.step(batches), expected)
    failed = [kind for _, kind in machine.attempts if kind != "ok"]
    assert failed and set(failed) == {where.removeprefix("max_")}


def test_the_entropy_bonus_is_cut_too(make_machine):
    machine, batches = make_machine(PolicyOptions(), skip=False, entropy_coef=0.1)
    expected = machine.step(batches)
    machine.max_backward = 9
    assert_same(machine.step(batches), expected)
    assert "policy_loss" in expected[1]


def test_a_failed_backward_pass_repeats_the_steps_earlier_batches_and_a_failed_forward_pass_does_not(make_machine):
    machine, batches = make_machine(PolicyOptions(loss_type="bnpo"), skip=False)
    batches = sorted(batches, key=lambda batch: batch.batch.num_tokens)
    sizes = [batch.batch.num_tokens for batch in batches]
    machine.max_forward = sizes[1]
    machine.step(batches)
    assert [n for n, kind in machine.attempts if kind == "ok"][:2] == sizes[:2]
    assert sum(n for n, kind in machine.attempts if kind == "ok") == sum(sizes)
    machine.guard, machine.max_forward, machine.max_backward = MemoryGuard(machine.policy.zero_grad), 10**9, sizes[1]
    machine.step(batches)
    assert sum(n for n, kind in machine.attempts if kind == "ok") == sum(sizes) + sizes[0] + sizes[1]


def test_the_size_is_remembered_and_saved(make_machine, caplog):
    machine, batches = make_machine(PolicyOptions(loss_type="bnpo"), skip=False)
    expected = machine.step(batches)
    machine.max_backward = 14
    with caplog.at_level(logging.WARNING):
        assert_same(machine.step(batches), expected)
    warned = len(caplog.records)
    assert warned and "does not fit into memory and is trained in parts" in caplog.text
    assert_same(machine.step(batches), expected)
    assert all(kind == "ok" for _, kind in machine.attempts)
    assert len(caplog.records) == warned
    resumed = MemoryGuard(machine.policy.zero_grad)
    resumed.load_state_dict(machine.guard.state_dict())
    before, machine.guard = machine.attempts, resumed
    assert_same(machine.step(batches), expected)
    assert machine.attempts == before


def test_one_row_that_does_not_fit_is_an_error(make_machine):
    machine, batches = make_machine(PolicyOptions())
    machine.max_forward = 5
    with pytest.raises(RuntimeError, match=r"one row alone \(1 completions, \d+ tokens .*lower max_completion_length"):
        machine.step(batches)


def test_where_cutting_is_not_safe_it_is_an_error(make_machine):
    machine, batches = make_machine(PolicyOptions())
    machine.max_forward = 5
    machine.guard = MemoryGuard(machine.policy.zero_grad, obstacle="DeepSpeed keeps the gradients")
    with pytest.raises(RuntimeError, match="DeepSpeed keeps the gradients; lower per_device_train_batch_size"):
        machine.step(batches)
    assert len(machine.attempts) == 1


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("out of memory of what was said")])
def test_other_errors_pass(make_machine, error):
    machine, batches = make_machine(PolicyOptions())
    machine.max_forward, machine.error = 5, error
    with pytest.raises(type(error), match=str(error)):
        machine.step(batches)
    assert len(machine.attempts) == 1


def test_parts_share_what_is_measured_once_a_micro_batch(make_machine):
    _, (whole, *_) = make_machine(PolicyOptions(), skip=False)
    parts = whole.split(2)
    shares = [3 / part.batch.totals.micro_batches for part in parts]
    assert sum(shares) == pytest.approx(1.0)
    tokens = [int(part.batch.trained.sum()) for part in parts]
    assert shares == pytest.approx([count / sum(tokens) for count in tokens])
    masked = replace(whole, step_rows=replace(whole.step_rows, loss_tokens=[0] * len(whole.step_rows.loss_tokens)))
    assert [part.batch.totals.micro_batches for part in masked.split(2)] == [6.0, 6.0]


class _Arguments:
    world_size, deepspeed, optim = 1, None, "adamw_torch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"world_size": 2}, None),
        ({"deepspeed": {"zero_optimization": {}}}, "DeepSpeed keeps"),
        ({"optim": "adalomo"}, "optim='adalomo' changes weights"),
        ({"optim": "galore_adamw_layerwise"}, "changes weights"),
    ],
)
def test_obstacles(changes, reason):
    args = _Arguments()
    for name, value in changes.items():
        setattr(args, name, value)
    actual = obstacle_to_cutting(args)
    assert actual is None if reason is None else reason in str(actual)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_batches_are_cut_to_the_size_of_a_pass(make_machine, loss_type):
    machine, batches = make_machine(PolicyOptions(loss_type=loss_type), skip=False)
    expected = machine.step(batches)
    whole = [n for n, _ in machine.attempts]
    machine.guard = MemoryGuard(machine.policy.zero_grad, max_tokens=1)
    assert_same(machine.step(batches), expected)
    assert sum(n for n, _ in machine.attempts) == sum(whole)
    assert len(machine.attempts) == sum(len(batch.batch.prompt_of_row.unique()) for batch in batches)


def test_ranks_that_make_passes_together_cut_none_by_their_own_memory(make_machine):
    """A part for each rank beforehand, no size from a run in which each rank had its own, and an error without room."""
    machine, batches = make_machine(PolicyOptions(), skip=False)
    expected = machine.step(batches)
    machine.guard = MemoryGuard(machine.policy.zero_grad, num_ranks=2)
    machine.guard.load_state_dict({"limit": 1})
    assert_same(machine.step(batches), expected)
    assert len(machine.attempts) == 2 * len(batches)
    assert len(machine.guard._within_limit(replace(batches[0], rows=[]))) == 1
    machine.max_forward = 5
    with pytest.raises(RuntimeError, match="on one of the 2 processes that make it together; set gradient_checkpoint"):
        machine.step(batches)
    assert len(machine.attempts) == 1


def test_parts_of_whole_groups_are_of_like_cost_and_hold_each_prompt_once(make_machine):
    _, (first, *others) = make_machine(PolicyOptions(), skip=False)
    whole = replace(first, rows=sorted(row for each in (first, *others) for row in each.rows))
    assert whole.split_to_size(whole.cost) == [whole]
    halves = whole.split_to_size(whole.cost - 1)
    assert len(halves) == 2
    assert sum(half.cost for half in halves) == whole.cost
    assert max(half.cost for half in halves) < 0.8 * whole.cost
    assert sorted(row for half in halves for row in half.rows) == whole.rows


def test_a_run_whose_batches_must_stay_whole_has_no_size_of_a_pass(make_machine):
    machine, batches = make_machine(PolicyOptions(), skip=False)
    machine.guard = MemoryGuard(machine.policy.zero_grad, max_tokens=1, obstacle="DeepSpeed")
    machine.step(batches)
    assert len(machine.attempts) == len(batches)


def test_only_models_whose_activations_are_small_take_larger_passes():
    """At a hidden size of 256 and a vocabulary of 151,936 a pass of 4,096 tokens takes 100 MB more than of 2,048."""
    assert [tokens_per_pass(width) for width in (4096, 512, 256, 128, 64, 16)] == [2048, 2048, 2048, 4096, 8192, 16384]
