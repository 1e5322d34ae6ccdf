"""Subclasses of vLLM's weight-transfer classes for groupgrad's backend. Only processes with vLLM import this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
)

from groupgrad.integrations.vllm.transfer_plugin import BACKEND
from groupgrad.integrations.vllm.weight_receiver import WeightReceiver
from groupgrad.integrations.vllm.weight_sender import WeightSender


class VerifiedWeightTransfer(WeightReceiver, WeightTransferEngine):
    """Receives weights over a process group, in shared memory, as bytes or by reference, and verifies them."""


@dataclass
class SenderInit(TrainerInitInfo):
    """Argument of `WeightTransferTrainerFactory.trainer_init` that picks `VerifiedWeightSender`; `rank` is the trainer
    process's, and rank 0 sends."""

    backend: ClassVar[str] = BACKEND


class VerifiedWeightSender(WeightSender, TrainerWeightTransferEngine):
    """Sends all weights of a source, and has the workers verify what arrived."""

    init_info_cls = SenderInit
