"""LoRA adapters as vLLM loads them: from a folder, up to a rank that is fixed when vLLM starts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # a server does not load the modeling code
    from groupgrad.models.weights import AdapterFiles

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


def lora_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM for an adapter of this rank. ValueError if there is none."""
    for size in LORA_RANKS:
        if rank <= size:
            return size
    raise ValueError(
        f"the adapter has rank {rank}, but vLLM takes adapters up to rank {LORA_RANKS[-1]}; merge it into the weights"
    )


def adapter_bytes(files: AdapterFiles, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Contents of `adapter_config.json` and `adapter_model.safetensors`, with tensors in vLLM's dtype."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in files.tensors.items()}
    return json.dumps(files.config, default=str).encode(), save(tensors)


@contextmanager
def lora_request(weight_version: str, number: int, config: bytes, tensors: bytes) -> Iterator[Any]:
    """vLLM's request for an adapter, which needs a `number` of its own; its files are removed afterwards.

    vLLM reads them when it loads the adapter, and then keeps that in memory.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="groupgrad-adapter-") as folder:
        (Path(folder) / "adapter_config.json").write_bytes(config)
        (Path(folder) / "adapter_model.safetensors").write_bytes(tensors)
        yield LoRARequest(weight_version, number, folder)
