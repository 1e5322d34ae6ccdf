"""A watch on the distance between the log-probs of sampling and those of training."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from groupgrad.metrics import Metric, merge
from groupgrad.modeling.quantized import rounds_to_int8

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 1e-4
_GROWTH = 10.0

MUCH_DROPPED = 0.25
"""Share of a step's rows or tokens; dropping more is worth a warning."""


class MismatchWatch:
    """Warns when the two differ by more than rounding explains: once, and again for each tenfold growth."""

    def __init__(self, tolerance: float):
        self._tolerance, self._warn_above = tolerance, tolerance
        self._step: list[Metric] = []

    def observe(self, mismatch: Metric) -> None:
        """Take a micro-batch's largest gap (nats); does not wait for the device."""
        self._step.append(mismatch)

    def end_step(self, step: int) -> None:
        """Warn of this rank's largest gap of the step, if it is above what was warned of before."""
        largest = None
        for metric in self._step:
            largest = metric if largest is None else merge(largest, metric)
        self._step = []
        gap = None if largest is None else largest.read()
        if gap is None or gap <= self._warn_above:
            return
        self._warn_above = gap * _GROWTH
        logger.warning(
            "step %d: training gives a sampled token a log-prob that is %.3g nats away from the one that sampling gave "
            "it (sampling/logp_mismatch), where rounding explains up to about %.1g; old log-probs are those of "
            "sampling, so ratios are off by as much. rollout_engine='transformers' samples in the other way",
            step,
            gap,
            self._tolerance,
        )


class DropWatch:
    """Warns when the correction of the mismatch drops more than a quarter of a step: once, and again if it goes on to
    drop more than half."""

    def __init__(self) -> None:
        self._tokens: Metric | None = None
        self._rows: Metric | None = None
        self._warn_above = MUCH_DROPPED

    def observe(self, tokens: Metric, rows: Metric) -> None:
        """Take a micro-batch's shares of loss tokens and rows that were dropped; does not wait for the device."""
        self._tokens = tokens if self._tokens is None else merge(self._tokens, tokens)
        self._rows = rows if self._rows is None else merge(self._rows, rows)

    def end_step(self, step: int) -> None:
        """Warn of this rank's shares of the step, if one is above what was warned of before."""
        shares = [0.0 if metric is None else metric.read() or 0.0 for metric in (self._rows, self._tokens)]
        self._tokens = self._rows = None
        if max(shares) <= self._warn_above:
            return
        self._warn_above = 2 * MUCH_DROPPED if max(shares) <= 2 * MUCH_DROPPED else 1.0
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


def tolerance(dtypes: Iterable[torch.dtype], device: torch.device | str) -> float:
    """The gap (nats) that rounding explains in a model that computes in these types on this device.

    1e-4 in float32. Half precision: 64 times the distance of 1.0 to the next number (0.5 in bfloat16, 0.06 in float16),
    which is four roundings of a logit of size 16 to 32. Matrix products in TF32 round like float16.
    """
    eps = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    if torch.device(device).type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        eps.append(torch.finfo(torch.float16).eps)
    return max([FLOAT32_TOLERANCE, *(64 * value for value in eps)])


def computing_types(model: nn.Module, mixed_precision: str) -> set[torch.dtype]:
    """The floating-point types of the model's parameters, and the one of mixed precision ("bf16", "fp16").

    Layers that round to 8 bits count as bfloat16, which has as many.
    """
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    types = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    if rounds_to_int8(model):
        types.add(torch.bfloat16)
    return types if mixed is None else types | {mixed}


def has_dropout(model: nn.Module) -> bool:
    """True if the model computes at random in training mode, so that its scores are not those of sampling."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float) and value > 0:
                return True
    return False
