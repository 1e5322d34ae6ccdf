"""Sampler/trainer mismatch: the ratio of the probabilities that trainer and sampling engine give a sampled token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric, maximum
from groupgrad.objectives.measure import counted, maximum_where, mean_where, minimum_where
from groupgrad.objectives.options import MismatchOptions
from groupgrad.objectives.ragged import PerRow, PerToken, broadcast_to_tokens, row_sum

FRAC_DROPPED_ROWS = "sampling/frac_dropped_rows"
FRAC_DROPPED_TOKENS = "sampling/frac_dropped_tokens"


@dataclass(slots=True, frozen=True)
class MismatchGap:
    """Difference between the log-probs of trainer and sampler."""

    values: torch.Tensor
    """(L,) trainer minus sampler log-prob, nats; 0 where it was not measured."""
    measured: torch.Tensor
    """(L,) bool, loss tokens for which the engine reported a finite log-prob."""


def mismatch_gap(old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, batch: Batch) -> MismatchGap:
    """The log-prob gap of every token between trainer, (L,), and sampling engine, (L,). No gradient."""
    gap = old_logprobs.detach() - sampling_logprobs
    measured = batch.trained & sampling_logprobs.isfinite()
    return MismatchGap(torch.where(measured, gap, torch.zeros_like(gap)), measured)


def mismatch_ratio(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, batch: Batch, options: MismatchOptions
) -> PerToken | PerRow:
    """The bounded importance ratio rho of each token or sequence, by which the policy term is multiplied.

    0 only where a mask drops it, however small the ratio; 1 (before the bounds) where nothing was measured. No gradient
    flows through it.
    """
    ratio = _unbounded(mismatch_gap(old_logprobs, sampling_logprobs, batch), batch, options)
    return type(ratio)(_bounded(ratio.values.clamp(min=torch.finfo(ratio.values.dtype).tiny), options))


def _unbounded(gap: MismatchGap, batch: Batch, options: MismatchOptions) -> PerToken | PerRow:
    if options.mode in ("token_truncate", "token_mask"):
        return PerToken(gap.values.exp())
    return PerRow(row_sum(gap.values, batch).exp())


def _bounded(ratio: torch.Tensor, options: MismatchOptions) -> torch.Tensor:
    low, high = _bounds(options)
    if options.mode in ("token_truncate", "sequence_truncate"):
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def _bounds(options: MismatchOptions) -> tuple[float, float]:
    low = 0.0 if options.clip_min is None else options.clip_min
    return low, float("inf") if options.clip_max is None else options.clip_max


def _dropped(ratio: PerToken | PerRow, batch: Batch, options: MismatchOptions) -> torch.Tensor:
    """(L,) bool, loss tokens that a mask takes out of the policy term."""
    low, high = _bounds(options)
    values = broadcast_to_tokens(ratio, batch)
    return batch.trained & ((values < low) | (values > high)) & ("mask" in options.mode)


def mismatch_metrics(batch: Batch, options: MismatchOptions, old_logprobs: torch.Tensor) -> dict[str, Metric]:
    """The `sampling/...` metrics of a batch: the absolute log-prob gap (nats), the ratio, and what a mask drops.

    The gap is taken over loss tokens with a finite sampler log-prob; the ratio over loss tokens or, in sequence modes,
    over rows that have any. In `truncate` modes it is the ratio after its bounds, in `mask` modes the one before the
    mask, since a ratio of 0 would say nothing of how far the two are apart. `frac_dropped_tokens` is the share of loss
    tokens that the mask drops, `frac_dropped_rows` the share of rows of which it drops all. `old_logprobs` (L,) is the
    trainer's view at sampling time. Empty if the engine reported no log-probs at all.
    """
    if batch.sampling_logprobs is None:
        return {}
    gap = mismatch_gap(old_logprobs, batch.sampling_logprobs, batch)
    distance = gap.values.abs()
    unbounded = _unbounded(gap, batch, options)
    ratio = unbounded.values if "mask" in options.mode else _bounded(unbounded.values, options)
    counts = counted(unbounded, batch)
    dropped = _dropped(unbounded, batch, options)
    kept_in_row = row_sum((batch.trained & ~dropped).float(), batch)
    return {
        "sampling/sampling_logp_difference/mean": mean_where(distance, gap.measured),
        "sampling/sampling_logp_difference/max": maximum_where(distance, gap.measured),
        "sampling/importance_sampling_ratio/min": minimum_where(ratio, counts),
        "sampling/importance_sampling_ratio/mean": mean_where(ratio, counts),
        "sampling/importance_sampling_ratio/max": maximum_where(ratio, counts),
        FRAC_DROPPED_ROWS: mean_where((kept_in_row == 0).float(), batch.loss_tokens > 0),
        FRAC_DROPPED_TOKENS: mean_where(dropped.float(), batch.trained),
    }


def logp_mismatch(logprobs: torch.Tensor, batch: Batch, rows: torch.Tensor) -> Metric:
    """The largest distance (nats) between (L,) log-probs of the policy and those that the engine reported.

    Over the loss tokens of `rows` (B,) bool that have a finite report; nothing measured if there are none.
    """
    if batch.sampling_logprobs is None:
        return maximum(float("nan"))
    gap = mismatch_gap(logprobs, batch.sampling_logprobs, batch)
    return maximum_where(gap.values.abs(), gap.measured & rows[batch.row_of_token])
