"""Makes the rows of a task and scores answers, in the process of reasoning-gym.

A formula such as 9**9**9**9 keeps some verifiers inside one call that no timeout in Python can interrupt, others raise
for an answer of the wrong form, and some rows follow Python's hash order and its global random stream. So the package
has a process with a fixed hash seed, which can be killed.
"""

from __future__ import annotations

import json
import pickle
import random
from functools import lru_cache
from typing import Any

import numpy as np

from groupgrad.concurrency.worker_main import drop_output

COMPOSITE = "composite"
"""The task that draws from others."""


def prepare() -> None:
    """Loads reasoning-gym in a new process, whose output is dropped: its libraries and tasks print remarks."""
    drop_output()
    import reasoning_gym  # noqa: F401


def system_prompt(name: str) -> str:
    """The system prompt that reasoning-gym has under a name; another text is one itself."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return SYSTEM_PROMPTS.get(name, name)


def make_entries(spec: str) -> list[tuple[dict[str, Any], bytes]]:
    """The entries of a task in order: the columns that show one, and the pickled entry, which its verifier reads.

    `spec` is the task and its settings in JSON. ValueError, with what to set, for a task or a setting that there is
    not, and for values with which the task cannot make rows.
    """
    task, settings = json.loads(spec)
    try:
        dataset = _dataset(spec)
        random.seed(settings["seed"])
        np.random.seed(settings["seed"] % 2**32)
        # In this order, since some tasks draw each row after the one before.
        entries = [dataset[row] for row in range(settings["size"])]
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"reasoning_gym:{task} cannot make rows with {shown} ({why}); change the task or that setting"
        ) from error
    return [(_columns(entry), pickle.dumps(entry)) for entry in entries]


def score(spec: str, entry: bytes, text: str) -> tuple[float, str | None, bool]:
    """The score of a completion by the verifier of its task, the answer in it, if any, and whether that is in tags."""
    from reasoning_gym.utils import extract_answer

    answer = tagged = extract_answer(text)
    if tagged is None and text.strip():
        # A small model seldom writes tags, and never would if its answers without them had no reward.
        answer = text.strip().splitlines()[-1].strip()
    return float(_dataset(spec).score_answer(answer, pickle.loads(entry))), answer, tagged is not None


def _columns(entry: dict[str, Any]) -> dict[str, Any]:
    metadata = entry["metadata"]
    difficulty = metadata.get("difficulty")
    return {
        "question": entry["question"],
        # None where many answers are right.
        "answer": None if entry["answer"] is None else str(entry["answer"]),
        "task": metadata["source_dataset"],
        "difficulty": None if difficulty is None else json.dumps(difficulty, default=str),
        # In JSON, since tasks have fields of the same name and different types.
        "metadata": json.dumps(metadata, default=str),
    }


@lru_cache(maxsize=64)
def _dataset(spec: str) -> Any:
    from reasoning_gym import create_dataset
    from reasoning_gym.composite import DatasetSpec

    task, settings = json.loads(spec)
    if task == COMPOSITE:
        parts = [{"weight": 1, "config": {}, **part} for part in settings.get("datasets") or []]
        # The seeds of parts follow from that of the whole, so that the held-out rows have other ones.
        fixed = [str(part.get("name")) for part in parts if {"seed", "size"} & part["config"].keys()]
        if fixed:
            raise ValueError(f"the parts {', '.join(fixed)} have a seed or size of their own; set that of the whole")
        settings["datasets"] = [DatasetSpec(**part) for part in parts]
    return create_dataset(task, **settings)
