"""Finds the name that was probably meant by one that is unknown, for the "did you mean" of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """Returns the choice spelled most like `value` in any case, or None if none is similar."""
    by_lower_case = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(str(value).lower(), by_lower_case, n=1)
    return by_lower_case[matches[0]] if matches else None


def with_nearest(names: Iterable[str], known: Iterable[str]) -> str:
    """Lists unknown names in quotes, each with the known one that is spelled most like it."""
    known = list(known)
    similar = {name: nearest(name, known) for name in names}
    return ", ".join(repr(name) + (f" (did you mean {near!r}?)" if near else "") for name, near in similar.items())
