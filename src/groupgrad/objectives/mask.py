"""The parts of an off-policy mask: how far the policy is from the sampler, and the tokens that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from groupgrad.batch import Batch
from groupgrad.objectives.ragged import PerRow, PerToken, row_sum
from groupgrad.objectives.registry import make_settings


@dataclass(slots=True, frozen=True)
class Mask:
    """Definition of an `off_policy_mask`."""

    keep: Callable[[torch.Tensor, Batch, Any], PerToken | PerRow]
    """(L,) log-ratio (nats) of the policy to the sampler, no gradient, 0 outside the loss tokens; the batch; its
    settings -> bool, the tokens or rows that it keeps."""
    settings: type[Any] | None = None
    """A frozen dataclass of settings of its own, which `off_policy_mask_settings` fills. `registry.setting` gives one
    its range; a `__post_init__` raises ValueError, with what to set, for values that do not go together."""
    cutoff: Callable[[torch.Tensor, Any], float] | None = None
    """Log-ratios of all loss tokens of the step, its settings -> what `StepTotals.drift_cutoff` is set to before the
    step. Needs a forward pass wherever the sampler's log-probs are not those of the present policy."""

    def make_settings(self, values: Mapping[str, Any]) -> Any:
        """The settings with these values; None for a mask without any. ValueError for others than it has."""
        return make_settings(self.settings, values, option="off_policy_mask_settings", owner="off_policy_mask")


LEVELS = ("token", "sequence_mean", "sequence_sum", "sequence_max")


def at_level(values: torch.Tensor, batch: Batch, level: str) -> PerToken | PerRow:
    """(L,) values of tokens, or (B,) their mean, sum or largest over the loss tokens of each row; 0 without any."""
    if level == "token":
        return PerToken(values)
    if level == "sequence_max":
        zeros = torch.zeros(batch.num_rows, dtype=values.dtype, device=values.device)
        rows = batch.row_of_token[batch.trained]
        return PerRow(zeros.scatter_reduce(0, rows, values[batch.trained], "amax", include_self=False))
    total = row_sum(values, batch)
    return PerRow(total if level == "sequence_sum" else total / batch.loss_tokens.clamp(min=1))
