"""The policy loss of a micro-batch: the surrogate and reduction of its method, with masks, KL and bonuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from groupgrad.batch import Batch, TokenScores
from groupgrad.metrics import Metric, mean_of
from groupgrad.objectives.masks import find_mask
from groupgrad.objectives.measure import mean_where
from groupgrad.objectives.method import PolicyTerms
from groupgrad.objectives.methods import find_method
from groupgrad.objectives.mismatch import mismatch_ratio
from groupgrad.objectives.nonfinite import TokenTerms
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import (
    PerRow,
    PerToken,
    broadcast_to_tokens,
    row_sum,
    token_advantages,
    where_trained,
)
from groupgrad.objectives.reduce import REDUCTIONS, even_share, token_mean_share
from groupgrad.objectives.terms import (
    at_level,
    drift,
    high_entropy_keep,
    kl_to_reference,
    off_policy_keep,
    policy_log_ratio,
    policy_ratio,
    reference_gap,
    unbiased_kl,
)

MASKED = "off_policy_mask/masked_mean"
"""Metric of `off_policy_mask`: the share of loss tokens that it leaves out."""


@dataclass(slots=True)
class PolicyLoss:
    """The loss of a micro-batch and what was measured on the way."""

    loss: torch.Tensor
    """() this micro-batch's share of the step's loss, with gradient."""
    metrics: dict[str, Metric]
    """Detached measurements of this micro-batch."""
    token_terms: tuple[TokenTerms, ...] = ()
    """What the loss is made of, to name what is not finite in it; detached."""


def policy_loss(
    scores: TokenScores,
    batch: Batch,
    options: PolicyOptions,
    *,
    entropy_coef: float = 0.0,
    aux_loss_coef: float = 0.0,
) -> PolicyLoss:
    """This micro-batch's share of the step's loss: policy term, KL term, less the entropy bonus, plus the router loss.

    The sum of the shares over a rank's micro-batches, averaged over ranks, is the loss of the optimizer step (see
    `reduce`); `batch.totals` holds its denominators. Empty batches, rows and masks give 0 with a gradient of 0.
    `entropy_coef` is what applies in this step. Gradient flows to `scores` only. Not a collective.

    Metrics are token- or sequence-weighted. `policy_loss` (only with an entropy bonus) is the policy and KL term as
    the paper writes it, averaged over the steps merged: each share weighs 1 / micro_batches, so that a step weighs 1.

    Tokens are kept by entropy if the totals have a threshold, whatever `top_entropy_quantile` it was made from.
    Raises ValueError for scores of another length than the batch, for `beta` without reference log-probs, and for an
    entropy bonus whose totals have a threshold but no count of the tokens it keeps.
    """
    _check_shapes(scores, batch)
    method = find_method(options.loss_type)
    if method.settings is not None and options.settings is None:
        options = replace(options, settings=method.settings())
    near = None if options.off_policy_mask is None else _near_sampler(scores.logprobs, batch, options)
    terms = _terms(scores, batch, options, near)
    policy = method.surrogate(terms, options)
    per_token = torch.where(terms.kept, policy.per_token, torch.zeros_like(policy.per_token))
    if terms.correction is not None and not method.folds_mismatch:
        # Infinity times 0 is NaN, so the ratio is read only where there is something to multiply.
        counts = terms.kept & ((terms.token_advantages != 0) | (per_token.detach() != 0))
        correction = broadcast_to_tokens(terms.correction, batch)
        per_token = per_token * torch.where(counts, correction, torch.zeros_like(correction))
    metrics = {"entropy": mean_where(scores.entropy, batch.trained), **policy.metrics}
    if near is not None:
        metrics[MASKED] = mean_where((~near).float(), batch.trained)
    kl = None
    if terms.gap is not None:
        kl = kl_to_reference(terms.gap)
        if options.use_bias_correction_kl:
            kl = unbiased_kl(terms.gap, terms.ratio, terms.log_level_ratio, batch)
        per_token = per_token + options.beta * kl
        metrics["kl"] = mean_where(kl, batch.trained)
    reduce = REDUCTIONS[method.reduction]
    loss = reduce(per_token, batch, options.max_completion_length)
    if entropy_coef != 0:
        metrics["policy_loss"] = mean_of(loss, 1 / batch.totals.micro_batches)
        loss = loss - entropy_coef * _entropy_share(scores.entropy, batch)
    if scores.aux_loss is not None:
        part = 1 / batch.totals.micro_batches
        metrics["aux_loss"] = mean_of(scores.aux_loss * part, part)
        if aux_loss_coef != 0:
            loss = loss + aux_loss_coef * even_share(scores.aux_loss, batch.totals)
    entropy = None if entropy_coef == 0 else scores.entropy
    return PolicyLoss(loss, metrics, (_token_terms(scores.logprobs, terms, kl, per_token, entropy),))


def _token_terms(
    logprobs: torch.Tensor,
    terms: PolicyTerms,
    kl: torch.Tensor | None,
    per_token: torch.Tensor,
    entropy: torch.Tensor | None,
) -> TokenTerms:
    """The terms of the loss, in the order in which they follow from each other."""
    batch, correction = terms.batch, terms.correction
    values = {
        "advantage": terms.token_advantages,
        "logprob": logprobs,
        "old_logprob": batch.old_logprobs,
        "ref_logprob": None if kl is None else batch.ref_logprobs,
        "ratio": terms.token_ratio,
        "importance_sampling_ratio": None if correction is None else broadcast_to_tokens(correction, batch),
        "kl": kl,
        "loss": per_token,
        "entropy": entropy,
    }
    given = {name: value.detach() for name, value in values.items() if value is not None}
    return TokenTerms(batch.step_row, batch.offsets, batch.trained, given)


def _terms(scores: TokenScores, batch: Batch, options: PolicyOptions, near: torch.Tensor | None) -> PolicyTerms:
    method = find_method(options.loss_type)
    log_ratio = policy_log_ratio(scores.logprobs, batch.old_logprobs, batch)
    correction = None
    if options.mismatch is not None and batch.sampling_logprobs is not None:
        old = scores.logprobs if batch.old_logprobs is None else batch.old_logprobs
        correction = mismatch_ratio(old, batch.sampling_logprobs, batch, options.mismatch)
    kept = _high_entropy(scores.entropy, batch)
    if near is not None:
        kept = kept & near
    if batch.selected is not None and method.leaves_out_selected:
        kept = kept & ~batch.selected
    threshold = options.off_policy_mask_threshold
    if threshold is not None:
        kept = kept & _small_drift(scores.logprobs, batch, threshold)
    if correction is not None and not method.folds_mismatch:
        kept = kept & (broadcast_to_tokens(correction, batch) != 0)
    gap = None if options.beta == 0 else _reference_gap(scores, batch, options)
    log_level_ratio = at_level(log_ratio, batch, options.importance_sampling_level)
    ratio = policy_ratio(log_level_ratio, _where_unbounded(log_level_ratio, kept, gap, batch, options))
    return PolicyTerms(
        batch,
        where_trained(scores.logprobs, batch),
        log_ratio,
        log_level_ratio,
        ratio,
        kept,
        gap,
        correction,
        token_ratio=broadcast_to_tokens(ratio, batch),
        token_advantages=token_advantages(batch),
    )


def _where_unbounded(
    log_ratio: PerToken | PerRow,
    kept: torch.Tensor,
    gap: torch.Tensor | None,
    batch: Batch,
    options: PolicyOptions,
) -> torch.Tensor | None:
    """Where the loss grows with the ratio without a bound: a bool of the ratio's shape, None for nowhere."""
    where, method = None, find_method(options.loss_type)
    if method.grows_with_ratio == "always":
        where = kept & (token_advantages(batch) != 0)
    elif method.grows_with_ratio == "negative" and (options.delta is None or "delta" not in method.reads):
        where = kept & (token_advantages(batch) < 0)
    if gap is not None and options.use_bias_correction_kl:
        where = gap != 0 if where is None else where | (gap != 0)
    if where is None or isinstance(log_ratio, PerToken):
        return where
    return row_sum(where.float(), batch) > 0


