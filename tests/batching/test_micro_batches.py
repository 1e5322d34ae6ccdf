"""What is left out of a step changes none of its numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from groupgrad.batch import FORWARD, FORWARD_AND_BACKWARD, NO_PASS, Batch
from groupgrad.batching.micro_batches import assign_micro_batches, has_gradient
from groupgrad.batching.packing import row_costs, total_cost
from groupgrad.batching.totals import step_totals
from groupgrad.objectives import LOSSES, OnPolicyInfo, PolicyOptions
from groupgrad.trainer.needed_scores import needed_scores

FRESH, STALE = OnPolicyInfo(step=5, exact=True), OnPolicyInfo(step=6, exact=True)
CASES = {
    "plain": {},
    "sequence_ratio": {"importance_sampling_level": "sequence"},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "mask_truncated": {},
    "beta": {"beta": 0.1},
    "entropy_bonus": {},
}


def prepared(policy, sample, case: str, options: PolicyOptions, *, moved: bool, old: bool) -> list[Batch]:
    """The step's micro-batches as they come from the buffer, with weights that have moved since they were sampled."""
    batches = sample(policy, mask_truncated=case == "mask_truncated")
    if moved:
        with torch.no_grad():
            policy.last += 0.3 * torch.randn(policy.last.shape, generator=torch.Generator().manual_seed(4))
    if old:
        batches = [replace(batch, old_logprobs=batch.sampling_logprobs) for batch in batches]
    if options.beta:
        batches = [replace(batch, ref_logprobs=batch.sampling_logprobs - 0.1) for batch in batches]
    with torch.no_grad():
        totals = step_totals(
            batches, keep_entropy=options.top_entropy_quantile, entropy_of=lambda b: policy(b).entropy.float()
        )
    policy.seen.clear()
    return [replace(batch, totals=totals) for batch in batches]


