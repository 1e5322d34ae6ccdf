"""The ragged loss against the papers' formulas written densely in NumPy, and what must not change it: the split of a
step into micro-batches and ranks, and the order of its rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import flat, make_batch

from groupgrad.batch import StepTotals, TokenScores
from groupgrad.metrics import merge_all
from groupgrad.objectives import LOSSES, MASKS, MismatchOptions, PolicyOptions, entropy_threshold, policy_loss

ENTROPY_COEF = 0.05
TOKEN_MEANS = ("bnpo", "dapo", "cispo", "vespo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
FOLDING = ("vespo", "dppo_tv", "dppo_kl")
"""Losses whose own weight has the mismatch ratio."""


@dataclass
class Step:
    """A whole optimizer step, dense: (N, T) arrays, `there` marks the tokens that exist, `mask` the loss tokens."""

    there: np.ndarray
    mask: np.ndarray
    adv: np.ndarray
    lp: np.ndarray
    old: np.ndarray | None
    ref: np.ndarray
    samp: np.ndarray | None
    ent: np.ndarray
    threshold: float | None
    turns: np.ndarray | None = None
    """(N, T) advantages of tokens, where turns have their own; `adv` has a row's mean then."""
    selected: np.ndarray | None = None
    """(N, T) the tokens that the loss selected among those of the step."""
    cutoff: float | None = None
    """Up to where the step's off-policy mask keeps squared log-ratios."""

    @property
    def token_adv(self):
        return np.broadcast_to(self.adv[:, None], self.lp.shape) if self.turns is None else self.turns

    def totals(self, world_size=1, micro_batches=1):
        kept = None if self.threshold is None else float((self.mask & (self.ent >= self.threshold)).sum())
        tokens = float(self.mask.sum())
        return StepTotals(float(len(self.adv)), tokens, micro_batches, world_size, self.threshold, kept, self.cutoff)


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
    selected = there & (rng.random(lp.shape) < 0.3)
    return Step(there, mask, adv, lp, old, ref, samp, ent, threshold, turns, selected, rng.choice([None, 0.05]))


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


# --- the papers' formulas ---


def masked_mean(values, mask, axis=None):
    return np.where(mask, values, 0.0).sum(axis=axis) / np.maximum(1, mask.sum(axis=axis))


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


def dense_surrogate(step, options, ratio, log_ratio, log_rho_sum):
    adv = step.token_adv
    if options.loss_type == "cispo":
        return -np.minimum(ratio, options.epsilon_high) * adv * step.lp
    if options.loss_type == "sapo":
        tau = np.where(adv > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
        return -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * adv
    if options.loss_type == "vespo":
        total = (np.clip(log_ratio, -20, 20) * step.mask).sum(axis=1, keepdims=True) + log_rho_sum
        weight = np.exp(np.clip(total, math.log(1e-8), 20))
        k, lam = (
            np.where(adv >= 0, pos, neg)
            for pos, neg in (
                (options.vespo_k_pos, options.vespo_k_neg),
                (options.vespo_lambda_pos, options.vespo_lambda_neg),
            )
        )
        return -(weight**k) * np.exp(lam * (1 - weight)) * adv * step.lp
    if options.loss_type.startswith("dppo"):
        old = step.lp - log_ratio
        mu = old if step.samp is None else np.where(np.isnan(step.samp), old, step.samp)
        p, m = np.exp(step.lp), np.exp(mu)
        a, b = (np.clip(x, 2.0**-52, 1 - 2.0**-52) for x in (m, p))
        kl = a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))
        far = (np.abs(p - m) if options.loss_type == "dppo_tv" else kl) > options.settings.threshold
        left_out = far & (np.sign(p - m) == np.sign(adv))
        return np.where(left_out, 0.0, -np.minimum(p / m, options.settings.ceiling) * adv * step.lp)
    if options.loss_type == "gmpo":
        clip, kept = options.settings.clip, dense_kept(step, options)
        bounded = np.where(adv > 0, np.minimum(log_ratio, clip), np.maximum(log_ratio, -clip))
        return -np.exp(masked_mean(bounded, kept & (adv != 0), 1))[:, None] * adv * np.ones_like(step.lp)
    if options.loss_type == "kl_cov":
        return -ratio * adv + options.settings.coef * np.abs(log_ratio) * step.selected
    assert options.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "clip_cov"), (
        "give the new loss its formula"
    )
    clipped = np.clip(ratio, 1 - options.epsilon, 1 + options.epsilon_high)
    return -np.minimum(np.minimum(ratio, options.delta or math.inf) * adv, clipped * adv)


def dense_kept(step, options):
    """(N, T) the loss tokens that no mask takes out of the policy term."""
    kept = step.mask if step.threshold is None else step.mask & (step.ent >= step.threshold)
    if options.loss_type == "clip_cov":
        kept = kept & ~step.selected
    behaviour = step.old if step.samp is None else step.samp
    if options.off_policy_mask_threshold is not None and behaviour is not None:
        drift = masked_mean(np.nan_to_num(behaviour - step.lp), step.mask, 1)[:, None]
        kept = kept & ((step.token_adv >= 0) | (drift <= options.off_policy_mask_threshold))
    if options.off_policy_mask is not None and behaviour is not None:
        kept = kept & dense_near(step, np.nan_to_num(step.lp - behaviour) * step.mask, options)
    return kept & (dense_rho(step, options)[0] != 0)


