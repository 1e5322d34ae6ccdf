"""The gradient of an on-policy step, precomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_batches import random_rows

from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives import LOSSES, PolicyOptions, policy_loss
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.trainer.sampler_logprobs import precompute_gradient


def make_batch(model: torch.nn.Module) -> Batch:
    """Two prompts, five rows, log-probs as an exact engine reports them."""
    batch = random_rows([4, 5], [(0, 3), (1, 5), (0, 0), (1, 7), (0, 2)], vocab=90)
    advantages, totals = torch.tensor([1.0, -0.5, 0.3, 0.0, 2.0]), StepTotals(rows=7, tokens=30)
    batch = replace(batch, trained=torch.arange(17) != 4, advantages=advantages, totals=totals)
    with torch.no_grad():
        scores = score_tokens(model, batch, ForwardOptions())
    return replace(batch, sampling_logprobs=scores.logprobs, sampling_entropy=scores.entropy)


@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_it_is_the_gradient_that_comes(make_model, loss_type):
    model = make_model(initializer_range=0.1)
    batch, options = make_batch(model), PolicyOptions(loss_type=loss_type, epsilon_high=5.0)
    precomputed = precompute_gradient(batch, options)
    assert precomputed is not None
    gradients = []
    for hint in (None, precomputed):
        model.zero_grad()
        scores = score_tokens(model, batch, ForwardOptions(), hint)
        scores.logprobs.retain_grad()
        policy_loss(scores, batch, options).loss.backward()
        torch.testing.assert_close(scores.logprobs.grad, precomputed.gradient, rtol=1e-4, atol=1e-7)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_only_an_on_policy_step_of_known_log_probs_is_precomputed(make_model):
    batch = make_batch(make_model())
    assert precompute_gradient(replace(batch, old_logprobs=batch.sampling_logprobs), PolicyOptions()) is None
    assert precompute_gradient(replace(batch, sampling_logprobs=None), PolicyOptions()) is None


def test_a_wrong_precomputed_gradient_changes_nothing(make_model):
    model = make_model(initializer_range=0.1)
    batch, gradients = make_batch(model), []
    other = replace(batch, sampling_logprobs=batch.sampling_logprobs - 0.3, advantages=-batch.advantages.square())
    wrong = precompute_gradient(other, PolicyOptions())
    for hint in (None, wrong):
        model.zero_grad()
        policy_loss(score_tokens(model, batch, ForwardOptions(), hint), batch, PolicyOptions()).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_a_log_prob_that_is_not_known_is_no_harm(make_model):
    model = make_model(initializer_range=0.1)
    batch = make_batch(model)
    holes = batch.sampling_logprobs.clone()
    holes[[0, 6]] = float("nan")
    precomputed = precompute_gradient(replace(batch, sampling_logprobs=holes), PolicyOptions())
    scores = score_tokens(model, batch, ForwardOptions(), precomputed)
    policy_loss(scores, batch, PolicyOptions()).loss.backward()
    assert bool(scores.logprobs.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
