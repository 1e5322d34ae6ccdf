"""LoRA adapters as vLLM loads them: from a folder, up to a rank that is fixed when vLLM starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # a server does not load the modeling code
    from groupgrad.modeling.weights import AdapterFiles

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


def lora_request(weight_version: str, number: int, parent: str, config: bytes, tensors: bytes) -> Any:
    """Write an adapter into a new folder of `parent`; returns vLLM's request for it, which needs its own `number`."""
    from vllm.lora.request import LoRARequest

    folder = Path(parent) / f"adapter-{number}"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    return LoRARequest(weight_version, number, str(folder))
