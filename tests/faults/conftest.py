"""A small run and its checkpoints, broken on purpose by the tests of this folder."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import repeatable_runs
import torch
from small_runs import weights

from groupgrad import GRPOTrainer


def make_trainer(output_dir: Path, **settings: Any) -> GRPOTrainer:
    """A trainer of three fast steps, equal for equal settings, that saves each of them."""
    return repeatable_runs.make_trainer(output_dir, **{"save_steps": 1, "max_steps": 3, **settings})


@pytest.fixture(scope="session")
def new_trainer() -> Callable[..., GRPOTrainer]:
    """`new_trainer(output_dir, **settings)`."""
    return make_trainer


@pytest.fixture(scope="session")
def weights_of() -> Callable[[GRPOTrainer], torch.Tensor]:
    """`weights_of(trainer)`: all parameters, one after the other."""
    return lambda trainer: weights(trainer.model)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    """The folder and the trainer of a run of three steps that nothing disturbed, with three checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    trainer = make_trainer(folder)
    trainer.train()
    return folder, trainer


@pytest.fixture
def full_from() -> Iterator[Callable[[int | None], None]]:
    """`full_from(num_bytes)`: from now on no file can have more bytes, as on a full disk; None ends that."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(num_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    yield limit
    limit(None)
