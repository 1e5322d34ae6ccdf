"""Plugin of vLLM that adds groupgrad's backend to its registries of weight transfers.

vLLM loads it in each of its processes, from the entry point `vllm.general_plugins` of the installed package.
"""

from __future__ import annotations

import contextlib
import json

BACKEND = "groupgrad"
"""Name of the backend, and of the plugin."""

TRANSFER_CONFIG = json.dumps({"backend": BACKEND})
"""Value of vLLM's `--weight-transfer-config`."""

FLAGS = ("--weight-transfer-config", TRANSFER_CONFIG, "--middleware", "groupgrad.integrations.vllm.server.Routes")
"""Arguments that make `vllm serve` a server for groupgrad's trainers."""


def register() -> None:
    """Adds the backend's two sides; their module is imported when a worker or a trainer needs it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    module = "groupgrad.integrations.vllm.transfer_engine"
    with contextlib.suppress(ValueError):  # they are registered
        WeightTransferEngineFactory.register_engine(BACKEND, module, "VerifiedWeightTransfer")
        WeightTransferTrainerFactory.register_engine(BACKEND, module, "VerifiedWeightSender")
