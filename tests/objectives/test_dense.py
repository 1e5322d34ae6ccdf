"""Losses, masks and estimators against the papers' formulas written densely in NumPy (`tests/helpers/twins.py`), and
what must not change a loss: the split of a step into micro-batches and ranks, and the order of its rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import twins
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import flat, make_batch
from twins import Scored, Step, Terms, masked_mean

from groupgrad.batch import StepTotals, TokenScores
from groupgrad.metrics import merge_all
from groupgrad.objectives import (
    ESTIMATORS,
    LOSSES,
    MASKS,
    Aggregation,
    MismatchMode,
    MismatchOptions,
    PolicyOptions,
    RatioLevel,
    ScaleRewards,
    StepTokens,
    compute_advantages,
    drift,
    entropy_threshold,
    policy_loss,
)
from groupgrad.objectives.ragged import broadcast_to_tokens
from groupgrad.types import Turns

ENTROPY_COEF = 0.05
SEEDS = range(25)
KINDS = {"LOSSES": LOSSES, "MASKS": MASKS, "ESTIMATORS": ESTIMATORS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_definition_has_a_twin(kind):
    missing = set(KINDS[kind]) - set(getattr(twins, kind))
    assert not missing, f"write the formula of {', '.join(missing)} in NumPy into {kind} of tests/helpers/twins.py"


def totals(step, options, world_size=1, micro_batches=1):
    """Denominators of the step, and the cutoff of the mask."""
    kept = None if step.threshold is None else float((step.mask & (step.ent >= step.threshold)).sum())
    cutoff = None
    if options.off_policy_mask is not None and MASKS[options.off_policy_mask].cutoff and step.behaviour is not None:
        gaps = np.nan_to_num(step.lp - step.behaviour)[step.mask]
        cutoff = MASKS[options.off_policy_mask].cutoff(torch.from_numpy(gaps), options.mask_settings)
    tokens = float(step.mask.sum())
    return StepTotals(float(len(step.adv)), tokens, micro_batches, world_size, step.threshold, kept, cutoff)


def draw_step(rng, keep=1.0, has_old=True, has_samp=True, has_turns=False):
    rows, width = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    lengths = rng.integers(0, width + 1, size=rows)
    there = np.arange(width) < lengths[:, None]
    mask = there & (rng.random((rows, width)) < 0.8) & (rng.random((rows, 1)) < 0.8)
    lp = -rng.exponential(1.0, (rows, width))
    old = lp + rng.normal(0, 0.4, lp.shape) if has_old else None
    samp = lp + rng.normal(0, 0.4, lp.shape) if has_samp else None
    if samp is not None:
        samp[rng.random(lp.shape) < 0.2] = math.nan
    ent = rng.exponential(1.0, lp.shape)
    threshold = entropy_threshold(torch.from_numpy(ent[mask]), keep) if keep < 1 else None
    ref = lp + rng.normal(0, 0.4, lp.shape)
    adv, turns = rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0], size=rows), None
    if has_turns:
        turns = rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0], size=lp.shape)
        adv = masked_mean(turns, there, 1)
    return Step(there, mask, adv, lp, old, ref, samp, ent, threshold, turns, there & (rng.random(lp.shape) < 0.3))


def draw(rng, loss_type):
    """A step, and options of every kind. Numbers that the loss reads are not those of the defaults."""
    pick, method = lambda choices: choices[int(rng.integers(len(choices)))], LOSSES[loss_type]
    keep, mask = pick([1.0, 0.5, 0.0]), pick([None, None, *twins.MASKS])
    mismatch = MismatchOptions(pick(get_args(MismatchMode)), pick([None, 0.7]), pick([None, 1.3]))
    read = {name: getattr(PolicyOptions(), name) for name in method.reads}
    options = PolicyOptions(
        **{
            **{name: value * pick([0.7, 1.4]) for name, value in read.items() if value is not None},
            "loss_type": loss_type,
            "settings": method.make_settings(pick(twins.LOSSES[loss_type].settings)),
            "importance_sampling_level": pick(get_args(RatioLevel)),
            "epsilon": 0.15,
            "epsilon_high": pick([0.25, 1.3]),
            "delta": pick([None, 1.4]),
            "beta": pick([0.0, 0.3]),
            "use_bias_correction_kl": pick([True, False]),
            "max_completion_length": 9,
            "off_policy_mask_threshold": pick([None, 0.1]),
            "off_policy_mask": mask,
            "mask_settings": mask and MASKS[mask].make_settings(pick(twins.MASKS[mask].settings)),
            "top_entropy_quantile": keep,
            "mismatch": pick([None, mismatch]),
        }
    )
    return draw_step(rng, keep, *(pick([True, False]) for _ in range(3))), options


def ragged(step, rows, totals):
    """Some rows of the step as a batch, and the log-probs and entropies of their tokens."""

    def nested(dense):
        return None if dense is None else [values[there] for values, there in zip(dense[rows], step.there[rows])]

    batch = make_batch(
        nested(step.mask),
        step.adv[rows],
        totals,
        old=nested(step.old),
        ref=nested(step.ref),
        sampling=nested(step.samp),
    )
    batch.token_advantages = flat(nested(step.turns))
    batch.selected = flat(nested(step.selected), torch.bool)
    return batch, flat(nested(step.lp)), flat(nested(step.ent))


def share(step, rows, options, totals):
    """Loss, metrics and the gradients scattered into (N, T) arrays."""
    rows = np.asarray(rows, dtype=int)
    batch, logprobs, entropy = ragged(step, rows, totals)
    scores = TokenScores(logprobs.requires_grad_(), entropy.requires_grad_())
    result = policy_loss(scores, batch, options, entropy_coef=ENTROPY_COEF)
    result.loss.backward()
    gradient = np.zeros((2, *step.lp.shape))
    for kind, leaf in enumerate((scores.logprobs, scores.entropy)):
        dense = np.zeros((len(rows), step.lp.shape[1]))
        dense[step.there[rows]] = leaf.grad.numpy()
        gradient[kind, rows] = dense
    return result.loss.item(), gradient, result.metrics


# --- the step's loss, of the formulas in twins.py ---


def dense_rho(step, options):
    rows = (len(step.adv), 1)
    if options.mismatch is None or step.samp is None:
        return np.ones_like(step.lp), np.zeros(rows)
    old = step.lp if step.old is None else step.old
    gap = np.nan_to_num(old - step.samp) * step.mask
    level, action = options.mismatch.mode.split("_")
    rho = np.exp(gap if level == "token" else gap.sum(axis=1, keepdims=True))
    low = options.mismatch.clip_min or 0.0
    high = options.mismatch.clip_max or math.inf
    rho = np.clip(rho, low, high) if action == "truncate" else np.where((rho < low) | (rho > high), 0.0, rho)
    log_rho = np.clip(np.log(np.maximum(rho, 1e-300)), math.log(1e-8), 20)
    log_sum = (log_rho * step.mask).sum(axis=1, keepdims=True) if level == "token" else log_rho
    return np.broadcast_to(rho, step.lp.shape), log_sum


def dense_kept(step, options):
    """(N, T) the loss tokens that no mask takes out of the policy term."""
    kept = step.mask if step.threshold is None else step.mask & (step.ent >= step.threshold)
    if twins.LOSSES[options.loss_type].leaves_out_selected:
        kept = kept & ~step.selected
    if step.behaviour is not None:
        gap = np.nan_to_num(step.lp - step.behaviour) * step.mask
        if options.off_policy_mask_threshold is not None:
            is_near = masked_mean(-gap, step.mask, 1)[:, None] <= options.off_policy_mask_threshold
            kept = kept & ((step.token_adv >= 0) | is_near)
        if options.off_policy_mask is not None:
            kept = kept & twins.MASKS[options.off_policy_mask].keep(gap, step.mask, options.mask_settings)
    return kept & (dense_rho(step, options)[0] != 0)


def dense_terms(step, options):
    """(N, T) each token's policy term and KL term."""
    twin, mask = twins.LOSSES[options.loss_type], step.mask
    log_ratio = step.lp - (step.lp if step.old is None else step.old)
    ratio = np.exp(log_ratio)
    if options.importance_sampling_level == "sequence":
        ratio = np.broadcast_to(np.exp(masked_mean(log_ratio, mask, 1))[:, None], ratio.shape)
    rho, log_rho = dense_rho(step, options)
    kept = dense_kept(step, replace(options, mismatch=None) if twin.folds_mismatch else options)
    loss = twin.term(Terms(step, options, log_ratio, ratio, kept, log_rho))
    kl = np.exp(step.ref - step.lp) - (step.ref - step.lp) - 1
    loss = loss * kept * (1.0 if twin.folds_mismatch else rho)
    return loss * mask, options.beta * kl * (ratio if options.use_bias_correction_kl else 1) * mask


