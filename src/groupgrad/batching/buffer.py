"""The generation round that is being trained on. It outlives optimizer steps, so it is part of a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import torch

from groupgrad.batch import Batch, StepTotals
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.types import Media

logger = logging.getLogger(__name__)

_MEDIA = ("media", "row_media")


class GenerationBuffer:
    """Keeps this rank's micro-batches of the current rounds (more than one only while a step spans several)."""

    def __init__(self, plan: GenerationPlan | None = None) -> None:
        self.plan = plan
        """How the rounds held are cut; None leaves it unchecked whether a checkpoint's rounds fit."""
        self._rounds: dict[int, list[Batch]] = {}

    def get(self, number: int) -> list[Batch] | None:
        """The S micro-batches of round `number`, or None if it is not held."""
        return self._rounds.get(number)

    def put(self, number: int, micro_batches: list[Batch]) -> None:
        """Hold a round."""
        self._rounds[number] = micro_batches

    def keep_only(self, numbers: set[int]) -> None:
        """Forget all rounds but these."""
        self._rounds = {number: batches for number, batches in self._rounds.items() if number in numbers}

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers that `load_state_dict` restores exactly."""
        rounds = {str(number): [_batch_state(batch) for batch in batches] for number, batches in self._rounds.items()}
        return {"plan": None if self.plan is None else dataclasses.asdict(self.plan), "rounds": rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what a checkpoint held; nothing, and a warning, if its rounds were cut in another way than ours."""
        plan = None if self.plan is None else dataclasses.asdict(self.plan)
        if plan is not None and state["plan"] is not None and state["plan"] != plan:
            pairs = [(name, state["plan"].get(name), plan[name]) for name in plan]
            changed = "; ".join(f"{name}: {then} then, {now} now" for name, then, now in pairs if then != now)
            logger.warning("the checkpoint's rollouts are not used: their batches do not fit (%s)", changed)
            self._rounds = {}
            return
        self._rounds = {int(number): [_batch_from(item) for item in items] for number, items in state["rounds"].items()}


def _batch_state(batch: Batch) -> dict[str, Any]:
    state = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "totals"}
    tensors = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    media = {name: None if state[name] is None else [_media_state(item) for item in state[name]] for name in _MEDIA}
    return {**tensors, "totals": dataclasses.asdict(batch.totals), **media}


def _batch_from(state: dict[str, Any]) -> Batch:
    kept = {name: state.get(name) for name in _MEDIA}
    media = {name: None if items is None else tuple(map(_media_from, items)) for name, items in kept.items()}
    return Batch(**{**state, "totals": StepTotals(**state["totals"]), **media})


def _media_state(media: Media | None) -> dict[str, Any] | None:
    """Images as (height, width, 3) uint8."""
    if media is None:
        return None
    state = {f.name: getattr(media, f.name) for f in dataclasses.fields(media)}
    return {**state, "images": [torch.from_numpy(np.array(image)) for image in media.images]}


def _media_from(state: dict[str, Any] | None) -> Media | None:
    if state is None:
        return None
    from PIL import Image

    return Media(**{**state, "images": tuple(Image.fromarray(image.numpy()) for image in state["images"])})