def _high_entropy(entropy: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(L,) bool: loss tokens, only the most uncertain ones if the totals have a threshold."""
    threshold = batch.totals.entropy_threshold
    return batch.trained if threshold is None else high_entropy_keep(entropy, batch, threshold)


def _small_drift(logprobs: torch.Tensor, batch: Batch, threshold: float) -> torch.Tensor:
    """(L,) bool: tokens of the sequences that the off-policy mask keeps."""
    behaviour = batch.old_logprobs if batch.sampling_logprobs is None else batch.sampling_logprobs
    if behaviour is None:
        return batch.trained
    return off_policy_keep(where_trained(logprobs, batch), behaviour, batch, threshold)


def _near_sampler(logprobs: torch.Tensor, batch: Batch, options: PolicyOptions) -> torch.Tensor:
    """(L,) bool: tokens that the off-policy mask keeps; a token whose sampler log-prob is NaN counts as no drift."""
    behaviour = batch.old_logprobs if batch.sampling_logprobs is None else batch.sampling_logprobs
    if behaviour is None:
        return batch.trained
    mask = find_mask(str(options.off_policy_mask))
    settings = options.mask_settings or (None if mask.settings is None else mask.settings())
    return broadcast_to_tokens(mask.keep(drift(logprobs, behaviour, batch), batch, settings), batch)


def _reference_gap(scores: TokenScores, batch: Batch, options: PolicyOptions) -> torch.Tensor:
    """(L,) log-prob of the reference less that of the policy. Differentiable."""
    if batch.ref_logprobs is None:
        raise ValueError(
            f"beta={options.beta} needs the reference model's log-probs, but the batch has none; "
            "set ref_logprobs, or beta=0"
        )
    return reference_gap(scores.logprobs, batch.ref_logprobs, batch)


def _entropy_share(entropy: torch.Tensor, batch: Batch) -> torch.Tensor:
    """() share of the step's mean entropy (nats) over the tokens kept. Differentiable."""
    totals = batch.totals
    count = totals.tokens
    if totals.entropy_threshold is not None:
        if totals.entropy_tokens is None:
            raise ValueError(
                "the step's totals have an entropy_threshold but entropy_tokens=None, so the bonus has no denominator; "
                "set entropy_tokens to the step's loss tokens at or above the threshold"
            )
        count = totals.entropy_tokens
    kept = _high_entropy(entropy, batch)
    return token_mean_share(torch.where(kept, entropy, torch.zeros_like(entropy)), batch, count)


def _check_shapes(scores: TokenScores, batch: Batch) -> None:
    expected = (batch.num_tokens,)
    if scores.logprobs.shape != expected or scores.entropy.shape != expected:
        raise ValueError(
            f"scores of shapes {tuple(scores.logprobs.shape)} and {tuple(scores.entropy.shape)} do not fit a batch of "
            f"{batch.num_tokens} completion tokens; give one log-prob and one entropy a token"
        )