def dense_loss(step, options):
    """The loss of the step as one process with one batch would have it."""
    kept = step.mask if step.threshold is None else step.mask & (step.ent >= step.threshold)
    loss = twins.LOSSES[options.loss_type].reduce(sum(dense_terms(step, options)), step, options)
    return loss - ENTROPY_COEF * masked_mean(step.ent, kept)


def nudged(step, options, nudge):
    """The step with other log-probs; the ratios of a loss whose weights are constants stay as they are."""
    moved = replace(step, lp=step.lp + nudge)
    if twins.LOSSES[options.loss_type].has_constant_weight:
        moved = replace(moved, old=step.old + nudge, samp=None if step.samp is None else step.samp + nudge)
    return moved


# --- each definition is its twin ---


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_its_twin(name):
    for seed in SEEDS:
        step, options = draw(np.random.default_rng(seed), name)
        if twins.LOSSES[name].has_constant_weight:
            options = replace(options, use_bias_correction_kl=False)
        every, of_step = range(len(step.adv)), totals(step, options)
        assert share(step, every, options, of_step)[0] == pytest.approx(dense_loss(step, options), abs=1e-9), seed
        step = replace(step, old=step.lp.copy() if step.old is None else step.old)
        gradient = share(step, every, options, of_step)[1][0]
        for place in zip(*np.nonzero(step.there)):
            nudge = np.zeros_like(step.lp)
            nudge[place] = 1e-6
            up, down = (dense_loss(nudged(step, options, sign * nudge), options) for sign in (1, -1))
            assert gradient[place] == pytest.approx((up - down) / 2e-6, abs=1e-6), seed


