"""Plugin of vLLM that adds groupgrad's backend to its registry of weight transfers.

vLLM loads it in each of its processes, from the entry point `vllm.general_plugins` of the installed package.
"""

from __future__ import annotations

import contextlib

from groupgrad.integrations.vllm.wire import BACKEND


def register() -> None:
    """Adds the backend: `WeightReceiver` as a subclass of vLLM's base class."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from groupgrad.integrations.vllm.weight_receiver import WeightReceiver

    class VerifiedWeightTransfer(WeightReceiver, WeightTransferEngine):
        """Receives weights over a process group, in shared memory or by reference, and verifies them."""

    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine(BACKEND, VerifiedWeightTransfer)
