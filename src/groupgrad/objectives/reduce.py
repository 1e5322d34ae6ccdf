"""Reduces (L,) token losses to this micro-batch's share of the step's loss; all scaling happens here.

The sum of the shares over a rank's micro-batches, then the mean over ranks (`trainer.gradients.GradientSync`, FSDP or
DeepSpeed average), is the loss that the papers write, over the rows and tokens of the whole optimizer step. `bnpo`
alone is local by definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives.ragged import row_mean, where_trained

Reduction = Literal["sequence_mean", "sequence_sum", "local_token_mean", "token_mean", "constant"]


def token_mean_share(per_token: torch.Tensor, batch: Batch, step_tokens: float) -> torch.Tensor:
    """() share of the mean over all `step_tokens` tokens of the step. Differentiable."""
    return batch.totals.world_size * where_trained(per_token, batch).sum() / max(1.0, step_tokens)


def even_share(value: torch.Tensor, totals: StepTotals) -> torch.Tensor:
    """() share of the mean over micro-batches, for what is measured once a micro-batch. Differentiable."""
    return value / totals.micro_batches


def _sequence_mean(per_token: torch.Tensor, batch: Batch, constant: int) -> torch.Tensor:
    return batch.totals.world_size * row_mean(per_token, batch).sum() / max(1.0, batch.totals.rows)


def _sequence_sum(per_token: torch.Tensor, batch: Batch, constant: int) -> torch.Tensor:
    return batch.totals.world_size * where_trained(per_token, batch).sum() / max(1.0, batch.totals.rows)


def _local_token_mean(per_token: torch.Tensor, batch: Batch, constant: int) -> torch.Tensor:
    # The `bnpo` of TRL, whose documentation names no paper: the mean over the loss tokens of the micro-batch.
    return even_share(where_trained(per_token, batch).sum() / batch.loss_tokens.sum().clamp(min=1), batch.totals)


def _token_mean(per_token: torch.Tensor, batch: Batch, constant: int) -> torch.Tensor:
    return token_mean_share(per_token, batch, batch.totals.tokens)


def _constant(per_token: torch.Tensor, batch: Batch, constant: int) -> torch.Tensor:
    return batch.totals.world_size * where_trained(per_token, batch).sum() / (max(1.0, batch.totals.rows) * constant)


REDUCTIONS: dict[Reduction, Callable[[torch.Tensor, Batch, int], torch.Tensor]] = {
    "sequence_mean": _sequence_mean,
    "sequence_sum": _sequence_sum,
    "local_token_mean": _local_token_mean,
    "token_mean": _token_mean,
    "constant": _constant,
}
"""Each gives () a micro-batch's share of the step's loss from its (L,) token losses, the batch and
`max_completion_length`. Differentiable; 0 without tokens. Rows that are empty or masked out count among the step's
rows; only loss tokens count among its tokens."""