@pytest.mark.parametrize("name", [name for name, method in LOSSES.items() if method.select])
def test_a_loss_selects_what_its_twin_does(name):
    for seed, chosen in itertools.product(SEEDS, twins.LOSSES[name].settings):
        step, made = draw_step(np.random.default_rng(seed)), LOSSES[name].make_settings(chosen)
        tokens, options = (step.lp[step.mask], step.token_adv[step.mask]), PolicyOptions(settings=made)
        if step.mask.any():
            found = LOSSES[name].select(StepTokens(*map(torch.from_numpy, tokens)), options, torch.Generator())
            eligible, count = twins.LOSSES[name].select(*tokens, made)
            assert found.sum() == count and not (found.numpy() & ~eligible).any(), (seed, chosen)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_keeps_what_its_twin_does(name):
    kept = []
    for seed, chosen in itertools.product(SEEDS, twins.MASKS[name].settings):
        step, made = draw_step(np.random.default_rng(seed)), MASKS[name].make_settings(chosen)
        options = PolicyOptions(off_policy_mask=name, mask_settings=made)
        batch, logprobs, _ = ragged(step, np.arange(len(step.adv)), totals(step, options))
        found = MASKS[name].keep(drift(logprobs, batch.sampling_logprobs, batch), batch, made)
        of_tokens = broadcast_to_tokens(found, batch)[batch.trained].tolist()
        expected = twins.MASKS[name].keep(np.nan_to_num(step.lp - step.samp) * step.mask, step.mask, made)
        assert of_tokens == np.broadcast_to(expected, step.lp.shape)[step.mask].tolist(), (seed, chosen)
        kept += of_tokens
    assert 0.1 < np.mean(kept) < 0.9, "give its twin settings that leave some tokens out"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_gives_the_advantages_of_its_twin(name):
    twin, estimator = twins.ESTIMATORS[name], ESTIMATORS[name]
    for seed, chosen in itertools.product(SEEDS, twin.settings):
        scored = draw_scored(np.random.default_rng(seed), estimator.binary, estimator.make_settings(chosen))
        flat_turns = [one for rows in zip(scored.turns, scored.states) for one in zip(*rows)]
        turns = [Turns([1 + len(s) for s in states], torch.from_numpy(r), states) for r, states in flat_turns]
        rewards = torch.from_numpy(scored.by_function).flatten(0, 1)
        found = compute_advantages(
            *(rewards, torch.from_numpy(scored.weights), scored.rewards.shape[1], scored.scale, scored.aggregation),
            estimator=name,
            settings=scored.settings,
            lengths=torch.from_numpy(scored.lengths).flatten(),
            turns=turns if ESTIMATORS[name].uses_turns else None,
        )
        expected = twin.advantages(scored)
        if ESTIMATORS[name].uses_turns:
            rows = [values for rows in expected for values in rows]
            for values, by_turn in zip(rows, found.by_turn, strict=True):
                assert by_turn.tolist() == pytest.approx(values.tolist(), abs=1e-9), (seed, chosen)
            expected = np.array([values @ one.lengths / sum(one.lengths) for values, one in zip(rows, turns)])
        else:
            alike = np.repeat(np.ptp(expected, axis=1) < 1e-9, expected.shape[1])
            assert found.zero_std.tolist() == alike.tolist(), "groups that teach nothing"
        assert found.advantages.tolist() == pytest.approx(expected.ravel().tolist(), abs=1e-9), (seed, chosen)


