"""Micro-batches that run out of memory."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from groupgrad.batch import Batch
from groupgrad.batching.micro_batches import assign_micro_batches, has_gradient
from groupgrad.batching.packing import row_costs, total_cost
from groupgrad.batching.totals import step_totals
from groupgrad.metrics import merge_all
from groupgrad.modeling.systems.oom_retry import MemoryGuard, Trained, between_groups, cut, obstacle_to_cutting
from groupgrad.objectives import LOSSES, OnPolicyInfo, PolicyOptions, policy_loss
from groupgrad.trainer.needed_scores import needed_scores

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("could not create a primitive"),
    MemoryError(),
]


class Machine:
    """Trains batches and runs out of memory above so many tokens with a gradient, forward or backward."""

    def __init__(self, policy, options: PolicyOptions, **terms):
        self.policy, self.options, self.terms = policy, options, terms
        self.max_forward = self.max_backward = 10**9
        self.error: Exception = ERRORS[0]
        self.attempts: list[tuple[int, str]] = []
        self.guard = MemoryGuard(policy.zero_grad)

    def attempt(self, batch: Batch) -> Trained:
        self.guard.gradients_are_whole = True
        self.attempts.append((batch.num_tokens, "ok"))
        if batch.num_tokens > self.max_forward:
            self.attempts[-1] = (batch.num_tokens, "forward")
            raise self.error
        result = policy_loss(needed_scores(batch, self.policy, self.policy), batch, self.options, **self.terms)
        self.guard.gradients_are_whole = False
        if batch.num_tokens > self.max_backward:
            self.attempts[-1] = (batch.num_tokens, "backward")
            self.policy.last.grad = torch.full_like(self.policy.last, 77.0)
            raise self.error
        if has_gradient(batch):
            result.loss.backward()
        return Trained(result.loss.detach(), result.metrics)

    def step(self, batches: list[Batch]):
        """Loss, metrics and gradient of a step."""
        self.policy.zero_grad()
        self.attempts = []
        self.guard.begin_step()
        results = [self.guard.train(batch, self.attempt) for batch in batches]
        metrics = merge_all(result.metrics for result in results)
        loss = float(sum(result.loss for result in results))
        return loss, {name: metric.read() for name, metric in metrics.items()}, self.policy.gradient()


@pytest.fixture
def make_machine(policy, sample):
    """`make_machine(options)`: a machine and the three micro-batches of a step."""

    def make(options: PolicyOptions, *, skip: bool = True, **terms):
        batches = sample(policy)
        totals = step_totals(batches)
        batches = [replace(batch, totals=totals) for batch in batches]
        if skip:
            batches = assign_micro_batches(batches, options, OnPolicyInfo(5, True), entropy_coef=0.0, aux_loss=False)
        return Machine(policy, options, **terms), batches

    return make


def assert_same(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-9)
    assert found[1] == {k: None if v is None else pytest.approx(v, abs=1e-9) for k, v in expected[1].items()}
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", ["max_forward", "max_backward"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_parts_sum_to_the_whole(make_machine, loss_type, where):
    machine, batches = make_machine(PolicyOptions(loss_type=loss_type), skip=loss_type != "dapo")
    expected = machine.step(batches)
    largest = max(batch.num_tokens for batch in batches)
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


@pytest.mark.parametrize("error", ERRORS, ids=["device", "cpu", "python"])
def test_every_way_of_running_out_is_known(make_machine, error):
    machine, batches = make_machine(PolicyOptions())
    expected = machine.step(batches)
    machine.error, machine.max_backward = error, 12
    assert_same(machine.step(batches), expected)


def test_a_failed_backward_pass_repeats_the_steps_earlier_batches_and_a_failed_forward_pass_does_not(make_machine):
    machine, batches = make_machine(PolicyOptions(loss_type="bnpo"), skip=False)
    batches = sorted(batches, key=lambda batch: batch.num_tokens)
    sizes = [batch.num_tokens for batch in batches]
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


def test_parts_share_what_is_measured_once_a_micro_batch(policy, sample):
    whole = replace(sample(policy)[0], totals=step_totals(sample(policy)))
    parts = cut(whole, 2)
    shares = [whole.totals.micro_batches / part.totals.micro_batches for part in parts]
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx([int(part.trained.sum()) / int(whole.trained.sum()) for part in parts])
    masked = replace(whole, trained=torch.zeros_like(whole.trained))
    assert [part.totals.micro_batches for part in cut(masked, 2)] == [6.0, 6.0]


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
    found = obstacle_to_cutting(args)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_batches_are_cut_between_groups_for_comfort_alone(make_machine, loss_type):
    machine, batches = make_machine(PolicyOptions(loss_type=loss_type), skip=False)
    expected = machine.step(batches)
    whole = [n for n, _ in machine.attempts]
    machine.guard = MemoryGuard(machine.policy.zero_grad, comfortable_tokens=1)
    assert_same(machine.step(batches), expected)
    assert sum(n for n, _ in machine.attempts) == sum(whole)
    assert len(machine.attempts) == sum(len(batch.prompt_of_row.unique()) for batch in batches)


def test_parts_between_groups_are_of_like_cost_and_hold_each_prompt_once(make_machine):
    _, batches = make_machine(PolicyOptions(), skip=False)
    batch = Batch.concat(batches)
    costs = total_cost(row_costs(batch))
    assert between_groups(batch, costs) == [batch]
    halves = between_groups(batch, costs - 1)
    assert len(halves) == 2
    sizes = [total_cost(row_costs(half)) for half in halves]
    assert sum(sizes) == costs
    assert max(sizes) < 0.8 * costs
    assert sorted(torch.cat([half.row_index for half in halves]).tolist()) == sorted(batch.row_index.tolist())


def test_a_run_whose_batches_must_stay_whole_is_not_made_comfortable(make_machine):
    machine, batches = make_machine(PolicyOptions(), skip=False)
    machine.guard = MemoryGuard(machine.policy.zero_grad, comfortable_tokens=1, obstacle="DeepSpeed")
    machine.step(batches)
    assert len(machine.attempts) == len(batches)
