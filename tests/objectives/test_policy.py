"""The loss of two completions: modifiers, metrics, errors and empty batches."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import make_batch, make_scores

from groupgrad.batch import StepTotals, TokenScores
from groupgrad.objectives import LOSSES, MismatchOptions, PolicyOptions, policy_loss

LP = [[-1.0, -2.0, -0.5], [-0.3, -1.2]]
OLD = [[-1.3, -2.0, -0.4], [-0.9, -1.0]]
REF = [[-1.1, -1.9, -0.7], [-0.4, -1.0]]
ENTROPY = [[1.0, 2.0, 3.0], [4.0, 5.0]]
ALL = [[True] * 3, [True] * 2]
ADVANTAGES = [1.0, -0.5]


def run(*, totals=None, entropy_coef=0.0, **options):
    batch = make_batch(ALL, ADVANTAGES, totals, old=OLD, ref=REF)
    options = PolicyOptions(**{"max_completion_length": 8, **options})
    return policy_loss(make_scores(LP, ENTROPY, grad=True), batch, options, entropy_coef=entropy_coef)


def read(result):
    return {key: metric.read() for key, metric in result.metrics.items()}


def test_kl_metric_with_and_without_correction():
    corrected = run(beta=0.1, use_bias_correction_kl=True)
    plain = run(beta=0.1)
    assert read(corrected)["kl"] == pytest.approx(0.010997, abs=1e-6)
    assert read(plain)["kl"] == pytest.approx(0.010996, abs=1e-6)
    assert "kl" not in read(run())


def test_metrics_of_the_token_ratio():
    metrics = read(run())
    assert metrics["entropy"] == pytest.approx(3.0)
    assert metrics["clip_ratio/low_mean"] == 0
    assert metrics["clip_ratio/high_mean"] == pytest.approx(0.2)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(0.2)
    assert metrics["clip_ratio/low_min"] == 0
    assert metrics["clip_ratio/high_max"] == pytest.approx(1 / 3)


def test_metrics_count_sequences_at_sequence_level():
    # Ratios 1.0689 (A > 0) and 1.2214 (A < 0): with widths of 0.05 the first is clipped above, none below.
    metrics = read(run(importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.05))
    assert metrics["clip_ratio/high_mean"] == 0.5
    assert metrics["clip_ratio/high_max"] == 1
    assert metrics["clip_ratio/low_mean"] == 0
    assert metrics["clip_ratio/region_mean"] == 0.5


def test_a_ratio_held_by_delta_below_the_clip_does_not_count_as_clipped():
    assert read(run(delta=1.3))["clip_ratio/high_mean"] == pytest.approx(0.2)
    assert read(run(delta=1.1))["clip_ratio/high_mean"] == 0


def test_low_clip_is_counted():
    batch = make_batch([[True, True], [True], []], [-1.0, -1.0, -1.0], old=[[0.0, 0.0], [0.0], []])
    metrics = read(policy_loss(make_scores([[-1.0, -0.1], [-1.0], []]), batch, PolicyOptions()))
    assert metrics["clip_ratio/low_mean"] == pytest.approx(2 / 3)
    assert metrics["clip_ratio/low_min"] == 0.5, "the empty completion does not count"
    assert metrics["clip_ratio/region_mean"] == pytest.approx(2 / 3)
    assert metrics["clip_ratio/high_max"] == 0


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_stays():
    scores = make_scores(LP, grad=True)
    result = policy_loss(scores, make_batch(ALL, ADVANTAGES), PolicyOptions())
    assert result.loss.item() == pytest.approx(-(3 * 1 - 2 * 0.5) / 5)
    result.loss.backward()
    torch.testing.assert_close(scores.logprobs.grad, torch.tensor([-1, -1, -1, 0.5, 0.5], dtype=torch.float64) / 5)
    assert read(result)["clip_ratio/region_mean"] == 0


def test_aux_loss_is_a_mean_over_micro_batches():
    scores = make_scores(LP)
    scores.aux_loss = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    batch = make_batch(ALL, [0.0, 0.0], StepTotals(rows=4, tokens=10, micro_batches=2))
    result = policy_loss(scores, batch, PolicyOptions(), aux_loss_coef=0.25)
    assert result.loss.item() == pytest.approx(0.5)
    result.loss.backward()
    assert scores.aux_loss.grad.item() == pytest.approx(0.125)
    assert read(result)["aux_loss"] == 4.0
    assert policy_loss(scores, batch, PolicyOptions()).loss.item() == 0


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("trained", [[], [[]], [[], []], [[False, False]], [[], [False], [True]]])
def test_nothing_to_train_is_a_zero_with_a_gradient(loss_type, level, trained):
    values = [[-1.0] * len(row) for row in trained]
    totals = StepTotals(rows=0, tokens=0, entropy_threshold=math.inf, entropy_tokens=0)
    batch = make_batch(trained, [-0.0] * len(trained), totals, old=values, ref=values, sampling=values)
    options = PolicyOptions(
        loss_type=loss_type, importance_sampling_level=level, off_policy_mask_threshold=0.0, beta=0.1,
        mismatch=MismatchOptions(), top_entropy_quantile=0.2,
    )  # fmt: skip
    scores = make_scores(values, grad=True)
    result = policy_loss(scores, batch, options, entropy_coef=0.1)
    assert result.loss.item() == 0
    result.loss.backward()
    assert scores.logprobs.grad.abs().sum() == 0 and not scores.logprobs.grad.isnan().any()
    loss_tokens = sum(map(sum, trained))
    assert (result.metrics["entropy"].read() is None) == (loss_tokens == 0)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_wild_values_outside_the_loss_tokens_reach_neither_loss_nor_gradient(loss_type):
    wild = 1e4
    batch = make_batch(
        [[True, False]], [1.0], old=[[-1.0, -wild]], ref=[[-1.0, wild]], sampling=[[-1.0, math.nan]]
    )  # fmt: skip
    options = PolicyOptions(loss_type=loss_type, beta=0.1, mismatch=MismatchOptions(), off_policy_mask_threshold=0.1)
    scores = make_scores([[-1.2, -3.0]], [[1.0, math.nan]], grad=True)
    result = policy_loss(scores, batch, options, entropy_coef=0.1)
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert scores.logprobs.grad[0] != 0 and scores.logprobs.grad[1] == 0
    assert scores.entropy.grad.tolist() == pytest.approx([-0.1, 0.0])
    assert result.metrics["entropy"].read() == 1.0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_measures_what_its_row_of_the_table_names(loss_type):
    assert run(loss_type=loss_type).metrics.keys() == {"entropy", *LOSSES[loss_type].metrics}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_float32_stays_float32(loss_type):
    batch = make_batch(ALL, ADVANTAGES, old=OLD, ref=REF)
    for name in ("advantages", "old_logprobs", "ref_logprobs"):
        setattr(batch, name, getattr(batch, name).float())
    exact = make_scores(LP, ENTROPY)
    single = TokenScores(exact.logprobs.float(), exact.entropy.float())
    options = PolicyOptions(loss_type=loss_type, beta=0.1)
    loss = policy_loss(single, batch, options).loss
    assert loss.dtype == torch.float32
    precise = policy_loss(exact, make_batch(ALL, ADVANTAGES, old=OLD, ref=REF), options).loss
    assert loss.item() == pytest.approx(precise.item(), rel=1e-5)


def test_what_cannot_work_is_refused():
    batch = make_batch(ALL, ADVANTAGES)
    with pytest.raises(ValueError, match=r"beta=0.1 needs .* set ref_logprobs"):
        policy_loss(make_scores(LP), batch, PolicyOptions(beta=0.1))
    with pytest.raises(ValueError, match="entropy_tokens"):
        run(totals=StepTotals(rows=2, tokens=5, entropy_threshold=3.4), entropy_coef=0.01)
    with pytest.raises(ValueError, match="5 completion tokens"):
        policy_loss(make_scores(LP[:1]), batch, PolicyOptions())
    with pytest.raises(ValueError, match=r"loss_type='ppo' is not known: .*Set it to one of bnpo, cispo"):
        policy_loss(make_scores(LP), batch, PolicyOptions(loss_type="ppo"))
    with pytest.raises(ValueError, match="importance_sampling_level='word'"):
        PolicyOptions(importance_sampling_level="word")