def draw_scored(rng, binary, made):
    """Groups of completions of up to three turns, of one reward function or two."""
    groups, size, num_functions = int(rng.integers(1, 4)), int(rng.integers(2, 6)), 1 if binary else 2
    turns = [
        [rng.integers(0, 4, (rng.integers(1, 4), num_functions)) / 2.0 for _ in range(size)] for _ in range(groups)
    ]
    states = [[["ab"[int(rng.integers(2))] * int(rng.integers(1, 3)) for _ in one] for one in rows] for rows in turns]
    sums = np.array([[one.sum(axis=0) for one in rows] for rows in turns])
    return Scored(
        *((sums > 2) * 1.0 if binary else sums, np.array([0.5, 1.0][:num_functions])),
        *(rng.integers(1, 9, (groups, size)) / 1.0, turns, states),
        *(rng.choice(get_args(ScaleRewards)), rng.choice(get_args(Aggregation)), made),
    )


# --- ranks and micro-batches ---

seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def cut(rng, rows):
    """The rows in a random number of runs, some of them empty."""
    return np.split(rows, np.sort(rng.integers(0, len(rows) + 1, size=int(rng.integers(0, 4)))))


def read(metrics):
    return {key: metric.read() for key, metric in metrics.items()}


def assert_same_metrics(parts, whole):
    merged = read(merge_all(parts))
    assert merged.keys() == whole.keys()
    for key, metric in whole.items():
        expected = metric.read()
        assert merged[key] == (None if expected is None else pytest.approx(expected, abs=1e-9)), key


@settings(max_examples=150, deadline=None)
@given(rng=seeds, loss_type=st.sampled_from([n for n, m in LOSSES.items() if m.reduction != "local_token_mean"]))
def test_any_ranks_and_micro_batches_give_the_same_step(rng, loss_type):
    """Mean over ranks of the sum over their micro-batches, ranks with nothing to do included, in any order of rows."""
    (step, options), world_size = draw(rng, loss_type), int(rng.integers(1, 4))
    whole, gradient, metrics = share(step, range(len(step.adv)), options, totals(step, options))
    rank_of_row = rng.integers(0, world_size, size=len(step.adv))
    shares = []
    for rank in range(world_size):
        parts = cut(rng, rng.permutation(np.nonzero(rank_of_row == rank)[0]))
        of_step = totals(step, options, world_size, len(parts))
        shares += [share(step, rows, options, of_step) for rows in parts]
    assert sum(loss for loss, _, _ in shares) / world_size == pytest.approx(whole, abs=1e-10)
    np.testing.assert_allclose(sum(part for _, part, _ in shares) / world_size, gradient, atol=1e-10)
    assert_same_metrics([part for _, _, part in shares], metrics)


# --- log-ratios of 200 nats, in float32: what is clipped, masked or weighs nothing is finite ---

FAR = (0.0, 200.0, -200.0)
VARIANTS = {
    "plain": {},
    "delta": {"delta": 4.0},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    "top entropy": {"top_entropy_quantile": 0.5},
    "KL": {"beta": 0.1},
    "unbiased KL": {"beta": 0.1, "use_bias_correction_kl": True},
    "all": {"beta": 0.1, "off_policy_mask_threshold": 0.1, "mismatch": MismatchOptions("token_mask", 0.5, 3.0)},
    **{mode: {"mismatch": MismatchOptions(mode)} for mode in ("token_truncate", "sequence_truncate")},
    **{mode: {"mismatch": MismatchOptions(mode)} for mode in ("token_mask", "sequence_mask")},
    "no upper bound": {"mismatch": MismatchOptions("token_truncate", 0.5, None)},
}


