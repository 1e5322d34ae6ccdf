"""A vLLM logits processor that changes nothing and takes its time while a file exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

SLOW_FILE = "GROUPGRAD_TEST_SLOW_FILE"
"""Variable with the path of the file."""
STEP_S = 0.2
"""Seconds that a step then takes at least."""


class SlowedSampling(LogitsProcessor):
    """Loaded by vLLM's worker: rows stay under way however busy the machine is, until a test lets them go on."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._file = Path(os.environ[SLOW_FILE])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits themselves."""
        if self._file.exists():
            time.sleep(STEP_S)
        return logits

    def is_argmax_invariant(self) -> bool:
        """False: vLLM would skip it for greedy rows."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """It keeps nothing of the rows."""
