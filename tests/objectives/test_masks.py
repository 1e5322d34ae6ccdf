"""Off-policy masks and the losses that choose tokens by covariance: ties, missing reports, draws and settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from loss_batches import loss_and_gradient, make_batch

from groupgrad.objectives import (
    LOSSES,
    MASKS,
    PolicyOptions,
    StepTokens,
    StepTotals,
    find_mask,
)
from groupgrad.objectives.masks.m2po import largest_kept
from groupgrad.objectives.method import covariances


def test_m2po_leaves_out_the_furthest_tokens_of_the_step():
    log_ratios = torch.tensor([0.3, -0.1, 1.0, math.sqrt(0.02)], dtype=torch.float64)
    settings = MASKS["m2po"].make_settings({})
    assert largest_kept(log_ratios, settings) == pytest.approx(0.09), "0.01, 0.02 and 0.09 have a mean of 0.04"
    assert largest_kept(log_ratios[:2] * 0.1, settings) == math.inf
    assert largest_kept(torch.tensor([1.0, -1.0]), settings) == -1.0, "equal squares go together"
    assert largest_kept(torch.tensor([0.0, 0.5, -0.5]), settings) == 0.0
    assert largest_kept(torch.zeros(0), settings) == math.inf
    ratios = [[math.exp(0.3), math.exp(-0.1)], [math.e]]
    totals = StepTotals(2, 3, drift_cutoff=0.09 + 1e-9)
    batch = make_batch(
        [[True, True], [True]], [1.0, 1.0], totals, sampling=[[-math.log(x) for x in row] for row in ratios]
    )
    _, gradient = loss_and_gradient([[0.0, 0.0], [0.0]], batch, PolicyOptions(off_policy_mask="m2po"))
    assert [value != 0 for value in gradient] == [True, True, False]


def test_a_token_that_the_sampler_did_not_report_counts_as_no_drift():
    batch = make_batch([[True, True]], [1.0], sampling=[[math.nan, -9.0]])
    options = PolicyOptions(off_policy_mask="k1", mask_settings=MASKS["k1"].make_settings({}))
    _, gradient = loss_and_gradient([[-1.0, -1.0]], batch, options)
    assert [value != 0 for value in gradient] == [True, False]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("k1", {"low": 1.5}, "low=1.5, which leaves out an unmoved policy. Set it to more than 0, at most 1"),
        (
            "k1",
            {"level": "sequence_max"},
            "level='sequence_max', which is not known. Set it to token, sequence_mean or",
        ),
        ("geometric", {"high": 0.5}, "high=0.5, which leaves out an unmoved policy"),
        ("k2", {"threshold": -1}, "threshold=-1, which leaves out an unmoved policy"),
        ("k3", {"level": "row"}, "level='row', which is not known"),
        ("m2po", {"tau": -0.1}, "tau=-0.1, which keeps no token"),
        ("m2po", {"threshold": 1}, "has 'threshold', but it has tau"),
    ],
)
def test_settings_that_cannot_work(name, settings, message):
    with pytest.raises(ValueError, match=message):
        MASKS[name].make_settings(settings)
    with pytest.raises(ValueError, match="off_policy_mask='geometrc' is not known: did you mean 'geometric'"):
        find_mask("geometrc")


# ------------------------------------------------------------------------------------------------- by covariance

TOKENS = StepTokens(
    torch.tensor([-0.1, -4.0, -0.2, -1.0, -3.0], dtype=torch.float64),
    torch.tensor([1.0, -2.0, 1.5, -0.5, 2.0], dtype=torch.float64),
)


def test_covariances():
    assert covariances(StepTokens(torch.tensor([0.0, -4.0]), torch.tensor([1.0, -1.0]))).tolist() == [2.0, 2.0]
    logprobs, advantages = TOKENS.logprobs.numpy(), TOKENS.advantages.numpy()
    expected = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    np.testing.assert_allclose(covariances(TOKENS).numpy(), expected)


def options(name, **settings):
    return PolicyOptions(loss_type=name, settings=LOSSES[name].make_settings(settings))


def test_kl_cov_selects_the_highest():
    order = covariances(TOKENS).argsort(descending=True).tolist()
    select = LOSSES["kl_cov"].select
    for share, count in ((0.0002, 1), (0.4, 2), (0.79, 3)):
        found = select(TOKENS, options("kl_cov", share=share), torch.Generator())
        assert sorted(found.nonzero().flatten().tolist()) == sorted(order[:count])
    twins = StepTokens(torch.tensor([-1.0, -1.0 - 1e-6, -2.0, -2.0, -2.0]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]))
    assert select(twins, options("kl_cov"), torch.Generator()).tolist() == [True, True, False, False, False]
    empty = StepTokens(torch.zeros(0).double(), torch.zeros(0).double())
    assert select(empty, options("kl_cov"), torch.Generator()).tolist() == []


def test_clip_cov_draws_within_its_bounds_whatever_the_order_of_tokens():
    values = covariances(TOKENS)
    eligible = ((values >= 0.5) & (values <= 5.0)).nonzero().flatten().tolist()
    assert 1 < len(eligible) < 5
    draw, chosen = LOSSES["clip_cov"].select, options("clip_cov", low=0.5, high=5.0, share=0.3)
    drawn = [
        draw(TOKENS, chosen, torch.Generator().manual_seed(seed)).nonzero().flatten().tolist() for seed in range(40)
    ]
    assert {len(found) for found in drawn} == {1} and {found[0] for found in drawn} == set(eligible)
    turned = StepTokens(TOKENS.logprobs.flip(0), TOKENS.advantages.flip(0))
    for seed, found in enumerate(drawn):
        again = draw(turned, chosen, torch.Generator().manual_seed(seed)).flip(0).nonzero().flatten().tolist()
        assert again == found
    assert not draw(TOKENS, options("clip_cov", low=90.0, high=99.0), torch.Generator()).any()


def test_rounding_is_no_drift_from_the_old_policy():
    """Two passes of one policy differ by it, and the penalty has a slope of 1 on both sides of 0."""
    batch = make_batch([[True, True]], [1.0], old=[[-1.0, -1.0]])
    batch.selected = torch.tensor([True, True])
    for drift, slopes in ((1e-6, [-1.0, -1.0]), (1e-4, [0.0, -2.0])):
        _, gradient = loss_and_gradient([[-1.0 + drift, -1.0 - drift]], batch, options("kl_cov"))
        assert gradient == pytest.approx([slope / 2 for slope in slopes], abs=1e-3)
