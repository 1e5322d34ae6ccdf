"""The options of the objective: literal names and small frozen records, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

RatioLevel = Literal["token", "sequence"]
MismatchMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(slots=True, frozen=True)
class MismatchOptions:
    """Bounds of the ratio between trainer and sampling engine.

    The first half of `mode` is the level (one ratio a token, or one a sequence: the product of its tokens'), the second
    what happens to a ratio outside the bounds: `truncate` moves it to the bound, `mask` sets it to 0. None is "no
    bound". Source: truncated importance sampling (fengyao.notion.site/off-policy-rl) and its masked form (IcePop).
    Raises ValueError for an unknown mode and for bounds that leave no ratio.
    """

    mode: MismatchMode = "sequence_mask"
    clip_min: float | None = None
    clip_max: float | None = 3.0

    def __post_init__(self) -> None:
        one_of("mismatch mode", self.mode, get_args(MismatchMode))
        low = 0.0 if self.clip_min is None else self.clip_min
        high = math.inf if self.clip_max is None else self.clip_max
        if not 0 <= low <= high or high == 0:
            raise ValueError(
                f"clip_min={self.clip_min} and clip_max={self.clip_max} leave no importance ratio; "
                "set 0 <= clip_min <= clip_max with clip_max > 0, or None for no bound"
            )


@dataclass(slots=True, frozen=True)
class PolicyOptions:
    """Everything that the policy loss depends on besides its tensors. Raises ValueError for unknown names."""

    loss_type: str = "dapo"
    """A name that `methods.find_method` knows: which surrogate, and which reduction."""
    settings: Any = None
    """The method's own settings (`Method.settings`), if it has any; None: their defaults."""
    importance_sampling_level: RatioLevel = "token"
    """One policy ratio a token, or one a sequence (geometric mean of its tokens')."""
    epsilon: float = 0.2
    """Lower clip width: the ratio is clipped at 1 - epsilon."""
    epsilon_high: float = 0.2
    """Upper clip width (clipped at 1 + epsilon_high); for `cispo` the absolute ceiling of the ratio."""
    delta: float | None = None
    """Ceiling of the ratio on the unclipped side of the clipped surrogate; None is "no ceiling"."""
    beta: float = 0.0
    """Weight of the KL term; 0 needs no reference log-probs."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate by the policy ratio."""
    max_completion_length: int = 256
    """The constant of `dr_grpo`, in tokens."""
    sapo_temperature_neg: float = 1.05
    """Gate temperature of `sapo` where the advantage is not positive."""
    sapo_temperature_pos: float = 1.0
    """Gate temperature of `sapo` where the advantage is positive."""
    vespo_k_pos: float = 2.0
    """Power of the sequence weight in `vespo` where the advantage is not negative."""
    vespo_lambda_pos: float = 3.0
    """Decay of the sequence weight in `vespo` where the advantage is not negative."""
    vespo_k_neg: float = 3.0
    """Power of the sequence weight in `vespo` where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """Decay of the sequence weight in `vespo` where the advantage is negative."""
    off_policy_mask_threshold: float | None = None
    """Mean drift (nats a token) beyond which a sequence of negative advantage is left out; None keeps all."""
    off_policy_mask: str | None = None
    """A name that `masks.find_mask` knows: which tokens or sequences are left out for their drift from the sampler."""
    mask_settings: Any = None
    """The mask's own settings (`Mask.settings`), if it has any; None: their defaults."""
    top_entropy_quantile: float = 1.0
    """Share of tokens, the most uncertain ones, that the policy term keeps: `entropy_threshold` makes the threshold of
    the step's totals from it. The loss itself reads only that threshold; None there keeps all tokens."""
    mismatch: MismatchOptions | None = None
    """Correction of the mismatch between trainer and sampler; None for no correction."""

    def __post_init__(self) -> None:
        one_of("importance_sampling_level", self.importance_sampling_level, get_args(RatioLevel))


def one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of the `choices`."""
    if value not in choices:
        names = ", ".join(repr(name) for name in choices)
        raise ValueError(f"{what}={value!r} is not known; set one of {names}")
