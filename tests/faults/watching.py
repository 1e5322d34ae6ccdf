"""A callback that watches the saves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from groupgrad.checkpoints.saving import checkpoints_in


class Watch(TrainerCallback):
    """Calls `action(step)` after each step, before it is saved, and notes each `on_save` whose checkpoint is there."""

    def __init__(self, folder: Path, action: Any = lambda step: None):
        self._folder, self._action, self.saved = folder, action, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._action(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert (self._folder / f"checkpoint-{state.global_step}" / "manifest.json").is_file()
        self.saved.append(state.global_step)


def names(folder: Path) -> list[str]:
    """Names of the checkpoints in a folder."""
    return [path.name for path in checkpoints_in(folder)]
