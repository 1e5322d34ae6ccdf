"""Finds the name that was probably meant by one that is unknown, for the "did you mean" of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """Returns the choice spelled most like `value` in any case, or None if none is similar."""
    by_lower_case = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(str(value).lower(), by_lower_case, n=1)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(
    value: object, choices: Iterable[str], *, before: str = "", after: str = "", otherwise: str = ""
) -> str:
    """Asks whether the most similar choice was meant, between `before` and `after`; `otherwise` if none is similar."""
    similar = nearest(value, choices)
    return f"{before}did you mean {similar!r}?{after}" if similar else otherwise


def with_nearest(names: Iterable[str], choices: Iterable[str]) -> str:
    """Lists unknown names in quotes, each with the known one that is spelled most like it."""
    choices = list(choices)
    return ", ".join(repr(name) + did_you_mean(name, choices, before=" (", after=")") for name in names)
