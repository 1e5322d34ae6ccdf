"""Forms groups of ranks that train rows together (`context_parallel_size`), or says why a model cannot run on them."""

from __future__ import annotations

from torch import nn

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.errors import ConfigError
from groupgrad.scoring.attention import whole_rows_reason
from groupgrad.scoring.self_check import LayoutReport


def context_group(
    config: GRPOConfig, model: nn.Module, report: LayoutReport, *, aux_loss: bool
) -> dist.RankGroup | None:
    """This rank's group; None if each rank trains rows of its own. Collective with groups.

    ConfigError if the tokens of a row of `model` cannot be cut over ranks.
    """
    size = config.context_parallel_size
    if size == 1:
        return None
    padded_because = str(report.reason) if report.layout == "dense" else None
    reason = whole_rows_reason(model, padded_because, aux_loss=aux_loss)
    if reason is not None:
        raise ConfigError([f"context_parallel_size={size} cuts the tokens of a row over processes, and {reason}"])
    return dist.consecutive_groups(size, timeout_s=config.ddp_timeout)
