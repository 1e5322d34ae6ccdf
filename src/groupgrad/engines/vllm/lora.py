"""LoRA adapters as vLLM loads them: from a folder, into room that was made when it started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from groupgrad.modeling.weights import AdapterFiles

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of the room that vLLM has for adapters."""


def lora_rank(rank: int) -> int:
    """The smallest of vLLM's sizes that an adapter of this rank fits into. ValueError if there is none."""
    for size in LORA_RANKS:
        if rank <= size:
            return size
    raise ValueError(
        f"the adapter has rank {rank}, but vLLM takes adapters up to rank {LORA_RANKS[-1]}; merge it into the weights"
    )


def write_adapter(files: AdapterFiles, dtype: torch.dtype, folder: Path) -> None:
    """Make the folder, with the adapter in it as PEFT would save it, in vLLM's dtype."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(files.config, default=str))
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in files.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def lora_request(weight_version: str, number: int, folder: Path) -> Any:
    """vLLM's request for the adapter in the folder; it wants a new number for each."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(weight_version, number, str(folder))
