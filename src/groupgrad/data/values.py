"""Values that users' functions get and return: copies of what they may change, and how messages show them."""

from __future__ import annotations

import copy
import math
import numbers
from decimal import Decimal
from typing import Any

import numpy as np

MAX_SHOWN_CHARS = 200
"""Characters of a value or a text that a message shows."""


def copy_containers(value: Any) -> Any:
    """Copies nested lists, tuples and dicts, sets and arrays; other leaves (images, tensors) stay shared."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return copy.copy(value) if isinstance(value, (set, np.ndarray)) else value


def real_number(value: Any) -> float | None:
    """Returns a real number, also of a 0-dim array or a Decimal, as a float, inf if it exceeds one; else None."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, (numbers.Real, np.bool_, Decimal)):
        return None
    try:
        return math.nan if isinstance(value, Decimal) and value.is_nan() else float(value)
    except OverflowError:
        return math.inf


def short_repr(value: Any) -> str:
    """Returns the value's repr, cut to 200 characters, and its type, for an error message."""
    return f"{cut_repr(value)} ({type(value).__name__})"


def cut_repr(value: Any) -> str:
    """Returns the value's repr, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
