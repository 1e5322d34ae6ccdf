"""Entropy rules: the threshold that selects the most uncertain tokens, and the adaptation of the entropy bonus."""

from __future__ import annotations

import math

import torch


def entropy_threshold(entropies: torch.Tensor, keep: float) -> float:
    """The entropy (nats) from which a token belongs to the `keep` most uncertain share of all loss tokens of a step.

    The (1 - keep) quantile of a 1-D tensor of any size and any float type, linearly interpolated; `keep` 1 gives the
    minimum, 0 the maximum, so that only the most uncertain token stays. Inf, which keeps nothing, if there are no
    tokens. Waits for the device; no gradient. Raises ValueError for `keep` outside [0, 1].
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"cannot keep a share of {keep} of the tokens; set top_entropy_quantile from 0 to 1")
    count = entropies.numel()
    if count == 0:
        return math.inf
    position = (1 - keep) * (count - 1)
    if abs(position - round(position)) < 1e-9 * count:
        # 1 - keep is not exact in binary; a position a hair above a token would drop that token.
        position = float(round(position))
    low = math.floor(position)
    ordered = entropies.detach().flatten().sort().values
    below, above = float(ordered[low]), float(ordered[min(low + 1, count - 1)])
    return below + (above - below) * (position - low)


def next_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float, minimum: float, maximum: float
) -> float:
    """The bonus coefficient for the next step: up by `delta` if `entropy` is at most `target`, else down by `delta`.

    `entropy` (nats) is the step's mean over all loss tokens of all ranks; NaN (no tokens) leaves the coefficient as it
    is. The result is within [minimum, maximum]. Source: arXiv:2505.22312, adaptive entropy control.
    """
    if not math.isnan(entropy):
        coef = coef + delta if entropy <= target else coef - delta
    return min(max(coef, minimum), maximum)


def applied_entropy_coef(coef: float, last_entropy: float | None, *, target: float) -> float:
    """The coefficient that the adaptive bonus applies now: `coef` if the last step's entropy was at most `target`.

    Otherwise 0, as in the first step (`last_entropy` None). Source: arXiv:2505.22312, adaptive entropy control.
    """
    return coef if last_entropy is not None and last_entropy <= target else 0.0
