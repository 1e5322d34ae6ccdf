"""Resumes models whose checkpoints have other weight names than the model in memory.

transformers 5 saves some models (Qwen2-VL) under their published weight names. `from_pretrained` maps these back, but
`Trainer` does not when it resumes: it warns and continues with the weights in memory. This module can go when `Trainer`
loads its checkpoints with `from_pretrained`'s name mapping.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def load_renamed(model: Any, folder: str | Path) -> bool:
    """Loads the checkpoint in `folder` into `model` if its weights have other names than the model's; True if so."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "is_quantized", False):
        return False
    saved = _saved_names(Path(folder))
    if saved <= set(model.state_dict()):
        return False
    # Initialising a model draws random numbers, which must not change a seeded run.
    with torch.random.fork_rng():
        loaded = type(model).from_pretrained(folder, config=model.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return True


def _saved_names(folder: Path) -> set[str]:
    """Names of the weights in a checkpoint; empty without a safetensors file."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SAFE_WEIGHTS_NAME).is_file():
        return set()
    with safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt") as file:
        return set(file.keys())
