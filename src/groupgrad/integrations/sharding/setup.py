"""Converts a configuration into what shards a model, and forms the groups of ranks that train rows together."""

from __future__ import annotations

import torch
from torch import nn

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.config.launcher import fsdp_layer_classes, fsdp_offloads, fsdp_settings
from groupgrad.errors import ConfigError
from groupgrad.integrations.sharding.fsdp import FSDPOptions
from groupgrad.scoring.attention import whole_rows_reason
from groupgrad.scoring.self_check import LayoutReport


def fsdp_options(config: GRPOConfig) -> FSDPOptions:
    """Returns how FSDP shards the policy."""
    in_bf16 = getattr(config, "mixed_precision", "bf16" if config.bf16 else "no") == "bf16"
    return FSDPOptions(
        layer_classes=fsdp_layer_classes(config),
        reshard_after_forward=fsdp_settings(config).get("reshard_after_forward", True) is not False,
        compute_dtype=torch.bfloat16 if in_bf16 else None,
        cpu_offload=fsdp_offloads(config),
    )


def context_group(config: GRPOConfig, model: nn.Module, report: LayoutReport, *, aux_loss: bool) -> dist.RankGroup:
    """The group of ranks that train rows together with this one (`context_parallel_size`). Collective.

    ConfigError if the tokens of a row of `model` cannot be cut over ranks.
    """
    size = config.context_parallel_size
    padded_because = str(report.reason) if report.layout == "dense" else None
    reason = whole_rows_reason(model, padded_because, aux_loss=aux_loss)
    if reason is not None:
        raise ConfigError([f"context_parallel_size={size} cuts the tokens of a row over processes, and {reason}"])
    return dist.consecutive_groups(size, timeout_s=config.ddp_timeout)
