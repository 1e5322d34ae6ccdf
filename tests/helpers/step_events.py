"""A callback of one event."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback


class At(TrainerCallback):
    """Calls a function with what an event gives; of the step that follows `step` whole ones alone, if that is given."""

    def __init__(self, event: str, action: Callable[[Any], Any], step: int | None = None):
        def call(args: Any, state: Any, control: Any, **given: Any) -> None:
            if step in (None, state.global_step):
                action(SimpleNamespace(args=args, state=state, **given))

        setattr(self, event, call)
