"""Weights and optimizer of a sharded run, as files of `torch.distributed.checkpoint`, one for each rank.

A checkpoint keeps them in the folder `sharded`. Any number of processes can load them, one process without shards too:
each reads the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from groupgrad import dist

FOLDER = "sharded"
"""Folder of a checkpoint that holds the files."""

_MODEL, _OPTIMIZER = "model", "optimizer"


def is_present(checkpoint: str | Path) -> bool:
    """True for a checkpoint whose weights are in such files."""
    return (Path(checkpoint) / FOLDER).is_dir()


def save_model(checkpoint: Path, model: nn.Module, *, trained_only: bool) -> None:
    """Writes this rank's part of the weights. Collective. With `trained_only` frozen parameters are left out."""
    _save(checkpoint / FOLDER / _MODEL, get_model_state_dict(model, options=_options(trained_only)))


def save_optimizer(checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
    """Writes this rank's part of the optimizer's state. Collective."""
    _save(checkpoint / FOLDER / _OPTIMIZER, get_optimizer_state_dict(model, _inner(optimizer)))


def load_model(checkpoint: str | Path, model: nn.Module, *, trained_only: bool) -> None:
    """Restores weights that `save_model` wrote with the same `trained_only`, on any number of processes. Collective."""
    state = get_model_state_dict(model, options=_options(trained_only))
    _load(Path(checkpoint) / FOLDER / _MODEL, state)
    set_model_state_dict(model, state, options=StateDictOptions(strict=not trained_only))


def load_optimizer(checkpoint: str | Path, model: nn.Module, optimizer: Any) -> None:
    """Restores what `save_optimizer` wrote, on any number of processes. Collective."""
    state = get_optimizer_state_dict(model, _inner(optimizer))
    _load(Path(checkpoint) / FOLDER / _OPTIMIZER, state)
    set_optimizer_state_dict(model, _inner(optimizer), state)


def _options(trained_only: bool) -> StateDictOptions:
    return StateDictOptions(ignore_frozen_params=trained_only)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer under accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _save(folder: Path, state: dict[str, Any]) -> None:
    if dist.is_main():
        folder.mkdir(parents=True, exist_ok=True)
    with _first_error_of_ranks():
        dcp.save(state, checkpoint_id=folder, no_dist=not torch_dist.is_initialized())


def _load(folder: Path, state: dict[str, Any]) -> None:
    with _first_error_of_ranks():
        dcp.load(state, checkpoint_id=folder, no_dist=not torch_dist.is_initialized())


@contextmanager
def _first_error_of_ranks() -> Iterator[None]:
    """Replaces torch's CheckpointException, which collects the errors of all ranks, by the first of these errors."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error
