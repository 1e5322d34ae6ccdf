"""Stores the generation batches in training. They may serve several optimizer steps, so checkpoints hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from groupgrad.batch import Batch, StepTotals
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.types import Branch, Media

_MEDIA = ("media", "row_media")


class GenerationBuffer:
    """This rank's rows of the current generation batches; more than one only while a step spans several.

    `plan`: a checkpoint's generation batches are used only if they were made under the same plan; None: always.
    `needs_reference`: only those with log-probs of the reference model are.
    """

    def __init__(self, plan: GenerationPlan | None = None, *, needs_reference: bool = False) -> None:
        self.plan, self._needs_reference = plan, needs_reference
        self.incompatibility: str | None = None
        """The reason for which the generation batches of a checkpoint were dropped; None if they fit."""
        self.batches: dict[int, Batch] = {}
        """Rows of the generation batches that are held, by number."""

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers that `load_state_dict` restores exactly."""
        rounds = {str(number): [_batch_state(batch)] for number, batch in self.batches.items()}
        return {"plan": None if self.plan is None else dataclasses.asdict(self.plan), "rounds": rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's batches; if they do not fit this run, restores none and sets `incompatibility`."""
        plan = None if self.plan is None else dataclasses.asdict(self.plan)
        # Checkpoints of earlier releases have no shuffle_seed, and whole groups.
        saved = None if state["plan"] is None else {"shuffle_seed": None, **state["plan"]}
        if plan is not None and saved is not None and saved != plan:
            pairs = [(name, saved.get(name), plan[name]) for name in plan]
            differences = "; ".join(f"{name}: {then} then, {now} now" for name, then, now in pairs if then != now)
            self._drop(f"for other sizes ({differences})")
            return
        # Earlier releases saved one batch for each micro-batch.
        self.batches = {
            int(number): Batch.concat([_batch_from(part) for part in parts])
            if len(parts) > 1
            else _batch_from(parts[0])
            for number, parts in state["rounds"].items()
        }

        if self._needs_reference and any(batch.ref_logprobs is None for batch in self.batches.values()):
            self._drop("without the reference model's log-probs, which beta above 0 needs")

    def _drop(self, incompatibility: str) -> None:
        self.incompatibility, self.batches = incompatibility, {}

    def join_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of any rank: its plan says that the rows were for another number of ranks."""
        return states[0]


def _batch_state(batch: Batch) -> dict[str, Any]:
    state = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "totals"}
    tensors = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    if batch.branches is not None:
        tensors["branches"] = [[(branch.start, branch.context) for branch in branches] for branches in batch.branches]
    media = {name: None if state[name] is None else [_media_state(item) for item in state[name]] for name in _MEDIA}
    return {**tensors, "totals": dataclasses.asdict(batch.totals), **media}


def _batch_from(state: dict[str, Any]) -> Batch:
    names = {f.name for f in dataclasses.fields(Batch)}
    values = {name: value for name, value in state.items() if name in names}
    if values.get("branches") is not None:
        values["branches"] = tuple(tuple(Branch(*branch) for branch in branches) for branches in values["branches"])
    items = {name: state.get(name) for name in _MEDIA}
    media = {name: None if item is None else tuple(map(_media_from, item)) for name, item in items.items()}
    return Batch(**{**values, "totals": StepTotals(**state["totals"]), **media})


def _media_state(media: Media | None) -> dict[str, Any] | None:
    """Fields of `media`, with images as (height, width, 3) uint8."""
    if media is None:
        return None
    state = {f.name: getattr(media, f.name) for f in dataclasses.fields(media)}
    return {**state, "images": [torch.from_numpy(np.array(image)) for image in media.images]}


def _media_from(state: dict[str, Any] | None) -> Media | None:
    if state is None:
        return None
    from PIL import Image

    return Media(**{**state, "images": tuple(Image.fromarray(image.numpy()) for image in state["images"])})