@pytest.mark.parametrize("weights", ["on_policy", "first_of_round", "moved"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_losses_gradients_and_metrics_stay(policy, sample, step, loss_type, case, weights):
    options = PolicyOptions(loss_type=loss_type, max_completion_length=9, **CASES[case])
    entropy_coef = 0.05 if case == "entropy_bonus" else 0.0
    batches = prepared(policy, sample, case, options, moved=weights == "moved", old=weights != "on_policy")
    loss, metrics, gradient = step(policy, batches, options, policy, entropy_coef=entropy_coef)
    assert sum(policy.seen) == sum(batch.num_tokens for batch in batches)

    policy.seen.clear()
    freshness = STALE if weights == "moved" else FRESH
    shared = assign_micro_batches(batches, options, freshness, entropy_coef=entropy_coef, aux_loss=False)
    other_loss, other_metrics, other_gradient = step(
        policy, shared, options, lambda b: needed_scores(b, policy, policy), entropy_coef=entropy_coef
    )
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert other_metrics == {k: None if v is None else pytest.approx(v, abs=1e-6) for k, v in metrics.items()}
    assert float((other_gradient - gradient).norm()) <= 1e-6 * float(gradient.norm())
    assert float(gradient.norm()) > 1e-4

    tokens = {n: sum(int((b.passes == n)[b.row_of_token].sum()) for b in shared) for n in (0, 1, 2)}
    assert sum(policy.seen) == tokens[FORWARD] + tokens[FORWARD_AND_BACKWARD]
    has_further_terms = case in ("beta", "entropy_bonus")
    assert (tokens[FORWARD] > 0) == (weights == "moved" and not has_further_terms)
    if weights != "moved" and not has_further_terms:
        assert tokens[NO_PASS] >= 16


def test_rows_without_gradient_are_measured_without(policy, sample):
    options, modes = PolicyOptions(), []
    batches = prepared(policy, sample, "plain", options, moved=True, old=True)
    shared = assign_micro_batches(batches, options, STALE, entropy_coef=0.0, aux_loss=False)

    def measure(batch: Batch):
        modes.append((torch.is_grad_enabled(), bool((batch.advantages == 0).all())))
        return policy(batch)

    for batch in shared:
        scores = needed_scores(batch, policy, measure)
        assert scores.logprobs.requires_grad == has_gradient(batch)
    assert modes and set(modes) == {(False, True)}


def test_one_pass_takes_all_rows_that_need_any(policy, sample):
    """Ranks that hold parts of one model call it equally often; rows that need nothing still cost nothing."""
    options = PolicyOptions()
    batches = prepared(policy, sample, "plain", options, moved=True, old=True)
    terms = {"entropy_coef": 0.0, "aux_loss": False, "backward_everywhere": True}
    apart, shared = (
        assign_micro_batches(batches, options, STALE, **terms, one_pass=one_pass) for one_pass in (False, True)
    )
    assert any(bool((batch.passes == FORWARD).any()) for batch in apart)
    idle = [sum(int((batch.passes == NO_PASS).sum()) for batch in made) for made in (apart, shared)]
    assert idle[0] == idle[1] > 0
    for whole in shared:
        assert not bool((whole.passes == FORWARD).any())
        calls: list[int] = []
        needed_scores(whole, lambda rows, calls=calls: calls.append(1) or policy(rows), measure=_no_pass)
        assert calls == [1]


def _no_pass(batch: Batch):
    raise AssertionError("a second pass")


def test_micro_batches_keep_their_number_and_join_groups(policy, sample):
    whole = Batch.concat(prepared(policy, sample, "plain", PolicyOptions(), moved=False, old=False))
    batches = [whole.select(rows) for rows in ([0, 1, 8, 9], [2, 3, 10, 11, 12], [4, 5, 6, 7, 13, 14, 15])]
    shared = assign_micro_batches(batches, PolicyOptions(), FRESH, entropy_coef=0.0, aux_loss=False)
    assert len(shared) == len(batches)
    assert sorted(row for b in shared for row in b.row_index.tolist()) == list(range(16))
    found, planned = ([total_cost(row_costs(batch)) for batch in each] for each in (shared, unmoved(batches)))
    assert max(found) <= max(planned)
    assert sum(found) < sum(planned)


def unmoved(batches: list[Batch]) -> list[Batch]:
    """The same with the passes that each row needs, in the plan's order (which bnpo keeps)."""
    return assign_micro_batches(batches, PolicyOptions(loss_type="bnpo"), FRESH, entropy_coef=0.0, aux_loss=False)


@pytest.mark.parametrize(("loss_type", "aux_loss"), [("bnpo", False), ("dapo", True)])
def test_local_losses_keep_the_plans_rows(policy, sample, loss_type, aux_loss):
    options = PolicyOptions(loss_type=loss_type)
    batches = prepared(policy, sample, "plain", options, moved=False, old=False)
    shared = assign_micro_batches(batches, options, FRESH, entropy_coef=0.0, aux_loss=aux_loss)
    assert [b.row_index.tolist() for b in shared] == [b.row_index.tolist() for b in batches]


@pytest.mark.parametrize(("world_size", "everywhere"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_step_without_signal_keeps_its_shortest_row_alive(policy, sample, world_size, everywhere):
    """Each micro-batch keeps one where backward passes are counted."""
    batches = prepared(policy, sample, "plain", PolicyOptions(), moved=False, old=False)
    dead = [
        replace(b, advantages=torch.zeros_like(b.advantages), totals=replace(b.totals, world_size=world_size))
        for b in batches
    ]
    terms = {"entropy_coef": 0.0, "aux_loss": False, "backward_everywhere": everywhere}
    shared = assign_micro_batches(dead, PolicyOptions(), FRESH, **terms)
    live = [int((b.passes == FORWARD_AND_BACKWARD).sum()) for b in shared]
    assert live == ([1, 1, 1] if everywhere else [1, 0, 0])
    for batch in shared[: 3 if everywhere else 1]:
        lengths = batch.offsets.diff()
        kept = lengths[batch.passes == FORWARD_AND_BACKWARD]
        prompts = batch.prompt_offsets.diff()[batch.prompt_of_row]
        assert int(kept) > 0
        assert int((prompts + lengths)[batch.passes == FORWARD_AND_BACKWARD]) == min(
            (p + n for p, n in zip(prompts.tolist(), lengths.tolist()) if n), default=0
        )


def test_rows_of_unknown_weights_are_forwarded(policy, sample):
    sampled = prepared(policy, sample, "plain", PolicyOptions(), moved=False, old=False)
    batches = [replace(batch, policy_version=None) for batch in sampled]
    shared = assign_micro_batches(batches, PolicyOptions(), FRESH, entropy_coef=0.0, aux_loss=False)
    for batch in shared:
        has_tokens = torch.zeros(batch.num_rows).index_add(0, batch.row_of_token, batch.trained.float()) > 0
        assert ((batch.passes == NO_PASS) == ~has_tokens).all()


def test_an_empty_step_stays_empty(policy, sample):
    empty = dataclasses.replace(sample(policy)[0].select([]))
    shared = assign_micro_batches([empty, empty], PolicyOptions(), FRESH, entropy_coef=0.0, aux_loss=False)
    assert [b.num_rows for b in shared] == [0, 0]
