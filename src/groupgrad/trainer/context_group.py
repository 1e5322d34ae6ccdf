"""Forms groups of ranks that train rows together (`context_parallel_size`), or says why a model cannot run on them."""

from __future__ import annotations

from torch import nn

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.errors import ConfigError
from groupgrad.modeling.scoring.attention import attention_dropout, pretrained
from groupgrad.modeling.scoring.recurrent_layers import recurrent_classes
from groupgrad.modeling.self_check import LayoutReport
from groupgrad.modeling.vlm import is_multimodal


def context_group(
    config: GRPOConfig, model: nn.Module, report: LayoutReport, *, aux_loss: bool
) -> dist.RankGroup | None:
    """This rank's group; None if each rank trains rows of its own. Collective with groups.

    ConfigError if the tokens of a row of `model` cannot be cut over ranks.
    """
    size = config.context_parallel_size
    if size == 1:
        return None
    reason = _obstacle(model, report, aux_loss=aux_loss)
    if reason is not None:
        raise ConfigError([f"context_parallel_size={size} cuts the tokens of a row over processes, and {reason}"])
    return dist.consecutive_groups(size, timeout_s=config.ddp_timeout)


def _obstacle(model: nn.Module, report: LayoutReport, *, aux_loss: bool) -> str | None:
    """Why the tokens of `model` cannot be on several ranks, and what to set; None if they can."""
    inner = pretrained(model)
    if is_multimodal(model):
        return "this model takes images, whose tokens must stay together. Set context_parallel_size=1"
    if inner is not None and recurrent_classes(inner):
        return "this model has recurrent layers, which pass a state on from token to token. Set context_parallel_size=1"
    if report.layout == "dense":
        return f"this model runs on padded rows only: {report.reason}. Set context_parallel_size=1"
    if dropout := attention_dropout(model):
        return f"this model has an attention dropout of {dropout:g}. Set disable_dropout=True"
    if aux_loss:
        return "this model's load-balancing loss counts all tokens of a pass. Set router_aux_loss_coef=0"
    return None
