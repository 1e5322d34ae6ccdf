"""The state of a paused run that stays in memory, so that the run goes on without reading its checkpoint."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupgrad import dist


@dataclass(slots=True)
class KeptState:
    """The part of a checkpoint that a paused trainer loses unless it is kept here.

    Weights, gradient scaler and the optimizer's moments stay where they are. The trainer's next training makes a new
    schedule and new parts of the run, and other runs move the random streams of the process.
    """

    checkpoint: Path
    """Folder of the checkpoint that holds the same state."""
    run: dict[str, Any]
    """State of the run's parts, by name."""
    random_states: tuple[Any, ...]
    """Random states of Python, NumPy, PyTorch and the present CUDA device; None where no device is in use."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's settings of each group of parameters, the present learning rate among them."""
    schedule: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Any, checkpoint: Path) -> KeptState | None:
        """Copies the state while `checkpoint` is being written; None with several ranks, DeepSpeed or FSDP."""
        if dist.is_active() or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return None
        return cls(checkpoint, copy.deepcopy(trainer.run_state.states()), random_states())

    def fits(self, trainer: Any, request: Any) -> bool:
        """True if this state can replace the checkpoint that a training resumes from (`request`)."""
        is_asked = isinstance(request, str) and Path(request) == self.checkpoint and self.checkpoint.is_dir()
        return is_asked and self.checkpoint.name == f"checkpoint-{trainer.state.global_step}"

    def take_schedule(self, trainer: Any) -> None:
        """Copies the schedule and the learning rates, which the next training sets anew when it begins."""
        self.groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in trainer.optimizer.param_groups
        ]
        self.schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())

    def restore(self, trainer: Any) -> None:
        """Restores the schedule and the run's parts, after the new training has made its own."""
        for group, kept in zip(trainer.optimizer.param_groups, self.groups, strict=True):
            group.update(kept)
        trainer.lr_scheduler.load_state_dict(self.schedule)
        trainer.run_state.set_states(self.run)


def random_states() -> tuple[Any, ...]:
    """Random states of Python, NumPy, PyTorch and the present CUDA device; None for a device that is not in use."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, ...]) -> None:
    """Puts random states back."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