def dense_near(step, gap, options):
    """(N, T) the tokens that the off-policy mask keeps, from log-ratios to the sampler."""
    name, chosen = options.off_policy_mask, options.mask_settings
    if name == "m2po":
        return gap**2 <= (math.inf if step.cutoff is None else step.cutoff)
    if name == "geometric":
        mean = np.exp(masked_mean(gap, step.mask, 1)[:, None])
        return np.broadcast_to((mean >= chosen.low) & (mean <= chosen.high), gap.shape)
    values = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(gap) - 1 - gap}[name]
    found = {
        "token": values,
        "sequence_mean": masked_mean(values, step.mask, 1)[:, None],
        "sequence_sum": (values * step.mask).sum(1, keepdims=True),
        "sequence_max": np.where(step.mask.any(1), np.where(step.mask, values, -np.inf).max(1), 0.0)[:, None],
    }[chosen.level]
    low, high = (math.log(chosen.low), math.log(chosen.high)) if name == "k1" else (-math.inf, chosen.threshold)
    return np.broadcast_to((found >= low) & (found <= high), gap.shape)


def dense_terms(step, options):
    """(N, T) each token's policy term and KL term, and (N, T) the tokens that the policy term keeps."""
    mask = step.mask
    old = step.lp if step.old is None else step.old
    log_ratio = step.lp - old
    ratio = np.exp(log_ratio)
    if options.importance_sampling_level == "sequence":
        ratio = np.broadcast_to(np.exp(masked_mean(log_ratio, mask, 1))[:, None], ratio.shape)
    rho, log_rho_sum = dense_rho(step, options)
    loss = dense_surrogate(step, options, ratio, log_ratio, log_rho_sum)
    folds = options.loss_type in FOLDING
    loss = loss * dense_kept(step, replace(options, mismatch=None) if folds else options) * (1.0 if folds else rho)
    kept = mask if step.threshold is None else mask & (step.ent >= step.threshold)
    kl = np.exp(step.ref - step.lp) - (step.ref - step.lp) - 1
    return loss * mask, options.beta * kl * (ratio if options.use_bias_correction_kl else 1) * mask, kept


def dense_loss(step, options):
    """The loss of the step as one process with one batch would have it."""
    mask = step.mask
    policy, kl, kept = dense_terms(step, options)
    loss = policy + kl
    rows, tokens = len(step.adv), max(1, mask.sum())
    reduced = {
        **dict.fromkeys(("grpo", "sapo", "gmpo"), lambda: masked_mean(loss, mask, 1).mean()),
        "luspo": lambda: loss.sum(axis=1).mean(),
        "dr_grpo": lambda: loss.sum() / (rows * options.max_completion_length),
        **dict.fromkeys(TOKEN_MEANS, lambda: loss.sum() / tokens),
    }[options.loss_type]()
    return reduced - ENTROPY_COEF * masked_mean(step.ent, kept)


# --- properties ---

seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
mismatches = st.one_of(
    st.none(),
    st.builds(
        MismatchOptions,
        st.sampled_from(["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
        st.sampled_from([None, 0.7]),
        st.sampled_from([None, 1.3]),
    ),
)


masks = st.one_of(
    st.just((None, {})),
    st.just(("geometric", {"low": 0.9, "high": 1.1})),
    st.just(("m2po", {})),
    st.sampled_from(["token", "sequence_mean", "sequence_sum"]).map(lambda at: ("k1", {"level": at, "low": 0.8})),
    st.tuples(
        st.sampled_from(["k2", "k3"]),
        st.sampled_from(["token", "sequence_mean", "sequence_sum", "sequence_max"]).map(
            lambda at: {"level": at, "threshold": 0.05}
        ),
    ),
)


@st.composite
def cases(draw, losses=tuple(LOSSES)):
    """A step and options that fit each other."""
    keep = draw(st.sampled_from([1.0, 0.5, 0.0]))
    loss_type = draw(st.sampled_from(losses))
    mask, chosen = draw(masks)
    options = PolicyOptions(
        loss_type=loss_type,
        settings=LOSSES[loss_type].make_settings({}),
        importance_sampling_level=draw(st.sampled_from(["token", "sequence"])),
        epsilon=0.15,
        epsilon_high=draw(st.sampled_from([0.25, 1.3])),
        delta=draw(st.sampled_from([None, 1.4])),
        beta=draw(st.sampled_from([0.0, 0.3])),
        use_bias_correction_kl=draw(st.booleans()),
        max_completion_length=9,
        off_policy_mask_threshold=draw(st.sampled_from([None, 0.1])),
        off_policy_mask=mask,
        mask_settings=None if mask is None else MASKS[mask].make_settings(chosen),
        top_entropy_quantile=keep,
        mismatch=draw(mismatches),
    )
    return draw_step(draw(seeds), keep, draw(st.booleans()), draw(st.booleans()), draw(st.booleans())), options


EXACT = tuple(name for name in LOSSES if name != "bnpo")


# The gradient of these losses is not the slope of their value; test_surrogates has its numbers.
SLOPED = tuple(name for name in LOSSES if name not in ("cispo", *FOLDING))


@settings(max_examples=60, deadline=None)
@given(case=cases(SLOPED))
def test_the_gradient_is_the_slope_of_the_dense_loss(case):
    step, options = case
    if step.old is None:
        step = replace(step, old=step.lp.copy())
    _, gradient, _ = share(step, range(len(step.adv)), options, step.totals())
    width = 1e-6
    for place in zip(*np.nonzero(step.there)):
        nudge = np.zeros_like(step.lp)
        nudge[place] = width
        up, down = replace(step, lp=step.lp + nudge), replace(step, lp=step.lp - nudge)
        slope = (dense_loss(up, options) - dense_loss(down, options)) / (2 * width)
        assert gradient[0][place] == pytest.approx(slope, abs=1e-6)


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
@given(case=cases(EXACT), rng=seeds, world_size=st.integers(1, 3))
def test_any_ranks_and_micro_batches_give_the_same_step(case, rng, world_size):
    """Mean over ranks of the sum over their micro-batches, ranks with nothing to do included, in any order of rows."""
    step, options = case
    whole, gradient, metrics = share(step, range(len(step.adv)), options, step.totals())
    rank_of_row = rng.integers(0, world_size, size=len(step.adv))
    shares = []
    for rank in range(world_size):
        parts = cut(rng, rng.permutation(np.nonzero(rank_of_row == rank)[0]))
        totals = step.totals(world_size=world_size, micro_batches=len(parts))
        shares += [share(step, rows, options, totals) for rows in parts]
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
    """(N, T) slope of each row's sum of token losses in the log-probs, by float64 differences of each term."""
    slopes, width = np.zeros_like(step.lp), 1e-6
    for place in range(step.lp.shape[1]):
        ends = []
        for sign in (1, -1):
            nudge = np.zeros_like(step.lp)
            nudge[:, place] = sign * width
            moved = replace(step, lp=step.lp + nudge)
            if options.loss_type not in SLOPED:  # their weights are constants: the ratios stay as they are
                moved = replace(moved, old=step.old + nudge, samp=step.samp + nudge)
            ends.append(np.stack(dense_terms(moved, options)[:2]))
        slopes[:, place] = ((ends[0] - ends[1]) / (2 * width)).sum(axis=(0, 2))
    return slopes


def share_in_float32(step, rows, options):
    """The loss and the (N, T) gradient of some rows."""
    batch, logprobs, entropy = ragged(
        step, rows, replace(step, mask=step.mask[rows], adv=step.adv[rows], ent=step.ent[rows]).totals()
    )
    fields = {name: getattr(batch, name).float() for name in ("advantages", "old_logprobs", "ref_logprobs")}
    batch = replace(batch, sampling_logprobs=batch.sampling_logprobs.float(), **fields)
    leaf = logprobs.float().requires_grad_()
    loss = policy_loss(TokenScores(leaf, entropy.float()), batch, options).loss
    loss.backward()
    return loss.item(), leaf.grad.double().numpy().reshape(len(rows), -1)


def factor(loss_type, rows, tokens):
    """What the reduction multiplies each token's loss with, in rows of one length without masked tokens."""
    return {"luspo": 1 / rows, "dr_grpo": 1 / rows / 9}.get(loss_type, 1 / tokens)


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
    if options.use_bias_correction_kl and loss_type not in SLOPED:
        options = replace(options, use_bias_correction_kl=False)
    step = far_step(options.top_entropy_quantile)
    values, slopes = sum(dense_terms(step, options)[:2]), far_slopes(step, options)
    every = np.arange(len(step.adv))
    if options.mismatch is not None:
        # Products that float32 cannot write: of a ratio of e^200 and a mismatch ratio of e^-200, and the other way.
        apart = (step.lp - step.old) * (step.old - step.samp) < -100
        unbounded = (step.old - step.samp > 100) & (options.mismatch.clip_max is None)
        every = every[(step.adv == 0) | ~(apart | unbounded).any(axis=1)]
    if options.use_bias_correction_kl:
        # The estimate is exactly 0, so its differences are noise times e^200.
        noise = (step.lp - step.old > 100) & (step.ref == step.lp)
        slopes[noise] = step.selected[noise] if loss_type == "kl_cov" else 0.0  # the slope of its penalty
    rows = every[(np.abs(values[every]) < np.finfo(np.float32).max).all(axis=1)]
    assert len(rows) >= 27
    loss, gradient = share_in_float32(step, rows, options)
    each = factor(loss_type, len(rows), 2 * len(rows))
    assert loss == pytest.approx(values[rows].sum() * each, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, slopes[rows] * each, rtol=1e-5, atol=1e-8)
    infinite = np.setdiff1d(every, rows)
    if len(infinite):
        _, gradient = share_in_float32(step, infinite, options)
        assert not np.isfinite(gradient).all(axis=1).any()
