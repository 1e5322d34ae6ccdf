"""Warns when the log-probs of sampling and of training differ by more than rounding explains."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from groupgrad.metrics import Metric
from groupgrad.models.rounding import Rounding
from groupgrad.objectives import FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS
from groupgrad.trainer.sampler_logprobs import MISMATCH

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 1e-4
_GROWTH = 10.0

MUCH_DROPPED = 0.25
"""Share of a step's rows or tokens; dropping more is worth a warning."""


class MismatchWatch:
    """Warns of this rank's step metrics: each kind of warning once, and again when its cause has grown.

    A gap above `tolerance` (nats) is warned of again for each tenfold growth. A mismatch correction that drops more
    than a quarter of a step is warned of again when it drops more than half. `is_native` tells of the engine.
    """

    def __init__(self, tolerance: float, *, is_native: bool = True):
        self._tolerance, self._warn_above, self._is_native = tolerance, tolerance, is_native
        self._warn_above_dropped = MUCH_DROPPED

    def end_step(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Reads the metrics of an optimizer step, and warns if the mismatch exceeds rounding."""
        numbers = {key: metrics[key].read() for key in (MISMATCH, *_DROPPED) if key in metrics}
        gap, shares = numbers.get(MISMATCH), [numbers.get(key) or 0.0 for key in _DROPPED]
        if gap is not None and gap > self._warn_above:
            self._warn_above = gap * _GROWTH
            self._warn_of_gap(step, gap)
        if max(shares) > self._warn_above_dropped:
            self._warn_above_dropped = 2 * MUCH_DROPPED if max(shares) <= 2 * MUCH_DROPPED else 1.0
            self._warn_of_dropped(step, shares)

    def _warn_of_gap(self, step: int, gap: float) -> None:
        logger.warning(
            "step %d: training gives a sampled token a log-prob that is %.3g nats away from the one that sampling gave "
            "it (sampling/logp_mismatch), where rounding explains up to about %.1g; so the text is not quite the "
            "policy's%s",
            step,
            gap,
            self._tolerance,
            ". rollout_engine='transformers' samples in another way" if self._is_native else "",
        )

    def _warn_of_dropped(self, step: int, shares: list[float]) -> None:
        logger.warning(
            "step %d: the correction of the difference between vLLM and training drops %.0f %% of the completions and "
            "%.0f %% of the tokens, which then teach nothing (sampling/frac_dropped_rows, "
            "sampling/frac_dropped_tokens). Raise vllm_importance_sampling_clip_max, use "
            "vllm_importance_sampling_mode='token_truncate' (a product over long completions soon leaves its bounds), "
            "or let both compute alike: the same precision in vLLM and training, rollout_ahead=0",
            step,
            100 * shares[0],
            100 * shares[1],
        )


_DROPPED = (FRAC_DROPPED_ROWS, FRAC_DROPPED_TOKENS)


def tolerance(rounding: Rounding, temperature: float) -> float:
    """The gap (nats) that rounding explains at this sampling temperature.

    1e-4 in float32. Half precision: 64 times the distance of 1.0 to the next number (0.5 in bfloat16, 0.06 in float16
    and TF32), which is four roundings of a logit of size 16 to 32. Temperatures below 1 multiply both.
    """
    return max(FLOAT32_TOLERANCE, 64 * rounding.eps) / min(temperature, 1.0)
