"""Which rows the model has to see."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from loss_batches import make_batch

from groupgrad.objectives import OnPolicyInfo, PolicyOptions, known_rows, live_rows, logp_mismatch, required_passes

NAN = float("nan")
T, F = True, False
ON, OFF = OnPolicyInfo(step=5, exact=True), OnPolicyInfo(step=5, exact=False)


@pytest.fixture
def batch():
    """Rows: live; zero advantage; zero advantage of older weights; masked out; empty; zero without one entropy."""
    made = make_batch(
        [[T, T], [T, T], [T], [F, F], [], [T, F, T]],
        [0.5, 0.0, -0.0, 2.0, 1.0, 0.0],
        sampling=[[-1.0, -2.0], [-1.0, -1.0], [-1.0], [NAN, NAN], [], [-1.0, NAN, -1.0]],
    )
    return dataclasses.replace(
        made,
        sampling_entropy=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, NAN, NAN, 1.0, NAN, NAN]),
        policy_version=torch.tensor([5, 5, 4, 5, 5, 5]),
    )


def test_rows_without_signal_are_dead(batch):
    options = PolicyOptions()
    live = live_rows(batch, options, entropy_coef=0.0, aux_loss=False)
    assert live.tolist() == [T, F, F, F, F, F]


@pytest.mark.parametrize(("beta", "entropy_coef"), [(0.1, 0.0), (0.0, 0.1), (0.0, -0.1)])
def test_further_terms_leave_only_rows_without_loss_tokens_dead(batch, beta, entropy_coef):
    live = live_rows(batch, PolicyOptions(beta=beta), entropy_coef=entropy_coef, aux_loss=False)
    assert live.tolist() == [T, T, T, F, F, T]


def test_a_load_balancing_loss_reaches_every_row(batch):
    assert live_rows(batch, PolicyOptions(), entropy_coef=0.0, aux_loss=True).tolist() == [T] * 6


def test_known_rows_are_fresh_and_fully_reported(batch):
    assert known_rows(batch, ON).tolist() == [T, T, F, T, T, F]
    assert known_rows(batch, OFF).tolist() == [F] * 6
    for changes in ({"sampling_entropy": None}, {"sampling_logprobs": None}, {"policy_version": None}):
        assert known_rows(dataclasses.replace(batch, **changes), ON).tolist() == [F] * 6


def test_dead_rows_are_measured_unless_they_are_known_or_have_no_loss_tokens(batch):
    def passes(freshness, **terms):
        return required_passes(batch, PolicyOptions(), freshness, **{"entropy_coef": 0.0, "aux_loss": False, **terms})

    assert passes(ON).tolist() == [2, 0, 1, 0, 0, 1]
    assert passes(OFF).tolist() == [2, 1, 1, 0, 0, 1]
    assert passes(ON, entropy_coef=0.1).tolist() == [2, 2, 2, 0, 0, 2]
    assert passes(ON, aux_loss=True).tolist() == [2] * 6


def test_the_mismatch_is_the_largest_gap_of_the_rows_asked_for(batch):
    logprobs = torch.tensor([-1.25, -2.0, -9.0, -1.0, -1.0, 5.0, 5.0, -1.5, 7.0, -1.0])
    rows = torch.tensor([T, F, T, T, T, T])
    assert logp_mismatch(logprobs, batch, rows).read() == 0.5
    assert logp_mismatch(logprobs, batch, torch.tensor([T, F, F, F, F, F])).read() == 0.25
    assert logp_mismatch(logprobs, batch, torch.tensor([F, F, F, T, T, F])).read() is None
    assert logp_mismatch(logprobs, dataclasses.replace(batch, sampling_logprobs=None), rows).read() is None
    assert logp_mismatch(logprobs, batch, rows).kind == "max"
