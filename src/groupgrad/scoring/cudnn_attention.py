"""Turns cuDNN's attention off in PyTorch while the input lengths change from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turns cuDNN's attention off inside the context, which PyTorch prefers on Hopper and Blackwell.

    cuDNN builds an execution for each new shape, in about half a second on a B200 (modelscope/FunASR, issue 3704; not
    measured here), and prompts and rows have many lengths. A backward pass has to run inside the same context: a
    checkpointed layer that is computed again has to take the same kernel.
    Nothing changes where other fused kernels are off.
    """
    backends = torch.backends.cuda
    if not (backends.cudnn_sdp_enabled() and backends.flash_sdp_enabled()):
        yield
        return
    backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(True)