def far_step(keep):
    """A row for each way in which its first token's ratios to the old policy, reference and sampler may be far."""
    cells = np.array(list(itertools.product(FAR, FAR, FAR, (1.0, -1.0, 0.0))))
    lp = np.tile([-1.5, -0.5], (len(cells), 1))
    policy, reference, sampler = (np.stack([cells[:, place], np.full(len(cells), 0.125)], 1) for place in range(3))
    there, entropy = np.ones(lp.shape, dtype=bool), np.tile([1.0, 2.0], (len(cells), 1))
    step = Step(there, there, cells[:, 3], lp, lp - policy, lp + reference, lp - policy - sampler, entropy, None)
    step = replace(step, selected=np.broadcast_to([True, False], lp.shape))
    return step if keep == 1 else replace(step, threshold=1.5)


def far_slopes(step, options):
    """(N, T) slopes of each row's policy terms and of its KL terms in the log-probs, by float64 differences."""
    slopes, width = np.zeros((2, *step.lp.shape)), 1e-6
    for place in range(step.lp.shape[1]):
        nudge = np.zeros_like(step.lp)
        nudge[:, place] = width
        up, down = (np.stack(dense_terms(nudged(step, options, sign * nudge), options)) for sign in (1, -1))
        slopes[:, :, place] = ((up - down) / (2 * width)).sum(axis=2)
    return slopes


def share_in_float32(step, rows, options):
    """The loss and the (N, T) gradient of some rows."""
    some = replace(step, mask=step.mask[rows], adv=step.adv[rows], ent=step.ent[rows])
    batch, logprobs, entropy = ragged(step, rows, totals(some, options))
    fields = {name: getattr(batch, name).float() for name in ("advantages", "old_logprobs", "ref_logprobs")}
    batch = replace(batch, sampling_logprobs=batch.sampling_logprobs.float(), **fields)
    leaf = logprobs.float().requires_grad_()
    loss = policy_loss(TokenScores(leaf, entropy.float()), batch, options).loss
    loss.backward()
    return loss.item(), leaf.grad.double().numpy().reshape(len(rows), -1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_log_ratios_of_200_nats_make_only_those_losses_infinite_that_are(loss_type, level, variant):
    options = PolicyOptions(
        loss_type=loss_type,
        settings=LOSSES[loss_type].make_settings({}),
        importance_sampling_level=level,
        max_completion_length=9,
        **VARIANTS[variant],
    )
    twin = twins.LOSSES[loss_type]
    if options.use_bias_correction_kl and twin.has_constant_weight:
        options = replace(options, use_bias_correction_kl=False)
    step = far_step(options.top_entropy_quantile)
    values, slopes = sum(dense_terms(step, options)), far_slopes(step, options)
    every = np.arange(len(step.adv))
    if options.mismatch is not None:
        # Products that float32 cannot write: of a ratio of e^200 and a mismatch ratio of e^-200, and the other way.
        apart = (step.lp - step.old) * (step.old - step.samp) < -100
        unbounded = (step.old - step.samp > 100) & (options.mismatch.clip_max is None)
        every = every[(step.adv == 0) | ~(apart | unbounded).any(axis=1)]
    if options.use_bias_correction_kl:
        # The estimate is exactly 0, so its differences are noise times e^200.
        slopes[1, (step.lp - step.old > 100) & (step.ref == step.lp)] = 0.0
    rows = every[(np.abs(values[every]) < np.finfo(np.float32).max).all(axis=1)]
    assert len(rows) >= 27
    loss, gradient = share_in_float32(step, rows, options)
    # What the reduction multiplies each loss with: rows have one length, and no token is masked.
    each = twin.reduce(np.ones_like(values), step, options) / values.size * len(values) / len(rows)
    assert loss == pytest.approx(values[rows].sum() * each, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, slopes.sum(axis=0)[rows] * each, rtol=1e-5, atol=1e-8)
    infinite = np.setdiff1d(every, rows)
    if len(infinite):
        _, gradient = share_in_float32(step, infinite, options)
        assert not np.isfinite(gradient).all(axis=1).any()
