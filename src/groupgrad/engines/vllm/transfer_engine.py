"""groupgrad's backend for vLLM's weight transfer as vLLM's class. Only processes with vLLM import this module."""

from __future__ import annotations

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from groupgrad.engines.vllm.weight_receiver import WeightReceiver


class VerifiedWeightTransfer(WeightReceiver, WeightTransferEngine):
    """Receives weights over a process group, in shared memory, as bytes or by reference, and verifies them."""
