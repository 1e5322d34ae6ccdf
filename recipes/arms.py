"""Arms of a comparison: the processes that train them, the file of their results, and means with intervals."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from groupgrad.evaluation.statistics import student_quantile

T = TypeVar("T")


def finished(path: Path, plan: Mapping[str, Any], kind: Callable[..., T]) -> dict[T, dict[str, Any]]:
    """The arms that have been trained with this plan."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = (json.loads(line) for line in lines)
    return {kind(*result["arm"]): result for result in kept if result["plan"] == plan}


def start_process(path: Path) -> None:
    """In a process of the pool: writes what runs print to a file, so that arms side by side do not mix.

    The process ends when the one that started it is killed; it would keep its memory and wait for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    file = path.open("a", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file.fileno(), stream.fileno())


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval by Student's distribution."""
    half = student_quantile(0.025, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half
