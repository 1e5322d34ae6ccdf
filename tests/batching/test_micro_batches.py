"""Rows that are left out of a step change none of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from bigram_step import as_step, scored

from groupgrad.batch import Batch
from groupgrad.batching.micro_batches import MicroBatch, MicroBatchRules, assign_micro_batches
from groupgrad.batching.totals import step_totals, with_entropy_threshold
from groupgrad.objectives import FORWARD, FORWARD_AND_BACKWARD, LOSSES, NO_PASS, OnPolicyInfo, PolicyOptions

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


Step = tuple[Batch, Sequence[Sequence[int]]]
"""The rows of a step, and those of each micro-batch as the generation plan cuts them."""


def prepared(policy, sample, case: str, options: PolicyOptions, *, moved: bool, old: bool) -> Step:
    """A step as it comes from the buffer, with weights that have `moved` since they sampled it."""
    batch, planned = as_step(sample(policy, mask_truncated=case == "mask_truncated"))
    if moved:
        with torch.no_grad():
            policy.last += 0.3 * torch.randn(policy.last.shape, generator=torch.Generator().manual_seed(4))
    if old:
        batch = replace(batch, old_logprobs=batch.sampling_logprobs)
    if options.beta:
        batch = replace(batch, ref_logprobs=batch.sampling_logprobs - 0.1)
    with torch.no_grad():
        totals, keep = step_totals(batch, len(planned)), options.top_entropy_quantile
        if keep < 1.0:
            totals = with_entropy_threshold(totals, batch, policy(batch).entropy.float(), keep)
    policy.seen.clear()
    return replace(batch, totals=totals), planned


def assigned(step: Step, options: PolicyOptions, on_policy: OnPolicyInfo, **terms: Any) -> list[MicroBatch]:
    of_step = {name: terms.pop(name) for name in ("entropy_coef", "every_row") if name in terms}
    return assign_micro_batches(*step, MicroBatchRules(options, **{"aux_loss": False, **terms}), on_policy, **of_step)


def parts_of(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [part for micro_batch in micro_batches for part in micro_batch.by_passes()]


@pytest.mark.parametrize("weights", ["on_policy", "first_of_generation_batch", "moved"])
@pytest.mark.parametrize(
    ("loss_type", "case"),
    [*((loss, "plain") for loss in LOSSES), *(("dapo", case) for case in CASES if case != "plain")],
)
def test_losses_gradients_and_metrics_stay(policy, sample, step, loss_type, case, weights):
    options = PolicyOptions(loss_type=loss_type, max_completion_length=9, **CASES[case])
    entropy_coef = 0.05 if case == "entropy_bonus" else 0.0
    rows = prepared(policy, sample, case, options, moved=weights == "moved", old=weights != "on_policy")
    batch, planned = rows
    batches = [batch.select(part) for part in planned]
    plain = [(part, policy(part)) for part in batches]
    loss, metrics, gradient = step(policy, plain, options, entropy_coef=entropy_coef)
    assert sum(policy.seen) == batch.num_tokens

    policy.seen.clear()
    on_policy = STALE if weights == "moved" else FRESH
    parts = parts_of(assigned(rows, options, on_policy, entropy_coef=entropy_coef))
    other_loss, other_metrics, other_gradient = step(
        policy, [scored(part, policy) for part in parts], options, entropy_coef=entropy_coef
    )
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert other_metrics == {k: None if v is None else pytest.approx(v, abs=1e-6) for k, v in metrics.items()}
    assert float((other_gradient - gradient).norm()) <= 1e-6 * float(gradient.norm())
    assert float(gradient.norm()) > 1e-4

    tokens = {n: sum(part.batch.num_tokens for part in parts if part.passes == n) for n in (0, 1, 2)}
    assert sum(policy.seen) == tokens[FORWARD] + tokens[FORWARD_AND_BACKWARD]
    has_further_terms = case in ("beta", "entropy_bonus")
    assert (tokens[FORWARD] > 0) == (weights == "moved" and not has_further_terms)
    if weights != "moved" and not has_further_terms:
        assert tokens[NO_PASS] >= 16


def test_parts_hold_rows_of_equal_needs(policy, sample):
    step = prepared(policy, sample, "plain", PolicyOptions(), moved=True, old=True)
    micro_batches = assigned(step, PolicyOptions(), STALE)
    for micro_batch in micro_batches:
        parts = micro_batch.by_passes()
        assert sorted(row for part in parts for row in part.rows) == sorted(micro_batch.rows)
        assert sum(part.share for part in parts) == pytest.approx(1.0)
        for part in parts:
            assert {micro_batch.step_rows.passes[row] for row in part.rows} == {part.passes}
            assert part.passes != FORWARD or bool((part.batch.advantages == 0).all())
    assert FORWARD in {part.passes for part in parts_of(micro_batches)}


def test_one_pass_takes_all_rows_that_need_any(policy, sample):
    """Ranks that hold parts of one model call it equally often; rows that need nothing still cost nothing."""
    step = prepared(policy, sample, "plain", PolicyOptions(), moved=True, old=True)
    apart, shared = (
        assigned(step, PolicyOptions(), STALE, backward_everywhere=True, one_pass=one_pass)
        for one_pass in (False, True)
    )
    assert FORWARD in apart[0].step_rows.passes
    assert FORWARD not in shared[0].step_rows.passes
    assert apart[0].step_rows.passes.count(NO_PASS) == shared[0].step_rows.passes.count(NO_PASS) > 0
    for micro_batch in shared:
        assert [part.passes for part in micro_batch.by_passes() if part.passes] == [FORWARD_AND_BACKWARD]


def test_micro_batches_keep_their_number_and_join_groups(policy, sample):
    batch, _ = prepared(policy, sample, "plain", PolicyOptions(), moved=False, old=False)
    step = batch, [[0, 1, 8, 9], [2, 3, 10, 11, 12], [4, 5, 6, 7, 13, 14, 15]]
    shared = assigned(step, PolicyOptions(), FRESH)
    planned = assigned(step, PolicyOptions(loss_type="bnpo"), FRESH)  # which keeps the plan's rows
    assert len(shared) == len(planned) == 3
    assert sorted(row for micro_batch in shared for row in micro_batch.rows) == list(range(16))
    assert max(part.cost for part in shared) <= max(part.cost for part in planned)
    assert sum(part.cost for part in shared) < sum(part.cost for part in planned)


@pytest.mark.parametrize(("loss_type", "aux_loss"), [("bnpo", False), ("dapo", True)])
def test_local_losses_keep_the_plans_rows(policy, sample, loss_type, aux_loss):
    options = PolicyOptions(loss_type=loss_type)
    step = prepared(policy, sample, "plain", options, moved=False, old=False)
    shared = assigned(step, options, FRESH, aux_loss=aux_loss)
    assert [micro_batch.rows for micro_batch in shared] == [list(rows) for rows in step[1]]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_step_without_signal_keeps_its_shortest_row_alive(policy, sample, everywhere):
    """Each micro-batch keeps one where backward passes are counted."""
    batch, planned = prepared(policy, sample, "plain", PolicyOptions(), moved=False, old=False)
    dead = replace(batch, advantages=torch.zeros_like(batch.advantages))
    shared = assigned((dead, planned), PolicyOptions(), FRESH, backward_everywhere=everywhere)
    live = [[row for row in part.rows if part.step_rows.passes[row] == FORWARD_AND_BACKWARD] for part in shared]
    assert [len(rows) for rows in live] == ([1, 1, 1] if everywhere else [1, 0, 0])
    lengths = batch.offsets.diff()
    sizes = (lengths + batch.prompt_offsets.diff()[batch.prompt_of_row]).tolist()
    for micro_batch, rows in zip(shared, live):
        for row in rows:
            assert lengths[row] > 0
            assert sizes[row] == min(sizes[other] for other in micro_batch.rows if lengths[other] > 0)


def test_rows_of_unknown_weights_are_forwarded(policy, sample):
    batch, planned = prepared(policy, sample, "plain", PolicyOptions(), moved=False, old=False)
    (step, *_) = assigned((replace(batch, policy_version=None), planned), PolicyOptions(), FRESH)
    has_tokens = torch.zeros(batch.num_rows).index_add(0, batch.row_of_token, batch.trained.float()) > 0
    assert [passes == NO_PASS for passes in step.step_rows.passes] == (~has_tokens).tolist()


def test_an_empty_step_stays_empty(policy, sample):
    empty = sample(policy)[0].select([])
    shared = assigned((empty, [[], []]), PolicyOptions(), FRESH)
    assert [micro_batch.rows for micro_batch in shared] == [[], []]
    assert [part.passes for part in parts_of(shared)] == [NO_PASS, NO_PASS]
