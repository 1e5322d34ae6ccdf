"""Makes the rows of a task and scores answers, in the process of reasoning-gym.

A formula such as 9**9**9**9 keeps some verifiers inside one call that no timeout in Python can interrupt, others raise
for an answer of the wrong form, and some rows follow Python's hash order and its global random stream. So the package
has a process with a fixed hash seed, which can be killed.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from groupgrad.concurrency.worker_main import drop_output
from groupgrad.spelling import did_you_mean

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
    except _Unknown:
        raise
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ValueError(
            f"reasoning_gym:{task} cannot make rows with {shown} ({type(error).__name__}: {error}); change that setting"
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


class _Unknown(ValueError):
    """A task or a setting that reasoning-gym does not have."""


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
    from reasoning_gym.factory import DATASETS

    task, settings = json.loads(spec)
    place = f"reasoning_gym:{task}"
    _check_name("task", task, DATASETS, "reasoning_gym")
    _check_names("setting", settings, _fields(DATASETS[task][1]), place)
    if task == COMPOSITE:
        parts = []
        for part in settings.get("datasets") or []:
            part = {"weight": 1, "config": {}, **part}
            _check_names("key", part, _fields(DatasetSpec), f"a part of {place}")
            name: Any = part.get("name")
            _check_name("task", name, DATASETS.keys() - {COMPOSITE}, f"a part of {place}")
            # The seeds of parts follow from that of the whole, so that the held-out rows have other ones.
            known = _fields(DATASETS[name][1]) - {"seed", "size"}
            _check_names("setting", part["config"], known, f"the part {name} of {place}")
            parts.append(DatasetSpec(**part))
        settings["datasets"] = parts
    return create_dataset(task, **settings)


def _fields(record: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def _check_names(what: str, given: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    for name in given:
        _check_name(what, name, known, place)


def _check_name(what: str, name: Any, known: Iterable[str], place: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known, otherwise=f"it has {', '.join(sorted(known))}")
        raise _Unknown(f"{place} has no {what} {name!r}; {hint}")
