"""Weights of a checkpoint back into the model that saved them, where it saved them under other names.

transformers (5.0 on) gives the weights of some models, Qwen2-VL's for one, their published names when it saves them.
`from_pretrained` turns them back, but `Trainer` does not when it resumes: it warns and goes on with the weights that it
has. This can go when `Trainer` loads its checkpoints by `from_pretrained`'s rules.
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
    """Load the weights of the checkpoint in `folder` into `model`, on its devices and in its dtypes, if they have other
    names than the model's; whether that was so."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "is_quantized", False):
        return False
    stored = _names(Path(folder))
    if stored <= set(model.state_dict()):
        return False
    # A seeded run draws the same numbers whether or not a model is made meanwhile.
    with torch.random.fork_rng():
        twin = type(model).from_pretrained(folder, config=model.config, dtype=torch.float32)
    model.load_state_dict(twin.state_dict())
    return True


def _names(folder: Path) -> set[str]:
    """Names of the weights in a checkpoint; empty without a file of weights."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SAFE_WEIGHTS_NAME).is_file():
        return set()
    with safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt") as file:
        return set(file.keys())
